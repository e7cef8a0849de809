"""tsm.elastic under `tesserae run`: real ranks, killed at random, that go on in the same processes, in another number,
and with the numbers of an undisturbed run."""

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
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tesserae as tsm
from ranks import free_port, run_ranks
from tesserae.elasticity.job import Job as TrainJob
from tesserae.job import fabrics

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))
from elastic_undisturbed import losses_in, processes_in, undisturbed  # noqa: E402

PROGRAM = Path(tsm.__file__).absolute().parents[2] / "cli/tesserae"
EXAMPLE = ROOT / "examples/python/elastic.py"
# torch's own FSDP2, on torch's own backend.
RAISES = textwrap.dedent("""\
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    import tesserae as tsm

    def train(job):
        os.write(1, f"epoch {job.epoch} rank {job.rank} of {job.world_size} process {os.getpid()}\\n".encode())
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in job.steps(model, optimizer, 20):
            if step == 5 and job.rank == 1 and job.epoch == 0:
                raise ValueError(f"bad batch of step {step}")
            batch = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(step))
            inputs, targets = batch[:, job.samples.start : job.samples.stop]
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if job.rank == 0:
                os.write(1, f"step {step} loss {total.item() / job.world_size!r}\\n".encode())

    tsm.elastic(train, backend="gloo", global_batch=12)
""")


class Job:
    def __init__(self, folder: Path, options: list[str], *script: object) -> None:
        self.folder, self.output = folder, folder / "output"
        self.process = self.start(options, *script)

    def start(self, options: list[str], *script: object) -> subprocess.Popen[bytes]:
        """Another launcher, whose ranks write to the same file."""
        with self.output.open("a") as output:
            return subprocess.Popen(
                [str(PROGRAM), "run", *options, *map(str, script)],
                stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TESSERAE_PYTHON": sys.executable},
            )  # fmt: skip

    def text(self) -> str:
        return self.output.read_text()

    def losses(self) -> dict[int, float]:
        return dict(losses_in(self.text()))

    def epoch(self) -> int:
        return max(int(epoch) for epoch in re.findall(r"epoch (\d+) rank", self.text()))

    def ranks(self, epoch: int) -> dict[int, int]:
        """Their processes, of those that have met."""
        return processes_in(self.text(), epoch)

    def wait_for_epoch(self, epoch: int, ranks: int) -> dict[int, int]:
        """Until its ranks have made a step that nobody made before."""
        self.wait_for(lambda: len(self.ranks(epoch)) == ranks)
        done = max(self.losses(), default=0)
        self.wait_for(lambda: max(self.losses(), default=0) > done + 2)
        assert sorted(self.ranks(epoch)) == list(range(ranks)), self.text()
        return self.ranks(epoch)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < end, self.text()
            assert self.process.poll() is None, self.text()
            time.sleep(0.01)

    def scale(self, ranks: int) -> str:
        asked = subprocess.run(
            [str(PROGRAM), "scale", str(self.folder / "run"), "--ranks", str(ranks)],
            capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        return asked.stdout + asked.stderr

    def status(self) -> int:
        try:
            return self.process.wait(timeout=180)
        finally:
            self.process.kill()


def example(
    folder: Path, *options: str, steps: int = 400, deadline: int = 60, pause: float = 0.02, more: tuple[str, ...] = ()
) -> Job:
    arguments = ["--folder", folder / "run", "--steps", steps, "--deadline", deadline, "--pause", pause, *more]
    return Job(folder, list(options), EXAMPLE, *arguments)


def expect_losses(job: Job, steps: int, decay: float = 0.5) -> None:
    found = job.losses()
    assert sorted(found) == list(range(steps)), job.text()
    for step, loss in enumerate(undisturbed(steps, decay)):
        assert found[step] == pytest.approx(loss, rel=1e-6), (step, job.text())


def expect_nothing_left(job: Job, memory: set[str]) -> None:
    assert {path.name for path in Path("/dev/shm").glob("tesserae-elastic-*")} <= memory
    for epoch in range(10):
        for process in job.ranks(epoch).values():
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)


