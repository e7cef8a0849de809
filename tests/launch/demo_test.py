"""What README promises of `make demo`: `kill -9` of any of its ranks while it trains, and it ends with the validation
loss of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launched import DEADLINE, ROOT, Environment, history, run, text, until

DEMO = ROOT / "examples" / "python-source.json"
RANKS, BETWEEN = 4, 40  # steps between two kills


def children(process: int) -> dict[str, int]:
    """By their names, which are those that `ps` and `pgrep` know."""
    found = {}
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        try:
            found[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
        except OSError:  # it has ended meanwhile
            continue
    return found


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.long
def test_each_rank_of_the_demo_may_be_killed(environment: Environment, tmp_path: Path) -> None:
    def command(folder: str) -> list[str | Path]:
        return ["tesserae", "train", DEMO, "--set", f"run.folder={tmp_path / folder}"]

    run(*command("alone"), environment=environment)
    alone, disturbed, log = tmp_path / "alone", tmp_path / "disturbed", tmp_path / "log"
    metrics = disturbed / "metrics.jsonl"
    with log.open("wb") as file:
        job = subprocess.Popen(
            list(map(str, command("disturbed"))), env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )

    def reach(what: str, reached: Callable[[], bool]) -> None:
        until(what, lambda: reached() or job.poll() is not None, lambda: text(log))
        assert job.poll() is None, f"it ended before {what}\n{text(log)}"

    try:
        for rank in range(RANKS):
            least = BETWEEN * (rank + 1)
            reach(f"step {least}", lambda least=least: lines_of(metrics) >= least)
            before = children(job.pid)
            os.kill(before[f"tesserae:{rank}"], signal.SIGKILL)
            reach(f"new rank {rank}", lambda r=rank: text(log).count("takes its place") > r)
            after = children(job.pid)
            assert {n: p for n, p in after.items() if p in before.values()} == {
                n: p for n, p in before.items() if n != f"tesserae:{rank}"
            }, "the others keep their processes"
        assert job.wait(DEADLINE) == 0, text(log)
    finally:
        job.kill()
        job.wait()
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (alone, disturbed)]
    recoveries = summaries[1]["recoveries"]
    assert [recovery["from"] for recovery in recoveries] == ["the ranks that are left"] * RANKS, "no step is lost"
    assert summaries[1]["val_loss"] == pytest.approx(summaries[0]["val_loss"], rel=1e-6)
    steps = [[step for step, *_ in history(folder)] for folder in (alone, disturbed)]
    assert steps[0] == steps[1], "every step once"
