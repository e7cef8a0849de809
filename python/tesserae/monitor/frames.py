"""Python's frames for `tesserae stacks`, from C++ and without the GIL: faulthandler writes them at a signal."""

from __future__ import annotations

import faulthandler
import os
import signal

_registered: tuple[int, int] | None = None


def register() -> tuple[int, int]:
    """The number of a signal at which faulthandler writes the frames of all threads, and the descriptor of the file
    that it writes to; (0, -1) where there is none. Once for a process: the file stays open."""
    global _registered
    if _registered is None:
        # C++ takes the first free one from the other end.
        free = (n for n in range(signal.SIGRTMIN, signal.SIGRTMAX) if signal.getsignal(n) == signal.SIG_DFL)
        number = next(free, 0)
        if number == 0 or not hasattr(os, "memfd_create"):
            return 0, -1
        file = os.memfd_create("python-stacks")
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        _registered = number, file
    return _registered
