"""The two faces of a parameter: what a module computes with, and what an optimizer sees.

Between steps a module's entry is the user's own Parameter object, which holds this rank's slice of the master (with
use_orig_params=True), or is missing (False: the unit's `_flat_param` stands for all). Inside the unit's forward the
entry is the compute parameter: the whole parameter, a view of the gathered buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tesserae.torch_compat.modules import own_modules, own_parameters, step_name
from tesserae.torch_compat.parameters import take_hooks


@dataclass
class Managed:
    """One parameter of a unit, under all names that it has in the unit's module (tied parameters have several)."""

    parameter: nn.Parameter  # the user's
    entries: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # as users know them, from the unit's module down
    compute: torch.Tensor | None = None
    dtype: torch.dtype = field(init=False)  # before sharding

    def __post_init__(self) -> None:
        self.dtype = self.parameter.dtype


def find_parameters(
    module: nn.Module, skip: set[nn.Module], ignored: set[nn.Parameter], inner: Set[nn.Module] = frozenset()
) -> list[Managed]:
    """The parameters below `module`, without those below the modules in `skip` and those in `ignored`; of what is below
    those in `inner`, which are instances already, what they have left to the instance around them."""
    found: dict[nn.Parameter, Managed] = {}
    seen: set[nn.Module] = set()  # a module may have several names

    def visit(part: nn.Module, path: str, is_inner: bool) -> None:
        for name, parameter in own_parameters(part).items():
            if parameter is None or parameter in ignored or (is_inner and is_managed(parameter)):
                continue
            managed = found.setdefault(parameter, Managed(parameter))
            if part not in seen:
                managed.entries.append((part, name))
            managed.names.append(path + name)
        seen.add(part)
        for name, child in own_modules(part).items():
            if child is not None and child not in skip:
                visit(child, path + step_name(name), is_inner or child in inner)

    visit(module, "", False)
    return list(found.values())


def is_managed(parameter: nn.Parameter) -> bool:
    """By an instance, which shards it."""
    return getattr(parameter, "_tesserae_managed", False)


def make_compute(managed: Managed, as_parameter: bool) -> torch.Tensor:
    """The tensor that the module will compute with; shares memory with the user's parameter until the unit is made."""
    values = managed.parameter.detach()
    if as_parameter:
        # Modules that override setattr, and code that looks for Parameter objects, must find one.
        compute: torch.Tensor = nn.Parameter(values, requires_grad=managed.parameter.requires_grad)
    else:
        compute = values.requires_grad_(managed.parameter.requires_grad)
    move_hooks(managed.parameter, compute)
    managed.compute = compute
    return compute


def move_hooks(local: nn.Parameter, compute: torch.Tensor) -> None:
    """Gradient hooks of the user belong to the tensor that autograd knows: those that he has registered move there, and
    those that he registers later go there. They see the whole, unreduced gradient of this rank."""
    on_gradient, after_accumulation = take_hooks(local)
    for hook in on_gradient:
        compute.register_hook(hook)
    for hook in after_accumulation:
        compute.register_post_accumulate_grad_hook(hook)
    local.register_hook = compute.register_hook  # type: ignore[method-assign]
    local.register_post_accumulate_grad_hook = compute.register_post_accumulate_grad_hook  # type: ignore[method-assign]


Entry = tuple[object, str, torch.Tensor, nn.Parameter]


def entries_of(parameters: Iterable[Managed]) -> list[Entry]:
    """What to swap at the borders of a forward: (owner, name, compute parameter, the user's parameter)."""
    return [
        (owner_of(module), name, managed.compute, managed.parameter)
        for managed in parameters
        for module, name in managed.entries
    ]


def owner_of(module: nn.Module) -> object:
    """Where to write an entry. Modules that keep references of their own to their parameters (LSTM's _flat_weights) do
    so in their setattr, which must therefore be called."""
    return own_parameters(module) if type(module).__setattr__ is nn.Module.__setattr__ else module


def entry_now(managed: Managed) -> Any:
    """What the user's modules have as this parameter between steps, which he may have replaced."""
    for module, name in managed.entries:
        now = getattr(module, name, None)
        if now is not managed.parameter:
            return now
    return managed.parameter


def flat_name(index: int) -> str:
    """Under what name a unit's module has its flat parameter of that number."""
    return "_flat_param" if index == 0 else f"_flat_param_{index}"


def replace_by_tensors(parameters: Iterable[Managed]) -> None:
    """use_orig_params=False: modules keep the compute tensors as plain attributes for good."""
    for managed in parameters:
        for module, name in managed.entries:
            del own_parameters(module)[name]
            setattr(module, name, managed.compute)


def restore_parameters(parameters: Iterable[Managed]) -> None:
    """The reverse: modules have the user's Parameter objects as entries."""
    for managed in parameters:
        for module, name in managed.entries:
            module.__dict__.pop(name, None)
            setattr(module, name, managed.parameter)
