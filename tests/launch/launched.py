"""What tests of launchers share: the program, what a run wrote, and jobs of Slurm."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny.json"
DEADLINE = 600  # seconds; what has it takes less than 60
ROUNDED = 1e-5  # of a loss: hosts reduce in another order than ranks of one host
FAILED = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
LAUNCHERS = re.compile(
    r"SLURM_|SBATCH_|SRUN_|OMPI_|PMI|MPI_|MASTER_|LOCAL_|RANK$|WORLD_SIZE$|TORCHELASTIC_|PET_|SM_|SAGEMAKER_"
)

Environment = dict[str, str]
Step = tuple[int, float, float]  # number, loss, norm of the gradients


def program() -> Path:
    """`tesserae`, of the build that has the package."""
    package = importlib.util.find_spec("tesserae")
    assert package is not None and package.origin is not None, "no tesserae: PYTHONPATH=build/release/python"
    of_build = Path(package.origin).absolute().parents[2] / "cli" / "tesserae"
    found = of_build if of_build.exists() else shutil.which("tesserae")
    assert found, f"no program in {of_build}, nor on the path"
    return Path(found)


def run(*words: str | Path, environment: Environment, deadline: float = DEADLINE) -> str:
    """What a command wrote, which ends well and in time; a whole failure is shown."""
    done = subprocess.run(
        [str(word) for word in words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=deadline,
    )
    assert done.returncode == 0, f"{words}: status {done.returncode}\n{done.stdout}"
    return done.stdout


def run_together(processes: list[tuple[list[str], Environment]], folder: Path, deadline: float = DEADLINE) -> list[str]:
    """What each of some commands wrote, which need one another: all end well and in time."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"host{number}.log" for number in range(len(processes))]
    started: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + deadline
    try:
        for log, (words, environment) in zip(logs, processes):
            with log.open("wb") as file:
                started.append(
                    subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
                )
        statuses = [process.wait(timeout=max(1, end - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
    written = [log.read_text() for log in logs]
    assert not any(statuses), f"status {statuses}\n" + "\n----\n".join(written)
    return written


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def history(folder: Path) -> list[Step]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def hosts(folder: Path) -> int:
    return json.loads((folder / "summary.json").read_text())["hosts"]


def expect_same_training(folder: Path, reference: Path, ranks: int) -> None:
    assert json.loads((folder / "summary.json").read_text())["world_size"] == ranks
    ours, theirs = history(folder), history(reference)
    assert [step for step, *_ in ours] == [step for step, *_ in theirs] == list(range(1, len(theirs) + 1))
    assert [loss for _, loss, _ in ours] == pytest.approx([loss for _, loss, _ in theirs], rel=ROUNDED)


@dataclass(frozen=True)
class Cluster:
    """Of tools/slurm_test_cluster.sh, two nodes."""

    environment: Environment
    hosts: int  # which ranks see: 1 where the kernel makes no namespaces

    def run(self, *words: str | Path, deadline: float = DEADLINE) -> str:
        return run(*words, environment=self.environment, deadline=deadline)

    def submit(self, log: Path, *words: str | Path) -> str:
        return self.run("sbatch", "--parsable", f"--output={log}", *words, deadline=60).strip()

    def job(self, number: str) -> dict[str, str]:
        shown = self.run("scontrol", "show", "job", "--oneliner", number, deadline=60)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, number: str, log: Path, status: int = 0) -> None:
        """Until the job is done; it has to end with `status`."""
        state = until("end of the job", lambda: self.state_at_end(number), lambda: text(log))
        assert self.job(number)["ExitCode"] == f"{status}:0", f"{state}\n{text(log)}"

    def state_at_end(self, number: str) -> str:
        state = self.job(number)["JobState"]
        return state if state == "COMPLETED" or state in FAILED else ""


def text(file: Path) -> str:
    return file.read_text() if file.exists() else f"no {file}"


def until(what: str, reached: Callable[[], str | bool], report: Callable[[], str]) -> str | bool:
    end = time.monotonic() + DEADLINE
    while not (value := reached()):
        assert time.monotonic() < end, f"no {what} within {DEADLINE} s\n{report()}"
        time.sleep(0.1)
    return value


def clean_environment() -> Environment:
    """Ours, without what a launcher has put there."""
    return {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
