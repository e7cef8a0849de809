"""A module -> what a checkpoint keeps of it: "model/NAME" for parameters, "buffer/NAME" for persistent buffers.

Names are those of the module that the user wrote: what FSDP, DDP, torch.compile and activation checkpointing put around
it adds nothing. So a checkpoint goes from any of them to any other, and to the C++ trainer where names mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tesserae import _C
from tesserae.checkpoint.pieces import Cut, Pieces, cuts_of_dtensor, whole
from tesserae.fsdp.instance import Instance, require_root
from tesserae.fsdp.parameters import find_parameters
from tesserae.fully_shard.parameters import inner_tensors
from tesserae.fully_shard.state import ours
from tesserae.job.fabrics import around_experts, tensor_degree, writes_unsplit
from tesserae.tensor_parallel.parts import split_of
from tesserae.torch_compat.compiled import uncompiled
from tesserae.torch_compat.fsdp2 import local_of
from tesserae.torch_compat.instance import uses_orig_params
from tesserae.torch_compat.modules import is_persistent, own_buffers, own_modules, step_name


@dataclass
class Slot:
    """One parameter of the model, or this rank's part of it, within a parameter of the optimizer."""

    names: list[str]  # all that it has; it is saved under the first
    shape: Sequence[int]  # of the whole
    cuts: list[Cut]
    written: bool
    split: _C.Splits | None = None  # the cuts are of this part of the whole


@dataclass
class Held:
    """A Parameter as an optimizer has it: one slot, or all those of a flat parameter (use_orig_params=False)."""

    parameter: nn.Parameter
    slots: list[Slot]
    flat: bool = False  # a shard of one dimension, whatever the dimensions of the slots


