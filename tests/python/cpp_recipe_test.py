"""examples/cpp/recipe.cpp does what docs/recipes/cpp.md says, by the commands that stand there."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tesserae import _C

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/recipes/cpp.md").read_text()
BUILD = Path(_C.__file__).parents[2]
RECIPE = BUILD / "tests/train/cpp_recipe"
PROGRAM = BUILD / "cli/tesserae"
DEADLINE = 300.0  # seconds; a run takes less than ten
SAME = 1e-4  # of a loss, after 60 steps in fp32
STEP = re.compile(r"^step (\d+): loss ([0-9.]+), gradient norm [0-9.]+, sharded over (\d+)$", re.MULTILINE)


def commands(program: str) -> list[list[str]]:
    """Those of the page that begin so, with the programs of this build."""
    found = [shlex.split(line) for line in PAGE.splitlines() if line.startswith(program + " ")]
    places = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "build/example/recipe": [str(RECIPE)],
        "tesserae": [str(PROGRAM)],
    }
    return [[word for part in command for word in places.get(part, [part])] for command in found]


def environment() -> dict[str, str]:
    libraries = Path(torch.__file__).parent / "lib"
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss, _ in STEP.findall(output)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[int, float]]]:
    """The page's three runs, one after the other."""
    folder = tmp_path_factory.mktemp("cpp")
    return folder, [losses(run(command, folder)) for command in commands("torchrun")]


def test_many_ranks_that_end_and_go_on_have_the_losses_of_one(ran: tuple[Path, list[dict[int, float]]]) -> None:
    _, (one, begun, continued) = ran
    assert list(one) == list(range(1, 61))
    assert list(begun) == list(range(1, 41)) and list(continued) == list(range(41, 61))
    assert {**begun, **continued} == pytest.approx(one, rel=SAME)
    assert sum(list(one.values())[-10:]) < 0.1 * sum(list(one.values())[:10])


def test_its_checkpoints_are_whole(ran: tuple[Path, list[dict[int, float]]]) -> None:
    folder, _ = ran
    assert sorted(path.name for path in (folder / "runs/recipe").glob("step-*")) == ["step-40", "step-60"]
    assert run([str(PROGRAM), "verify", "runs/recipe"], folder).count(": good, ") == 2


def test_the_dial_turns_it_while_it_trains_and_the_monitor_sees_it(ran: tuple[Path, list[dict[int, float]]]) -> None:
    folder, _ = ran
    command = [*commands("torchrun")[1][:-1], "1000000"]  # until it is ended
    turn, show = commands("tesserae dial")
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        try:
            assert STEP.match(job.stdout.readline())
            said = run(turn, folder)
            deadline = time.monotonic() + DEADLINE
            seen = set()
            while "2" not in seen and time.monotonic() < deadline:
                found = STEP.match(job.stdout.readline())
                seen |= {found.group(3)} if found else set()
            assert "2" in seen, said
            assert re.search(r"\b2\b", run(show, folder))
            written = folder / "runs/recipe/monitor/now.json"
            while not written.exists() or (now := json.loads(written.read_text()))["step"] == 0:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert now["job"]["source"] == "recipe" and now["job"]["ranks"] == 4
        finally:
            job.send_signal(signal.SIGTERM)
            job.stdout.read()


def test_a_request_that_cannot_be_met_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    command = [*commands("torchrun")[1][:-2], "runs/new", "1000000"]  # whose folder it makes
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        try:
            assert STEP.match(job.stdout.readline())
            reading = threading.Thread(target=job.stdout.read, daemon=True)  # or it would wait for a reader
            reading.start()
            refused = subprocess.run(
                [str(PROGRAM), "dial", "runs/new", "--offload", "all=disk"],
                cwd=tmp_path,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=DEADLINE,
            )
            assert refused.returncode == 1 and "there is no disk" in refused.stderr, refused.stdout + refused.stderr
            assert "chooses its degrees itself" in run([str(PROGRAM), "dial", "runs/new", "--auto"], tmp_path)
            assert "P=" in run([str(PROGRAM), "dial", "runs/new"], tmp_path)
            assert job.poll() is None
        finally:
            job.send_signal(signal.SIGTERM)
            reading.join(DEADLINE)
