"""torch's offload_wrapper: what it saves through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

from tesserae.torch_compat.checked import require

require(checkpoint_wrapper, "save_on_cpu", "OffloadWrapper")

__all__ = ["halves_of", "save_on_cpu", "saved_tensors_hooks", "set_saving", "version_of"]


def set_saving(saving: Callable[..., Any]) -> None:
    """The context, made with pin_memory=True, in which offload_wrapper runs its module."""
    checkpoint_wrapper.save_on_cpu = saving  # type: ignore[attr-defined]


def halves_of(hooks: saved_tensors_hooks) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return hooks.pack_hook, hooks.unpack_hook


def version_of(tensor: torch.Tensor) -> int:
    """Counts what has changed the tensor in place, or what shares its storage; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version
