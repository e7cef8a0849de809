"""How long a script of FSDP2 takes from the command that starts its ranks to the end of its first step, what that costs
the processors, and what its processes have in memory while it trains: under torchrun, under `tesserae run --cold`, and
under `tesserae run`, whose ranks are copies of one process that has imported torch. In turn.

    python bench/script_startup.py [--ranks 4] [--rounds 5] [--update-docs]

Memory is the sum of the PSS of all processes, the launcher's among them, after 50 steps of
examples/python/fully_shard.py: a small model, so that nearly all of it is the interpreter and what is imported.

Writes bench/out/script_startup.json; --update-docs puts the table between the markers `script-startup` in
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import report
from cases import ROOT
from launch import environment
from memory import family, rollup

SCRIPT = ROOT / "examples/python/fully_shard.py"
TICKS = os.sysconf("SC_CLK_TCK")


def commands(program: Path, ranks: int) -> dict[str, list[str]]:
    return {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)],
        "tesserae run --cold": [str(program), "run", "--cold", "--nproc", str(ranks)],
        "tesserae run": [str(program), "run", "--nproc", str(ranks)],
    }


def processor_seconds(processes: list[int]) -> float:
    """Of these, and of those below them that have ended."""
    ticks = 0
    for process in processes:
        try:
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
        except OSError:
            continue
    return ticks / TICKS


def pss(processes: list[int]) -> float:
    """In MB, all of these together."""
    return sum(rollup(process).get("Pss", 0) for process in processes) * 1024 / 1e6


def measure(command: list[str], package: Path) -> dict[str, float]:
    """`package`: the folder in which ranks find tesserae."""
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    variables = environment() | {"OMP_NUM_THREADS": "1", "TESSERAE_PYTHON": sys.executable, "PYTHONPATH": path}
    measured: dict[str, float] = {}
    begin = time.monotonic()
    with subprocess.Popen([*command, str(SCRIPT)], stdout=subprocess.PIPE, text=True, env=variables) as run:
        assert run.stdout
        for line in run.stdout:
            if "step   1 " in line:
                measured["first"] = time.monotonic() - begin
                measured["processor"] = processor_seconds(family(run.pid))
            if "step  50 " in line:
                measured["memory"] = pss(family(run.pid))
    if run.returncode != 0 or len(measured) != 3:
        raise RuntimeError(f"{' '.join(command)} ended with status {run.returncode}")
    return measured


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    def cell(name: str, what: str, form: str) -> str:
        values = [each[name][what] for each in rounds]
        shown = [format(value, form) for value in (statistics.median(values), min(values), max(values))]
        return f"{shown[0]} ({shown[1]} to {shown[2]})"

    columns = {"first": ".1f", "processor": ".1f", "memory": ".0f"}
    rows = [
        " | ".join([f"| `{name}`", *(cell(name, what, form) for what, form in columns.items())]) + " |"
        for name in rounds[0]
    ]
    head = "| | to the end of the first step, s | of the processors, s | all processes while it trains, MB |"
    return "\n".join([head, "|---|--:|--:|--:|", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "release" / "cli" / "tesserae")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "out" / "script_startup.json")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    if not options.program.exists():
        parser.error(f"there is no {options.program}: `make program` builds it")

    about, rounds = report.about(), []
    report.warn_if_busy("script_startup", about)
    package = options.program.resolve().parents[1] / "python"
    ways = commands(options.program, options.ranks)
    for number in range(-1, options.rounds):  # the first reads what the others find in memory
        print(f"script_startup: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        measured = {name: measure(command, package) for name, command in ways.items()}
        if number >= 0:
            rounds.append(measured)
    text = (
        f"{table(rounds)}\n\n{options.ranks} ranks; medians (lowest to highest). "
        f"{report.describe(about, f'{options.rounds} rounds')}\n"
    )
    print(text)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "ranks": options.ranks, "rounds": rounds}, indent=1) + "\n")
    return 1 if options.update_docs and not report.update_performance("script-startup", text) else 0


if __name__ == "__main__":
    sys.exit(main())
