"""Kills ranks of a training job that nobody replaces, one after the other at random instants, until one is left, and
compares the losses with those of the same job left alone.

    python bench/fewer_ranks.py                                # 4 ranks, four layouts, five jobs each
    python bench/fewer_ranks.py --model 118M --layouts 2,2,2 --jobs 1 --steps 12 --deadline 120

What ranks that are left hold together goes to a checkpoint; a layout without replicas (O = N, which any layout can
become) keeps snapshots in memory after every step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memory import children
from recovery import MODELS, configuration, last_step, lines

ROOT = Path(__file__).resolve().parent.parent


def command(arguments: argparse.Namespace, job: Path, run: Path, layout: str, least: int) -> list[str]:
    degrees = dict(zip(("parameters", "gradients", "optimizer"), map(int, layout.split(","))))
    settings = {
        "run.folder": run,
        "degrees": json.dumps(degrees),
        "recovery.min_ranks": least,
        "model.dropout": 0,  # its masks belong to ranks
        "train.batch_per_rank": 3,  # with accumulate 2, 24 samples a step: 4, 3, 2 or 1 ranks
        "checkpoint.memory_every_steps": 1,
    }
    made = [str(arguments.program), "train", str(job), "--nproc", "4"]
    return made + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def disturb(job: subprocess.Popen, run: Path, arguments: argparse.Namespace, dice: random.Random) -> list[float]:
    """Returns the seconds from each kill to the end of the next step that was not done before."""
    waits = []
    while job.poll() is None and last_step(run) < 2:
        time.sleep(0.02)
    for _ in range(3):
        time.sleep(dice.uniform(0.05, arguments.pause))
        step, at = last_step(run), time.monotonic()
        os.kill(dice.choice(children(job.pid)), signal.SIGKILL)
        # The step at hand may be finished by those that are left: it is not the next one.
        while job.poll() is None and last_step(run) <= step + 1:
            time.sleep(0.01)
        waits.append(time.monotonic() - at)
    return waits


def train(arguments: argparse.Namespace, words: list[str], said: Path, disturbed: random.Random | None, run: Path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with said.open("w") as output, subprocess.Popen(words, env=environment, stdout=output, stderr=output) as job:
        waits = disturb(job, run, arguments, disturbed) if disturbed else []
        return waits, job.wait(timeout=arguments.patience)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/cli/tesserae")
    parser.add_argument("--layouts", nargs="+", default=["1,1,1", "2,2,2", "1,2,2", "4,4,4"], help="P,G,O")
    parser.add_argument("--jobs", type=int, default=5, help="for each layout; three ranks are killed in each")
    parser.add_argument("--pause", type=float, default=1.0, help="at most so many seconds between kills")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", choices=sorted(MODELS), default="230K")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds of run.deadline_seconds")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for the rest of a run after its kills")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(
        "| P,G,O | kills | jobs that ended well | steps lost | losses differ by | kill to second new step, s (worst) |"
    )
    print("|---|---|---|---|---|---|")
    good = True
    for layout in arguments.layouts:
        with tempfile.TemporaryDirectory(prefix="tesserae-fewer-") as name:
            folder = Path(name)
            job, alone = configuration(folder, arguments), folder / "alone"
            train(arguments, command(arguments, job, alone, layout, 0), folder / "said", None, alone)
            expected = lines(alone)
            waits, well, lost, worst = [], 0, 0, 0.0
            for number in range(arguments.jobs):
                dice = random.Random(f"{arguments.seed} {layout} {number}")
                run, said = folder / f"run-{number}", folder / f"said-{number}"
                seconds, status = train(arguments, command(arguments, job, run, layout, 1), said, dice, run)
                got = lines(run)
                waits += seconds
                if status != 0 or [line["step"] for line in got] != list(range(1, arguments.steps + 1)):
                    print(said.read_text(), file=sys.stderr, flush=True)
                    continue
                well += 1
                lost += sum(scaling.get("steps_back", 0) for scaling in summary(run)["scalings"])
                worst = max(worst, *(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(expected, got)))
            good = good and well == arguments.jobs and worst <= 1e-6
            print(
                f"| {layout} | {len(waits)} | {well} of {arguments.jobs} | {lost} | {worst:.1e} | "
                f"{statistics.median(waits):.2f} ({max(waits):.2f}) |",
                flush=True,
            )
    return 0 if good else 1


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
