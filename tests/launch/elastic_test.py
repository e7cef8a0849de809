"""torchrun's own recovery, with a recipe as the script: workers that are restarted on the same ranks, and an elastic
job that goes on with the host that is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launched import ROOT, ROUNDED, Environment, free_port, run, text, until

pytestmark = pytest.mark.long

STEPS, LOST_AT = 400, 60
SCRIPT = [str(ROOT / "examples/python/molecules.py"), "--steps", str(STEPS), "--save-every", "20"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]

# Else torch's own groups may read where the workers of before listened, and wait for them.
A_STORE_FOR_EACH_START = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = text(folder / "metrics.jsonl").splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("}\n")]
    return [(line["step"], line["loss"]) for line in whole if "loss" in line]


@pytest.fixture(scope="module")
def undisturbed(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """Of two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(*TORCHRUN, "2", "--standalone", *SCRIPT, "--folder", folder, environment=environment)
    found = losses(folder)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    return found


@contextmanager
def started(words: list[str], environment: Environment, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """In a group of its own, which is killed at the end."""
    with log.open("wb") as file:
        job = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                               start_new_session=True)  # fmt: skip
    try:
        yield job
    finally:
        kill_all(job)


def kill_all(job: subprocess.Popen[bytes]) -> None:
    """The launcher and its workers, which have sessions of their own."""
    for process in [*workers(job), job.pid]:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    job.wait()


def workers(job: subprocess.Popen[bytes]) -> list[int]:
    tasks = Path(f"/proc/{job.pid}/task")
    try:
        return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def test_a_killed_worker_is_restarted_and_no_number_changes(
    environment: Environment, undisturbed: list[tuple[int, float]], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    words = [*TORCHRUN, "2", "--max-restarts", "1", "--standalone", *SCRIPT, "--folder", str(tmp_path)]
    with started(words, environment | A_STORE_FOR_EACH_START, log) as job:
        until(f"step {LOST_AT}", lambda: len(losses(tmp_path)) >= LOST_AT, lambda: text(log))
        os.kill(workers(job)[-1], signal.SIGKILL)
        until("end", lambda: job.poll() is not None, lambda: text(log))
        assert job.returncode == 0, text(log)
    assert "goes on after step" in text(log), "it was not killed in time"
    assert losses(tmp_path) == undisturbed


def test_an_elastic_job_goes_on_with_the_host_that_is_left(
    environment: Environment, undisturbed: list[tuple[int, float]], tmp_path: Path
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"

    def host(number: int) -> list[str]:
        # The store is host 0's. A host that is silent for three seconds is lost.
        quick = f"is_host={1 - number},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        words = ["--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
        words += ["--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1", "--rdzv-conf", quick]
        return [*TORCHRUN, "1", *words, *SCRIPT, "--folder", str(tmp_path)]

    logs = [tmp_path / f"host{number}.log" for number in range(2)]
    environment = environment | A_STORE_FOR_EACH_START
    with started(host(0), environment, logs[0]) as first, started(host(1), environment, logs[1]) as second:
        until("rank on host 1", lambda: bool(workers(second)), lambda: "\n".join(map(text, logs)))
        until(f"step {LOST_AT}", lambda: len(losses(tmp_path)) >= LOST_AT, lambda: text(logs[0]))
        kill_all(second)
        until("end", lambda: first.poll() is not None, lambda: text(logs[0]))
        assert first.returncode == 0, text(logs[0])
    assert "goes on after step" in text(logs[0]), "host 1 was not lost in time"
    found = losses(tmp_path)
    assert [step for step, _ in found] == [step for step, _ in undisturbed]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in undisturbed], rel=10 * ROUNDED)
