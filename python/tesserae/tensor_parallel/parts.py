"""Modules some of whose parameters are this rank's parts of larger tensors: over tensor-parallel ranks, stacks of
experts over expert-parallel ones, or over both.

A SplitModule has parameters of the shape of a part, under the names that they have in the whole model. Outside, they
are whole: its entries of a state dict are put together from all ranks of the axes (a collective), and whole tensors
that are loaded are cut. What walks a model for FSDP asks split_of() which parameters are parts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from tesserae import _C
from tesserae.job.device import default_device
from tesserae.torch_compat.modules import own_parameters


@dataclass(frozen=True)
class SplitParameter:
    """How a parameter is cut, and the shape of the whole tensor."""

    split: _C.Splits
    whole: tuple[int, ...]

    def part_shape(self) -> torch.Size:
        return torch.Size(self.split.part_shape(list(self.whole)))

    @property
    def of_experts(self) -> bool:
        """Whether ranks share experts out: those with the same shard its state."""
        return self.split.parts("expert") > 1

    @property
    def repeated(self) -> bool:
        """Whether all ranks of a tensor group have the same: one of them counts it and writes it."""
        return self.split.parts("tensor") == 1


@dataclass(frozen=True)
class Mark:
    """On an entry of a state dict that was put together: of which memory it shows the part."""

    storage: int
    place: tuple[int, torch.Size]


Init = Callable[[nn.Module], Any]  # gives the parameters of a module values

marks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # beside the tensors: what users save has nothing of ours


class SplitModule(nn.Module):
    """Becomes the class of a module of the user's: see split_module(). Parameters that are not named are whole."""

    _tesserae_parallel: _C.Parallel
    _tesserae_splits: Mapping[str, SplitParameter]  # by name in this module

    def reset_parameters(self) -> None:
        """As the unsplit layer does it, with the same random numbers."""
        with whole_parameters(self, keep=False):
            super().reset_parameters()  # type: ignore[misc]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, split in self._tesserae_splits.items():
            part = destination.get(prefix + name)
            # Another shape: a slice of FSDP's, where only another rank wants to know.
            if part is not None and part.shape == split.part_shape():
                destination[prefix + name] = self._whole_of(part, split)

    def _whole_of(self, part: Tensor, split: SplitParameter) -> Tensor:
        if part.is_meta:
            return part.new_empty(split.whole)
        # Parts that have been brought to the host still travel between devices.
        place = default_device() if part.device.type == "cpu" else part.device
        whole = self._tesserae_parallel.whole_of(part.detach().to(place), split.split, list(split.whole))
        whole = whole.to(part.device)
        marks[whole] = Mark(part.untyped_storage().data_ptr(), (part.data_ptr(), part.shape))
        return whole

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, split in self._tesserae_splits.items():
            value = state_dict.get(prefix + name)
            if isinstance(own_parameters(self)[name], DTensor):  # of fully_shard: it stands for the whole
                continue
            if isinstance(value, Tensor) and value.shape == torch.Size(split.whole):
                state_dict[prefix + name] = _C.part_of(value, split.split)
        super()._load_from_state_dict(state_dict, prefix, *args)


class SplitWithoutReset(SplitModule):
    """For modules that have no reset_parameters()."""

    @property
    def reset_parameters(self) -> None:  # type: ignore[override]
        """There is none, and hasattr() is to say so."""
        raise AttributeError("reset_parameters")


def holds_experts(module: nn.Module) -> bool:
    """Whether the module has some of the experts that ranks share out: its state is sharded over those that have the
    same."""
    return isinstance(module, SplitModule) and any(s.of_experts for s in module._tesserae_splits.values())


@dataclass(frozen=True)
class Change:
    """What is to become of a module, once all of a plan has been checked."""

    module: nn.Module
    splits: dict[str, SplitParameter]  # of those of its parameters that become parts
    make: Callable[[], None]  # does not raise


def split_module(
    module: nn.Module, kind: type[SplitModule], parallel: _C.Parallel, splits: dict[str, SplitParameter]
) -> None:
    """`module` is a `kind` from now on, which is derived from its class: the same object, with its hooks, for whoever
    has a reference to it. Its parameters are not touched: see cut_parameters()."""
    module.__class__ = kind
    module._tesserae_parallel = parallel  # type: ignore[assignment]
    module._tesserae_splits = splits  # type: ignore[assignment]


def cut_parameters(model: nn.Module, modules: Iterable[SplitModule]) -> None:
    """Whole parameters become parts: the same objects, in the memory of a part, tied ones tied as before. Raises
    InvalidArgument as check_ties()."""
    modules = list(modules)
    check_ties(model, {module: module._tesserae_splits for module in modules})
    cut: set[nn.Parameter] = set()
    for module in modules:
        for name, split in module._tesserae_splits.items():
            parameter = own_parameters(module)[name]
            if parameter is not None and parameter not in cut:
                cut.add(parameter)
                _cut(parameter, split)


