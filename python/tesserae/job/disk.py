"""The scratch file of this rank, for what lies on a disk while nobody works on it."""

from __future__ import annotations

import os

from tesserae import _C
from tesserae.job import config as configuration

_disk: _C.Disk | None = None


def open_disk(settings: configuration.Config) -> _C.Disk:
    """One for the process. Raises IoError."""
    global _disk
    if _disk is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        _disk = _C.Disk(folder=settings.scratch_folder, limit=settings.memory_limit, ranks=ranks)
    return _disk


def current() -> _C.Disk | None:
    return _disk


def forget() -> None:
    """What lies there stays there until it is gone."""
    global _disk
    _disk = None
