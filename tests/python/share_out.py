"""What every rank compares with is computed by one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

Key = TypeVar("Key")
Value = TypeVar("Value")


def share_out(compute: Callable[[Key], Value], keys: Sequence[Key]) -> dict[Key, Value]:
    """`compute(key)` of each key; in every rank, each made by one. Collective: `keys` are the same everywhere, and what
    is computed does not depend on the rank."""
    keys = list(dict.fromkeys(keys))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made: list[Any] = [None] * ranks
    dist.all_gather_object(made, [compute(key) for key in keys[rank::ranks]])
    return {key: made[place % ranks][place // ranks] for place, key in enumerate(keys)}
