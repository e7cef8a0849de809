"""What job.steps() of tsm.elastic saves, and when: in the ranks' memory and in the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tesserae as tsm
from ranks import run_ranks
from tesserae import _C
from tesserae.elasticity.job import Job
from tesserae.job import fabrics


def steps_in(folder: Path) -> list[int]:
    return sorted(step for step, _ in _C.list_checkpoints(str(folder)))


class Training:
    """Of ranks that have met, and keep what they have in `memory`."""

    def __init__(self, rank: int, world_size: int, memory: Path | None, epoch: int = 0) -> None:
        nothing: Any = lambda *_: None  # noqa: E731
        fabric = fabrics.fabric_of(None, torch.device("cpu"))
        kept = str(memory) if memory is not None else None
        self.job = Job(rank, world_size, epoch, None, fabric, kept, 0.0, nothing, nothing, nothing)
        torch.manual_seed(1)
        self.model = fully_shard(nn.Linear(4, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def run(self, until: int, accumulate: int = 1, **places: Any) -> Iterator[int]:
        for step in self.job.steps(self.model, self.optimizer, until, **places):
            self.model(torch.randn(2, 4)).square().mean().backward()
            if step % accumulate == accumulate - 1:
                self.optimizer.step()
                self.optimizer.zero_grad()
            yield step


def goes_on_with_what_was_due(rank: int, world_size: int, folder: Path) -> None:
    """The ranks hold a later step than the folder has: some were lost while it was written."""
    tsm.init()
    for name, stored, held, until, every, found in (
        ("the last one", 0, 6, 6, 100, [6]),
        ("one of every two", 2, 5, 9, 2, [2, 5]),
        ("nothing was due", 4, 5, 9, 4, [4]),
    ):
        memory, place = folder / name / "memory", folder / name / "folder"
        training = Training(rank, world_size, memory)
        if stored > 0:
            tsm.checkpoint.save(place, training.model, training.optimizer, step=stored)
        list(training.run(held))
        assert steps_in(memory)[-1] == held
        later = Training(rank, world_size, memory, epoch=1)
        next(later.run(until, folder=place, every=every, keep=0), None)
        tsm.checkpoint.maybe_finalize_async_calls()
        assert steps_in(place) == found, name


def cannot_save(rank: int, world_size: int, folder: Path) -> None:
    """One of the two places is below a file."""
    tsm.init()
    if rank == 0:
        (folder / "file").touch()
    torch.distributed.barrier()
    full = Training(rank, world_size, folder / "file/memory")
    assert list(full.run(6, folder=folder / "good", every=2, keep=0)) == list(range(6))
    assert steps_in(folder / "good") == [2, 4, 6]
    lost, done = Training(rank, world_size, folder / "memory"), []
    with pytest.raises(tsm.checkpoint.SaveFailed, match="step 2 was not saved"):
        done.extend(lost.run(6, folder=folder / "file/folder", every=2))
    assert steps_in(folder / "memory")[-1] == 2


def accumulates(rank: int, world_size: int, folder: Path) -> None:
    """A step of the loop is a micro-batch, and gradients are saved by nobody."""
    tsm.init()
    training = Training(rank, world_size, folder / "memory")
    for step in training.run(12, accumulate=4, folder=folder / "stored", every=3, keep=0):
        if step == 6:
            tsm.checkpoint.maybe_finalize_async_calls()
            assert steps_in(folder / "memory") == [4]
            break
    again = Training(rank, world_size, folder / "memory", epoch=1)
    assert list(again.run(12, accumulate=4, folder=folder / "stored", every=3, keep=0)) == list(range(4, 12))
    assert steps_in(folder / "stored") == [4, 8, 12]
    list(Training(rank, world_size, folder / "third").run(11, accumulate=4, memory_every=3))
    assert steps_in(folder / "third") == [8, 11], "due after 6, and after 9"
    list(Training(rank, world_size, None).run(12, accumulate=4, folder=folder / "alone", every=5, keep=0))
    assert steps_in(folder / "alone") == [8, 12]


def test_a_checkpoint_that_was_due_is_made_up_for(tmp_path: Path) -> None:
    run_ranks(goes_on_with_what_was_due, 2, tmp_path)


def test_a_full_memory_is_a_warning_and_a_full_folder_an_error(tmp_path: Path) -> None:
    run_ranks(cannot_save, 2, tmp_path)


def test_nobody_goes_on_from_within_an_accumulation(tmp_path: Path) -> None:
    run_ranks(accumulates, 2, tmp_path)
