"""How much of its time a job trains whose ranks die: Tesserae's trainer, which replaces them; a Python script under
tsm.elastic, whose other ranks keep their processes, and under tsm.with_recovery, whose ranks begin again in new ones,
both from memory of the host; and FSDP2 under torchrun, which restarts all of them from a checkpoint of
torch.distributed.checkpoint.

    python bench/recovery_time.py --seconds 150 --every 30 --json bench/out/recovery.json

All train a model of the same size on 4 ranks with two replicas (degree 2). The same ranks are killed at the same
seconds; each side is measured against its own steps before the first kill. Scripts save beside training: ours into
memory after every step, the other to storage every --save-every steps.
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

from launch import environment
from memory import children
from recovery import lines, processes

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parent / "build/release/cli/tesserae"
RANKS = 4
SHAPE = {"dimension": 512, "layers": 8, "heads": 8, "vocabulary": 8192, "sequence": 128}


def ours(folder: Path, ranks: int) -> list[str]:
    (folder / "text.txt").write_text("".join(f"the square of {i % 997} is {(i % 997) ** 2}\n" for i in range(40000)))
    job = {
        "hybrid_shard_degree": ranks // 2,
        "recovery": {"replacements": 1000},
        "run": {"folder": str(folder / "run"), "nproc": ranks, "log_every": 1000},
        "model": {key: SHAPE[key] for key in ("dimension", "layers", "heads", "vocabulary")},
        "data": {"path": str(folder / "text.txt"), "sequence_length": SHAPE["sequence"]},
        "train": {"steps": 100000, "batch_per_rank": 1, "eval_batches": 0},
        "optimizer": {"lr": 1e-4},
    }
    (folder / "job.json").write_text(json.dumps(job))
    return [str(PROGRAM), "train", str(folder / "job.json")]


def script(
    name: str, folder: Path, ranks: int, save_every: int, until: float, *more: str, elastic: bool = False
) -> list[str]:
    folder.mkdir()
    arguments = [word for key, value in SHAPE.items() for word in (f"--{key}", str(value))]
    arguments += ["--degree", str(ranks // 2), "--every", str(save_every), "--folder", str(folder)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch = [*torchrun, "--max-restarts", "1000"]
    if elastic:
        launch = [str(PROGRAM), "run", "--nproc", str(ranks), "--replacements", "1000", "--spares", "1"]
        more = ("--elastic", *more)
    return [*launch, str(HERE / name), *arguments, "--until", str(until), *more]


def process_of(job: int, rank: int, folder: Path) -> int | None:
    """What trains as that rank: the process that it has named itself, one of the launcher's, or the child of that."""
    if (named := folder / f"rank-{rank}.process").exists():
        process = int(named.read_text())
        return process if Path(f"/proc/{process}").exists() else None
    process = processes(job).get(rank)
    if process is None:
        return None
    return next(iter(children(process)), process)


def watch(command: list[str], steps: Path, seconds: float, every: float, seed: int, log: Path) -> dict:
    """Runs for so many seconds from the first step on, killing a rank every so often; when each step was first done."""
    dice = random.Random(seed)
    done: dict[int, float] = {}
    kills: list[float] = []
    with log.open("w") as output:
        # torchrun's restarts share a store in which Gloo finds addresses of the life before, and fails.
        variables = {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TESSERAE_PYTHON": sys.executable,
        }
        job = subprocess.Popen(command, env=environment() | variables, stdout=output, stderr=output)
        begin, limit = None, time.monotonic() + 300
        while job.poll() is None and (begin is None or time.monotonic() < begin + seconds):
            now = time.monotonic()
            for line in lines(steps):
                done.setdefault(line["step"], now)
            if begin is None and done:
                begin = now
            if begin is None and now > limit:
                raise RuntimeError(f"no step within 300 s; see {log}")
            if begin is not None and now >= begin + every * (len(kills) + 1) and now < begin + seconds - every / 2:
                if (victim := process_of(job.pid, dice.randrange(4), steps)) is not None:
                    os.kill(victim, signal.SIGKILL)
                    kills.append(now - begin)
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
    if begin is None:
        raise RuntimeError(f"the job ended before its first step; see {log}")
    times = sorted(at - begin for at in done.values())
    calm = [b - a for a, b in zip(times, times[1:], strict=False) if b < kills[0]]
    step = statistics.median(calm[1:])
    pauses = [min(at for at in times if at > kill + 1e-3) - kill for kill in kills if times[-1] > kill + 1e-3]
    return {
        "times": times,
        "kills": kills,
        "step_seconds": step,
        "kill_to_next_step": pauses,
        "effective": (len(times) - 1) * step / seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="of each side, from its first step on")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between kills")
    parser.add_argument(
        "--save-every", type=int, default=10, help="steps between checkpoints of the job that torchrun restarts"
    )
    parser.add_argument("--only", choices=("tesserae", "elastic", "script", "torchrun"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = {
        "seconds": options.seconds,
        "every": options.every,
        "save_every": options.save_every,
        "tokens": RANKS * SHAPE["sequence"],  # of a step
        "sides": {},
    }
    with (
        tempfile.TemporaryDirectory(prefix="tesserae-recovery-") as name,
        tempfile.TemporaryDirectory(prefix="tesserae-recovery-", dir="/dev/shm") as memory,
    ):
        folder = Path(name)
        until = time.time() + 4 * (options.seconds + 300)
        sides = {
            "tesserae": (lambda: ours(folder, RANKS), folder / "run"),
            "elastic": (
                lambda: script("recovery_script.py", folder / "elastic", RANKS, 1, until, elastic=True),
                folder / "elastic",
            ),
            "script": (
                lambda: script("recovery_script.py", folder / "script", RANKS, 1, until, "--memory", memory),
                folder / "script",
            ),
            "torchrun": (
                lambda: script("recovery_peer.py", folder / "peer", RANKS, options.save_every, until),
                folder / "peer",
            ),
        }
        for side, (command, where) in sides.items():
            if options.only not in (None, side):
                continue
            report["sides"][side] = watch(
                command(), where, options.seconds, options.every, options.seed, folder / f"{side}.txt"
            )
            found = report["sides"][side]
            print(
                f"{side}: {len(found['times'])} steps in {options.seconds:.0f} s with {len(found['kills'])} kills, "
                f"{found['step_seconds']:.2f} s a step before; of its time it trained {found['effective']:.3f}; from a "
                f"kill to the next step {', '.join(f'{s:.1f}' for s in found['kill_to_next_step'])} s",
                flush=True,
            )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
