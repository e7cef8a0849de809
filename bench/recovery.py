"""Kills ranks of a training job at random instants and watches it go on: in the same processes, from the last finished
step, with the numbers of the same job left alone.

    python bench/recovery.py                                  # all layouts of 4 ranks, 20 kills each
    python bench/recovery.py --layouts 1,1,2 --kills 200 --signal STOP
    python bench/recovery.py --model 118M --layouts 2,2,2 --kills 5

Each layout (P,G,O) is trained once alone and once disturbed, with the same seed. A layout without replicas (O = N)
keeps snapshots in memory after every step. A kill comes at an instant that is drawn at random, and some are followed by
another one within half a second (--double, their share), so that ranks die in forward, backward, the optimizer, and in
a recovery.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from memory import children

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = "1,1,1 1,1,2 1,1,4 1,2,2 1,2,4 1,4,4 2,2,2 2,2,4 2,4,4 4,4,4".split()
MODELS = {
    "230K": {"dimension": 64, "layers": 4, "heads": 2, "sequence": 64, "batch": 4},
    "3M": {"dimension": 192, "layers": 6, "heads": 6, "sequence": 128, "batch": 4},
    "118M": {"dimension": 768, "layers": 16, "heads": 12, "sequence": 256, "batch": 1},
}


@dataclass
class Outcome:
    layout: str
    status: int = 0
    kills: int = 0
    recoveries: list[dict] = field(default_factory=list)
    steps_lost: int = 0
    killed: list[tuple[float, int]] = field(default_factory=list)  # when, and the last step that had a line then
    ended: dict[int, float] = field(default_factory=dict)  # when a step's line was there, after a kill
    seconds_to_next_step: list[float] = field(default_factory=list)
    survivors_kept: int = 0  # kills after which every other rank still had its process
    worst_loss: float = float("inf")  # relative difference to the undisturbed run
    every_step_once: bool = False
    step_seconds: float = 0.0
    words: str = ""  # the job's last, if it failed


def configuration(folder: Path, arguments: argparse.Namespace) -> Path:
    model = MODELS[arguments.model]
    (folder / "text.txt").write_text("".join(f"the square of {i % 997} is {(i % 997) ** 2}\n" for i in range(40000)))
    keys = ("dimension", "layers", "heads")
    job = {
        "run": {"folder": str(folder / "run"), "log_every": 1, "deadline_seconds": arguments.deadline},
        "model": {key: model[key] for key in keys} | {"dropout": 0.1},
        "data": {"path": str(folder / "text.txt"), "sequence_length": model["sequence"]},
        "train": {"steps": arguments.steps, "batch_per_rank": model["batch"], "accumulate": 2, "eval_batches": 1},
        "optimizer": {"lr": 1e-3, "warmup_steps": 3},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def command(program: Path, job: Path, run: Path, layout: str, ranks: int, replacements: int) -> list[str]:
    degrees = dict(zip(("parameters", "gradients", "optimizer"), map(int, layout.split(","))))
    made = [str(program), "train", str(job), "--nproc", str(ranks)]
    settings = [f"run.folder={run}", f"degrees={json.dumps(degrees)}", f"recovery.replacements={replacements}"]
    if degrees["optimizer"] == ranks:
        settings.append("checkpoint.memory_every_steps=1")
    for setting in settings:
        made += ["--set", setting]
    return made


def lines(run: Path) -> list[dict]:
    """What a run says of its steps."""
    try:
        text = next(run / name for name in ("metrics.jsonl", "steps.jsonl") if (run / name).exists()).read_text()
    except (StopIteration, FileNotFoundError):
        return []
    return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("{")]


def last_step(run: Path) -> int:
    found = lines(run)
    return found[-1]["step"] if found else 0


def processes(launcher: int) -> dict[int, int]:
    """By rank, of the launcher's children that live."""
    found: dict[int, int] = {}
    for child in children(launcher):
        try:
            name = Path(f"/proc/{child}/comm").read_text().strip()
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        # Ours has its rank in its name once it trains: a copy of the launcher has its environment.
        ranks = [name.partition(":")[2]] if ":" in name else [v[5:].decode() for v in variables if v[:5] == b"RANK="]
        if ranks and state != "Z":
            found[int(ranks[0])] = child
    return found


def second_victim(first: int, layout: str, ranks: int, dice: random.Random) -> int:
    """The ranks r, r + O, r + 2 O, ... hold the same: where there are two of them, one must stay."""
    degree = int(layout.split(",")[2])
    spared = {first + degree, first - degree} if ranks == 2 * degree else set()
    return dice.choice([rank for rank in range(ranks) if rank not in spared])