@pytest.fixture
def memory() -> set[str]:
    """What others keep there."""
    return {path.name for path in Path("/dev/shm").glob("tesserae-elastic-*")}


def test_ranks_are_lost_replaced_and_become_fewer_and_more(tmp_path: Path, memory: set[str]) -> None:
    steps = 300
    job = example(tmp_path, "--nproc=3", "--replacements=1", "--spares=1", "--min-ranks=2", steps=steps)
    first = job.wait_for_epoch(0, 3)
    os.kill(first[0], signal.SIGKILL)  # it leads, and writes
    second = job.wait_for_epoch(1, 3)
    assert second[0] != first[0]
    assert [second[rank] for rank in (1, 2)] == [first[rank] for rank in (1, 2)], "the others kept their processes"

    os.kill(second[1], signal.SIGKILL)  # nobody replaces any more
    third = job.wait_for_epoch(2, 2)
    assert third == {0: second[0], 1: second[2]}

    assert "keeps its 2 ranks, not 5: 5 ranks do not divide the 12 samples" in job.scale(5)
    assert re.search(r"^step \d+: 2 -> 3 ranks, .* in \d", job.scale(3))
    fourth = job.wait_for_epoch(3, 3)
    assert {rank: fourth[rank] for rank in third} == third

    assert job.status() == 0, job.text()
    expect_losses(job, steps)
    assert len(re.findall("is done", job.text())) == 3
    expect_nothing_left(job, memory)


def test_replicas_hold_what_nobody_has_copied(tmp_path: Path, memory: set[str]) -> None:
    """No copies in memory, no checkpoint before the last step: on from the step that was made last all the same."""
    steps, more = 9, ("--degree", "2", "--memory-every", "0")
    job = example(tmp_path, "--nproc=4", "--replacements=1", steps=steps, pause=2, more=more)
    ranks = job.wait_for_epoch(0, 4)
    time.sleep(1)  # a step has been told of: now the next one is before its forward
    done = max(job.losses())
    os.kill(ranks[0], signal.SIGKILL)
    job.wait_for_epoch(1, 4)
    went_on = re.findall(r"4 ranks go on from step (\d+)", job.text())
    assert [int(step) > done for step in went_on] == [True], job.text()
    assert job.status() == 0, job.text()
    expect_losses(job, steps)
    expect_nothing_left(job, memory)


def test_a_spare_of_its_host_replaces_a_lost_rank(tmp_path: Path) -> None:
    """The launchers of two hosts, both on this one."""
    steps, shared = 60, tmp_path / "shared"
    shared.mkdir()
    options = ["--nproc=2", "--replacements=2", "--spares=1", f"--shared={shared}", "--hosts=2"]
    options += ["--address=127.0.0.1", f"--port={free_port()}"]
    script = [EXAMPLE, "--folder", tmp_path / "run", "--steps", steps, "--degree", 2, "--pause", 0.1]
    job = Job(tmp_path, [*options, "--host=0"], *script)
    second = job.start([*options, "--host=1"], *script)
    first = job.wait_for_epoch(0, 4)
    spares = set(children(second)) - set(first.values())
    assert len(spares) == 1
    os.kill(first[3], signal.SIGKILL)
    ranks = job.wait_for_epoch(1, 4)
    assert ranks[3] in spares
    assert {rank: ranks[rank] for rank in (0, 1, 2)} == {rank: first[rank] for rank in (0, 1, 2)}
    assert len(list(shared.iterdir())) == 1
    assert job.status() == 0, job.text()
    assert second.wait(timeout=60) == 0, job.text()
    expect_losses(job, steps)
    assert not list(shared.iterdir())


