"""Finds optimizers that hold parameters which no longer take part in training.

With use_orig_params=False the unit's flat parameter takes the place of the user's parameters. An optimizer that was
built on those before would update nothing, without an error: its next step says so.
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


def retire(parameters: Iterable[nn.Parameter]) -> None:
    """These have been sharded: they hold nothing any more."""
    global _watching
    for parameter in parameters:
        parameter._tesserae_retired = True
        parameter.data = parameter.data.new_empty(0)
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    if any(getattr(p, "_tesserae_retired", False) for group in optimizer.param_groups for p in group["params"]):
        raise _C.InvalidArgument(
            f"[{type(optimizer).__name__}.step] this optimizer was built before FSDP(...) with use_orig_params=False, "
            "on parameters that have been sharded since: it would update nothing. Build it on model.parameters() after "
            "FSDP(...), or pass use_orig_params=True"
        )
    _checked.add(optimizer)
