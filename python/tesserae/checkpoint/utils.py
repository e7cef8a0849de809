"""Which folders of checkpoints stay, by SMP v2's path: torch.sagemaker.checkpoint.utils."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path


def SORT_BY_LAST_INT(name: str) -> int:
    """The last number in a name, -1 without one: `llama-1500steps` after `llama-900steps`."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else -1


def limit_num_subdirs(
    curr_dir: str | os.PathLike[str],
    max_num_subdirs: int,
    sort_fn: Callable[[str], int] = SORT_BY_LAST_INT,
    regex: str = r"^.*$",
    log: bool = True,
) -> None:
    """Removes folders in `curr_dir` whose names match `regex` but for the `max_num_subdirs` that `sort_fn` has last.

    `log`: whether this rank is the one that removes, and says so; the others return at once. Below 1, and where there
    is no such folder, nothing is removed. For folders that a script writes by itself: tsm.checkpoint and job.steps keep
    as many as they are told (`keep`).
    """
    folder = Path(curr_dir)
    if not log or max_num_subdirs < 1 or not folder.is_dir():
        return
    found = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
    names = sorted((name for name in found if re.match(regex, name)), key=lambda name: (sort_fn(name), name))
    for name in names[:-max_num_subdirs]:
        logging.getLogger("tesserae").info("%s: removed, %d newer ones stay", folder / name, max_num_subdirs)
        shutil.rmtree(folder / name)
