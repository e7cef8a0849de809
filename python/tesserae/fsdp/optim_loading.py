"""What an optimizer takes, from state by the names of whole parameters.

1. Parameter by parameter, in the order of the model: each value is made whole, and this rank's part of it is kept.
2. Names become the keys that this optimizer has, in its groups.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tesserae import _C
from tesserae.fsdp.instance import Instance
from tesserae.fsdp.optim_keys import HeldTensor, Keys, plain
from tesserae.fsdp.sharded_values import whole_of
from tesserae.job.fabrics import tensor_degree
from tesserae.torch_compat.optimizers import Key


class _AtRankZero(NamedTuple):
    """Stands for a tensor that rank 0 has."""

    shape: torch.Size
    dtype: torch.dtype


class _Source:
    """A saved state: on every rank, or on the first rank of `group` alone."""

    def __init__(self, saved: dict[str, Any], rank0_only: bool, instance: Instance, group: Any) -> None:
        self._instance = instance
        if tensor_degree() > 1:
            group = dist.group.WORLD  # rank 0 of the job has it for all tensor indices
        self._group = (group or instance._everyone or dist.group.WORLD) if rank0_only else None
        self.saved = self._tell(saved) if rank0_only else saved
        if "state" not in self.saved:
            raise _C.InvalidArgument(
                "[optim_state_dict_to_load] expected a state dict with 'state' and 'param_groups', got "
                f"{list(self.saved)}"
            )

    def _tell(self, saved: dict[str, Any]) -> dict[str, Any]:
        """All but tensors goes to all ranks; rank 0 keeps its own."""
        first = dist.get_rank(self._group) == 0
        told: list[Any] = [_without_tensors(saved) if first else None]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        return saved if first else told[0]

    def value(self, value: Any) -> Any:
        """A value of `saved`, whole. Scalars are copies: optimizers count in them. Collective unless all have it."""
        if isinstance(value, Tensor) and value.dim() == 0:
            return value.clone()
        if self._group is None:
            return whole_of(self._instance, value)
        device = self._instance.compute_device
        if isinstance(value, _AtRankZero):
            value = torch.empty(value.shape, dtype=value.dtype, device=device)
        elif not isinstance(value, Tensor):
            return value
        value = value.to(device).contiguous()
        dist.broadcast(value, group=self._group, group_src=0)
        return value


def _without_tensors(saved: Any) -> Any:
    if isinstance(saved, Tensor):
        return _AtRankZero(saved.shape, saved.dtype) if saved.dim() > 0 else saved.cpu()
    return {key: _without_tensors(value) for key, value in saved.items()} if isinstance(saved, dict) else saved


@torch.no_grad()
def load(keys: Keys, saved: dict[str, Any], *, rank0_only: bool, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """`rank0_only`: only the first rank of `group` has `saved`. Collective."""
    source = _Source(saved, rank0_only, keys.instances[0], group)
    states = {plain(name): state for name, state in source.saved["state"].items()}
    key_of = {parameter: key for key, parameter in keys.parameters.items()}
    result: dict[Key, Any] = {}
    for parameter, names in keys.names.items():
        theirs = [states.pop(plain(name), None) or {} for name in names]
        key = key_of.get(parameter)
        if key is None or not any(theirs):
            continue
        state = _state_of(source, keys.held.get(parameter), theirs, names)
        if not state and keys.named and keys.optim is not None:
            state = copy.deepcopy(keys.optim.state.get(parameter))  # such optimizers want an entry for each parameter
        if state:
            result[key] = state
    for name, state in states.items():  # the optimizer's own
        result[name] = source.value(state)
    return {"state": result} | _groups(keys, source.saved, key_of)


def _groups(keys: Keys, saved: dict[str, Any], key_of: dict[nn.Parameter, Key]) -> dict[str, Any]:
    if "param_groups" not in saved:
        return {}
    named = [(p, name) for p, names in keys.names.items() for name in names] + list(keys.flat_names.items())
    key_of_name = {plain(name): key_of[p] for p, name in named if p in key_of}
    groups = []
    for group in saved["param_groups"]:
        unknown = [name for name in group["params"] if plain(name) not in key_of_name]
        if unknown:
            raise _C.InvalidArgument(
                f"[optim_state_dict_to_load] the saved optimizer has parameters that this one has not: {unknown[:4]}"
            )
        own = sorted({key_of_name[plain(name)] for name in group["params"]})
        groups.append(copy.deepcopy(group) | {"params": own})
    return {"param_groups": groups}


def _state_of(
    source: _Source, held: HeldTensor | None, states: list[dict[str, Any]], names: list[str]
) -> dict[str, Any]:
    if held is None:
        return {name: source.value(value) for name, value in states[0].items()}
    if held.is_flat:
        return _joined(source, held, states, names)
    (slot,) = held.slots
    low, high = held.range_of(slot)
    result = {}
    for name, value in states[0].items():
        value = held.cut(slot, source.value(value))
        if _per_element(name, value, held.shape(slot), names[0]):
            value = value.reshape(-1)[low:high].clone().view(held.shown)
        result[name] = value
    return result if high > low else {}


def _joined(source: _Source, held: HeldTensor, states: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """One part for all parameters of a flat buffer, zeros for those without state; scalars must be the same for all."""
    result: dict[str, Any] = {}
    for slot, parameter in zip(held.slots, names):
        low, high = held.range_of(slot)
        offset = held.flat.begins[slot] + low - held.flat.local_range[0]
        for name, value in states[slot].items():
            value = held.cut(slot, source.value(value))
            if _per_element(name, value, held.shape(slot), parameter):
                part = result.setdefault(name, value.new_zeros(held.numel))
                part[offset : offset + high - low].copy_(value.reshape(-1)[low:high])
            elif bool(result.setdefault(name, value) != value):
                raise _C.InvalidArgument(
                    f"[optim_state_dict_to_load] parameters of one flat parameter differ in state {name!r}: {names[0]} "
                    f"has {result[name]}, {parameter} has {value}; pass use_orig_params=True to FSDP"
                )
    return result


def _per_element(name: str, value: Any, shape: torch.Size, parameter: str) -> bool:
    """Whether a value has one element for each of the parameter's. A scalar parameter's has, except for the step."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and (len(shape) > 0 or name == "step")):
        return False
    if value.shape != shape:
        raise _C.InvalidArgument(
            f"[optim_state_dict_to_load] state {name!r} of {parameter} has shape {list(value.shape)}, and the "
            f"parameter {list(shape)}"
        )
    return True
