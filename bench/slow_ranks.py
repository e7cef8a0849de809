"""Disturbs one rank of a training job at a time and sees whom the job names: rank, stage, and in which step.

    python bench/slow_ranks.py                       # 50 faults, 1,000 quiet steps
    python bench/slow_ranks.py --faults 8 --quiet 50

The job is the usual FSDP script (bench/slow_ranks_train.py) with Tesserae's monitor, a rank on each of two emulated
hosts (bench/hosts.sh: root, iproute2). A fault is one of
  stop        the process is stopped for 0.6 s (SIGSTOP, SIGCONT), whatever it is doing
  data        each batch takes 0.15 s longer to read, for 10 steps
  processor   the process gets a third of a processor for 10 steps (cgroup of the cpu controller)
  neighbour   another process computes on the processor that the rank is pinned to, for 10 steps
  memory      the memory of the process is limited to what it cannot give back, for 10 steps (cgroup of the memory
              controller): the rows that it maps have to be read from the disk again and again
  link        the link of the rank's host carries a fortieth for 10 steps (tc)
A fault counts as found if the first that is named after it is the right one with a stage that the fault can slow down,
in the first two steps that it touched (the script tells which those are); any other name is a false alarm. Right is the
rank, but of a slow link: it cannot be told which of its ends is slow, so that must be said of the link.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launch import HOSTS, UNAVAILABLE, environment, free_port

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "bench" / "slow_ranks_train.py"
GROUPS = Path("/sys/fs/cgroup")  # of v1
IN_A_GROUP = 'echo $$ >"$0-$RANK/cgroup.procs"; exec "$@"'
STEPS_OF_A_FAULT = 10
COMPUTES = {"forward", "backward", "optimizer", "between", "data"}
WAITS = {"gather", "reduce", "agree"}
STAGES = {"stop": COMPUTES | WAITS, "data": {"data"}, "memory": {"data"}, "link": WAITS}  # of others: COMPUTES


@dataclass
class Fault:
    kind: str
    rank: int
    step: int  # the first that it touched
    named: dict | None = None  # the event

    @property
    def found(self) -> bool:
        named = self.named
        if named is None:
            return False
        right = named["kind"] == "slow_link" if self.kind == "link" else named.get("rank") == self.rank
        return right and any(f" in {stage}," in named["text"] for stage in STAGES.get(self.kind, COMPUTES))

    @property
    def steps(self) -> int:
        return self.named["step"] - self.step + 1 if self.named else -1


class Job:
    """A rank on each of so many hosts, whose links carry `megabits` a second. Each has a processor of its own, and a
    control group of the memory controller."""

    def __init__(self, folder: Path, ranks: int, width: int, megabits: int) -> None:
        self.folder, self.ranks, self.megabits = folder, ranks, megabits
        self.groups = [GROUPS / f"memory/{folder.name}-{rank}" for rank in range(ranks)]
        for group in self.groups:
            group.mkdir()
        command = ["sh", "-c", IN_A_GROUP, str(GROUPS / "memory" / folder.name), sys.executable, str(TRAIN)]
        rate = f"{megabits}mbit"
        where = ["--hosts", str(ranks), "--rate", rate, "--port", str(free_port()), "--doors", str(folder / "doors")]
        self.hosts = subprocess.Popen(
            [str(HOSTS), *where, "--", *command, str(folder), str(width)],
            env=environment() | {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"},
            stdout=(folder / "said.txt").open("w"),
            stderr=subprocess.STDOUT,
        )
        while not all((folder / f"at-{rank}").exists() and self.at(rank)[1] > 0 for rank in range(ranks)):
            self.check()
            time.sleep(0.05)
        self.processes = [self.at(rank)[0] for rank in range(ranks)]
        for rank, process in enumerate(self.processes):
            for task in Path(f"/proc/{process}/task").iterdir():
                os.sched_setaffinity(int(task.name), {self.processor(rank)})

    def check(self) -> None:
        if self.hosts.poll() is not None:
            said = (self.folder / "said.txt").read_text()
            print(said if self.hosts.returncode == UNAVAILABLE else f"a rank ended:\n{said}", file=sys.stderr)
            self.end()
            sys.exit(self.hosts.returncode or 1)

    def at(self, rank: int) -> tuple[int, int]:
        """Its process, and the step in which it is at this moment."""
        return struct.unpack("qq", (self.folder / f"at-{rank}").read_bytes())

    @staticmethod
    def processor(rank: int) -> int:
        return rank % (os.cpu_count() or 1)

    def step(self) -> int:
        self.check()
        return min(self.at(rank)[1] for rank in range(self.ranks))

    def wait_until(self, step: int) -> None:
        while self.step() < step:
            time.sleep(0.01)

    def step_seconds(self) -> float:
        return json.loads((self.folder / "run/monitor/now.json").read_text())["step_seconds"]

    def events(self) -> list[dict]:
        lines = (self.folder / "run/monitor/events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] in ("slow", "slow_link")]

    def end(self) -> None:
        (self.folder / "end").touch()
        try:
            self.hosts.wait(60)
        except subprocess.TimeoutExpired:
            self.hosts.terminate()
            self.hosts.wait()
        for group in self.groups:
            with suppress(FileNotFoundError):  # it is the second end: a rank had ended
                group.rmdir()


@contextmanager
def group_of(controller: str, process: int) -> Iterator[Path]:
    """A control group that has the process alone, for that long."""
    [before] = [
        line.split(":", 2)[2]
        for line in Path(f"/proc/{process}/cgroup").read_text().splitlines()
        if controller in line.split(":", 2)[1].split(",")
    ]
    group = GROUPS / controller / f"tesserae-slow-ranks-{process}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(process))
    try:
        yield group
    finally:
        with suppress(ProcessLookupError):
            (GROUPS / controller / before.lstrip("/") / "cgroup.procs").write_text(str(process))
        with suppress(OSError):  # what is charged to it is still there
            group.rmdir()


@contextmanager
def stop(job: Job, rank: int) -> Iterator[None]:
    os.kill(job.processes[rank], signal.SIGSTOP)
    time.sleep(0.6)
    os.kill(job.processes[rank], signal.SIGCONT)
    yield


@contextmanager
def data(job: Job, rank: int) -> Iterator[None]:
    slow = job.folder / f"slow-{rank}"
    (job.folder / "slow").write_text("0.15")
    (job.folder / "slow").rename(slow)
    yield
    slow.unlink()


@contextmanager
def processor(job: Job, rank: int) -> Iterator[None]:
    with group_of("cpu", job.processes[rank]) as group:
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text("7000")
        yield


@contextmanager
def neighbour(job: Job, rank: int) -> Iterator[None]:
    us = os.getpid()
    hog = os.fork()  # computes at once: an interpreter that starts would take a step
    if hog == 0:
        os.sched_setaffinity(0, {job.processor(rank)})
        while os.getppid() == us:
            pass
        os._exit(0)
    yield
    os.kill(hog, signal.SIGKILL)
    os.waitpid(hog, 0)


@contextmanager
def memory(job: Job, rank: int) -> Iterator[None]:
    limit = job.groups[rank] / "memory.limit_in_bytes"
    holds = dict(line.split() for line in limit.with_name("memory.stat").read_text().splitlines())
    of_files = int(holds["active_file"]) + int(holds["inactive_file"])
    limit.write_text(str(int(limit.with_name("memory.usage_in_bytes").read_text()) - of_files + (16 << 20)))
    yield
    limit.write_text("-1")


@contextmanager
def link(job: Job, rank: int) -> Iterator[None]:
    holder = dict(line.split() for line in (job.folder / "doors").read_text().splitlines())[f"host{rank}"]

    def carries(megabits: int) -> None:
        shape = ["tc", "qdisc", "change", "dev", "eth0", "root", "handle", "1:", "tbf", "rate", f"{megabits}mbit"]
        inside = ["nsenter", "--target", holder, "--net"]
        subprocess.run([*inside, *shape, "burst", str(max(job.megabits * 250, 1 << 17)), "latency", "50ms"], check=True)

    carries(job.megabits // 40)
    yield
    carries(job.megabits)


KINDS: dict[str, Callable] = {
    "stop": stop,
    "data": data,
    "processor": processor,
    "neighbour": neighbour,
    "memory": memory,
    "link": link,
}


def disturb(job: Job, kind: str, rank: int, quiet_after: int) -> Fault:
    fault = Fault(kind, rank, job.at(rank)[1])
    with KINDS[kind](job, rank):
        if kind != "stop":
            fault.step = job.at(rank)[1]
            job.wait_until(fault.step + STEPS_OF_A_FAULT)
    job.wait_until(job.step() + quiet_after)
    return fault


def assign(faults: list[Fault], events: list[dict], ends: list[int]) -> list[dict]:
    """Gives each fault the first event of its time; returns the false alarms."""
    false = []
    for event in events:
        # One may begin in the step in which another has ended; and before a forward begins, the script is a step ahead.
        times = reversed(list(zip(faults, ends, strict=True)))
        owner = next((fault for fault, end in times if fault.step - 1 <= event["step"] <= end), None)
        if owner is not None and owner.named is None:
            owner.named = event
        elif owner is None or event.get("rank") != owner.named.get("rank"):
            false.append(event)
    return false


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--quiet", type=int, default=1000, help="steps without a fault before the first (1000)")
    parser.add_argument("--between", type=int, default=12, help="quiet steps after each fault (12)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="of the model: the length of a step (512)")
    parser.add_argument("--megabits", type=int, default=5000, help="a second, of each host's link (5000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--output", type=Path, default=ROOT / "bench/out/slow_ranks.json")
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    kinds = arguments.kinds.split(",")
    for controller in ("cpu", "memory"):
        if not os.access(GROUPS / controller / "tasks", os.W_OK):
            parser.error(f"it takes root and control groups of v1: {GROUPS / controller} cannot be written")
    with tempfile.TemporaryDirectory(prefix="tesserae-slow-ranks-") as name:
        job = Job(Path(name), arguments.ranks, arguments.width, arguments.megabits)
        try:
            job.wait_until(20)
            print(f"{job.step_seconds():.3f} s a step; {arguments.quiet} quiet steps", flush=True)
            job.wait_until(20 + arguments.quiet)
            quiet_alarms = job.events()
            for event in quiet_alarms:
                print(f"false alarm: step {event['step']}: {event['text']}", flush=True)
            faults, ends = [], []
            for number in range(arguments.faults):
                fault = disturb(job, kinds[number % len(kinds)], dice.randrange(arguments.ranks), arguments.between)
                faults.append(fault)
                ends.append(job.step())
                if not number % 10:
                    print(f"{number + 1} of {arguments.faults} faults", file=sys.stderr, flush=True)
                time.sleep(dice.uniform(0, 0.3))
            false = assign(faults, job.events()[len(quiet_alarms) :], ends)
            step_seconds = job.step_seconds()
        finally:
            job.end()
    for fault in faults:
        said = fault.named["text"] if fault.named else "nobody is named"
        mark = " " if fault.found and fault.steps <= 2 else "*"
        print(f"{mark}{fault.kind:10} rank {fault.rank} from step {fault.step}: {fault.steps:2} steps, {said}")
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
