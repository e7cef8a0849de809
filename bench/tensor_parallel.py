"""Compares tensor parallelism of Tesserae with torch's own on the same Llama and ranks: parallelize_module, and FSDP2
where there are data-parallel ranks.

Rounds are interleaved: each runs both, as freshly started ranks, in alternating order. Ratios are taken round by round.
Memory is the largest sum of PSS of a run (bench/memory.py).

    python bench/tensor_parallel.py --rounds 5                       # tensor x data ranks: 2 x 2 and 4 x 1
    python bench/tensor_parallel.py --quick                          # proves in a minute that it works

Results go to bench/out/tensor_parallel.json and, as a table, to the standard output; --update-docs also puts the table
between the markers in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import report
from cases import ROOT
from launch import Run, launch
from report import Spread

SIDES = ("ours", "torch")
LOSS_TOLERANCE = 1e-3  # relative: the order of sums differs
MODEL = {
    "dimension": 512,
    "layers": 8,
    "heads": 8,
    "kv-heads": 4,
    "feed-forward": 1376,
    "vocabulary": 8192,
    "sequence": 256,
    "batch": 2,
}
TINY = {
    "dimension": 64,
    "layers": 2,
    "heads": 4,
    "kv-heads": 4,
    "feed-forward": 128,
    "vocabulary": 256,
    "sequence": 32,
    "batch": 1,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", default="2,4", help="tensor-parallel degrees, separated by commas")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 1 round of 2 steps after 1")
    parser.add_argument("--deadline", type=float, default=900, help="seconds a run")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.warmup = 1, 2, 1
    options.tensor = [int(degree) for degree in options.tensor.split(",")]
    return options


def run(side: str, tensor: int, options: argparse.Namespace) -> Run:
    sizes = TINY if options.quick else MODEL
    command = [sys.executable, str(Path(__file__).with_name("tensor_parallel_train.py")), "--side", side]
    for name, value in {**sizes, "tensor": tensor, "steps": options.steps, "warmup": options.warmup}.items():
        command += [f"--{name}", str(value)]
    return launch(command, options.ranks, options.deadline)


def check(runs: dict[str, Run]) -> None:
    """Both must train the same. Raises RuntimeError if they do not."""
    ours, theirs = (runs[side].report for side in ("ours", "torch"))
    same = all(
        math.isclose(a, b, rel_tol=LOSS_TOLERANCE) for a, b in zip(ours["losses"], theirs["losses"], strict=True)
    )
    if not same or ours["parameters"] != theirs["parameters"]:
        raise RuntimeError(f"the sides train different things: losses {ours['losses']} and {theirs['losses']}")


def compare(tensor: int, options: argparse.Namespace) -> list[dict[str, Run]]:
    rounds = []
    for index in range(options.rounds):
        order = list(SIDES) if index % 2 == 0 else list(reversed(SIDES))
        runs = {side: run(side, tensor, options) for side in order}
        check(runs)
        rounds.append(runs)
        shown = ", ".join(f"{side} {runs[side].report['tokens_per_second']:,.0f} tokens/s" for side in SIDES)
        print(f"tensor {tensor}, round {index + 1}/{options.rounds}: {shown}", file=sys.stderr, flush=True)
    return rounds


def title(side: str, data_ranks: int) -> str:
    if side == "ours":
        return "Tesserae: tsm.transform + FSDP"
    return "torch: parallelize_module" + (" + FSDP2" if data_ranks > 1 else "")


def row(tensor: int, side: str, rounds: list[dict[str, Run]], ranks: int) -> str:
    mine = [runs[side] for runs in rounds]
    speed = Spread.of([each.report["tokens_per_second"] for each in mine])
    ratio = Spread.of([r[side].report["tokens_per_second"] / r["torch"].report["tokens_per_second"] for r in rounds])
    memory = Spread.of([memory_of(each) / 2**20 for each in mine])
    memory_ratio = Spread.of([memory_of(r[side]) / memory_of(r["torch"]) for r in rounds])
    host = Spread.of([each.report["host_us_per_layer"] for each in mine])
    return (
        f"| {tensor} x {ranks // tensor} | {title(side, ranks // tensor)} | {speed.median:,.0f} | "
        f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) | {memory.median:,.0f} | "
        f"{memory_ratio.median:.2f} ({memory_ratio.low:.2f} to {memory_ratio.high:.2f}) | {host.median:,.0f} |"
    )


def memory_of(run: Run) -> int:
    return run.peak_pss or run.peak_rss


def main() -> int:
    options = parse()
    about = report.about() | {"rounds": options.rounds, "steps": options.steps, "warmup": options.warmup}
    report.warn_if_busy("tensor_parallel", about)
    lines = [
        "| tensor x data ranks | | tokens/s | of torch (lowest to highest round) | memory of all ranks, MiB "
        "| of torch | host cost of a layer, µs |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    data = {"about": about, "model": TINY if options.quick else MODEL, "rounds": {}}
    for tensor in options.tensor:
        rounds = compare(tensor, options)
        lines += [row(tensor, side, rounds, options.ranks) for side in SIDES]
        data["rounds"][tensor] = [{side: asdict(each) for side, each in runs.items()} for runs in rounds]
    lines += ["", report.describe(about, f"{options.rounds} rounds of {options.steps} steps")]
    table = "\n".join(lines)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tensor_parallel.json").write_text(json.dumps(data, indent=1) + "\n")
    print(table)
    if options.update_docs and not report.update_between_markers(
        ROOT / "docs" / "performance.md", "tensor-parallel", table
    ):
        print("tensor_parallel: docs/performance.md has no markers for it: left alone", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
