"""SMP v2's functions that save state dicts. The files are those of tsm.checkpoint, which also loads them.

`coordinator_rank`, `wait_error_handling` and `force_check_all_plans` are accepted and mean nothing: ranks always agree
on failures, and there are no plans to compare.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from tesserae.checkpoint import nested
from tesserae.checkpoint.saving import maybe_finalize_async_calls
from tesserae.distributed.checkpoint.arguments import folder_of, refuse

__all__ = ["async_save", "maybe_finalize_async_calls", "save"]


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    queue: Any = None,
    sharded_strategy: Any = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Begins to save `state_dict` to the folder `checkpoint_id`, in which one checkpoint stays: tensors that are
    sharded (DTensor, ShardedTensor) or not, and values that JSON has. Values are those at the call, as with
    tsm.checkpoint.async_save. Collective over `process_group`. Raises SaveFailed if the last save failed."""
    refuse(
        "async_save",
        planner=planner,
        queue=queue,
        sharded_strategy=sharded_strategy,
        s3_region=s3_region,
        s3client_config=s3client_config,
    )
    nested.save(state_dict, folder_of("async_save", checkpoint_id, storage_writer), process_group, asynchronous=True)


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """As async_save(), but returns when the checkpoint is committed."""
    refuse("save", planner=planner, s3_region=s3_region, s3client_config=s3client_config)
    nested.save(state_dict, folder_of("save", checkpoint_id, storage_writer), process_group, asynchronous=False)
