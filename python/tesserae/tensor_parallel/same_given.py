"""Ranks that compute one batch together must be given the same one, and draw the same numbers where activations are the
same: what a loader or a seed by rank does instead trains something else, and nobody sees it. Asked once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tesserae import _C
from tesserae.tensor_parallel.dropout import draws


class _FirstForward:
    """Of a model that is trained: before its first forward with gradients the ranks compare what they have."""

    def __init__(self, model: nn.Module, parallel: _C.Parallel, place: torch.device) -> None:
        self._parallel, self._place = parallel, place
        self._hook = model.register_forward_pre_hook(self._compare, with_kwargs=True)

    def _compare(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        self._hook.remove()
        given = [*args, *(value for _, value in sorted(kwargs.items()))]
        self._parallel.require_same([value for value in given if isinstance(value, Tensor) and not value.is_meta])
        if model.training and draws(model):
            generators = torch if self._place.type == "cpu" else torch.get_device_module(self._place)
            self._parallel.require_same_random(generators.get_rng_state())


def install(model: nn.Module, parallel: _C.Parallel, place: torch.device) -> None:
    """Of the whole model, split by now. `place`: where it computes."""
    if parallel.size > 1:
        _FirstForward(model, parallel, place)
