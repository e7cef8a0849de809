"""The tensors that an optimizer over a sharded model holds: their names and keys, and what part of whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tesserae import _C
from tesserae.fsdp.instance import Instance, instances_of
from tesserae.tensor_parallel.parts import SplitParameter, split_of
from tesserae.torch_compat import optimizers
from tesserae.torch_compat.modules import without_compiler
from tesserae.torch_compat.optimizers import Key, OptimInput, names_of_parameters


@dataclass(frozen=True)
class HeldTensor:
    """What a tensor that an optimizer holds stands for: one slot of a flat buffer, or all of them."""

    flat: _C.FlatBuffer
    slots: list[int]
    order: list[int]  # the same in the order of the module; the buffer has matrices first
    shown: torch.Size  # of the tensor, on this rank
    splits: list[SplitParameter | None]  # by slot of the buffer: what is a tensor-parallel part

    @property
    def numel(self) -> int:
        """Of the tensor, on this rank."""
        return self.shown.numel()

    @property
    def is_flat(self) -> bool:
        return len(self.slots) > 1

    def shape(self, slot: int) -> torch.Size:
        """Of the parameter: of this rank's part, if it is split over tensor-parallel ranks."""
        return torch.Size(self.flat.shapes[slot])

    def cut(self, slot: int, value: Any) -> Any:
        """What this rank has of a whole state tensor of a parameter that is split."""
        split = self.splits[slot]
        is_whole = split is not None and isinstance(value, torch.Tensor) and value.shape == torch.Size(split.whole)
        return _C.part_of(value, split.split) if is_whole else value

    def range_of(self, slot: int) -> tuple[int, int]:
        """Which elements of the parameter are on this rank."""
        begin, size = self.flat.begins[slot], self.shape(slot).numel()
        low, high = (min(max(edge - begin, 0), size) for edge in self.flat.local_range)
        return low, high


@dataclass(frozen=True)
class Keys:
    """The parameters of a model, under their names and under the keys that an optimizer has for them."""

    instances: list[Instance]
    optim: Optimizer | None
    named: bool  # the optimizer's keys are names
    parameters: dict[Key, nn.Parameter]  # of the optimizer, in its order
    names: dict[nn.Parameter, list[str]]  # of the model, in its order; by slot for a flat parameter
    flat_names: dict[nn.Parameter, str]  # of flat parameters themselves
    held: dict[nn.Parameter, HeldTensor]  # of what instances have, buffer by buffer

    @staticmethod
    def of_instances(model: nn.Module) -> Keys:
        """Without an optimizer: only the tensors, their names and held."""
        instances = instances_of(model)
        return Keys(instances, None, False, {}, names_of_parameters(model), {}, _held_tensors(instances))

    @staticmethod
    def of(
        model: nn.Module,
        optim: Optimizer | None,
        optim_input: OptimInput = None,
        state: dict[str, Any] | None = None,
        named: bool = False,
    ) -> Keys:
        """`optim_input`: what the optimizer was made of, for want of itself. `state`: its state dict, which shows
        whether its keys are names."""
        instances = instances_of(model)
        for instance in instances:
            if instance._whole is not None:
                raise _C.InvalidArgument(
                    "[optim_state_dict] called inside summon_full_params, where optimizers do not fit the parameters; "
                    "call it outside"
                )
        names, flat_names = names_of_parameters(model), optimizers.names_of_flat_parameters(model)
        named = named or (state is not None and optimizers.has_names_as_keys(state))
        if optim is None or optim_input is not None:
            parameters = optimizers.parameters_of_input(model, optim_input)
        else:
            parameters = optimizers.parameters_by_key(optim, model, named, names, flat_names)
        return Keys(instances, optim, named, parameters, names, flat_names, _held_tensors(instances))

    def names_in_module(self, parameter: nn.Parameter) -> list[str]:
        """In the order of the module."""
        names, held = self.names[parameter], self.held.get(parameter)
        return [names[slot] for slot in held.order] if held is not None and held.is_flat else names


def _held_tensors(instances: list[Instance]) -> dict[nn.Parameter, HeldTensor]:
    held = {}
    for instance in instances:
        for flat, tensors, numbers in zip(instance._flats, instance._local, instance._unit.flats):
            count = len(flat.shapes)
            splits = [split_of(instance._managed[number].entries) for number in numbers]
            for i, tensor in enumerate(tensors):
                slots = [i] if len(tensors) == count else list(range(count))
                held[tensor] = HeldTensor(flat, slots, sorted(slots, key=numbers.__getitem__), tensor.shape, splits)
    return held


def plain(name: Key) -> Key:
    """torch's state dict functions leave out what torch.compile puts in the middle of names, or put it in."""
    return without_compiler(name) if isinstance(name, str) else name