def _cut(parameter: nn.Parameter, split: SplitParameter) -> None:
    """The object stays, with its hooks and what the user has put on it: an optimizer that was made before has it."""
    whole, gradient = parameter.detach(), parameter.grad
    parameter.grad = None
    if not parameter.is_meta:
        # Another dtype in between: autograd forgets the shape, which a graph that is still there keeps alive.
        parameter.data = whole.new_empty(0, dtype=torch.half if whole.dtype != torch.half else torch.float)
    parameter.data = _part_of(whole, split)
    if gradient is not None:
        parameter.grad = _part_of(gradient.detach(), split)


def _part_of(whole: Tensor, split: SplitParameter) -> Tensor:
    if whole.is_meta:
        return whole.new_empty(split.part_shape())
    part = _C.part_of(whole, split.split)
    return part.clone() if part.data_ptr() == whole.data_ptr() else part  # not a view that keeps the whole alive


def check_ties(model: nn.Module, planned: Mapping[nn.Module, Mapping[str, SplitParameter]]) -> None:
    """Raises InvalidArgument if a parameter that is to be cut, of the modules in `planned`, is tied to one that is not,
    or is cut differently."""
    cut: dict[nn.Parameter, SplitParameter] = {}
    for module, splits in planned.items():
        for name, split in splits.items():
            parameter = own_parameters(module)[name]
            if parameter is not None and cut.setdefault(parameter, split) != split:
                raise _C.InvalidArgument(
                    f"[tsm.transform] the parameter {name} of a {type(module).__name__} is tied to another one that is "
                    f"cut differently: {split.split} and {cut[parameter].split}; give them plans of the same kind"
                )
    for path, module in model.named_modules():
        splits = module._tesserae_splits if isinstance(module, SplitModule) else planned.get(module, {})
        for name, parameter in own_parameters(module).items():
            if name not in splits and parameter in cut:
                raise _C.InvalidArgument(
                    f"[tsm.transform] {path}.{name} is tied to a parameter that the plan splits, but is not in the "
                    'plan itself; put it there, too ("head" for the layer that gives logits)'
                )


@contextmanager
def whole_parameters(module: nn.Module, keep: bool) -> Generator[None]:
    """The module's parameters are whole tensors within this context, and afterwards what is then in their parts: the
    parameters of before, or what was put in their place.
    `keep`: with the values that they have, which is collective; else with memory for whoever gives them values."""
    if not isinstance(module, SplitModule):
        yield
        return
    own = own_parameters(module)
    parts: dict[str, nn.Parameter] = {}
    wholes: dict[str, nn.Parameter] = {}
    for name, split in module._tesserae_splits.items():
        part = own[name]
        if part is None or part.shape == torch.Size(split.whole):  # whole already: a context within another
            continue
        whole = module._whole_of(part, split) if keep else part.new_empty(split.whole)
        parts[name] = part
        wholes[name] = nn.Parameter(whole.detach(), requires_grad=part.requires_grad)
        wholes[name].__dict__.update(part.__dict__)
        wholes[name].__dict__.pop("_is_hf_initialized", None)  # transformers' mark: it has values
    own.update(wholes)
    try:
        yield
        with torch.no_grad():
            for name in list(parts):
                now, split = own[name], module._tesserae_splits[name]
                if now is wholes[name]:
                    parts[name].copy_(_C.part_of(now.detach(), split.split))
                elif now is not None:  # memory that an initialiser has made
                    if now.shape == torch.Size(split.whole):
                        _cut(now, split)
                    parts[name] = now
    finally:
        own.update(parts)


def cuts(init: Init) -> Init:
    """Marks `init`, which knows itself that parameters are parts: cutting() leaves it as it is."""
    init._tesserae_cuts = True  # type: ignore[attr-defined]
    return init


def cutting(init: Init | None) -> Init | None:
    """A script's own initialiser (FSDP's param_init_fn): of the module that it is given it sees whole parameters,
    and what it puts in them is cut, so that numbers do not depend on how many ranks share them out."""
    if init is None or getattr(init, "_tesserae_cuts", False):
        return init

    def initialise(module: nn.Module) -> None:
        with whole_parameters(module, keep=False):
            init(module)

    return initialise


def split_of(entries: Iterable[tuple[nn.Module, str]]) -> SplitParameter | None:
    """How the parameter is cut that the modules have under these names; None: it is whole. Raises InvalidArgument if
    they do not agree."""
    modules = list(entries)
    found = [m._tesserae_splits.get(name) if isinstance(m, SplitModule) else None for m, name in modules]
    if any(split != found[0] for split in found):
        names = ", ".join(f"{type(module).__name__}.{name}" for module, name in modules)
        raise _C.InvalidArgument(
            f"[FSDP] the parameter that {names} share is cut in different ways ({', '.join(map(str, found))}); give "
            "tied layers the same plan"
        )
    return found[0]