def disturb(job: subprocess.Popen, run: Path, outcome: Outcome, arguments: argparse.Namespace, dice: random.Random):
    """Kills until all kills are spent, the job has nearly ended, or it does not go on."""
    number = getattr(signal, f"SIG{arguments.signal}")

    def kill(rank: int) -> None:
        os.kill(processes(job.pid)[rank], number)
        outcome.kills += 1

    while job.poll() is None and last_step(run) < 2:
        time.sleep(0.02)
    while outcome.kills < arguments.kills and job.poll() is None and last_step(run) <= arguments.steps - 6:
        time.sleep(dice.uniform(0.05, arguments.pause))
        before, step, at = processes(job.pid), last_step(run), time.monotonic()
        victims = [dice.randrange(arguments.ranks)]
        if dice.random() < arguments.double:
            victims.append(second_victim(victims[0], outcome.layout, arguments.ranks, dice))
        try:
            kill(victims[0])
            for victim in victims[1:]:
                time.sleep(dice.uniform(0, 0.5))
                kill(victim)
        except KeyError:
            pass  # a rank has not been replaced yet
        limit = at + 10 * (arguments.deadline + 30)
        outcome.killed.append((at, step))
        now = step
        while job.poll() is None and time.monotonic() < limit and now <= step + 1:
            time.sleep(0.01)
            now = last_step(run)
            outcome.ended.setdefault(now, time.monotonic())
        after = processes(job.pid)
        outcome.survivors_kept += all(after.get(r) == p for r, p in before.items() if r not in victims)


def time_to_next_steps(outcome: Outcome) -> None:
    """A step that was over at the kill may get its line after it: the next one is what follows the recovery's."""
    for at, step in outcome.killed:
        over = [r["step"] for r in outcome.recoveries if step <= r["step"] <= step + 1]
        ends = [when for number, when in outcome.ended.items() if over and number == max(over) + 1]
        outcome.seconds_to_next_step += [when - at for when in ends]


def one(program: Path, folder: Path, layout: str, arguments: argparse.Namespace, dice: random.Random) -> Outcome:
    job = configuration(folder, arguments)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    alone, run = folder / f"alone-{layout}", folder / f"run-{layout}"
    subprocess.run(
        command(program, job, alone, layout, arguments.ranks, 0),
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    outcome = Outcome(layout)
    said = folder / f"said-{layout}.txt"
    with said.open("w") as output:
        started = subprocess.Popen(
            command(program, job, run, layout, arguments.ranks, 10 * arguments.kills + 10),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        disturb(started, run, outcome, arguments, dice)
        try:
            outcome.status = started.wait(timeout=arguments.patience)
        except subprocess.TimeoutExpired:
            outcome.status = -1
            if arguments.leave_hanging:
                print(f"process {started.pid} hangs; said: {said}", flush=True)
                signal.pause()
            started.send_signal(signal.SIGTERM)
            time.sleep(3)
            started.kill()
            started.wait()
    text = said.read_text()
    outcome.steps_lost = sum(int(n) for n in re.findall(r", (\d+) steps back", text))
    if outcome.status != 0:
        outcome.words = text
        return outcome
    expected, got = lines(alone), lines(run)
    outcome.every_step_once = [line["step"] for line in got] == list(range(1, arguments.steps + 1))
    outcome.worst_loss = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(expected, got, strict=False))
    try:
        outcome.recoveries = json.loads((run / "summary.json").read_text()).get("recoveries", [])
    except FileNotFoundError:
        outcome.status, outcome.words = -2, text
    time_to_next_steps(outcome)
    outcome.step_seconds = statistics.median(line["step_ms"] for line in expected) / 1e3
    return outcome


def row(outcome: Outcome) -> str:
    went_on = "yes" if outcome.status == 0 else "NO"
    waits = outcome.seconds_to_next_step or [float("nan")]
    inside = [r["seconds"] for r in outcome.recoveries] or [float("nan")]
    return (
        f"| {outcome.layout} | {outcome.kills} | {len(outcome.recoveries)} | {went_on} | {outcome.survivors_kept} of "
        f"{len(outcome.killed)} | {outcome.steps_lost} | {'yes' if outcome.every_step_once else 'NO'} | "
        f"{outcome.worst_loss:.1e} | {statistics.median(inside):.2f} | {statistics.median(waits):.2f} "
        f"({max(waits):.2f}) | {outcome.step_seconds:.2f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/cli/tesserae")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="P,G,O; default: all of 4 ranks")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20, help="for each layout")
    parser.add_argument("--signal", choices=["KILL", "STOP", "TERM", "ABRT"], default="KILL")
    parser.add_argument("--double", type=float, default=0.2, help="the share of kills that another one follows")
    parser.add_argument("--pause", type=float, default=0.5, help="at most so many seconds between kills")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--model", choices=sorted(MODELS), default="230K")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds of run.deadline_seconds")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for the rest of a run after its kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the outcomes there")
    parser.add_argument("--leave-hanging", action="store_true", help="for debugging: a run that hangs is not ended")
    arguments = parser.parse_args()
    print(
        "| P,G,O | kills | recoveries | went on | others kept their process | steps lost | every step once | loss "
        "differs by | meeting, s | kill to next step, s (worst) | step, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    outcomes = []
    for layout in arguments.layouts:
        with tempfile.TemporaryDirectory(prefix="tesserae-recovery-") as folder:
            dice = random.Random(f"{arguments.seed} {layout}")
            outcomes.append(one(arguments.program, Path(folder), layout, arguments, dice))
        print(row(outcomes[-1]), flush=True)
        if outcomes[-1].words:
            print(outcomes[-1].words, file=sys.stderr, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(o) for o in outcomes], indent=1) + "\n")
    good = all(o.status == 0 and o.every_step_once and o.worst_loss <= 1e-6 for o in outcomes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