class ModelState:
    """The parameters and buffers of a module on this rank, found by walking it. No collective."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model = _unwrapped(model)
        self.instances: list[Instance] = []
        self.held: list[Held] = []
        self._buffers: list[tuple[str, torch.Tensor]] = []
        self._stateful: list[tuple[str, nn.Module]] = []  # modules with a state of their own making
        self._seen: set[nn.Module] = set()  # a module may be there under several names
        self._find(model, "", "")
        self.fabric: _C.Fabric | None = None
        for instance in self.instances:
            fabric = around_experts(_C.unit_fabric(instance._unit))
            if self.fabric is not None and fabric is not self.fabric:
                raise _C.InvalidArgument(
                    "[checkpoint] FSDP instances of the model are over different groups of ranks; save the modules of "
                    "each group by themselves, to a folder of their own"
                )
            self.fabric = fabric

    def _find(self, part: nn.Module, path: str, root: str) -> None:
        """`path`: of this module, ending with a dot; `root`: of the FSDP instance that names its parameters."""
        if part in self._seen:
            return
        self._seen.add(part)
        if (state := ours(part)) is not None:
            state.show_shards()  # between a forward and its backward it may show what it has gathered
        if isinstance(part, Instance):
            if part._unit.is_root:
                root = path
            elif not self.instances:
                require_root(part, "checkpoint")
            self.instances.append(part)
            self.held += _held_by(part, root)
        elif isinstance(part, TorchFSDP):
            raise _C.InvalidArgument(
                "[checkpoint] the model is wrapped by torch's own FSDP: call tsm.init() before it is wrapped, or save "
                "its sharded state_dict() by tesserae.distributed.checkpoint.state_dict_saver"
            )
        for name, buffer in own_buffers(part).items():
            if buffer is not None and is_persistent(part, name):
                self._buffers.append((path + name, buffer))
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            self._stateful.append((path.removesuffix("."), part))
        for name, child in own_modules(part).items():
            if child is not None:
                self._find(child, path + step_name(name), root)

    @property
    def device(self) -> torch.device:
        """Where the model computes, as far as that can be seen."""
        places = {h.parameter.device for h in self.held} | {buffer.device for _, buffer in self._buffers}
        return next((place for place in places if place.type != "cpu"), torch.device("cpu"))

    @property
    def degrees(self) -> tuple[int, int, int]:
        return _C.unit_degrees(self.instances[0]._unit) if self.instances else (1, 1, 1)

    @property
    def expert_degree(self) -> int:
        """Over how many ranks its experts are shared out."""
        splits = (slot.split for held in self.held for slot in held.slots if slot.split is not None)
        return max((split.parts("expert") for split in splits), default=1)

    def find_plain(self, fabric: _C.Fabric) -> None:
        """Adds the parameters that no instance of FSDP has. Those of them that all ranks hold are written by rank 0."""
        for managed in find_parameters(self.model, set(), set()):
            parameter = managed.parameter
            if not getattr(parameter, "_tesserae_managed", False):
                cuts, written, columns = whole(parameter), fabric.rank == 0, None
                if isinstance(parameter, DTensor):
                    cuts, written, columns = cuts_of_dtensor(managed.names[0], parameter, fabric.size)
                split = split_of(managed.entries)
                if split is not None and not isinstance(parameter, DTensor):
                    index, tensor = divmod(fabric.rank, tensor_degree())
                    written = index < split.split.parts("expert") and not (split.repeated and tensor > 0)
                    slot = Slot(managed.names, split.whole, cuts, written, split.split)
                else:
                    slot = Slot(managed.names, parameter.shape, cuts, written, columns and _C.Splits(columns))
                self.held.append(Held(parameter, [slot]))

    def add_to(self, pieces: Pieces, rank: int, strict: bool = True) -> None:
        for held in self.held:
            _require_one_tensor(held)
            for slot in held.slots:
                pieces.add(
                    [f"model/{name}" for name in slot.names],
                    slot.shape,
                    slot.cuts,
                    held.parameter,
                    split=slot.split,
                    written=slot.written,
                    optional=not strict,
                )
        for name, buffer in self._buffers:
            # What comes from other formats does not tell buffers from parameters.
            pieces.add(
                [f"buffer/{name}", f"model/{name}"],
                buffer.shape,
                whole(buffer),
                buffer,
                written=rank == 0,
                changes_in_forward=True,
                optional=not strict,
            )

    def aliases(self) -> dict[str, str]:
        """Other names of tied parameters -> the name under which they are saved."""
        return {name: slot.names[0] for held in self.held for slot in held.slots for name in slot.names[1:]}

    def extra_state(self) -> dict[str, Any]:
        """What modules return from get_extra_state(), by their names."""
        return {name: module.get_extra_state() for name, module in self._stateful}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        for name, module in self._stateful:
            if name in state:
                module.set_extra_state(state[name])

    def require_extra_state(self, state: dict[str, Any]) -> None:
        """InvalidArgument unless `state` is of the same modules."""
        own, saved = {name for name, _ in self._stateful}, state.keys()
        for whose, lacks, names in (("model", "checkpoint", own - saved), ("checkpoint", "model", saved - own)):
            if names:
                raise _C.InvalidArgument(
                    f"[checkpoint.load] the {whose} has get_extra_state() of {len(names)} modules of which the {lacks} "
                    f"has none: {_few(sorted(names))}; pass strict=False to go on without"
                )

    def publish(self) -> None:
        """Collective: what was loaded is what the next forward computes with."""
        for instance in self.instances:
            _C.publish_unit(instance._unit)

    def require_known(self, pieces: Pieces) -> None:
        """InvalidArgument if the checkpoint has parameters or buffers that the model does not have."""
        assert pieces.stored is not None
        known = pieces.used.union(f"model/{name}" for name in self.aliases())  # it may have tied ones twice
        unknown = [n for n in pieces.stored if n.startswith(("model/", "buffer/")) and n not in known]
        if unknown:
            raise _C.InvalidArgument(
                f"[checkpoint.load] the checkpoint has {len(unknown)} tensors that the model does not have: "
                f"{_few(unknown)}; pass strict=False to leave them"
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _require_one_tensor(held: Held) -> None:
    """A checkpoint keeps one tensor of values under a name."""
    parameter = held.parameter
    inner = inner_tensors(local_of(parameter) if isinstance(parameter, DTensor) else parameter)
    if len(inner) > 1:
        raise _C.InvalidArgument(
            f"[checkpoint] parameter {held.slots[0].names[0]} holds {len(inner)} tensors ({', '.join(inner)}), of "
            "which a checkpoint would keep the first: save its state_dict() by torch.distributed.checkpoint"
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    """Without what DDP and torch.compile have put around it."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else uncompiled(model)
        if inner is model:
            return model
        model = inner


def _held_by(instance: Instance, root: str) -> list[Held]:
    """The parameters of the optimizer that one instance of FSDP shows."""
    if instance._whole is not None:
        raise _C.InvalidArgument(
            "[checkpoint] called inside summon_full_params, where parameters are not sharded; call it outside"
        )
    held = []
    first = writes_unsplit()
    for index, (flat, parameters) in enumerate(zip(instance._flats, instance._local, strict=True)):
        written, slices = _C.flat_slices(instance._unit, index)
        names, shapes = flat.names, flat.shapes
        splits = [split_of(instance._managed[number].entries) for number in instance._unit.flats[index]]
        here = {slot: (begin, end, offset) for slot, begin, end, offset in slices}
        slots = []
        for slot, slot_names in enumerate(names):
            cuts = []
            if slot in here:
                begin, end, offset = here[slot]
                cuts = [(offset, offset + end - begin, begin if not uses_orig_params(instance) else 0)]
            full_names, split = [root + name for name in slot_names], splits[slot]
            if split is not None:
                written_here = written and (first or not split.repeated)
                slots.append(Slot(full_names, split.whole, cuts, written_here, split.split))
            else:
                slots.append(Slot(full_names, shapes[slot], cuts, written and first))
        if uses_orig_params(instance):
            held += [Held(p, [slot], flat=True) for p, slot in zip(parameters, slots, strict=True)]
        else:
            held.append(Held(parameters[0], slots, flat=True))
    return held
