"""How far numbers and tensors are from what they should be. A module of its own: ranks import what they call, and this
imports no list of cases."""

from __future__ import annotations

from torch import Tensor


def furthest(ours: list[float], theirs: list[float]) -> float:
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """max |a - b| / max |b|"""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)).item() if theirs.numel() else 0.0


def way_off(ours: Tensor, theirs: Tensor, initial: Tensor) -> float:
    """How far ours ended from theirs, as a share of the way that theirs has gone: 1 for an optimizer that does nothing,
    whatever it does to losses. What did not move has not moved here either."""
    if theirs.equal(initial):
        return 0.0 if ours.equal(theirs) else float("inf")
    ours, theirs, initial = ours.double(), theirs.double(), initial.double()
    return ((ours - theirs).norm() / (theirs - initial).norm()).item()
