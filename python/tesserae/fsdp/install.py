"""torch.distributed.fsdp.FullyShardedDataParallel -> ours, for every script that holds the name.

torch's class object itself is changed, since scripts and libraries import it before tsm.init:
  1. Its `__new__` makes an instance of our subclass, whose `__init__` Python then calls. isinstance holds.
  2. Its static methods ask whether the module that they are given contains one of ours: if so ours is called, else
     torch's. So a model keeps its meaning under either name, whatever is installed when it is used.
  3. Its methods of an instance, called through the class, ask the same of the instance.
The name is bound to ours in no module: torch's own code, and who imports it late, would take models that torch has
wrapped before for plain ones, and pickle would not find torch's class. So `type(model) is FSDP` is False for a model
of ours. Accelerate asks just that when it loads a FULL_STATE_DICT: if False only rank 0 loads, and waits for ever.
  4. The module of Accelerate that asks gets a `type` of its own, which says torch's class of a model of ours. It gets
     it from 2, for Accelerate calls FSDP.state_dict_type before it asks: it does not matter when it is imported.
`uninstall` ends 1. It leaves a `__new__` that makes what it is asked for, because a class that has had one cannot be
called with arguments once it is deleted; and it leaves the others, because models of ours may live on.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed.fsdp
from torch import nn

from tesserae import _C

TorchFSDP = torch.distributed.fsdp.FullyShardedDataParallel

_ours: type[nn.Module] | None = None  # the class that torch's static methods look for
_installed = False
_originals: dict[str, Callable[..., Any]] = {}  # torch's methods that are dispatched


def install(cls: type[nn.Module]) -> None:
    """torch's name means `cls` from now on: a subclass of torch's class.

    A second call does nothing. Not thread-safe: call it before the script starts threads that wrap models.
    """
    global _ours, _installed
    if _installed:
        return
    _ours = cls
    for name in dispatched_methods():
        if name not in _originals:
            _originals[name] = getattr(TorchFSDP, name)
            setattr(TorchFSDP, name, staticmethod(_dispatcher(name)))
    for name in overridden_methods(cls):
        if name not in _originals:
            _originals[name] = vars(TorchFSDP)[name]
            setattr(TorchFSDP, name, _instance_dispatcher(name))
    _set_new(cls)
    _installed = True


def uninstall() -> None:
    """torch's name means torch's class again. Models that are wrapped already stay what they are."""
    global _installed
    if _installed:
        _installed = False
        _set_new(TorchFSDP)


def is_installed() -> bool:
    """Whether torch's name means our class."""
    return _installed


def original(name: str) -> Callable[..., Any]:
    """torch's own static method of that name, for modules that contain none of ours."""
    return _originals.get(name) or getattr(TorchFSDP, name)


def dispatched_methods() -> Iterator[str]:
    """torch's static methods that are given a module."""
    for name, method in list(vars(TorchFSDP).items()):
        if isinstance(method, staticmethod) and _module_parameter(method.__func__) is not None:
            yield name


def overridden_methods(cls: type[nn.Module]) -> Iterator[str]:
    """torch's public methods of an instance in whose place `cls` has its own, but for forward: nobody calls that
    through the class, and torch's own models should not pay for it."""
    for name, method in list(vars(TorchFSDP).items()):
        if name.startswith("_") or name == "forward" or not inspect.isfunction(method):
            continue
        if getattr(cls, name) is not method:
            yield name


def _module_parameter(function: Callable[..., Any]) -> tuple[int, str] | None:
    """Position and name of the parameter that takes the module."""
    for position, name in enumerate(inspect.signature(function).parameters):
        if name in ("module", "model"):
            return position, name
    return None


def _dispatcher(name: str) -> Callable[..., Any]:
    torchs = _originals[name]
    parameter = _module_parameter(torchs)
    assert parameter is not None
    position, keyword = parameter

    @functools.wraps(torchs)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        module = args[position] if len(args) > position else kwargs.get(keyword)
        if not contains_ours(module):
            return torchs(*args, **kwargs)
        _answer_accelerate()
        method = next((vars(cls)[name] for cls in _ours.__mro__ if cls is not TorchFSDP and name in vars(cls)), None)
        if method is None:
            raise NotImplementedError(
                f"[FSDP.{name}] this method of torch's FSDP is not available for a model that tesserae has wrapped"
            )
        return getattr(_ours, name)(*args, **kwargs)

    return dispatch


def _instance_dispatcher(name: str) -> Callable[..., Any]:
    torchs = _originals[name]

    @functools.wraps(torchs)
    def dispatch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _ours is not None and isinstance(self, _ours):
            return getattr(_ours, name)(self, *args, **kwargs)
        return torchs(self, *args, **kwargs)

    return dispatch


def _answer_accelerate() -> None:
    """`type(model) is FSDP` is True in Accelerate for a model of ours."""
    if (asking := sys.modules.get("accelerate.utils.fsdp_utils")) is not None:
        vars(asking)["type"] = _type_for_accelerate


def _type_for_accelerate(value: Any, *parts: Any) -> type:
    if not parts and _ours is not None and isinstance(value, _ours):
        return TorchFSDP
    return type(value, *parts)


def contains_ours(module: Any) -> bool:
    """Whether a submodule of `module`, or itself, was wrapped by tesserae."""
    return _ours is not None and isinstance(module, nn.Module) and any(isinstance(m, _ours) for m in module.modules())


def _set_new(cls: type[nn.Module]) -> None:
    """`TorchFSDP(...)` makes a `cls`; it shows the signature of its constructor."""

    def new(asked: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        if not args and not kwargs:  # copy and pickle rebuild what was there
            return object.__new__(asked)
        if asked is TorchFSDP:
            return object.__new__(cls)
        if cls is not TorchFSDP and not issubclass(asked, cls):
            raise _C.InvalidArgument(
                f"[FSDP] {asked.__module__}.{asked.__qualname__} is a subclass of torch's FullyShardedDataParallel, "
                "which tesserae cannot replace; use FullyShardedDataParallel itself, derive from "
                "tesserae.fsdp.FullyShardedDataParallel, or call tsm.uninstall() before"
            )
        return object.__new__(asked)

    new.__name__ = new.__qualname__ = "__new__"
    new.__signature__ = inspect.signature(cls.__init__)  # type: ignore[attr-defined]
    TorchFSDP.__new__ = new  # type: ignore[method-assign, assignment]
