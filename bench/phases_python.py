"""Where the time of a step of a Python script goes: forward, backward, optimizer; ours beside PyTorch's.

    python bench/phases_python.py [--cases A,A/gpt2] [--rounds 3] [--update-docs]

Rounds are interleaved, each run starts fresh ranks; times are rank 0's, which all ranks begin together. Writes
bench/out/phases_python.json; --update-docs puts the table between the markers `phases-python` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import report
from cases import CASES, ROOT, candidates_of, command, title
from launch import launch

CANDIDATES = ("plain", "ddp", "fsdp2", "ours-python", "ours-python2")
PHASES = ("forward", "backward", "optimizer")


def phases_of(figures: dict) -> list[dict[str, float]]:
    """Milliseconds of each step by phase; zero_grad belongs to the optimizer."""
    steps = zip(figures["step_ms"], figures["forward_ms"], figures["optimizer_ms"], strict=True)
    return [{"forward": f, "backward": whole - f - o, "optimizer": o} for whole, f, o in steps]


def table(measured: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    lines = [f"| | | {' | '.join(f'{phase}, ms' for phase in PHASES)} | step, ms |", "|---|---|--:|--:|--:|--:|"]
    for case, by_candidate in measured.items():
        for candidate, steps in by_candidate.items():
            middle = [statistics.median(step[phase] for step in steps) for phase in PHASES]
            whole = statistics.median(sum(step.values()) for step in steps)
            cells = " | ".join(f"{time:,.0f}" for time in (*middle, whole))
            lines.append(f"| {report.heading(case)} | {title(candidate)} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="A,A/gpt2", help="of bench/compare.py, on one host")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps a run")
    parser.add_argument("--deadline", type=float, default=900, help="seconds a run")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := [case for case in cases if case not in CASES or CASES[case].hosts > 1]:
        parser.error(f"no case of one host: {', '.join(unknown)}")

    about = report.about()
    report.warn_if_busy("phases_python", about)
    options.out.mkdir(parents=True, exist_ok=True)
    measured = {case: {candidate: [] for candidate in candidates_of(CASES[case], CANDIDATES)} for case in cases}
    for index in range(options.rounds):
        for case, by_candidate in measured.items():
            for candidate, steps in by_candidate.items():
                print(f"phases_python: round {index + 1}, {case}, {title(candidate)}", file=sys.stderr, flush=True)
                timing = ["--steps", str(options.steps), "--warmup", "1"]
                words = [*command(candidate, Path(), CASES[case]), *CASES[case].arguments(), *timing]
                steps += phases_of(launch(words, CASES[case].ranks, options.deadline).report)
    (options.out / "phases_python.json").write_text(json.dumps({"about": about, "cases": measured}, indent=1) + "\n")
    text = f"{table(measured)}\n{report.describe(about, f'{options.rounds} rounds of {options.steps} steps')}\n"
    print(text)
    if options.update_docs:
        report.update_performance("phases-python", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
