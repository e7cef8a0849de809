"""torch.nn.utils.clip_grad_norm_: the two halves that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.utils import clip_grad

from tesserae.torch_compat.checked import checked, require

require(clip_grad, "_get_total_norm", "_clip_grads_with_norm_")

with checked():
    torch_norm = clip_grad._get_total_norm
    torch_clip = clip_grad._clip_grads_with_norm_

__all__ = ["set_halves", "torch_clip", "torch_norm"]


def set_halves(norm: Callable[..., Any], clip: Callable[..., Any]) -> None:
    """What clip_grad_norm_ calls: norm(gradients, norm_type, error_if_nonfinite, foreach), and
    clip(parameters, max_norm, total_norm, foreach)."""
    clip_grad._get_total_norm = norm
    clip_grad._clip_grads_with_norm_ = clip
