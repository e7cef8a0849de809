"""Clipping of gradients, by SMP v2's name for it."""

from __future__ import annotations

import torch
from torch import nn


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """model.clip_grad_norm_: scales gradients so that their norm over the whole model is at most `max_norm`.

    Every rank calls it; returns the norm before. `model` is the root, wrapped in FSDP.
    """
    return model.clip_grad_norm_(max_norm, norm_type)  # type: ignore[operator]
