"""What a forward does to its inputs, and what the root does before its module is called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from tesserae.fsdp.instance import Instance, instances_below, instances_of
from tesserae.fsdp.replaced import take_replaced
from tesserae.job import config
from tesserae.torch_compat.distributed import cast_inputs, move_inputs
from tesserae.torch_compat.instance import ignored_modules, wrapped
from tesserae.torch_compat.modules import own_buffers

Arguments = tuple[tuple, dict[str, Any]]

# Called as a root's training forward begins, on all ranks alike: here the dial turns. With the root (an instance, or
# fully_shard's state) and the forward's arguments.
before_training_forward: list[Callable[[Any, tuple, dict[str, Any]], None]] = []


def begin_step(root: Instance, args: tuple, kwargs: dict[str, Any]) -> Arguments:
    if root._below is None:
        root._below = [instance for instance in instances_of(root) if instance is not root]
    for instance in (root, *root._below):
        take_replaced(instance)
    if torch.is_grad_enabled():
        for call in before_training_forward:
            call(root, args, kwargs)
    _warn_of_pool_misses(root)
    if not root._buffers_cast:
        for instance in (root, *root._below):
            _cast_buffers(instance)
    if root.compute_device.type != "cpu":
        return move_inputs(root.compute_device, args, kwargs)
    return args, kwargs


def cast(instance: Instance, args: tuple, kwargs: dict[str, Any]) -> Arguments:
    """Inputs in the dtype in which the unit computes, as the mixed precision says."""
    precision = instance.mixed_precision
    casts = precision.cast_forward_inputs and instance._computes
    casts = casts or (precision.cast_root_forward_inputs and instance._unit.is_root)
    if precision.param_dtype is None or not casts:
        return args, kwargs
    return cast_inputs(precision.param_dtype, args, kwargs)


def _warn_of_pool_misses(root: Instance) -> None:
    settings = config.current()
    if settings is None or not settings.fsdp_cache_flush_warnings:
        return
    misses = root._unit.statistics().pool_misses
    if misses > root._pool_misses:
        logging.getLogger("tesserae").warning(
            "[FSDP] %d times since the last step the memory planned for gathered parameters did not suffice, and more "
            "was allocated: units ran in another order than in the first step, or several at once "
            '("fsdp_cache_flush_warnings": false in tsm.init silences this)',
            misses - root._pool_misses,
        )
        root._pool_misses = misses


def _cast_buffers(instance: Instance) -> None:
    """Buffers compute in their own dtype of the mixed precision, as the root's first forward in FSDP does it."""
    instance._buffers_cast = True
    dtype = instance.mixed_precision.buffer_dtype
    below = {part for child in instances_below(wrapped(instance)).values() for part in child.modules()}
    for part in instance.modules():
        if part in below or part in ignored_modules(instance):
            continue
        buffers = own_buffers(part)
        for name, buffer in buffers.items():
            if buffer is not None:
                target = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                buffers[name] = buffer.to(instance.compute_device, target)
