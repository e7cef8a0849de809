"""torch.distributed's backend "tesserae": process groups over shared memory, for CPU tensors.

    import tesserae
    torch.distributed.init_process_group("tesserae")          # or "cpu:tesserae,cuda:nccl"

Each process group has connections of its own, a thread that runs its operations in order, and a liveness channel. What
a group does is C++ (tesserae/comm/torch_backend/process_group.h); here is only how torch comes to make one.
"""

from __future__ import annotations

import atexit
from typing import Any

import torch.distributed as dist

from tesserae import _C
from tesserae.job.fabrics import outlives_rank_zero

NAME = "tesserae"


def register() -> None:
    """torch.distributed knows the backend from now on. Without torch.distributed it does nothing."""
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
    atexit.register(_C.shutdown_process_groups)


def _make(options: Any, _: object = None) -> Any:
    ranks = list(options.global_ranks_in_group)
    return _C.connect_process_group(
        options.store,
        options.group_rank,
        options.group_size,
        name=options.group_id,
        global_ranks=ranks,
        timeout=options.timeout.total_seconds(),
        served=outlives_rank_zero(options.store) or (len(ranks) > 0 and ranks[0] != 0),
    )
