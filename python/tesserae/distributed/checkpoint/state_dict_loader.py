"""SMP v2's function that loads state dicts: what state_dict_saver or tsm.checkpoint has saved."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from tesserae.checkpoint import nested
from tesserae.distributed.checkpoint.arguments import folder_of, refuse

__all__ = ["load"]


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
    refuse("load", planner=planner, s3_region=s3_region, s3client_config=s3client_config)
    nested.load(state_dict, folder_of("load", checkpoint_id, storage_reader), process_group, strict=check_keys_matched)
