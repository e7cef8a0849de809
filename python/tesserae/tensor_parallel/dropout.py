"""Dropout on split activations: each tensor-parallel rank has other heads and features, so it draws other masks.

Ranks of one tensor-parallel group are seeded alike: where activations are the same on all, dropout draws the same mask
on all, as it does in any model. Where they are split the default generators are the rank's own (C++: SplitRandom),
 1. from the end of a column layer, within a module that the family or the plan names (attention, a dense block),
 2. to the beginning of a row layer, whose sum, and what follows in the module, is the same on all again;
 3. or to the end of the module, if it has none, or an exception ends it before.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tesserae import _C
from tesserae.tensor_parallel.layers import Column, Row


def install(patterns: tuple[str, ...], model: nn.Module, random: _C.SplitRandom) -> None:
    for name, module in model.named_modules():
        columns = [child for child in module.children() if isinstance(child, Column)]
        rows = [child for child in module.children() if isinstance(child, Row)]
        if columns and any(fnmatchcase(name, pattern) for pattern in patterns) and draws(module):
            _install(module, columns, rows, random)


def _install(module: nn.Module, columns: list[Column], rows: list[Row], random: _C.SplitRandom) -> None:
    def begin(*_: Any) -> None:
        if module.training:
            random.begin()

    def end(*_: Any) -> None:
        random.end()

    for column in columns:
        column.register_forward_hook(begin)
    for row in rows:
        row.register_forward_pre_hook(end)
    module.register_forward_hook(end, always_call=True)


def draws(model: nn.Module) -> bool:
    """Whether it may draw any random number while it trains: dropout by whatever name, jitter of routers, layers that
    are left out. Rates of 0 cost nothing."""
    parts = list(model.modules())
    inside = any(isinstance(part, nn.Dropout) and part.p > 0 for part in parts)
    return inside or any(_is_rate(name, value) for part in parts for name, value in vars(part).items())


def _is_rate(name: str, value: object) -> bool:
    return isinstance(value, float) and 0 < value <= 1 and ("drop" in name or "jitter" in name)
