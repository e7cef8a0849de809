"""Runs a script whose Accelerator finds an accelerator called cpu: `python accelerate_on_cpu.py script.py ...`.

Accelerate 1.15 reads its FSDP plugin only if `PartialState._prepare_backend` saw a GPU or one of its like
(accelerate/state.py, AcceleratorState.__init__). The device itself may be chosen with ACCELERATE_TORCH_DEVICE; the kind
of job may not, so this one answer is replaced. All that follows (wrapping, upcasting, clipping, state dicts) is
Accelerate's own.
"""

from __future__ import annotations

import os
import runpy
import sys

from accelerate.state import DistributedType, PartialState


def gpu_job_over_gloo(
    self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


if __name__ == "__main__":
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = gpu_job_over_gloo
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
