"""The state of optimizers, on its way to other degrees: the engine asks for it, and gives it back, one flat buffer and
one kind of state at a time. Scalars stay, and go to ranks that see a parameter for the first time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tesserae import _C
from tesserae.fsdp.instance import Instance, instances_of
from tesserae.fsdp.optim_contents import Like, Purpose, State, agree, kinds_of
from tesserae.fsdp.optim_keys import Keys

_PURPOSE = Purpose("tsm.reshard", "can move to another degree. Save a checkpoint, and start again at that degree")


class Moving:
    """The optimizers' state of one root's parameters, for the engine: see shard::Companion. Making it is collective."""

    _gives_away = True  # what the engine takes

    def __init__(self, root: Instance, optimizers: list[Optimizer]) -> None:
        keys = Keys.of_instances(root)
        mine = {p: each.state[p] for each in optimizers for p in keys.held if p in each.state}
        self._owner = {p: each for each in optimizers for group in each.param_groups for p in group["params"]}
        self._group = {p: group for each in optimizers for group in each.param_groups for p in group["params"]}
        self._empty = [p for p, held in keys.held.items() if held.numel == 0 and p in self._owner]
        self._contents = self._agree(keys, mine, root)
        self._buffers: dict[int, tuple[_C.FlatBuffer, list[nn.Parameter]]] = {}
        self._kinds: dict[int, list[tuple[str, Like]]] = {}
        for instance in instances_of(root):
            for flat, members in zip(instance._flats, instance._local):
                if flat.shard is not None:
                    self._buffers[flat.shard] = flat, members
                    self._kinds[flat.shard] = kinds_of(members, self._contents)

    def _agree(self, keys: Keys, mine: dict[nn.Parameter, State], root: Instance) -> dict[nn.Parameter, State]:
        return agree(keys, mine, root._everyone, _PURPOSE)

    def forget_what_stood_still(self) -> None:
        """What is left of a time when there were elements here: its counters have not moved since."""
        for parameter in self._empty:
            self._owner[parameter].state.pop(parameter, None)

    def complete(self) -> None:
        """Scalars where a rank has elements of a parameter for the first time."""
        for parameter, content in self._contents.items():
            if parameter not in self._owner or parameter.numel() == 0:
                continue
            now = self._owner[parameter].state[parameter]
            for name, value in content.items():
                if name not in now and not isinstance(value, Like):
                    now[name] = self._scalar(parameter, value)

    def _scalar(self, parameter: nn.Parameter, value: Any) -> Any:
        """A copy, where the optimizer has it: kernels that are fused or captured read counters on the device."""
        group = self._group[parameter]
        if isinstance(value, Tensor) and (group.get("fused") or group.get("capturable")):
            return value.to(parameter.device, copy=True)
        return copy.deepcopy(value)

    def dtypes(self, shard: int) -> list[torch.dtype]:
        return [like.dtype for _, like in self._kinds[shard]]

    def take(self, shard: int) -> list[Tensor]:
        flat, members = self._buffers[shard]
        joined = []
        for name, like in self._kinds[shard]:
            slices = [self._take(member, name, like) for member in members]
            joined.append(flat.join(slices, like.dtype))
        return joined

    def put(self, shard: int, tensors: list[Tensor]) -> None:
        flat, members = self._buffers[shard]
        for (name, like), tensor in zip(self._kinds[shard], tensors):
            for member, part in zip(members, flat.split(tensor)):
                content = self._contents.get(member, {})
                if content.get(name) != like or member not in self._owner:
                    continue
                if part.numel() == 0:
                    self._owner[member].state.pop(member, None)
                    continue
                now = self._owner[member].state[member]
                for before, value in content.items():  # in the order that the optimizer gave them
                    if before == name:
                        break
                    if not isinstance(value, Like):
                        now.setdefault(before, self._scalar(member, value))
                now[name] = part

    def _take(self, member: nn.Parameter, name: str, like: Like) -> Tensor | None:
        """What moves is held once: the optimizer lets go of it. The name keeps its place among the others."""
        if member.numel() == 0 or member not in self._owner or self._contents.get(member, {}).get(name) != like:
            return None
        now = self._owner[member].state.get(member, {})
        tensor = now.get(name)
        if tensor is not None and self._gives_away:
            now[name] = None
        return tensor
