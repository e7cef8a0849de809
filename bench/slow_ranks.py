"""Disturbs one rank of a training job at a time and sees whom the job names: rank, stage, and in which step.

    python bench/slow_ranks.py                       # 50 faults, 1,000 quiet steps
    python bench/slow_ranks.py --faults 8 --quiet 50

The job is the usual FSDP script (bench/slow_ranks_train.py) with Tesserae's monitor. A fault is one of
  stop        the process is stopped for 0.6 s (SIGSTOP, SIGCONT), whatever it is doing
  data        each batch takes 0.15 s longer to read, for 10 steps
  processor   the process gets a third of a processor for 10 steps (cgroup of the cpu controller, else SIGSTOP by turns)
  neighbour   another process computes on the processor that the rank is pinned to, for 10 steps
A fault counts as found if the first rank that is named after it is the right one with a stage that the fault can slow
down, in the first two steps that it touched; any other name is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch import free_port, rank_environment

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "bench" / "slow_ranks_train.py"
CPU = Path("/sys/fs/cgroup/cpu")
STEPS_OF_A_FAULT = 10
COMPUTES = {"forward", "backward", "optimizer", "between", "data"}


@dataclass
class Fault:
    kind: str
    rank: int
    step: int  # the first that it touched
    named: dict | None = None  # the event

    @property
    def stages(self) -> set[str]:
        return {"data"} if self.kind == "data" else COMPUTES

    @property
    def found(self) -> bool:
        named = self.named
        return (
            named is not None and named["rank"] == self.rank and any(f" in {s}," in named["text"] for s in self.stages)
        )

    @property
    def steps(self) -> int:
        return self.named["step"] - self.step + 1 if self.named else -1


class Job:
    def __init__(self, folder: Path, ranks: int, width: int) -> None:
        self.folder, self.ranks = folder, ranks
        port = free_port()
        said = (folder / "said.txt").open("w")
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(TRAIN), str(folder), str(width)],
                env=rank_environment(rank, ranks, port) | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        for rank, process in enumerate(self.processes):
            os.sched_setaffinity(process.pid, {rank % (os.cpu_count() or 1)})

    def now(self) -> dict:
        for process in self.processes:
            if process.poll() is not None:
                raise SystemExit(f"a rank ended:\n{(self.folder / 'said.txt').read_text()}")
        try:
            return json.loads((self.folder / "run/monitor/now.json").read_text())
        except (FileNotFoundError, ValueError):
            return {"step": 0, "step_seconds": 1, "ranks": [{"step": 1, "age": 0}] * self.ranks}

    def step(self) -> int:
        return self.now()["step"]

    def step_at_this_moment(self, rank: int) -> int:
        """From what the rank told of itself last, and how long ago that was."""
        now = self.now()
        late = time.time() - now.get("time", time.time())
        one = now["ranks"][rank]
        return one["step"] + int((one["age"] + late) / max(now["step_seconds"], 1e-3))

    def wait_until(self, step: int) -> None:
        while self.step() < step:
            time.sleep(0.05)

    def events(self) -> list[dict]:
        lines = (self.folder / "run/monitor/events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == "slow"]

    def end(self) -> None:
        (self.folder / "end").touch()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def stop(job: Job, rank: int) -> Iterator[None]:
    job.processes[rank].send_signal(signal.SIGSTOP)
    time.sleep(0.6)
    job.processes[rank].send_signal(signal.SIGCONT)
    yield


@contextmanager
def data(job: Job, rank: int) -> Iterator[None]:
    slow = job.folder / f"slow-{rank}"
    slow.write_text("0.15")
    yield
    slow.unlink()


@contextmanager
def processor(job: Job, rank: int) -> Iterator[None]:
    group = CPU / f"tesserae-slow-ranks-{os.getpid()}"
    pid = job.processes[rank].pid
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text("20000")
    (group / "cpu.cfs_quota_us").write_text("7000")
    (group / "cgroup.procs").write_text(str(pid))
    yield
    (CPU / "cgroup.procs").write_text(str(pid))
    group.rmdir()


@contextmanager
def neighbour(job: Job, rank: int) -> Iterator[None]:
    where = {rank % (os.cpu_count() or 1)}
    hog = os.fork()  # computes at once: an interpreter that starts would take a step
    while hog == 0:
        os.sched_setaffinity(0, where)
    yield
    os.kill(hog, signal.SIGKILL)
    os.waitpid(hog, 0)


KINDS: dict[str, Callable] = {"stop": stop, "data": data, "processor": processor, "neighbour": neighbour}


def disturb(job: Job, kind: str, rank: int, quiet_after: int) -> Fault:
    fault = Fault(kind, rank, job.step_at_this_moment(rank))
    with KINDS[kind](job, rank):
        if kind != "stop":
            fault.step = job.step_at_this_moment(rank)
            job.wait_until(fault.step + STEPS_OF_A_FAULT)
    job.wait_until(job.step() + quiet_after)
    return fault


def assign(faults: list[Fault], events: list[dict], ends: list[int]) -> list[dict]:
    """Gives each fault the first event of its time; returns the false alarms."""
    false = []
    for event in events:
        owner = next((f for f, end in zip(faults, ends) if f.step - 1 <= event["step"] <= end), None)
        if owner is not None and owner.named is None:
            owner.named = event
        elif owner is None or event["rank"] != owner.rank:
            false.append(event)
    return false


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--quiet", type=int, default=1000, help="steps without a fault before the first (1000)")
    parser.add_argument("--between", type=int, default=12, help="quiet steps after each fault (12)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=768, help="of the model: the length of a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--output", type=Path, default=ROOT / "bench/out/slow_ranks.json")
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    kinds = arguments.kinds.split(",")
    if "processor" in kinds and not (CPU / "cpu.cfs_quota_us").exists() and not CPU.exists():
        parser.error("there is no cgroup v1 cpu controller here: leave out the kind `processor` (--kinds)")
    with tempfile.TemporaryDirectory(prefix="tesserae-slow-ranks-") as name:
        job = Job(Path(name), arguments.ranks, arguments.width)
        try:
            job.wait_until(20)
            print(f"{job.now()['step_seconds']:.3f} s a step; {arguments.quiet} quiet steps", flush=True)
            job.wait_until(20 + arguments.quiet)
            quiet_alarms = job.events()
            for event in quiet_alarms:
                print(f"false alarm: step {event['step']}: {event['text']}", flush=True)
            faults, ends = [], []
            for number in range(arguments.faults):
                fault = disturb(job, kinds[number % len(kinds)], dice.randrange(arguments.ranks), arguments.between)
                faults.append(fault)
                ends.append(job.step())
                time.sleep(dice.uniform(0, 0.3))
            false = assign(faults, job.events()[len(quiet_alarms) :], ends)
            step_seconds = job.now()["step_seconds"]
        finally:
            job.end()
    for fault in faults:
        said = fault.named["text"] if fault.named else "nobody is named"
        print(f"{fault.kind:10} rank {fault.rank} from step {fault.step}: {fault.steps:2} steps, {said}")
    for event in false:
        print(f"false alarm: step {event['step']}: {event['text']}")
    found = sum(fault.found for fault in faults)
    quick = sum(fault.found and fault.steps <= 2 for fault in faults)
    report = {
        "faults": len(faults),
        "found": found,
        "within_two_steps": quick,
        "quiet_steps": arguments.quiet,
        "quiet_alarms": len(quiet_alarms),
        "other_alarms": len(false),
        "step_seconds": step_seconds,
        "by_kind": {
            kind: [sum(f.found for f in faults if f.kind == kind), sum(f.kind == kind for f in faults)]
            for kind in kinds
        },
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
