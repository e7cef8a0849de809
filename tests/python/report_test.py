"""python -m tesserae.report: what trackers get of a run."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
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

    def close(self, outcome: report.Outcome) -> None:
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


def write_now(run: Path, **changes: object) -> None:
    draft = run / "monitor/now.json.tmp"
    draft.write_text(json.dumps(NOW | {"time": time.time()} | changes))
    draft.rename(run / "monitor/now.json")


def write_metrics(run: Path, lines: dict[int, float]) -> None:
    """Another file in the place of the one that is there, as a run writes that goes back or is resumed."""
    draft = run / "metrics.jsonl.tmp"
    draft.write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in lines.items()))
    draft.rename(run / "metrics.jsonl")


def losses(notes: Notes) -> list[tuple[int, float]]:
    return [(step, of["train/loss"]) for step, of in notes.scalars if "train/loss" in of]


class Following:
    """report.follow of a run in a thread, which looks all the time."""

    def __init__(self, run: Path, **options: float) -> None:
        self.notes = Notes()
        arguments = (run, self.notes, 0.01)
        self._thread = threading.Thread(target=report.follow, args=arguments, kwargs=options, daemon=True)
        self._thread.start()

    def is_on(self, seconds: float = 0.2) -> bool:
        """After some more looks."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def hears(self, steps: list[int]) -> None:
        deadline = time.monotonic() + 60
        while [step for step, _ in losses(self.notes)] != steps and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [step for step, _ in losses(self.notes)] == steps

    def ends(self) -> Notes:
        assert not self.is_on(60)
        return self.notes


@pytest.mark.parametrize(
    "how", ["a rank was lost", "ranks were lost", "the number of ranks changes", "the ranks meet again", "failed"]
)
def test_a_run_whose_ranks_meet_again_is_not_over(how: str, tmp_path: Path) -> None:
    write_metrics(write_run(tmp_path, state="running"), {1: 4.0, 2: 3.0})
    following = Following(tmp_path)
    following.hears([1, 2])
    write_now(tmp_path, state="ended", how=how)
    assert following.is_on()
    (tmp_path / "monitor/now.json").unlink()  # by the next monitor, which has not heard of its ranks yet
    assert following.is_on()
    write_now(tmp_path, state="running", step=0)
    write_now(tmp_path, state="running", step=2)  # the run went back
    assert following.is_on()
    write_metrics(tmp_path, {1: 4.0, 2: 3.5, 3: 2.5})
    following.hears([1, 2, 2, 3])
    write_now(tmp_path, step=3, how="stopped, asked by signal 15")
    notes = following.ends()
    assert losses(notes)[2:] == [(2, 3.5), (3, 2.5)]
    assert [step for step, of in notes.scalars if "job/step_seconds" in of] == [3, 2, 3]


def test_a_run_that_begins_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    (tmp_path / "summary.json").write_text("{}")  # of the part before, until this one is there
    following = Following(tmp_path)
    assert following.is_on()
    write_now(tmp_path, state="running")
    assert following.is_on()
    write_now(tmp_path, how="done")
    following.ends()


def test_a_run_without_a_monitor_is_followed_until_it_has_a_summary(tmp_path: Path) -> None:
    write_metrics(tmp_path, {1: 4.0})
    following = Following(tmp_path)
    following.hears([1])
    assert following.is_on()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 3.0}\n')
    following.hears([1, 2])
    (tmp_path / "summary.json").write_text("{}")
    following.ends()


@pytest.mark.parametrize("state", ["running", "ended"])
def test_it_ends_if_nothing_changes_any_more(state: str, tmp_path: Path) -> None:
    write_run(tmp_path, state=state, how="a rank was lost")
    following = Following(tmp_path, patience=0.5)
    for _ in range(8):
        write_now(tmp_path, state=state, how="a rank was lost")
        assert following.is_on(0.1)
    following.ends()
    # Who comes long after that does not wait.
    for path in (tmp_path / "monitor/now.json", tmp_path / "metrics.jsonl", tmp_path / "monitor"):
        os.utime(path, (time.time() - 3600,) * 2)
    late = Following(tmp_path)
    assert losses(late.ends())[0] == (1, 4.0)


