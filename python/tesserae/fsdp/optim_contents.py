"""What an optimizer's state is made of, parameter by parameter. A rank knows it of the slices that have elements there;
ranks tell each other the rest."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tesserae import _C
from tesserae.fsdp.optim_keys import Keys

State = dict[str, Any]  # of one parameter


class Like(NamedTuple):
    """Stands for a state tensor of the size of the parameter's slice."""

    dtype: torch.dtype


class _Misfit(NamedTuple):
    """A tensor of another size, which can be neither gathered nor taken from one rank."""

    shape: list[int]
    expected: int  # elements


class Purpose(NamedTuple):
    """For error texts."""

    function: str
    misfit: str  # what can be done with state that fits, and what to do with state that does not


def agree(
    keys: Keys, mine: dict[nn.Parameter, State], group: dist.ProcessGroup | None, purpose: Purpose
) -> dict[nn.Parameter, State]:
    """The contents of each tensor's state, on whatever rank it is: scalars and other values as they are, Like for
    tensors of the slice's size. The same on all ranks. Collective. Raises InvalidArgument for state of another size,
    and if ranks differ."""
    told_by_me: dict[int, tuple[bool, State | None]] = {}
    for i, (parameter, held) in enumerate(keys.held.items()):
        if parameter in mine:
            described = {name: _describe(value, held.numel) for name, value in mine[parameter].items()}
            told_by_me[i] = held.numel > 0, described
        elif held.numel > 0:
            told_by_me[i] = True, None
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, told_by_me, group=group)
    contents: dict[nn.Parameter, State] = {}
    for i, parameter in enumerate(keys.held):
        told = [(rank, *theirs[i]) for rank, theirs in enumerate(everyones) if i in theirs]
        lacking = [rank for rank, _, state in told if state is None]
        told = [each for each in told if each[2] is not None]
        if lacking and any(has_elements and state for _, has_elements, state in told):
            raise _C.InvalidArgument(
                f"[{purpose.function}] rank {lacking[0]} holds a part of {keys.names[parameter][0]} and its optimizer "
                f"has no state of it, but that of rank {told[0][0]} has: give all ranks' optimizers the same parameters"
            )
        # A rank without elements has no say, unless nobody has any.
        counting = [(rank, state) for rank, has_elements, state in told if has_elements]
        for rank, state in counting or [(rank, state) for rank, _, state in told]:
            _merge(contents.setdefault(parameter, {}), state, keys.names[parameter][0], rank, purpose)
    return contents


def held_here(keys: Keys, mine: dict[nn.Parameter, State]) -> dict[nn.Parameter, State]:
    """What this rank has of each tensor's state that is of the slice's size."""
    found = {}
    for parameter, held in keys.held.items():
        described = {name: _describe(value, held.numel) for name, value in mine.get(parameter, {}).items()}
        found[parameter] = {name: value for name, value in described.items() if isinstance(value, Like)}
    return found


def kinds_of(members: list[nn.Parameter], contents: dict[nn.Parameter, State]) -> list[tuple[str, Like]]:
    """The kinds of tensors that these parameters have, in an order that is the same on all ranks."""
    states = (contents.get(member, {}) for member in members)
    return sorted({(k, v) for state in states for k, v in state.items() if isinstance(v, Like)}, key=str)


def _describe(value: Any, numel: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.detach().cpu()
    return Like(value.dtype) if value.numel() == numel else _Misfit(list(value.shape), numel)


def _merge(merged: State, state: State, parameter: str, rank: int, purpose: Purpose) -> None:
    for name, value in state.items():
        if isinstance(value, _Misfit):
            raise _C.InvalidArgument(
                f"[{purpose.function}] state {name!r} of {parameter} has shape {value.shape} on rank {rank}, where its "
                f"slice has {value.expected} elements: only state with one element for each of the parameter's, and "
                f"scalars, {purpose.misfit}"
            )
        before = merged.setdefault(name, value)
        tensors = isinstance(before, Tensor) and isinstance(value, Tensor)
        if not (torch.equal(before, value) if tensors else before == value):
            raise _C.InvalidArgument(
                f"[{purpose.function}] ranks differ in state {name!r} of {parameter}: {before} and, on rank {rank}, "
                f"{value}"
            )
