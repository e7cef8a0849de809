"""What it costs a step of a Python script to be able to go on after a loss (tsm.elastic): nothing, the state held where
it lives (what replicas need), and a copy of it in memory of the host beside that (what O = N needs).

    python bench/protection.py                       # 34 M parameters on 4 ranks, degree 2; starts its ranks
    python bench/protection.py --dimension 768 --layers 16 --heads 12

The three take turns, some steps each, so that a slow minute of the machine meets all of them. What tsm.elastic does at
the end of a step is done here by hand. The first step of each turn is not counted; a copy is written beside the steps
after it, which is in their time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from cases import add_model, find_tesserae
from checkpoint_peer import FIXED, Bench
from launch import environment

KINDS = ("unprotected", "held", "held and copied")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, sequence=128)
    parser.add_argument("--degree", type=int, default=2, help="ranks that share the state out")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.set_defaults(batch=1, precision="fp32", device="cpu", folder=None, **FIXED)
    return parser.parse_args()


def rank(options: argparse.Namespace) -> None:
    import tesserae as tsm
    from tesserae.checkpoint.holding import Holder
    from tesserae.checkpoint.random_state import random_state

    torch.set_num_threads(1)
    tsm.init()
    dist.init_process_group("tesserae")
    bench = Bench(options)
    holder = Holder(bench.model, bench.optimizer)
    memory = os.environ["MEMORY"]
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    held_for: list[float] = []
    for turn in range(options.rounds * len(KINDS)):
        # Each is after each other as often: what is copied is written during the steps that follow.
        kind = KINDS[turn % 3 if turn // 3 % 2 == 0 else -turn % 3]
        for index in range(options.steps + 1):
            dist.barrier()
            start = time.perf_counter()
            bench.step()
            if kind != "unprotected":
                before = time.thread_time()
                held = holder.hold(None, step=bench.steps, rank_extra=random_state())
                held_for.append(time.thread_time() - before)
                if kind == "held and copied":
                    held.async_save(memory, 2)
            dist.barrier()  # all of them: to hold is to meet
            if index > 0:
                steps[kind].append(time.perf_counter() - start)
        tsm.checkpoint.maybe_finalize_async_calls()
    if bench.rank == 0:
        print(f"{bench.parameters / 1e6:.0f} M parameters, {bench.ranks} ranks, degree {options.degree}, fp32")
        print("| | a step, s | of the first |\n|---|--:|--:|")
        base = statistics.median(steps[KINDS[0]])
        for kind, seconds in steps.items():
            middle = statistics.median(seconds)
            print(f"| {kind} | {middle:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {middle / base:.3f} |")
        print(
            f"to hold takes {1e3 * statistics.median(held_for):.1f} ms a step of the training thread's processor time"
        )


def main() -> int:
    options = parse()
    if not find_tesserae():
        sys.exit("protection: build first: make build")
    if "RANK" in os.environ:
        rank(options)
        return 0
    memory = tempfile.mkdtemp(prefix="tesserae-protection-", dir="/dev/shm")
    try:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        variables = {"OMP_NUM_THREADS": "1", "MEMORY": memory}
        return subprocess.run(
            [*launch, str(Path(__file__).resolve()), *sys.argv[1:]], env=environment() | variables, check=False
        ).returncode
    finally:
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
