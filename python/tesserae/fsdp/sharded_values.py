"""Values that are spread over ranks, as torch's state dicts have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tesserae import _C
from tesserae.fsdp.instance import Instance
from tesserae.job.device import count
from tesserae.torch_compat import sharded_tensors
from tesserae.torch_compat.instance import device_mesh
from tesserae.torch_compat.sharded_tensors import ShardedTensor, is_sharded


def chunk(instance: Instance, tensor: Tensor) -> Tensor:
    """This rank's chunk of a whole tensor along its first dimension: a DTensor if the script gave a device mesh, else a
    ShardedTensor. What cannot be cut stays whole."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor.detach().clone()
    mesh, group = device_mesh(instance), instance.process_group or dist.group.WORLD
    if mesh is not None:
        return sharded_tensors.chunk_on_mesh(tensor, dist.get_rank(group), mesh)
    return sharded_tensors.chunk_in_group(tensor, group, count(instance.compute_device))


def whole_of(instance: Instance, value: Any) -> Any:
    """A ShardedTensor or DTensor as the whole tensor, collective; anything else as it is."""
    if not is_sharded(value):
        return value
    return sharded_tensors.whole_of(value, instance.process_group, instance.compute_device)


def part_of(instance: Instance, flat: _C.FlatBuffer) -> Tensor:
    """This rank's part of a flat buffer, sharing its memory; a ShardedTensor unless it is all of it. Collective."""
    part, group = flat.local(), instance.process_group or dist.group.WORLD
    if part.numel() == flat.total:
        return part.detach()
    if part.numel() * dist.get_world_size(group) != flat.total:
        raise _C.InvalidArgument(
            f"[state_dict] LOCAL_STATE_DICT of a unit in {flat.total // part.numel()} parts over a process group of "
            f"{dist.get_world_size(group)} ranks: some hold the same part; use SHARDED_STATE_DICT"
        )
    return sharded_tensors.from_part(part.detach(), flat.local_range[0], flat.total, group)


def local_part(value: Any) -> Tensor:
    """What part_of() made, on this rank."""
    if not isinstance(value, ShardedTensor):
        return value
    blocks = sharded_tensors.local_blocks(value)
    return blocks[0][0] if len(blocks) == 1 else torch.empty(0)
