"""Small functions by the names of SMP v2."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


def get_logger() -> logging.Logger:
    """logging.getLogger("tesserae"): its level and handlers are the script's to choose."""
    return logging.getLogger("tesserae")


@contextmanager
def timeit(condition: bool, message: str, rank: int = 0) -> Generator[None]:
    """Logs how long the block took, on rank 0, if `condition` holds."""
    begin = time.perf_counter()
    yield
    if condition and rank == 0:
        get_logger().info("%s: %.2f s", message, time.perf_counter() - begin)


def get_global_ranks(process_group: dist.ProcessGroup | None = None) -> list[int]:
    """The ranks of the job that are members of the group, in the group's order."""
    return dist.get_process_group_ranks(process_group)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """model.clip_grad_norm_: scales gradients so that their norm over the whole model is at most `max_norm`.

    Every rank calls it; returns the norm before. `model` is the root, wrapped in FSDP.
    """
    return model.clip_grad_norm_(max_norm, norm_type)  # type: ignore[operator]
