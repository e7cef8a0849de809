"""Runs a rule of the state dicts in a rank, on our FSDP class with either kind of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import tesserae as tsm


def with_ours(rank: int, world_size: int, rule: Callable[..., None]) -> None:
    """Calls rule(rank, world_size, use_orig_params) with both values of the last."""
    warnings.simplefilter("ignore")
    tsm.init()
    for use_orig_params in (True, False):
        print(f"{use_orig_params=}", flush=True)  # in the report, if it is the last
        rule(rank, world_size, use_orig_params)
