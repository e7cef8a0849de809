"""torch.distributed's backend "tesserae" when something goes wrong: mistakes, disagreement, lost peers, kills."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tesserae
from ranks import RankFailed, run_ranks

Op = dist.ReduceOp
FLOATS = (torch.float32, torch.float64)


def start(backend: str = "tesserae", **arguments: object) -> None:
    dist.init_process_group(backend, **arguments)  # type: ignore[arg-type]


def mistakes(rank: int, world_size: int) -> None:
    start()
    for wrong in (
        lambda: dist.all_reduce(torch.ones(2), Op.BAND),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), Op.AVG),
        lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(2)),
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5)),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
    ):
        with pytest.raises((tesserae.InvalidArgument, ValueError, RuntimeError)):
            wrong()
    total = torch.ones(1)
    dist.all_reduce(total)  # the group is as it was
    assert total.item() == world_size


def test_mistakes_are_errors_at_once() -> None:
    run_ranks(mistakes, 2, init=False)


DISAGREEMENTS: dict[str, tuple[Callable[[int], object], str, str]] = {
    "sizes": (lambda rank: dist.all_reduce(torch.ones(10 + rank)), "all_reduce of 10 x Float", "all_reduce of 11 x"),
    "dtypes": (lambda rank: dist.all_reduce(torch.ones(4).to(FLOATS[rank])), "4 x Float", "4 x Double"),
    "reductions": (
        lambda rank: dist.all_reduce(torch.ones(4), (Op.SUM, Op.MAX)[rank]),
        "all_reduce of 4 x Float",
        r"all_reduce \(maximum\) of 4 x Float",
    ),
    "operations": (
        lambda rank: dist.barrier() if rank else dist.all_reduce(torch.ones(4)),
        "rank 0 called all_reduce of 4 x Float",
        "rank 1 called barrier",
    ),
    "roots": (lambda rank: dist.broadcast(torch.ones(4), rank), "broadcast of 4 x Float from member", "rank 1 called"),
    "gathers": (
        lambda rank: dist.gather(torch.ones(4 + rank), [torch.ones(4)] * 2 if rank == 0 else None, 0),
        "gather of 4 x Float to member 0",
        "gather of 5 x Float to member 0",
    ),
    "splits": (
        lambda rank: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [1, 3] if rank else [2, 2]),
        "rank 1 sends 1 elements to rank 0",
        "which expects 2 of it",
    ),
}


def disagree(rank: int, world_size: int, kind: str) -> None:
    start()
    call, first, second = DISAGREEMENTS[kind]
    began = time.monotonic()
    with pytest.raises(tesserae.Mismatch, match=first) as caught:
        call(rank)
        dist.barrier()  # who sends may not have noticed yet
    assert caught.match(second)
    assert time.monotonic() - began < 10
    with pytest.raises(tesserae.Mismatch):
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("kind", list(DISAGREEMENTS))
def test_disagreement_names_both_on_all_ranks(kind: str) -> None:
    run_ranks(disagree, 2, kind, init=False)


def loses_a_peer(rank: int, world_size: int, folder: str) -> None:
    start()
    pair = dist.new_group([1, 2])
    dist.barrier()
    if rank == 2:
        Path(folder, "died").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with pytest.raises(tesserae.PeerLost) as caught:
            dist.all_reduce(torch.ones(100_000))
        assert caught.value.ranks == (2,)
        took = time.time() - float(Path(folder, "died").read_text())
        if rank == 1:
            with pytest.raises(tesserae.PeerLost) as caught:
                dist.all_reduce(torch.ones(4), group=pair)
            assert caught.value.ranks == (2,) and "global ranks 1, 2" in str(caught.value)
        outcome = f"noticed {took}"
    except BaseException as error:
        outcome = repr(error)
    Path(folder, f"rank-{rank}").write_text(outcome)


def test_a_killed_peer_is_named_at_once(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Within a second, at the median of several, and never after more than ten times that."""
    took = []
    for _ in range(3):
        with pytest.raises(RankFailed, match="rank 2 failed"):
            run_ranks(loses_a_peer, 3, str(tmp_path), init=False)
        for rank in (0, 1):
            outcome = (tmp_path / f"rank-{rank}").read_text()
            assert outcome.startswith("noticed "), outcome
            took.append(float(outcome.removeprefix("noticed ")))
    record_property("seconds", took)
    assert statistics.median(took) <= 1 and max(took) <= 10, took


def waits_for_a_stopped_peer(rank: int, world_size: int, folder: str) -> None:
    start(timeout=timedelta(seconds=8))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with pytest.raises(tesserae.Timeout, match="deadline of 8000 ms") as caught:
            dist.all_reduce(torch.ones(4))
        outcome = repr(caught.value.silent)
    except BaseException as error:
        outcome = repr(error)
    Path(folder, "outcome").write_text(outcome)
    raise RuntimeError("seen")


def test_a_stopped_peer_is_named_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="seen"):
        run_ranks(waits_for_a_stopped_peer, 2, str(tmp_path), init=False)
    assert (tmp_path / "outcome").read_text() == "(1,)"


# ---- nothing is left behind ----
def works_until_killed(rank: int, world_size: int, folder: str) -> None:
    start()
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor)
    assert shared_by(os.getpid())
    assert "/dev/shm/tesserae" not in Path("/proc/self/maps").read_text()  # a name would outlive the processes
    Path(folder, f"rank-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    end = time.monotonic() + 0.05
    while rank != 0 or time.monotonic() < end:
        dist.all_reduce(tensor, Op.MAX)
    for file in Path(folder).iterdir():
        os.kill(int(file.read_text()), signal.SIGKILL)


def shared_by(process: int) -> list[str]:
    """What a process has mapped of anonymous shared memory."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [line for line in maps.splitlines() if "memfd:tesserae-" in line]


@pytest.mark.parametrize("jobs", [20, pytest.param(100, marks=pytest.mark.long)])
def test_killed_jobs_leave_no_memory_behind(jobs: int, tmp_path: Path) -> None:
    processes = []
    for job in range(jobs):
        folder = tmp_path / f"job-{job}"
        folder.mkdir()
        with pytest.raises(RankFailed, match="ended by signal SIGKILL"):
            run_ranks(works_until_killed, 2, str(folder), init=False)
        processes += [int(file.read_text()) for file in folder.iterdir()]
    assert len(processes) == 2 * jobs
    assert [lines for process in processes if (lines := shared_by(process))] == []  # nobody else ever maps it
