"""Values that are spread over ranks, as torch's state dicts have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.fsdp._shard_utils import _create_chunk_dtensor, _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor

from tesserae import _C

if TYPE_CHECKING:
    from tesserae.fsdp import FullyShardedDataParallel as Instance


def is_sharded(value: Any) -> bool:
    return isinstance(value, (ShardedTensor, DTensor))


def chunk(instance: Instance, tensor: Tensor) -> Tensor:
    """This rank's chunk of a whole tensor along its first dimension: a DTensor if the script gave a device mesh, else a
    ShardedTensor. What can not be cut stays whole."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor.detach().clone()
    mesh, group = instance._device_mesh, instance.process_group or dist.group.WORLD
    if mesh is not None:
        mesh._get_root_mesh()
        return _create_chunk_dtensor(tensor, dist.get_rank(group), mesh)
    devices = torch.cuda.device_count() if instance.compute_device.type == "cuda" else 1
    return _create_chunk_sharded_tensor(tensor, dist.get_rank(group), dist.get_world_size(group), devices, group)


def whole_of(instance: Instance, value: Any) -> Any:
    """A ShardedTensor or DTensor as the whole tensor, collective; anything else as it is."""
    if not is_sharded(value):
        return value
    group = value._process_group if isinstance(value, ShardedTensor) else instance.process_group
    return _gather_state_dict({"": value}, pg=group, device=instance.compute_device)[""]


def part_of(instance: Instance, flat: _C.FlatBuffer) -> Tensor:
    """This rank's part of a flat buffer, sharing its memory; a ShardedTensor unless it is all of it. Collective."""
    part, group = flat.part(), instance.process_group or dist.group.WORLD
    if part.numel() == flat.total:
        return part.detach()
    if part.numel() * dist.get_world_size(group) != flat.total:
        raise _C.InvalidArgument(
            f"[state_dict] LOCAL_STATE_DICT of a unit in {flat.total // part.numel()} parts over a process group of "
            f"{dist.get_world_size(group)} ranks: some hold the same part; use SHARDED_STATE_DICT"
        )
    shard = Shard.from_tensor_and_offsets(part.detach(), [flat.part_range[0]], dist.get_rank(group))
    return init_from_local_shards([shard], flat.total, process_group=group)


def local_part(value: Any) -> Tensor:
    """What part_of() made, on this rank."""
    if not isinstance(value, ShardedTensor):
        return value
    shards = value.local_shards()
    return shards[0].tensor if len(shards) == 1 else torch.empty(0)
