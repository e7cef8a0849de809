"""The state of optimizers over DTensors, on its way to other degrees: as moving.py does it for FSDP instances. A rank
without rows has state, too, so nothing has to be told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tesserae import _C
from tesserae.fully_shard.parameters import Managed, at_places
from tesserae.fully_shard.places import Places
from tesserae.fully_shard.state import State


class MovingDTensors:
    """That of one root's parameters: see shard::Companion. `places`: where each state goes."""

    def __init__(self, root: State, optimizers: list[Optimizer], places: dict[State, Places]) -> None:
        self._buffers: dict[int, tuple[_C.FlatBuffer, Managed, Places]] = {}
        self._state: dict[int, dict[str, Any]] = {}
        for state in root.below:
            unit = state.prepared()
            for flat, numbers in zip(_C.flat_buffers(unit), unit.flats, strict=True):
                if flat.shard is None:
                    continue
                managed = state.parameters[numbers[0]]
                self._buffers[flat.shard] = flat, managed, places[state]
                held = (each.state[managed.parameter] for each in optimizers if managed.parameter in each.state)
                self._state[flat.shard] = next(held, {})
        for shard in self._state:
            self._check(shard)

    def _check(self, shard: int) -> None:
        _, managed, _ = self._buffers[shard]
        for name, value in self._state[shard].items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != managed.parameter.shape:
                raise _C.InvalidArgument(
                    f"[tsm.reshard] state {name!r} of {managed.name} has shape {list(value.shape)}, the parameter "
                    f"{list(managed.parameter.shape)}: only state of the parameter's shape, and scalars, can move to "
                    "another degree. Save a checkpoint, and start again at that degree"
                )

    def _moving(self, shard: int) -> list[str]:
        """Names of the tensors that have rows, in an order that is the same on all ranks."""
        return sorted(name for name, value in self._state[shard].items() if isinstance(value, DTensor))

    def dtypes(self, shard: int) -> list[torch.dtype]:
        return [self._state[shard][name].dtype for name in self._moving(shard)]

    def take(self, shard: int) -> list[Tensor]:
        flat, state = self._buffers[shard][0], self._state[shard]
        return [flat.join([state[name].to_local()], state[name].dtype) for name in self._moving(shard)]

    def put(self, shard: int, tensors: list[Tensor]) -> None:
        flat, managed, places = self._buffers[shard]
        for name, tensor in zip(self._moving(shard), tensors, strict=True):
            (part,) = flat.split(tensor)
            self._state[shard][name] = at_places(managed, places, part)
