"""Tensors of a module on a device: what delayed parameter initialisation is made of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tesserae.job.device import default_device
from tesserae.torch_compat.modules import own_buffers, own_parameters


def empty_module_params(
    module: nn.Module, device: torch.device | int | None = None, recurse: bool = False
) -> nn.Module:
    """Gives the module new parameters of the same shapes on `device` (None: where this rank computes), without values.

    `recurse`: those of its submodules too. A parameter that stands in several places (tied weights) becomes one new
    one. Returns `module`.
    """
    device = default_device() if device is None else device
    made: dict[int, nn.Parameter] = {}
    for owner in _modules(module, recurse):
        for name, old in own_parameters(owner).items():
            if old is None:
                continue
            if id(old) not in made:
                new = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)  # marks that model code has put on it
                new.__dict__.pop("_is_hf_initialized", None)  # transformers' mark: it has values
                made[id(old)] = new
            setattr(owner, name, made[id(old)])
    return module


def move_buffers_to_device(module: nn.Module, device: torch.device | int, recurse: bool = False) -> nn.Module:
    """Moves the module's buffers to `device`; one on the meta device has no values to move and gets none.

    `recurse`: those of its submodules too. Returns `module`.
    """
    for owner in _modules(module, recurse):
        for name, buffer in own_buffers(owner).items():
            if buffer is not None:
                moved = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                setattr(owner, name, moved)
    return module


def _modules(module: nn.Module, recurse: bool) -> Iterator[nn.Module]:
    return module.modules() if recurse else iter((module,))
