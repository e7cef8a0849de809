import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailed, run_ranks


def sums(rank: int, world_size: int, start: int) -> float:
    total = torch.tensor(float(rank + start))
    dist.all_reduce(total)
    return total.item()


def test_results_come_in_order_of_rank() -> None:
    assert run_ranks(sums, 3, 10) == [33.0] * 3


def whoami(rank: int, world_size: int) -> tuple[str, str, bool, int]:
    return os.environ["RANK"], os.environ["MORE"], dist.is_initialized(), torch.get_num_threads()


def test_environment_and_init() -> None:
    assert run_ranks(whoami, 2, environment={"MORE": "x"}, init=False) == [("0", "x", False, 1), ("1", "x", False, 1)]


def collectives_that_end_together(rank: int, world_size: int) -> None:
    group = dist.distributed_c10d._get_default_group()
    results, input = [torch.ones(4) for _ in range(400)], torch.ones(4)
    for _ in range(200):
        work = [
            group.allgather_into_tensor_coalesced([result], [input]) if i % 2 else group.allreduce([result])
            for i, result in enumerate(results)
        ]
        for each in work:
            each.wait()


def test_collectives_that_end_together_leave_the_heap_alone() -> None:
    run_ranks(collectives_that_end_together, 1)


def one_raises(rank: int, world_size: int) -> None:
    treasure = 42 + rank
    print("on my way")
    if rank == 1:
        raise ValueError("no gold")
    dist.barrier()
    assert treasure


def test_the_first_failure_is_raised_with_its_variables_and_output() -> None:
    with pytest.raises(RankFailed, match="rank 1 failed") as caught:
        run_ranks(one_raises, 2)
    assert caught.value.rank == 1
    for part in ("ValueError: no gold", "treasure = 43", "on my way"):
        assert part in str(caught.value)


def one_dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 failed\nits process ended by signal SIGKILL"):
        run_ranks(one_dies, 2)


def sleeps_with_a_child(rank: int, world_size: int, file: str) -> None:
    child = os.fork()
    if child:
        Path(f"{file}-{rank}").write_text(f"{os.getpid()} {child}")
    time.sleep(600)


def test_at_the_deadline_ranks_say_where_they_are_and_go(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="still runs after 5 s") as caught:
        run_ranks(sleeps_with_a_child, 2, str(tmp_path / "pid"), deadline=5, init=False)
    assert "sleeps_with_a_child" in str(caught.value)
    if shutil.which("gdb"):
        assert "nanosleep" in str(caught.value)
    processes = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(processes) == 4
    end = time.monotonic() + 10
    while any(is_running(pid) for pid in processes):
        assert time.monotonic() < end, f"of {processes}, {[pid for pid in processes if is_running(pid)]} still run"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
