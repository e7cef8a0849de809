"""python -m tesserae.report: what trackers get of a run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tesserae import report

NOW = {
    "format": 1,
    "state": "ended",
    "step": 3,
    "step_seconds": 0.5,
    "stages": ["forward", "reduce"],
    "seconds": [[0.25, 0.25], [0.4, 0.1]],
    "slow": [{"rank": 1, "stage": "forward", "seconds": 0.15, "share": 0.3, "since": 2, "why": ""}],
    "memory": {"categories": ["masters"], "bytes": [[2**20], [3 * 2**20]]},
    "load": {"kinds": ["tokens"], "amounts": [[512], [256]]},
    "links": {
        "hops": [{"link": "shared memory", "lane": "gather", "verb": "all_gather", "ranks": 2}],
        "speed": [[7 * 10**9], [6 * 10**9]],
    },
}


def write_run(folder: Path, **changes: object) -> Path:
    (folder / "monitor").mkdir(parents=True, exist_ok=True)
    (folder / "monitor/now.json").write_text(json.dumps(NOW | {"time": time.time()} | changes))
    lines = [
        {"step": step, "loss": 4.0 / step, "lr": 0.1, "degrees": [1, 2, 4], "val_loss": None} for step in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    event = {"time": 0, "step": 2, "kind": "slow", "rank": 1, "text": "rank 1 takes 0.15 s longer"}
    (folder / "monitor/events.jsonl").write_text(json.dumps(event) + "\n")
    return folder


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_tensorboard_gets_every_step_and_every_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    subprocess.run([sys.executable, "-m", "tesserae.report", str(run)], check=True, timeout=300)
    board = run / "tensorboard"
    assert scalars(board, "train/loss") == [(1, 4.0), (2, 2.0), (3, pytest.approx(4 / 3))]
    assert scalars(board, "degrees/O") == [(1, 4.0), (2, 4.0), (3, 4.0)]
    assert scalars(board, "seconds/forward/rank_1") == [(3, pytest.approx(0.4))]
    assert scalars(board, "memory_mib/masters/rank_1") == [(3, 3.0)]
    assert scalars(board, "load/tokens/rank_1") == [(3, 256.0)]
    speed = "link_gb_per_second/shared_memory_gather_all_gather_2/rank_1"
    assert scalars(board, speed) == [(3, pytest.approx(6.0))]
    assert scalars(board, "job/slow_share") == [(3, pytest.approx(0.3))]
    accumulator = EventAccumulator(str(board))
    accumulator.Reload()
    assert accumulator.Tags()["tensors"] == ["events/text_summary"]


class Notes:
    """What a tracker was told."""

    def __init__(self) -> None:
        self.scalars: list[tuple[int, report.Scalars]] = []
        self.texts: list[tuple[int, str]] = []

    def add(self, step: int, scalars: report.Scalars) -> None:
        self.scalars.append((step, scalars))

    def say(self, step: int, text: str) -> None:
        self.texts.append((step, text))

    def close(self) -> None:
        pass


def test_a_run_is_followed_until_it_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path, state="running")
    notes = Notes()
    follower = threading.Thread(target=report.follow, args=(run, notes, 0.02))
    follower.start()
    deadline = time.monotonic() + 60
    while len(notes.scalars) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 1.0}\n{"step": 5, "loss": 0.5}\n')
    write = tmp_path / "monitor/new.json"
    write.write_text(json.dumps(NOW | {"step": 5, "time": time.time()}))
    write.rename(tmp_path / "monitor/now.json")
    follower.join(60)
    assert not follower.is_alive()
    assert [step for step, of in notes.scalars if "train/loss" in of] == [1, 2, 3, 4, 5], (
        "a line counts once it is whole"
    )
    assert [step for step, of in notes.scalars if "job/step_seconds" in of] == [3, 5]
    assert notes.texts == [(2, "rank 1 takes 0.15 s longer")]


def test_of_many_ranks_the_least_the_median_and_the_most_are_shown() -> None:
    ranks = 1001
    seen = report.of_ranks(NOW | {"seconds": [[float(r), 0.0] for r in range(ranks)], "memory": {}})
    assert seen["seconds/forward/min"] == 0
    assert seen["seconds/forward/median"] == 500
    assert seen["seconds/forward/max"] == 1000
    assert len(seen) < 20


@pytest.mark.parametrize(("what", "words"), [("nowhere", "there is no run folder"), ("empty", "holds no run")])
def test_what_is_no_run_is_refused(what: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        report.main([str(tmp_path / what)])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match="pip install wandb"):
        report.main([str(write_run(tmp_path)), "--to", "wandb"])
