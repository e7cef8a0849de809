"""tsm.with_recovery under torchrun: real ranks, killed at random, and the numbers of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tesserae as tsm
from ranks import free_port, run_ranks

SCRIPT = textwrap.dedent("""\
    import os, signal, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    import tesserae as tsm

    folder, steps, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]

    def batch(step):
        return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))

    def say(text):  # in one piece, whoever else writes
        sys.stdout.write(text + "\\n")
        sys.stdout.flush()

    def train():
        dist.init_process_group("gloo")
        say(f"rank {dist.get_rank()} has process {os.getpid()}")
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = tsm.checkpoint.load(folder, model, optimizer)
        for step in range(found.step if found else 0, steps):
            if kind == "raises" and step == 5 and dist.get_rank() == 1:
                raise ValueError(f"bad batch of step {step}")
            loss = model(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            tsm.checkpoint.async_save(folder, model, optimizer, step=step + 1, keep=2)
            if dist.get_rank() == 0:
                say(f"step {step} loss {loss.item()!r}")
        if kind == "leaves":
            sys.exit(7)

    if kind == "handles":
        signal.signal(signal.SIGUSR1, lambda *_: say("heard"))
    tsm.init({"run": {"deadline_seconds": 8}} if kind == "stopped" else None)
    tsm.with_recovery(train, restarts=100 if kind == "killed" else 3, deadline=60)
    say(f"process {os.getpid()} is done")
""")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# A launcher that serves no store, and knows of no restart.
BY_HAND = ["bash", "-c", """
    for rank in 0 1; do
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "$@" & ranks+=($!)
    done
    for rank in "${ranks[@]}"; do wait "$rank" || exit; done""", "by hand", sys.executable]  # fmt: skip


class Job:
    def __init__(self, folder: Path, kind: str, steps: int, launcher: list[str] = TORCHRUN) -> None:
        folder.mkdir()
        script = folder / "script.py"
        script.write_text(SCRIPT)
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*launcher, str(script), str(folder / "checkpoints"), str(steps), kind],
                stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())},
            )  # fmt: skip

    def text(self) -> str:
        return self.output.read_text()

    def losses(self) -> dict[int, str]:
        """By step; what a step that was made again says is the same."""
        found: dict[int, str] = {}
        for step, loss in re.findall(r"^step (\d+) loss (\S+)\n", self.text(), re.MULTILINE):
            assert found.setdefault(int(step), loss) == loss, (step, loss, found)
        return found

    def begun(self) -> list[tuple[str, str]]:
        """Ranks and processes, of all tries."""
        return re.findall(r"^rank (\d+) has process (\d+)\n", self.text(), re.MULTILINE)

    def ranks(self) -> list[int]:
        """The processes that train now, by rank."""
        newest = dict(self.begun())
        return [int(newest[rank]) for rank in sorted(newest)]

    def wait_for_ranks(self, count: int) -> None:
        self.wait_for(lambda: len(self.begun()) == count)

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(lambda: len(self.losses()) >= count)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, self.text()
            assert self.process.poll() is None, self.text()
            time.sleep(0.01)

    def status(self) -> int:
        try:
            return self.process.wait(timeout=180)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    job = Job(tmp_path_factory.mktemp("undisturbed") / "job", "quiet", 40)
    assert job.status() == 0, job.text()
    assert len(re.findall("is done", job.text())) == 2
    return job.losses()


def test_ranks_that_are_killed_cost_no_number(undisturbed: dict[int, str], tmp_path: Path) -> None:
    dice = random.Random(4)
    job = Job(tmp_path / "job", "killed", 40)
    for begun in range(4):
        job.wait_for_ranks(2 * (begun + 1))
        job.wait_for_steps(min(len(job.losses()) + 3, 38))
        os.kill(job.ranks()[dice.randrange(2)], signal.SIGKILL)
    assert job.status() == 0, job.text()
    assert job.losses() == undisturbed
    assert len(re.findall(r"was killed by signal 9 \(Killed\)", job.text())) == 4
    assert len(re.findall("is done", job.text())) == 2
    for process in job.ranks():
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_the_first_watcher_serves_the_store_if_nobody_else_does(undisturbed: dict[int, str], tmp_path: Path) -> None:
    job = Job(tmp_path / "job", "killed", 40, BY_HAND)
    job.wait_for_steps(3)
    os.kill(job.ranks()[0], signal.SIGKILL)
    assert job.status() == 0, job.text()
    assert job.losses() == undisturbed
    assert len(job.begun()) == 4


def test_a_job_of_one_rank(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", "killed", 40, [sys.executable])
    job.wait_for_steps(3)
    os.kill(job.ranks()[0], signal.SIGKILL)
    assert job.status() == 0, job.text()
    assert len(job.losses()) == 40
    assert len(job.begun()) == 2


def test_a_signal_that_a_script_handles_ends_no_recovery(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", "handles", 40, [sys.executable])
    job.wait_for_steps(3)
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for(lambda: "heard" in job.text())
    os.kill(job.ranks()[0], signal.SIGKILL)
    assert job.status() == 0, job.text()
    assert len(job.losses()) == 40
    assert len(job.begun()) == 2


def test_a_process_that_has_begun_is_refused() -> None:
    run_ranks(has_begun, 1)


def has_begun(rank: int, world_size: int) -> None:
    with pytest.raises(tsm.InvalidArgument, match=r"init_process_group\(\) inside of train"):
        tsm.with_recovery(lambda: None)


def test_a_rank_that_is_stopped_counts_as_lost(undisturbed: dict[int, str], tmp_path: Path) -> None:
    job = Job(tmp_path / "job", "stopped", 40)
    job.wait_for_steps(3)
    stopped = job.ranks()[1]
    os.kill(stopped, signal.SIGSTOP)
    job.wait_for_ranks(4)
    with pytest.raises(ProcessLookupError):  # it could go on, and write
        os.kill(stopped, signal.SIGCONT)
    assert job.status() == 0, job.text()
    assert job.losses() == undisturbed
    assert re.search(
        r"tesserae: rank 0 ended by .* the deadline of 8000 ms passed; no sign of life from rank 1", job.text()
    )


def test_what_a_script_does_wrong_again_ends_it(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", "raises", 40)
    assert job.status() == 1, job.text()
    text = job.text()
    assert "RecoveryFailed: [with_recovery] rank 1 ended by ValueError: bad batch of step 5, as in the epoch" in text
    assert len(job.begun()) == 4  # once more, in case that it was chance


def test_the_scripts_own_status_is_kept(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", "leaves", 2)
    assert job.status() != 0
    assert "exitcode  : 7" in job.text()
    assert len(job.begun()) == 2


def test_a_signal_ends_it(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", "quiet", 100000)
    job.wait_for_steps(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.status() != 0
    assert len(job.begun()) == 2
    for process in job.ranks():
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_signal_ends_ranks_that_still_meet(tmp_path: Path) -> None:
    port = free_port()
    script = tmp_path / "alone.py"
    script.write_text("import tesserae as tsm\n\ntsm.with_recovery(print)\n")

    def start(rank: int) -> subprocess.Popen[bytes]:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": port}
        place = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
        return subprocess.Popen([sys.executable, str(script)], env=os.environ | place)

    def handles(process: subprocess.Popen[bytes], number: int) -> bool:
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)

    ranks = [start(rank) for rank in (0, 1)]
    end = time.monotonic() + 100
    while not all(handles(process, signal.SIGTERM) for process in ranks):
        assert time.monotonic() < end
        time.sleep(0.05)
    ranks[1].send_signal(signal.SIGTERM)
    for process in ranks:
        assert process.wait(timeout=100) == 128 + signal.SIGTERM
