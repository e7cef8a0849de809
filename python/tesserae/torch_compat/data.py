"""Who reads batches, and when: the iterators of torch's DataLoader, and what libraries put around them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_tell: Callable[[str], None] | None = None
_thread = 0  # that trains; others may read ahead
_depth = 0  # of iterators that read from iterators
_torch_next = _BaseDataLoaderIter.__next__


def watch(tell: Callable[[str], None] | None) -> None:
    """`tell` is called with "data" before a batch is read and with "between" after; None: nobody is. Counts once
    follow_this_thread() has been called."""
    global _tell, _thread
    _tell, _thread = tell, 0
    # Installed once, for good: an iterator may be in use when nobody listens any more.
    if _BaseDataLoaderIter.__next__ is _torch_next:
        _BaseDataLoaderIter.__next__ = _next


def follow_this_thread() -> None:
    """The calling thread is the one whose reading counts."""
    global _thread
    _thread = threading.get_ident()


def _next(self: _BaseDataLoaderIter) -> Any:
    global _depth
    tell = _tell
    if tell is None or threading.get_ident() != _thread:
        return _torch_next(self)
    _depth += 1
    try:
        if _depth == 1:
            tell("data")
        return _torch_next(self)
    finally:
        _depth -= 1
        if _depth == 0:
            tell("between")


# Of Accelerate, and of Trainer: one rank reads, for others or in the place of others.
_DEALERS = ("DataLoaderDispatcher", "IterableDatasetShard")


def who_deals_out() -> str | None:
    """The class that begins to iterate over the caller's dataset, if it is one of those."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__iter__":
            name = type(frame.f_locals.get("self")).__name__
            if name in _DEALERS:
                return name
        frame = frame.f_back  # type: ignore[assignment]
    return None
