"""The step of an optimizer without the hooks that torch puts around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from tesserae.torch_compat.checked import require

require(Optimizer, "_patch_step_function", "profile_hook_step")

Step = Callable[..., Any]

_patch = Optimizer._patch_step_function
_calls: list[Callable[[Optimizer], None]] = []
_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop, Rprop)


def on_new_optimizer(call: Callable[[Optimizer], None]) -> Callable[[], None]:
    """`call` is made for each optimizer that is made from now on, at the end of torch's part of its construction, and
    again when a state dict is loaded into it; until what is returned is called."""
    _calls.append(call)
    Optimizer._patch_step_function = _patch_and_call  # type: ignore[method-assign]

    def end() -> None:
        _calls.remove(call)
        if not _calls:
            Optimizer._patch_step_function = _patch  # type: ignore[method-assign]

    return end


def _patch_and_call(self: Optimizer) -> None:
    _patch(self)
    for call in list(_calls):
        call(self)


def works_element_by_element(optimizer: Optimizer) -> bool:
    """Whether a step over some of the parameters, and then over the others, is a step over all of them: known of these
    of torch's optimizers. Others may count steps by group, or take norms over all parameters."""
    return isinstance(optimizer, _ELEMENTWISE) and _inner(optimizer).__module__.startswith("torch.optim.")


def replace_step(optimizer: Optimizer, make: Callable[[Step], Step]) -> None:
    """make(step) is what this optimizer does in its step from now on, between the hooks; `step` is what it did."""
    step = Optimizer.profile_hook_step(make(_inner(optimizer)))
    optimizer.step = step.__get__(optimizer)  # type: ignore[method-assign]


def _inner(optimizer: Optimizer) -> Step:
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
