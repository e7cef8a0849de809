"""Tensors that are spread over ranks, as FSDP1's state dicts have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tesserae.torch_compat.checked import checked

with checked():
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
    from torch.distributed._state_dict_utils import _gather_state_dict
    from torch.distributed.fsdp._shard_utils import _create_chunk_dtensor, _create_chunk_sharded_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["ShardedTensor", "compute_local_shape_and_global_offset"]


def is_sharded(value: Any) -> bool:
    return isinstance(value, (ShardedTensor, DTensor))


def chunk_on_mesh(tensor: Tensor, rank: int, mesh: Any) -> DTensor:
    """This rank's chunk of a whole tensor along its first dimension."""
    return _create_chunk_dtensor(tensor, rank, mesh)


def chunk_in_group(tensor: Tensor, group: dist.ProcessGroup, devices_per_host: int) -> ShardedTensor:
    """The same as a ShardedTensor."""
    return _create_chunk_sharded_tensor(
        tensor, dist.get_rank(group), dist.get_world_size(group), devices_per_host, group
    )


def whole_of(value: Any, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """A sharded value as the whole tensor; a ShardedTensor knows its own group. Collective."""
    group = value._process_group if isinstance(value, ShardedTensor) else group
    return _gather_state_dict({"": value}, pg=group, device=device)[""]


def from_part(part: Tensor, begin: int, total: int, group: dist.ProcessGroup) -> ShardedTensor:
    """A ShardedTensor of one dimension, of which this rank has the elements from `begin` on. Collective."""
    shard = Shard.from_tensor_and_offsets(part, [begin], dist.get_rank(group))
    return init_from_local_shards([shard], total, process_group=group)


def local_blocks(value: ShardedTensor) -> list[tuple[Tensor, Sequence[int], Sequence[int]]]:
    """What this rank has: memory, and offsets and sizes of the block in the whole."""
    return [(shard.tensor, shard.metadata.shard_offsets, shard.metadata.shard_sizes) for shard in value.local_shards()]
