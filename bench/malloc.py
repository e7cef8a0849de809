"""What malloc wastes of a script's memory: the FSDP2 script of bench/peers.py on torch, on Tesserae with torch's own
blocks for tensors (which THP_MEM_ALLOC_ENABLE keeps), and on Tesserae as it is (tesserae/offload/host_blocks.h), in
turn.

    python bench/malloc.py [--rounds 3] [--update-docs]

Of each are told the most memory of all processes at a time (PSS), for a rank, and the median step. Writes
bench/out/malloc.json; --update-docs puts the table between the markers `malloc` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import report
from cases import ROOT
from launch import launch

JOBS = {
    "GPT-2, 6 x 512, 1,024 tokens": (2, "--model gpt2 --dimension 512 --layers 6 --heads 8 --vocabulary 2048 "
                                        "--sequence 256 --batch 4"),
    "GPT-2, 4 x 128, 512 tokens": (4, "--model gpt2 --dimension 128 --layers 4 --heads 2 --vocabulary 8192 "
                                      "--sequence 256 --batch 2"),
    "Llama, 4 x 128, 512 tokens": (4, "--model llama --dimension 128 --layers 4 --heads 2 --vocabulary 8192 "
                                      "--sequence 512 --batch 1"),
    "Llama, 8 x 512, 512 tokens": (2, "--model llama --dimension 512 --layers 8 --heads 8 --vocabulary 8192 "
                                      "--sequence 128 --batch 4"),
}  # fmt: skip
SIDES = {
    "FSDP2": ("fsdp2", {}),
    "torch's blocks": ("tesserae2", {"THP_MEM_ALLOC_ENABLE": "0"}),
    "ours": ("tesserae2", {}),
}


def run(job: str, side: str, options: argparse.Namespace) -> dict:
    ranks, words = JOBS[job]
    mode, variables = SIDES[side]
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
    os.environ.update(variables)
    command = [sys.executable, str(ROOT / "bench/peers.py"), "--mode", mode, *words.split()]
    done = launch([*command, "--warmup", "2", "--steps", str(options.steps)], ranks, options.deadline)
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)
    return {"memory": done.peak_pss / ranks, "step": statistics.median(done.report["step_ms"])}


def table(results: dict[str, dict[str, list[dict]]]) -> str:
    lines = [
        "| | " + " | ".join(f"{side}, MB a rank (step, ms)" for side in SIDES) + " |",
        "|---|" + "--:|" * len(SIDES),
    ]
    for job, sides in results.items():
        cells = []
        for runs in sides.values():
            memory = statistics.median(run["memory"] for run in runs) / 1e6
            cells.append(f"{memory:,.0f} ({statistics.median(run['step'] for run in runs):,.0f})")
        lines.append(f"| {job}, {JOBS[job][0]} ranks | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--deadline", type=float, default=300, help="seconds that a run may take (300)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    about = report.about()
    report.warn_if_busy("malloc", about)
    results: dict[str, dict[str, list[dict]]] = {job: {side: [] for side in SIDES} for job in JOBS}
    for number in range(options.rounds):
        for job in JOBS:
            for side in SIDES:
                results[job][side].append(run(job, side, options))
                seen = results[job][side][-1]
                print(f"{number + 1}/{options.rounds} {job}, {side}: {seen['memory'] / 1e6:,.0f} MB a rank, "
                      f"{seen['step']:,.0f} ms", flush=True)  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "malloc.json").write_text(json.dumps(results, indent=1))
    text = f"{table(results)}\n{report.describe(about, f'{options.rounds} rounds')}\n"
    print(text)
    if options.update_docs and not report.update_between_markers(ROOT / "docs" / "performance.md", "malloc", text):
        print("malloc: docs/performance.md has no markers malloc", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