def test_steps_of_a_file_in_the_place_of_another_are_told_from_where_they_differ(tmp_path: Path) -> None:
    def told() -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in steps.lines()]

    steps = report.Steps(tmp_path / "metrics.jsonl")
    assert told() == []
    write_metrics(tmp_path, {1: 4.0, 2: 3.0, 3: 2.0})
    assert told() == [(1, 4.0), (2, 3.0), (3, 2.0)]
    write_metrics(tmp_path, {1: 4.0, 2: 3.0})
    assert told() == []
    write_metrics(tmp_path, {1: 4.0, 2: 3.0, 3: 2.5, 4: 1.5})  # as long as what was read, and longer
    assert told() == [(3, 2.5), (4, 1.5)]
    write_metrics(tmp_path, {1: 4.0, 2: 3.0, 3: 2.5, 4: 1.5, 5: 1.0})  # resumed at its last step
    assert told() == [(5, 1.0)]
    write_metrics(tmp_path, {1: 5.0})  # begun anew
    assert told() == [(1, 5.0)]
    (tmp_path / "metrics.jsonl").write_text("")  # the same file, emptied
    assert told() == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 6.0}\n')
    assert told() == [(1, 6.0)]


def test_a_long_file_is_read_in_pieces(tmp_path: Path) -> None:
    count = 200_000
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {step}, "loss": 1.5, "of": "{"x" * 100}"}}\n' for step in range(1, count + 1))
        file.write('{"step": ')
    follower = report.Follower(tmp_path / "metrics.jsonl")
    tracemalloc.start()
    try:
        steps = sum(line["step"] == number for number, line in enumerate(follower.lines(), 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert steps == count
    assert peak < (tmp_path / "metrics.jsonl").stat().st_size / 2
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("7}\n")
    assert list(follower.lines()) == [{"step": 7}], "a line counts once it is whole"


def test_a_file_server_that_is_not_reached_for_a_while_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_metrics(write_run(tmp_path, state="running"), {1: 4.0})
    following = Following(tmp_path)
    following.hears([1])

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        for name in ("open", "read_text", "stat", "is_dir", "exists"):
            patched.setattr(Path, name, stale)
        assert following.is_on()
    write_metrics(tmp_path, {1: 4.0, 2: 3.0})
    following.hears([1, 2])
    write_now(tmp_path, how="done")
    following.ends()


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


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("done", "finished"),
        ("stopped, asked by SIGTERM", "killed"),
        ("stopped for its bad numbers", "failed"),
        ("a rank was lost", "failed"),
    ],
)
def test_it_says_what_became_of_the_run(how: str, outcome: str, tmp_path: Path) -> None:
    assert report.follow(write_run(tmp_path, how=how), Notes(), 0.01, patience=0.1) == outcome


@pytest.mark.parametrize(
    ("summary", "outcome"),
    [
        ({}, "finished"),
        ({"broken_off": "the loss is nan"}, "failed"),
        ({"stopped_by_signal": 15, "stopped_by": "SIGTERM"}, "killed"),
    ],
)
def test_without_a_monitor_the_summary_says_what_became_of_the_run(
    summary: dict[str, object], outcome: str, tmp_path: Path
) -> None:
    write_metrics(tmp_path, {1: 4.0})
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert report.follow(tmp_path, Notes(), 0.01) == outcome


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, "KILLED"), (signal.SIGINT, "KILLED"), (0, "FINISHED")])
def test_its_end_is_told_to_the_tracker(number: int, status: str, tmp_path: Path) -> None:
    # What MLflow's client is asked for: an MLflow that is not ended says for ever that the run goes on.
    (tmp_path / "mlflow.py").write_text(
        "set_experiment = lambda project: None\n"
        "start_run = lambda run_name: None\n"
        "set_tag = lambda key, text: print(text, flush=True)\n"
        "log_metrics = lambda scalars, step: None\n"
        "end_run = lambda status: print(status, flush=True)\n"
    )
    run = write_run(tmp_path / "run", state="running" if number else "ended")
    paths = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    # Where this session was started in the background SIGINT is ignored.
    with subprocess.Popen(
        [sys.executable, "-m", "tesserae.report", str(run), "--to", "mlflow"],
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as follower:
        assert follower.stdout is not None
        assert "0.15 s longer" in follower.stdout.readline()  # it looks
        if number:
            follower.send_signal(number)
        assert follower.stdout.read() == f"{status}\n"  # communicate() would not see what readline() has read ahead
    assert follower.returncode == 0


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match="pip install wandb"):
        report.main([str(write_run(tmp_path)), "--to", "wandb"])
