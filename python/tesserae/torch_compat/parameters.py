"""Hooks of a parameter, and how often it was written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tesserae.torch_compat.checked import require
from tesserae.torch_compat.fsdp2 import local_of

require(nn.Parameter(torch.empty(0)), "_backward_hooks", "_post_accumulate_grad_hooks", "_version")

Hooks = list[Callable]


def hooks_after_accumulation(parameter: nn.Parameter) -> Hooks:
    """What the user has registered by register_post_accumulate_grad_hook."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def steps_in_backward(parameter: nn.Parameter) -> bool:
    """_apply_optimizer_in_backward has given it an optimizer."""
    return hasattr(parameter, "_in_backward_optimizers")


def take_hooks(parameter: nn.Parameter) -> tuple[Hooks, Hooks]:
    """The hooks on the parameter's gradient, and those that run once it is accumulated. It has none afterwards."""
    on_gradient = list((parameter._backward_hooks or {}).values())
    after_accumulation = hooks_after_accumulation(parameter)
    parameter._backward_hooks = None
    parameter._post_accumulate_grad_hooks = None
    return on_gradient, after_accumulation


def version_of(parameter: torch.Tensor) -> int:
    """Another one after each write in place: of a DTensor, to what this rank has."""
    return (local_of(parameter) if isinstance(parameter, DTensor) else parameter)._version
