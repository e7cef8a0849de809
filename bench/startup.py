"""How long `tesserae train` takes from its start to the end of its first step, beside as many processes that load torch
and do nothing else, in turn.

    python bench/startup.py [--ranks 4] [--rounds 5] [--update-docs]

Writes bench/out/startup.json; --update-docs puts the table between the markers `startup` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report
from cases import ROOT

CONFIGURATION = ROOT / "examples" / "python-source.json"


def seconds_to_load(program: Path, ranks: int) -> float:
    """`tesserae config` is the same program: libtorch is loaded before it prints a list."""
    begin = time.monotonic()
    loading = [subprocess.Popen([program, "config"], stdout=subprocess.DEVNULL) for _ in range(ranks)]
    if any(process.wait() for process in loading):
        raise RuntimeError(f"`{program} config` failed")
    return time.monotonic() - begin


def seconds_to_first_step(program: Path, ranks: int) -> float:
    with tempfile.TemporaryDirectory(prefix="tesserae-startup-") as folder:
        settings = [f"run.folder={folder}/run", "run.log_every=1", "train.steps=2", "train.eval_every=0"]
        command = [program, "train", CONFIGURATION, "--nproc", str(ranks), "--set", *settings, "hybrid_shard_degree=1"]
        begin = time.monotonic()
        run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        first = None
        for line in run.stdout:
            if first is None and "step 1/" in line:
                first = time.monotonic() - begin
        if run.wait() != 0 or first is None:
            raise RuntimeError(f"{' '.join(map(str, command))} ended with status {run.returncode}")
        return first


def table(rounds: list[dict[str, float]]) -> str:
    def row(name: str, values: list[float]) -> str:
        return f"| {name} | {statistics.median(values):.2f} s | {min(values):.2f} to {max(values):.2f} s |"

    return "\n".join(
        [
            "| | median | lowest to highest |",
            "|---|--:|--:|",
            row("as many processes that load torch", [each["load"] for each in rounds]),
            row("`tesserae train`, to the end of its first step", [each["first"] for each in rounds]),
            row("the difference", [each["first"] - each["load"] for each in rounds]),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "release" / "cli" / "tesserae")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "out" / "startup.json")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    if not options.program.exists():
        parser.error(f"there is no {options.program}: `make program` builds it")

    about, rounds = report.about(), []
    report.warn_if_busy("startup", about)
    seconds_to_first_step(options.program, options.ranks)  # reads what the others find in memory
    for number in range(options.rounds):
        print(f"startup: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        load = seconds_to_load(options.program, options.ranks)
        rounds.append({"load": load, "first": seconds_to_first_step(options.program, options.ranks)})
    text = f"{table(rounds)}\n\n{options.ranks} ranks. {report.describe(about, f'{options.rounds} rounds')}\n"
    print(text)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "ranks": options.ranks, "rounds": rounds}, indent=1) + "\n")
    if options.update_docs:
        report.update_performance("startup", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
