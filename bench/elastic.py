"""Kills ranks of a Python script under tsm.elastic at random instants and watches the others go on in the same
processes, with the losses of one process that nothing disturbs.

    python bench/elastic.py                     # 20 kills with replicas, 20 without; 3 jobs of 4 ranks down to one
    python bench/elastic.py --kills 200 --jobs 0
    python bench/elastic.py --calm 15           # a process waits to replace the next one

The script is examples/python/elastic.py. A kill comes at an instant that is drawn at random; a share of them (--double)
is followed by another one within two seconds, which may meet the recovery.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from elastic_undisturbed import undisturbed
from launch import environment

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples/python/elastic.py"


class Job:
    """One that runs, and what it says, as it says it."""

    def __init__(self, folder: Path, options: list[str], pause: float, degree: int) -> None:
        folder.mkdir()
        command = [str(ROOT / "build/release/cli/tesserae"), "run", "--nproc", "4", *options, str(SCRIPT)]
        command += ["--folder", str(folder), "--steps", "1000000", "--pause", str(pause), "--degree", str(degree)]
        variables = {"OMP_NUM_THREADS": "1", "TESSERAE_PYTHON": sys.executable}
        self.process = subprocess.Popen(
            command, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.steps: list[tuple[float, int, float]] = []  # when, which, its loss
        self.ranks: dict[int, dict[int, int]] = {}  # by epoch: processes by rank
        self.text: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text.append(line)
            if found := re.search(r"step (\d+) loss (\S+)", line):
                self.steps.append((time.monotonic(), int(found[1]), float(found[2])))
            if found := re.search(r"epoch (\d+) rank (\d+) of \d+ process (\d+)", line):
                self.ranks.setdefault(int(found[1]), {})[int(found[2])] = int(found[3])

    def wait_for_step(self, step: int, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while self.newest() < step:
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError("the job does not go on:\n" + "".join(self.text[-60:]))
            time.sleep(0.005)

    def newest(self) -> int:
        return max((step for _, step, _ in list(self.steps)), default=-1)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._reader.join(10)


@dataclass
class Outcome:
    kills: int = 0
    kept: int = 0  # survivors that have their process still
    survivors: int = 0
    lost: list[int] = field(default_factory=list)  # steps, by recovery
    waits: list[float] = field(default_factory=list)
    worst: float = 0.0  # difference of a loss, relative


def disturb(job: Job, kills: int, arguments: argparse.Namespace, dice: random.Random, out: Outcome) -> None:
    spent = 0
    while spent < kills:
        reached = job.newest()
        job.wait_for_step(reached + 3)
        time.sleep(arguments.calm + dice.uniform(0, 1))
        before = job.ranks[max(job.ranks)]
        epoch, step, at = max(job.ranks), job.newest(), time.monotonic()
        victims = {dice.choice(list(before.values()))}
        os.kill(*victims, signal.SIGKILL)
        spent += 1
        if spent < kills and dice.random() < arguments.double:
            time.sleep(dice.uniform(0, 2))
            newest = job.ranks[max(job.ranks)]
            second = dice.choice([process for process in newest.values() if process not in victims])
            os.kill(second, signal.SIGKILL)
            victims.add(second)
            spent += 1
        job.wait_for_step(step + 2)  # the step at hand may be finished by those that are left
        out.waits.append(time.monotonic() - at)
        after = set(job.ranks[max(job.ranks)].values())
        left = set(before.values()) - victims
        out.survivors += len(left)
        out.kept += len(left & after)
        again = [made for when, made, _ in list(job.steps) if when > at]
        out.lost.append(sum(1 for made in set(again) if made <= step))
        if max(job.ranks) == epoch:
            raise RuntimeError("a rank was killed, and no other epoch has begun")
        if arguments.verbose:
            print(f"  kill after step {step}: {out.waits[-1]:.2f} s, {out.lost[-1]} steps again", flush=True)
    out.kills += spent


def compare(job: Job, out: Outcome) -> None:
    expected = undisturbed(job.newest() + 1)
    assert {step for _, step, _ in job.steps} == set(range(len(expected))), "a step is missing"
    for _, step, loss in job.steps:
        out.worst = max(out.worst, abs(loss - expected[step]) / abs(expected[step]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=int, default=20, help="of ranks that are replaced, with replicas and as many without"
    )
    parser.add_argument("--spares", type=int, default=1, help="processes that wait to replace one")
    parser.add_argument("--jobs", type=int, default=3, help="of which three ranks are killed that nobody replaces")
    parser.add_argument("--double", type=float, default=0.2, help="share of kills that another one follows at once")
    parser.add_argument("--calm", type=float, default=0, help="seconds at least before each kill (0)")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that the script waits before each step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="each rank starts a Python of its own")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| lost ranks are | kills | others kept their process | steps made again | losses differ by | "
        "kill to the second new step, s (worst) |"
    )
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory(prefix="tesserae-elastic-") as name:
        replaced = ["--replacements", "100000", "--spares", str(arguments.spares)]
        cold = ["--cold"] if arguments.cold else []
        any_kills = int(arguments.kills > 0)
        sides = {
            "replaced, two replicas": (any_kills, arguments.kills, 2, replaced),
            "replaced, no replicas": (any_kills, arguments.kills, 0, replaced),
            "not replaced, no replicas": (arguments.jobs, 3, 0, ["--min-ranks", "1"]),
        }
        for side, (jobs, kills, degree, options) in sides.items():
            out = Outcome()
            for number in range(jobs):
                folder = Path(name) / f"{side.replace(', ', '-').replace(' ', '-')}-{number}"
                job = Job(folder, options + cold, arguments.pause, degree)
                try:
                    dice = random.Random(f"{arguments.seed} {side} {number}")
                    disturb(job, kills, arguments, dice, out)
                finally:
                    job.end()
                compare(job, out)
            if out.kills:
                print(
                    f"| {side} | {out.kills} | {out.kept} of {out.survivors} | {sum(out.lost)} | {out.worst:.1e} | "
                    f"{statistics.median(out.waits):.2f} ({max(out.waits):.2f}) |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
