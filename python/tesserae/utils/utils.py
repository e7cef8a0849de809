"""Timing, by the names of SMP v2."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from tesserae.logger import get_logger


@contextmanager
def timeit(condition: bool, message: str, rank: int = 0) -> Generator[None]:
    """Logs how long the block took, on rank 0, if `condition` holds."""
    begin = time.perf_counter()
    yield
    if condition and rank == 0:
        get_logger().info("%s: %.2f s", message, time.perf_counter() - begin)
