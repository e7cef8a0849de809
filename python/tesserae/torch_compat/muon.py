"""torch.optim.Muon: what it does with a list of matrices, and the parts of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tesserae.torch_compat.checked import checked, require

with checked():
    from torch.optim import _muon
    from torch.optim._muon import _adjust_lr as adjusted_lr
    from torch.optim._muon import _single_tensor_muon as torch_update
    from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalised

require(_muon, "_single_tensor_muon")

__all__ = ["adjusted_lr", "orthogonalised", "set_update", "torch_update"]


def set_update(update: Callable[..., Any]) -> None:
    """What Muon.step calls with a group's parameters, gradients and momentum buffers."""
    _muon._single_tensor_muon = update
