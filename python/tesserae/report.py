"""python -m tesserae.report RUN --to tensorboard|wandb|mlflow: what a run measures, in the tracker of your choice.

    python -m tesserae.report runs/job --to tensorboard             # follows the run; ends with it, or at Ctrl-C
    tensorboard --logdir runs/job/tensorboard

A process of its own that reads the run folder: training does not know of it. It works on a run that trains and on one
that is over, from `tesserae train` and from a script that gave tsm.init a run folder. Where ranks were lost or their
number changes it waits for what they do next.
  1. Lines of metrics.jsonl (`tesserae train`) become scalars of their step: loss, lr, grad_norm, tokens_per_second, ...
  2. Each new step in monitor/now.json becomes, of every rank, seconds of each stage and bytes of each category of
     memory, its load and the speed of its links (of more than 16 ranks: the least, the median and the most), and how
     much the slow ranks cost.
  3. Events of monitor/events.jsonl become texts, where the tracker has texts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import statistics
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

MOST_RANKS = 16
PIECE = 1 << 20  # bytes of a file at a time
# `how` of now.json begins so where a run is over. After all else it may go on: ranks meet again, and a job that failed
# may be begun again by its launcher.
OVER = ("done", "stopped")
ASKED_TO_STOP = "stopped, asked by"  # and not for its bad numbers
Scalars = dict[str, float]
# What became of the run; "killed": `tesserae train` was asked to stop, or this process was.
Outcome = Literal["finished", "failed", "killed"]


class Tracker(Protocol):
    def add(self, step: int, scalars: Scalars) -> None: ...
    def say(self, step: int, text: str) -> None: ...
    def close(self, outcome: Outcome) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, run: Path, arguments: argparse.Namespace) -> None:
        writer = library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(arguments.folder or run / "tensorboard")

    def add(self, step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def say(self, step: int, text: str) -> None:
        self._writer.add_text("events", text, step)

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B; its own variables (WANDB_MODE, WANDB_DIR, ...) count."""

    def __init__(self, run: Path, arguments: argparse.Namespace) -> None:
        wandb = library("wandb", "wandb")
        self._run = wandb.init(project=arguments.project, name=run.name, dir=arguments.folder)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, scalars: Scalars) -> None:
        self._run.log({"step": step, **scalars})

    def say(self, step: int, text: str) -> None:
        self._run.summary["last_event"] = f"step {step}: {text}"

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code={"finished": 0, "failed": 1, "killed": 255}[outcome])


class MLflow:
    """A run of MLflow; MLFLOW_TRACKING_URI says where."""

    def __init__(self, run: Path, arguments: argparse.Namespace) -> None:
        self._mlflow = library("mlflow", "mlflow")
        if arguments.folder:
            self._mlflow.set_tracking_uri(arguments.folder)
        self._mlflow.set_experiment(arguments.project)
        self._mlflow.start_run(run_name=run.name)

    def add(self, step: int, scalars: Scalars) -> None:
        self._mlflow.log_metrics(scalars, step=step)

    def say(self, step: int, text: str) -> None:
        self._mlflow.set_tag("last_event", f"step {step}: {text}")

    def close(self, outcome: Outcome) -> None:
        self._mlflow.end_run(status=outcome.upper())


TRACKERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def library(module: str, package: str) -> Any:
    """The user's own; exits with what to install where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(
            f"tesserae.report: {package} is not installed here ({error}): pip install {package}"
        ) from error


def entries(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut off when its writer died
        if isinstance(entry, dict):
            yield entry


class Follower:
    """Whole lines of a file that grows, each once. A file in its place is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, -1

    def lines(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode = status.st_ino
                    self._rewind()
                file.seek(self._offset)
                rest = b""
                while piece := file.read(PIECE):
                    whole, end, rest = (rest + piece).rpartition(b"\n")
                    self._offset += len(whole + end)
                    yield from entries(whole)
        except OSError:
            return  # not there, or not now: a file server that is not reached for a while

    def _rewind(self) -> None:
        self._offset = 0


class Steps(Follower):
    """Lines of metrics.jsonl. A run that goes back to a step, or is resumed, puts another file in its place, which
    begins with the same lines: of that one, those that come after the last line that both have."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._told, self._same = array("q"), 0  # a hash of each line; how many of them this file has, too

    def lines(self) -> Iterator[dict[str, Any]]:
        for line in super().lines():
            if not isinstance(line.get("step"), int):
                continue
            mark = hash(repr(line))
            same = self._same < len(self._told) and self._told[self._same] == mark
            if not same:
                del self._told[self._same :]
                self._told.append(mark)
            self._same += 1
            if not same:
                yield line

    def _rewind(self) -> None:
        super()._rewind()
        self._same = 0


class Changes:
    """For how long nothing in a run folder has changed."""

    def __init__(self, run: Path) -> None:
        self._paths = [run / "monitor", run / "monitor/now.json", run / "metrics.jsonl"]
        self._seen = self._look()
        # By this clock alone from now on. How old a first sight is must be taken from the files.
        newest = max((when for _, _, when in self._seen), default=time.time_ns())
        self._last = time.monotonic() - max(0.0, (time.time_ns() - newest) / 1e9)

    def seconds_since(self) -> float:
        seen = self._look()
        if seen != self._seen:
            self._seen, self._last = seen, time.monotonic()
        return time.monotonic() - self._last

    def _look(self) -> list[tuple[int, int, int]]:
        found = []
        for path in self._paths:
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return found


def of_step(line: dict[str, Any]) -> Scalars:
    """A line of metrics.jsonl."""
    numbers = {name: value for name, value in line.items() if isinstance(value, (int, float)) and name != "step"}
    scalars = {f"train/{name}": float(value) for name, value in numbers.items()}
    degrees = line.get("degrees") or []
    return scalars | {f"degrees/{name}": float(value) for name, value in zip("PGO", degrees, strict=False)}


def of_ranks(now: dict[str, Any]) -> Scalars:
    """A step of now.json."""
    scalars = {"job/step_seconds": float(now["step_seconds"]), "job/slow_ranks": float(len(now["slow"]))}
    scalars["job/slow_share"] = float(sum(slow["share"] for slow in now["slow"]))
    tables = [("seconds", now["stages"], now["seconds"], 1.0)]
    memory = now.get("memory") or {}
    tables.append(("memory_mib", memory.get("categories", []), memory.get("bytes", []), 2.0**-20))
    load, links = now.get("load") or {}, now.get("links") or {}
    tables.append(("load", load.get("kinds", []), load.get("amounts", []), 1.0))
    hops = ["_".join(str(hop[key]) for key in ("link", "lane", "verb", "ranks")) for hop in links.get("hops", [])]
    tables.append(("link_gb_per_second", [hop.replace(" ", "_") for hop in hops], links.get("speed", []), 1e-9))
    for what, columns, rows, factor in tables:
        for column, name in enumerate(columns):
            values = [row[column] * factor for row in rows]
            if len(values) > MOST_RANKS:
                few = {"min": min(values), "median": statistics.median(values), "max": max(values)}
                scalars |= {f"{what}/{name}/{key}": value for key, value in few.items()}
            else:
                scalars |= {f"{what}/{name}/rank_{rank}": value for rank, value in enumerate(values)}
    return scalars


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # not there, or not now
    return read if isinstance(read, dict) else {}


def read_now(run: Path) -> dict[str, Any]:
    return read_json(run / "monitor/now.json")


def is_over(run: Path, now: dict[str, Any]) -> bool:
    """Whether the run says so itself."""
    with suppress(OSError):
        if (run / "monitor").is_dir():  # a summary may be that of the part before, until what is resumed is read
            return now.get("state") == "ended" and str(now.get("how", "done")).startswith(OVER)
        return (run / "summary.json").exists()
    return False


def outcome_of(run: Path, now: dict[str, Any]) -> Outcome:
    """Of a run that is followed no longer: one that does not say itself that it is over counts as failed."""
    if not is_over(run, now):
        return "failed"
    summary = read_json(run / "summary.json")
    how = str(now.get("how", "done"))
    if how.startswith(ASKED_TO_STOP) or "stopped_by_signal" in summary:
        return "killed"
    return "finished" if how == "done" and "broken_off" not in summary else "failed"


def follow(run: Path, tracker: Tracker, every: float, patience: float = 60.0) -> Outcome:
    """Until the run is over, or nothing has changed for `patience` seconds: it died, or nobody goes on."""
    metrics, events = Steps(run / "metrics.jsonl"), Follower(run / "monitor/events.jsonl")
    changes = Changes(run)
    shown = 0
    while True:
        now = read_now(run)
        over = is_over(run, now) or changes.seconds_since() > patience
        for line in metrics.lines():
            tracker.add(line["step"], of_step(line))
        if now.get("step", 0) not in (0, shown):  # a lower one where the run went back
            shown = now["step"]
            tracker.add(shown, of_ranks(now))
        for event in events.lines():
            tracker.say(event.get("step", 0), str(event.get("text", "")))
        if over:
            return outcome_of(run, now)
        time.sleep(every)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tesserae.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder")
    parser.add_argument("--to", choices=TRACKERS, default="tensorboard", help="default: %(default)s")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="how often it looks (%(default)s)")
    patience = "it ends if nothing changes for so long (%(default)s)"
    parser.add_argument("--patience", type=float, default=60.0, metavar="SECONDS", help=patience)
    parser.add_argument("--project", default="tesserae", help="of W&B, or MLflow's experiment (%(default)s)")
    parser.add_argument("--folder", help="where it writes; MLflow: a tracking URI. Default: RUN/tensorboard, theirs")
    chosen = parser.parse_args(arguments)
    run = chosen.run
    if not run.is_dir():
        parser.error(f"there is no run folder {run}")
    if not (run / "metrics.jsonl").exists() and not (run / "monitor").exists():
        parser.error(f"{run} holds no run: neither metrics.jsonl nor monitor/ is in it")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: trackers hear of the end
    tracker: Tracker = TRACKERS[chosen.to](run, chosen)
    outcome: Outcome = "failed"
    try:
        outcome = follow(run, tracker, chosen.every, chosen.patience)
    except KeyboardInterrupt:
        outcome = "killed"
    finally:
        tracker.close(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
