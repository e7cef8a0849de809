"""What FSDP1's constructor does before it shards: wraps children, and gives parameters their values and places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tesserae.torch_compat.checked import checked
from tesserae.torch_compat.instance import TorchInstance, ignored_modules, ignored_parameters
from tesserae.torch_compat.moving import can_move_in_place, replace_tensors

with checked():
    from torch.distributed.fsdp._init_utils import (
        FSDP_SYNCED,
        _materialize_meta_module,
        _materialize_with_param_init_fn,
        _move_module_to_device,
        _need_to_materialize_module,
    )
    from torch.distributed.fsdp._wrap_utils import _auto_wrap


def auto_wrap(instance: TorchInstance, module: nn.Module, policy: Any, arguments: dict[str, Any]) -> None:
    """Wraps the modules below `module` that the policy names, in the instance's class with these arguments."""
    _auto_wrap(module, policy, ignored_modules(instance), ignored_parameters(instance), arguments, type(instance))


def materialize(
    instance: TorchInstance, module: nn.Module, device: torch.device, init: Callable[[nn.Module], None] | None
) -> None:
    """Gives parameters on the meta device values, and moves what is elsewhere to an accelerator."""
    ignored, parameters = ignored_modules(instance), ignored_parameters(instance)
    is_meta, _ = _need_to_materialize_module(module, parameters, ignored)
    if is_meta and init is not None:
        _materialize_with_param_init_fn(module, init, ignored)
    elif is_meta:
        _materialize_meta_module(module, device, ignored, None)
    if device.type != "cpu":
        buffers = {buffer for part in ignored for buffer in part.buffers()}
        if can_move_in_place(device):
            _move_module_to_device(module, parameters, buffers, device)
        else:
            stays = parameters | buffers
            replace_tensors(_parts(module), device, lambda tensor: tensor.is_cpu and tensor not in stays)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """It and those below, but for instances further in and what is below them."""
    yield module
    for child in module.children():
        if not isinstance(child, TorchInstance):
            yield from _parts(child)


def buffers_to_synchronise(module: nn.Module) -> Iterator[torch.Tensor]:
    """Those that no instance further in has synchronised; they count as synchronised from now on."""
    for buffer in module.buffers():
        if not getattr(buffer, FSDP_SYNCED, False):
            setattr(buffer, FSDP_SYNCED, True)
            yield buffer.detach()
