"""What nn.Module keeps for itself, and the wrappers that torch puts around a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tesserae.torch_compat.checked import checked, require

with checked():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE
    from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

require(
    nn.Module(),
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
    # Overridden by us.
    *("_apply", "_load_from_state_dict", "_save_to_state_dict"),
)

_COMPILED_MODULE = "_orig_mod"


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The entries of the module itself: the dictionary that it looks them up in."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether state dicts have the module's buffer of that name."""
    return buffer not in module._non_persistent_buffers_set


def step_name(name: str) -> str:
    """What a child of that name adds to its parameters' names: wrappers that state dicts leave out add nothing."""
    hidden = name in (FSDP_WRAPPED_MODULE, _CHECKPOINT_WRAPPED_MODULE, _COMPILED_MODULE)
    return "" if hidden else name + "."


def step_key(name: str) -> str:
    """The same for keys of torch's state dicts, where only activation checkpointing leaves nothing behind."""
    return "" if name == _CHECKPOINT_WRAPPED_MODULE else name + "."


def without_compiler(name: str) -> str:
    """torch.compile puts a step into the middle of names, which torch's state dict functions leave out."""
    return name.replace(_COMPILED_MODULE + ".", "")


def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """What gives the module's own parameters new values, if it knows: torch's attention keeps that for itself."""
    methods = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next((method for method in methods if callable(method)), None)


def run_state_dict_pre_hooks(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for hook in module._state_dict_pre_hooks.values():
        hook(module, prefix, keep_vars)


def run_state_dict_hooks(module: nn.Module, destination: Any, prefix: str) -> Any:
    """What nn.Module.state_dict does at its end: the dictionary, or what a hook puts in its place."""
    for hook in module._state_dict_hooks.values():
        result = hook(module, destination, prefix, destination._metadata.get(prefix[:-1], {}))
        destination = destination if result is None else result
    return destination
