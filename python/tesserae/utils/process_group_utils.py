"""Process groups, by the names of SMP v2."""

from __future__ import annotations

import torch.distributed as dist


def get_global_ranks(process_group: dist.ProcessGroup | None = None) -> list[int]:
    """The ranks of the job that are members of the group, in the group's order."""
    return dist.get_process_group_ranks(process_group)
