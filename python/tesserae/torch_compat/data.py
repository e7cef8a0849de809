"""When a script reads its next batch: the iterators of torch's DataLoader."""

from __future__ import annotations

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