def test_another_host_takes_over_when_the_first_is_lost(tmp_path: Path) -> None:
    """Its launcher decides. The ranks of the other host go on in their processes."""
    steps, shared = 60, tmp_path / "shared"
    shared.mkdir()
    options = ["--nproc=2", "--min-ranks=2", f"--shared={shared}", "--hosts=2"]
    options += ["--address=127.0.0.1", f"--port={free_port()}"]
    script = [EXAMPLE, "--folder", tmp_path / "run", "--steps", steps, "--degree", 2, "--pause", 0.1]
    job = Job(tmp_path, [*options, "--host=0"], *script)
    second = job.start([*options, "--host=1"], *script)
    first = job.wait_for_epoch(0, 4)
    job.wait_for(lambda: "step 8 " in job.text())
    job.process.kill()
    assert second.wait(timeout=180) == 0, job.text()
    last = max(int(epoch) for epoch in re.findall(r"epoch (\d+) rank 0 of 2 ", job.text()))
    assert job.ranks(last) == {0: first[2], 1: first[3]}
    assert "host 1 decides from now on, and 2 ranks are left" in job.text()
    expect_losses(job, steps)
    assert not list(shared.iterdir())


def children(process: subprocess.Popen[bytes]) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in found if Path(f"/proc/{child}/comm").read_text() != "fork server\n"]


def test_several_hosts_need_what_they_share(tmp_path: Path) -> None:
    def refused(*options: str, **environment: str) -> str:
        variables = {**os.environ, "TESSERAE_PYTHON": sys.executable, **environment}
        asked = [str(PROGRAM), "run", *options, str(EXAMPLE), "--folder", str(tmp_path)]
        result = subprocess.run(asked, capture_output=True, text=True, timeout=180, env=variables)
        assert result.returncode == 2, result.stderr
        return result.stderr

    hosts = ["--hosts=2", "--address=127.0.0.1"]
    assert "a folder that all hosts see" in refused(*hosts, "--replacements=1")
    assert "--shared /nowhere: there is no such folder" in refused(*hosts, "--replacements=1", "--shared=/nowhere")
    assert "--hosts needs --address" in refused("--hosts=2")
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    assert "torchrun has started 2 ranks, and `tesserae run` starts its own" in refused(**torchrun)


@pytest.mark.long
def test_an_exception_is_a_loss_also_for_torchs_own_fsdp(tmp_path: Path, memory: set[str]) -> None:
    (tmp_path / "script.py").write_text(RAISES)
    job = Job(tmp_path, ["--nproc=2", "--replacements=1"], tmp_path / "script.py")
    assert job.status() == 0, job.text()
    expect_losses(job, 20, decay=1.0)
    assert "ValueError: bad batch of step 5" in job.text()
    assert job.ranks(0)[0] == job.ranks(1)[0]
    assert job.ranks(0)[1] != job.ranks(1)[1]
    expect_nothing_left(job, memory)


def test_a_job_that_is_set_up_already_is_refused() -> None:
    run_ranks(has_begun, 1)


def has_begun(rank: int, world_size: int) -> None:
    with pytest.raises(tsm.InvalidArgument, match="torch.distributed is set up already"):
        tsm.elastic(lambda job: None)


