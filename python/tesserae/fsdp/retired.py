"""Finds optimizers that hold parameters which no longer take part in training.

With use_orig_params=False the unit's flat parameter takes the place of the user's parameters, with fully_shard DTensors
do. An optimizer that was built on those before would update nothing, without an error: its next step says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tesserae import _C

_watching = False
_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def retire(parameters: Iterable[nn.Parameter], by: str, otherwise: str = "") -> None:
    """These have been sharded `by` a call: an optimizer that is to train is built after it. `otherwise`: what else
    helps."""
    global _watching
    for parameter in parameters:
        parameter._tesserae_retired = by, otherwise
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        retired = getattr(parameter, "_tesserae_retired", None)
        if retired is not None:
            by, otherwise = retired
            raise _C.InvalidArgument(
                f"[{type(optimizer).__name__}.step] this optimizer was built before {by}, on parameters that have been "
                f"sharded since: it would update nothing. Build it on model.parameters() after {by}{otherwise}"
            )
    _checked.add(optimizer)
