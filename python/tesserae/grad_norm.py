"""Clipping of gradients, by SMP v2's path."""

from tesserae.smp.small import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
