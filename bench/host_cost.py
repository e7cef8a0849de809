"""Host cost per unit and step of Tesserae (from C++ and from Python), FSDP1 and FSDP2, when no byte is moved: runs
bench_host_cost and bench/host_cost_python.py in turn, several times, and prints one table.

    python bench/host_cost.py [--rounds 5] [--update-docs]

Writes bench/out/host_cost.json; --update-docs puts the table between the markers `host_cost` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import report
from cases import HERE, ROOT, newest_program

NAMES = {
    "sharded": "**Tesserae**, C++",
    "watched": "**Tesserae**, C++, with the monitor's stopwatch",
    "tesserae": "**Tesserae**, Python, FSDP1's script",
    "tesserae2": "**Tesserae**, Python, FSDP2's script",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
}
KINDS = ("per_unit_us", "cpu_per_unit_us", "optimizer_per_unit_us")


def measure(command: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        subprocess.run(
            [*command, "--json", str(file)],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return json.loads(file.read_text())


def table(rounds: list[dict]) -> str:
    lines = [
        "µs a unit and step (lowest to highest round):",
        "",
        "| | forward + backward | the same, CPU time | optimizer |",
        "|---|--:|--:|--:|",
    ]
    for mode, name in NAMES.items():
        if mode not in rounds[0]:  # no Python face was built
            continue
        spreads = {kind: report.Spread.of([figures[mode][kind] for figures in rounds]) for kind in KINDS}
        step = spreads["per_unit_us"]
        lines.append(
            f"| {name} | {step.median:.1f} ({step.low:.1f} to {step.high:.1f}) "
            f"| {spreads['cpu_per_unit_us'].median:.1f} | {spreads['optimizer_per_unit_us'].median:.1f} |"
        )
    return "\n".join(lines) + "\n\nEach over the same modules unsharded, in the same language.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7, help="in each round")
    parser.add_argument("--steps", type=int, default=20, help="a repeat")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--program", type=Path, help="default: the newest bench_host_cost below build/")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "out" / "host_cost.json")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    program = options.program or newest_program("bench_host_cost")
    if program is None:
        parser.error("no bench_host_cost below build/: build it or name it with --program")

    about = report.about() | {"rounds": options.rounds}
    report.warn_if_busy("host_cost", about)
    common = ["--repeats", str(options.repeats), "--steps", str(options.steps), "--device", options.device]
    rounds = []
    for index in range(options.rounds):
        print(f"host_cost: round {index + 1}/{options.rounds}", file=sys.stderr, flush=True)
        ours = measure([str(program), *common])
        python = measure([sys.executable, str(HERE / "host_cost_python.py"), *common])
        rounds.append(python | {"sharded": ours["sharded"], "cpp_plain": ours["plain"]})
    text = f"{table(rounds)}\n{report.describe(about, f'{options.rounds} rounds')}\n"
    print(text)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "rounds": rounds}, indent=1) + "\n")
    if options.update_docs:
        report.update_performance("host_cost", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
