"""The arguments of FSDP's constructor -> how the engine shards: where, dtypes, what is gathered ahead."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from tesserae import _C
from tesserae.job import config
from tesserae.job.device import default_device, indexed, with_index
from tesserae.job.fabrics import has_parts, parallel_of

FULL_PRECISION_IN_EVALUATION = "FSDP_USE_FULL_PREC_IN_EVAL"  # torch's


@dataclass(frozen=True)
class Arguments:
    """Those that an instance hands on to the instances that it wraps. Field by field those of the constructor."""

    process_group: Any
    sharding_strategy: ShardingStrategy | None
    cpu_offload: CPUOffload | None
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision | None
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: int | str | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    device_mesh: Any
    post_param_init_fn: Callable[[nn.Module], None] | None

    def device(self, module: nn.Module) -> torch.device:
        """Where the ranks compute: what device_id says, else where the parameters are, else the current accelerator."""
        if self.device_id is not None:
            is_index = isinstance(self.device_id, int)
            return indexed(self.device_id) if is_index else with_index(torch.device(self.device_id))
        places = {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")}
        if len(places) > 1:
            raise _C.InvalidArgument(
                f"[FSDP] parameters of one module are on several devices ({', '.join(sorted(map(str, places)))}); "
                "move the module to one device first, or pass device_id"
            )
        return with_index(places.pop()) if places else default_device()

    def options(self, strategy: _C.Strategy, device: torch.device) -> _C.Options:
        """What the engine takes. Without any prefetch one unit is gathered at a time; else two, or four without the
        limit."""
        precision = self.mixed_precision or MixedPrecision()
        if precision.keep_low_precision_grads:
            raise _C.InvalidArgument(
                "[FSDP] MixedPrecision(keep_low_precision_grads=True) is not supported: gradients have the dtype of "
                "the master parameters; leave it out"
            )
        if os.environ.get(FULL_PRECISION_IN_EVALUATION, "") == "1" and precision.param_dtype is not None:
            raise _C.InvalidArgument(
                f"[FSDP] {FULL_PRECISION_IN_EVALUATION}=1 is not supported: evaluations compute in "
                f"{precision.param_dtype}, as training does; unset it"
            )
        prefetches = self.backward_prefetch is not None or self.forward_prefetch
        return engine_options(
            device,
            strategy=strategy,
            parameters=precision.param_dtype,
            reduce=precision.reduce_dtype,
            limit_all_gathers=(2 if self.limit_all_gathers else 4) if prefetches else 1,
            offload=self.cpu_offload is not None and self.cpu_offload.offload_params,
        )


def engine_options(device: torch.device, **options: Any) -> _C.Options:
    """These, and what the configuration says of wires and split layers."""
    settings = config.current()
    return _C.Options(
        parameter_wire=settings.parameter_wire if settings is not None else "exact",
        gradient_wire=settings.gradient_wire if settings is not None else "exact",
        parallel=parallel_of(device) if has_parts() else None,
        **options,
    )
