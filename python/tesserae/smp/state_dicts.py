"""SMP v2's functions that save and load state dicts. The files are those of tsm.checkpoint, which also loads them.

`coordinator_rank`, `wait_error_handling` and `force_check_all_plans` are accepted and mean nothing: ranks always agree
on failures, and there are no plans to compare.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from tesserae import _C
from tesserae.checkpoint import nested


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
    _refuse(
        "async_save",
        planner=planner,
        queue=queue,
        sharded_strategy=sharded_strategy,
        s3_region=s3_region,
        s3client_config=s3client_config,
    )
    nested.save(state_dict, _folder_of("async_save", checkpoint_id, storage_writer), process_group, asynchronous=True)


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
    _refuse("save", planner=planner, s3_region=s3_region, s3client_config=s3client_config)
    nested.save(state_dict, _folder_of("save", checkpoint_id, storage_writer), process_group, asynchronous=False)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Fills `state_dict`, which has the tensors to be filled and is of the structure that was saved, from the newest
    checkpoint of the folder `checkpoint_id`, at any world size. With check_keys_matched what the checkpoint lacks is an
    InvalidArgument. Collective over `process_group`. Raises Damaged naming file, tensor and offset, IoError."""
    _refuse("load", planner=planner, s3_region=s3_region, s3client_config=s3client_config)
    nested.load(state_dict, _folder_of("load", checkpoint_id, storage_reader), process_group, strict=check_keys_matched)


def _folder_of(function: str, checkpoint_id: str | os.PathLike[str] | None, storage: Any) -> str:
    """Where `checkpoint_id`, or a reader or writer of torch's that has a path, points to."""
    chosen = checkpoint_id if checkpoint_id is not None else getattr(storage, "path", None)
    if chosen is None:
        raise _C.InvalidArgument(f"[{function}] checkpoint_id is missing: the folder of the checkpoint")
    if str(chosen).startswith("s3://"):
        raise _C.InvalidArgument(f"[{function}] {chosen}: only folders are supported; mount the bucket, or copy")
    return os.fspath(chosen)


def _refuse(function: str, **arguments: Any) -> None:
    """InvalidArgument for arguments that have no meaning here, unless they are None."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise _C.InvalidArgument(f"[{function}] {', '.join(given)}: not supported; leave it out")
