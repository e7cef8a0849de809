"""model.state_dict() of a sharded module. For each instance on the way down the modules (so only the units of one path
are whole at a time):

 1. Its own parameters are summoned; its module fills the dictionary, inner instances doing the same in turn.
 2. Entries that share memory with its own parameters are copied: whole (FULL), as this rank's chunk along the first
    dimension (SHARDED), or not at all (LOCAL: the parts as they are, one entry for each flat buffer).
 3. Buffers get the dtype back that they had before mixed precision.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from tesserae import _C
from tesserae.fsdp.instance import Instance, keeps_whole
from tesserae.fsdp.parameters import flat_name
from tesserae.fsdp.sharded_values import chunk, part_of
from tesserae.fsdp.whole import Summoned, SummonOptions
from tesserae.tensor_parallel.parts import marks
from tesserae.torch_compat.instance import buffer_dtypes, device_mesh, ignored_buffers, state_dict_settings, wrapped
from tesserae.torch_compat.modules import run_state_dict_hooks, run_state_dict_pre_hooks


@torch.no_grad()
def save(instance: Instance, destination: Any, prefix: str, keep_vars: bool) -> dict[str, Any]:
    """What state_dict() returns, of the type that was set. Collective."""
    kind = kind_of(instance)
    full = kind == StateDictType.FULL_STATE_DICT
    local = kind == StateDictType.LOCAL_STATE_DICT
    config = state_dict_settings(instance).config
    options = SummonOptions(
        rank0_only=full and getattr(config, "rank0_only", False), offload_to_cpu=full and config.offload_to_cpu
    )
    run_state_dict_pre_hooks(instance, prefix, keep_vars)
    # 1.
    with contextlib.nullcontext() if local else Summoned(instance, options, "state_dict"):
        destination = wrapped(instance).state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        # 2.
        if local:
            _replace_by_parts(instance, destination, prefix)
        else:
            _replace_whole(instance, destination, prefix, None if full else instance, drop=options.rank0_only)
    # 3.
    _restore_buffers(instance, destination, prefix, drop=options.rank0_only and not keeps_whole(instance))
    return run_state_dict_hooks(instance, destination, prefix)


def kind_of(instance: Instance) -> StateDictType:
    """The type that counts: parameters that are not sharded have none but the full one."""
    kind = state_dict_settings(instance).kind
    if instance.sharding_strategy == ShardingStrategy.NO_SHARD:
        return StateDictType.FULL_STATE_DICT
    if kind == StateDictType.LOCAL_STATE_DICT and device_mesh(instance) is not None:
        raise _C.InvalidArgument(
            "[state_dict] LOCAL_STATE_DICT with a device mesh: its entries cannot be DTensors; use SHARDED_STATE_DICT"
        )
    return kind


def _storages(instance: Instance) -> set[int]:
    """Addresses of the memory that the instance's parameters show now."""
    shown = [m.parameter for m in instance._managed] + [p for parameters in instance._local for p in parameters]
    return {p.untyped_storage().data_ptr() for p in shown} - {0}


def _own_keys(instance: Instance, state: dict[str, Any], prefix: str) -> list[str]:
    """The keys of what shares memory with the instance's parameters: whatever name hooks and wrappers give it."""
    mine = _storages(instance)
    return [
        key
        for key, value in state.items()
        if key.startswith(prefix) and type(value) in (Tensor, nn.Parameter) and _storage_of(value) in mine
    ]


def _storage_of(value: Tensor) -> int:
    """Of a tensor that was put together from tensor-parallel parts: that of this rank's part."""
    mark = marks.get(value)
    return mark.storage if mark is not None else value.untyped_storage().data_ptr()


def _replace_whole(
    instance: Instance, state: dict[str, Any], prefix: str, sharded_by: Instance | None, drop: bool
) -> None:
    """Entries of the summoned parameters become copies; tied ones stay tied."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    offload = state_dict_settings(instance).config.offload_to_cpu
    for key in _own_keys(instance, state, prefix):
        value = state[key]
        mark = marks.pop(value, None)  # put together already: a copy
        if drop and not keeps_whole(instance):
            del state[key]
            continue
        place = mark.place if mark is not None else (value.data_ptr(), value.shape)
        if place not in copies:
            if sharded_by is not None:
                copy = chunk(sharded_by, value)
            else:
                copy = value.detach().clone() if mark is None else value
            copies[place] = copy.cpu() if offload else copy
        state[key] = copies[place]


def _replace_by_parts(instance: Instance, state: dict[str, Any], prefix: str) -> None:
    """One entry for each flat buffer in the place of all: this rank's part, sharing its memory."""
    for key in _own_keys(instance, state, prefix):
        del state[key]
    for i, flat in enumerate(instance._flats):
        part = part_of(instance, flat)
        state[prefix + flat_name(i)] = part.cpu() if state_dict_settings(instance).config.offload_to_cpu else part


def _restore_buffers(instance: Instance, state: dict[str, Any], prefix: str, drop: bool) -> None:
    for name, dtype in buffer_dtypes(instance).items():
        key = prefix + name
        if key not in state:
            continue  # not persistent
        if drop:
            del state[key]
            continue
        if name not in ignored_buffers(instance):
            state[key] = state[key].to(dtype)
        if state_dict_settings(instance).config.offload_to_cpu:
            state[key] = state[key].cpu()