def goes_on_from_what_it_saved(rank: int, world_size: int, folder: Path) -> None:
    """What a script saves by itself, and what it may not have saved."""
    tsm.init()
    nothing: Any = lambda *_: None  # noqa: E731
    fabric = fabrics.fabric_of(None, torch.device("cpu"))
    job = TrainJob(rank, world_size, 0, None, fabric, None, 0.0, nothing, nothing, nothing)

    def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def first_step(name: str, *, with_schedule: bool) -> tuple[int, float]:
        model, optimizer, schedule = make()
        others = (schedule,) if with_schedule else ()
        step = next(iter(job.steps(model, optimizer, 5, folder=folder / name, others=others)))
        schedule.step()
        return step, optimizer.param_groups[0]["lr"]

    model, optimizer, schedule = make()
    for _ in range(2):
        optimizer.step()
        schedule.step()
    job.save(folder / "own", model, optimizer, step=2, others=[schedule])
    assert first_step("own", with_schedule=True) == (2, 0.125)
    saved: dict[str, dict[str, Any]] = {
        "plain": {},
        "extra": {"extra": {"schedule": schedule.state_dict()}},
        "random": {"rank_extra": {"random": tsm.checkpoint.random_state()}},
    }
    for name, more in saved.items():
        tsm.checkpoint.save(folder / name, model, optimizer, step=2, **more)
        assert first_step(name, with_schedule=False)[0] == 2
        with pytest.raises(tsm.InvalidArgument, match="has the state of none of the 1 others"):
            first_step(name, with_schedule=True)


def test_what_a_script_saves_by_itself(tmp_path: Path) -> None:
    run_ranks(goes_on_from_what_it_saved, 2, tmp_path)


@pytest.mark.long
def test_many_kills_at_random(tmp_path: Path, memory: set[str]) -> None:
    dice, steps = random.Random(4), 1500
    job = example(tmp_path, "--nproc=4", "--replacements=6", "--spares=1", "--min-ranks=1", steps=steps)
    job.wait_for_epoch(0, 4)
    for _ in range(8):
        time.sleep(dice.uniform(0, 1))
        epoch = job.epoch()
        os.kill(dice.choice(list(job.ranks(epoch).values())), signal.SIGKILL)
        next_epoch = f"epoch {epoch + 1} rank 0 "
        job.wait_for(lambda text=next_epoch: text in job.text())
    assert job.status() == 0, job.text()
    expect_losses(job, steps)
    expect_nothing_left(job, memory)


@pytest.mark.long
def test_a_rank_that_is_stopped_is_lost(tmp_path: Path, memory: set[str]) -> None:
    job = example(tmp_path, "--nproc=3", "--replacements=1", deadline=8)
    first = job.wait_for_epoch(0, 3)
    os.kill(first[1], signal.SIGSTOP)
    second = job.wait_for_epoch(1, 3)
    assert {rank for rank in first if first[rank] == second[rank]} == {0, 2}
    assert job.status() == 0, job.text()
    expect_losses(job, 400)
    expect_nothing_left(job, memory)


def test_a_rank_that_hangs_is_lost(tmp_path: Path) -> None:
    """It is alive, and waits for something that does not come."""
    script = tmp_path / "hangs.py"
    hangs = 'import time; print("rank 1 hangs", flush=True); time.sleep(600)'
    text = RAISES.replace('raise ValueError(f"bad batch of step {step}")', hangs)
    over_ours = 'tsm.init({"run": {"deadline_seconds": 8}})\ntsm.elastic(train'
    text = text.replace('tsm.elastic(train, backend="gloo"', over_ours)
    assert hangs in text
    assert over_ours in text
    script.write_text(text)
    job = Job(tmp_path, ["--nproc=3", "--replacements=1", "--spares=1"], script)
    assert job.status() == 0, job.text()
    assert "rank 1 of 3 is killed: it stopped or hangs" in job.text()
    first, second = job.ranks(0), job.ranks(1)
    assert {rank for rank in first if first[rank] == second[rank]} == {0, 2}, job.text()
    assert sorted(job.losses()) == list(range(20)), job.text()


@pytest.mark.long
def test_a_signal_ends_it(tmp_path: Path, memory: set[str]) -> None:
    job = example(tmp_path, "--nproc=2", "--replacements=4", steps=100000)
    job.wait_for_epoch(0, 2)
    job.wait_for(lambda: len(job.losses()) > 3)
    job.process.send_signal(signal.SIGTERM)
    assert job.status() == 128 + signal.SIGTERM
    assert not job.ranks(1)
    expect_nothing_left(job, memory)
