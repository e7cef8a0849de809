"""Where the time of our step goes, phase by phase, and how near AdamW comes to the speed of memory (bench_phases).

    python bench/phases.py [--cases A,B,C] [--update-docs]

Writes bench/out/phases.json; --update-docs puts the table between the markers `phases` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import report
from cases import CASES, FIRST_MODEL, ROOT, newest_program

PHASES = ("forward", "backward", "norm", "adamw", "zero_grad")


def table(measured: dict[str, dict]) -> str:
    lines = [
        f"| | {' | '.join(PHASES)} | AdamW, GB/s a rank | adding two arrays, GB/s a rank | |",
        "|---|" + "--:|" * (len(PHASES) + 3),
    ]
    for case, figures in measured.items():
        times = figures["milliseconds"]
        whole = sum(times[phase] for phase in PHASES)
        cells = [f"{times[phase]:,.1f} ms ({times[phase] / whole:.0%})" for phase in PHASES]
        adamw, memory = figures["adamw_gb_per_s"], figures["memory_gb_per_s"]
        lines.append(f"| {case} | {' | '.join(cells)} | {adamw:.1f} | {memory:.1f} | {adamw / memory:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="A,B,C", help="of bench/compare.py, on one host")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--program", type=Path, help="default: the newest bench_phases below build/")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    program = options.program or newest_program("bench_phases")
    if program is None:
        parser.error("no bench_phases below build/: build it or name it with --program")
    cases = options.cases.split(",")
    if unknown := [case for case in cases if case not in FIRST_MODEL or CASES[case].hosts > 1]:
        parser.error(f"no case of one host: {', '.join(unknown)}")

    about = report.about()
    report.warn_if_busy("phases", about)
    options.out.mkdir(parents=True, exist_ok=True)
    measured = {}
    for case in cases:
        print(f"phases: case {case}", file=sys.stderr, flush=True)
        file = options.out / f"phases_{case}.json"
        command = [str(program), "--nproc", str(CASES[case].ranks), *CASES[case].arguments()]
        subprocess.run([*command, "--steps", str(options.steps), "--json", str(file)], check=True)
        measured[case] = json.loads(file.read_text())
        file.unlink()
    (options.out / "phases.json").write_text(json.dumps({"about": about, "cases": measured}, indent=1) + "\n")
    text = f"{table(measured)}\n{report.describe(about, f'{options.steps} steps')}\n"
    print(text)
    if options.update_docs:
        report.update_performance("phases", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
