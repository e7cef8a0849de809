"""Whole parameters of modules that see a part of the activations (some heads, a piece of the sequence): each rank has a
summand of their gradients, which are summed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tesserae import _C
from tesserae.torch_compat.modules import own_parameters


def wrap(module: nn.Module, parallel: _C.Parallel) -> None:
    """As summed(), in every forward of `module`."""
    compute, names = module.forward, parameters_of(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with summed(module, names, parallel):
            return compute(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def parameters_of(module: nn.Module) -> list[str]:
    """The names of its own, before FSDP puts views in their place."""
    return [name for name, value in own_parameters(module).items() if value is not None]


@contextmanager
def summed(module: nn.Module, names: list[str], parallel: _C.Parallel) -> Generator[None]:
    """Within this context gradients of these parameters of the module are summed over the tensor-parallel ranks. All of
    them make the same calls, forward and backward."""
    with _replaced(module, {name: _C.copy_to_parallel(getattr(module, name), parallel) for name in names}):
        yield


@contextmanager
def _replaced(module: nn.Module, values: dict[str, Tensor]) -> Generator[None]:
    """Parameters, or the views that FSDP has put in their place, wherever the module keeps them."""
    places: list[dict[str, Any]] = [module.__dict__, own_parameters(module)]
    before = [{name: place[name] for name in values if name in place} for place in places]
    for place, own in zip(places, before, strict=True):
        place.update({name: values[name] for name in own})
    try:
        yield
    finally:
        for place, own in zip(places, before, strict=True):
            place.update(own)
