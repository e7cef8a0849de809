"""Compares saving and loading of the training state with PyTorch's Distributed Checkpoint (DCP) of the same torch, and
prints medians and ratios. Rounds are interleaved: each runs both candidates once. Run it on a machine that does nothing
else:

    python bench/checkpoint.py                              # 118 M parameters + AdamW, 4 ranks, the disk of --folder
    python bench/checkpoint.py --folder /dev/shm/tesserae   # without a disk: what the code itself costs
    python bench/checkpoint.py --case tiny --rounds 1           # proves that it works

Writes bench/out/checkpoint.json; --update-docs puts the table between the markers `checkpoint` in docs/performance.md.
The speed of the disk is measured beside them: one file of the checkpoint's size, written and synced.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import report
from cases import CASES, FIRST_MODEL, HERE, ROOT, newest_program
from launch import launch

ROWS = (  # field, what the table calls it
    ("save", "synchronous save, synced"),
    ("save_unsynced", "synchronous save, not synced"),
    ("load", "load"),
    ("async_call", "asynchronous save: training is held up"),
    ("step", "a step with no save beside it"),
    ("async_step", "a step right after an asynchronous save began"),
    ("async_lost", "asynchronous save: it and the next {steps} steps take longer than so many steps alone"),
    ("checksum", "of a save: checksums"),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="B", choices=FIRST_MODEL)
    parser.add_argument("--folder", type=Path, help="on the disk that is meant; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="of each kind in a run")
    parser.add_argument("--steps", type=int, default=3, help="after each asynchronous save")
    parser.add_argument("--deadline", type=float, default=1800, help="seconds a run")
    parser.add_argument("--program", type=Path, help="default: the newest bench_checkpoint below build/")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    options.program = options.program or newest_program("bench_checkpoint")
    if not options.program:
        parser.error("bench_checkpoint is not built: make build")
    return options


def disk_seconds(folder: Path, size: int) -> float:
    """How long a plain file of that size takes to be written and synced."""
    block, path = os.urandom(1 << 20), folder / "plain"
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(-(-size // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[dict]]:
    case = CASES[options.case]
    common = [*case.arguments(), "--saves", str(options.saves), "--steps", str(options.steps)]
    commands = {"dcp": [sys.executable, str(HERE / "checkpoint_peer.py")], "ours": [str(options.program)]}
    runs: dict[str, list[dict]] = {name: [] for name in commands}
    runs["disk"] = []
    for index in range(options.rounds):
        for name in sorted(commands, reverse=index % 2 == 1):
            place = folder / f"{name}-{index}"
            figures = launch([*commands[name], *common, "--folder", str(place)], case.ranks, options.deadline).report
            baseline = statistics.median(figures["step"]) * options.steps
            figures["async_lost"] = [seconds - baseline for seconds in figures["async_steps"]]
            runs[name].append(figures)
            shutil.rmtree(place)
        runs["disk"].append({"save": [disk_seconds(folder, runs["ours"][-1]["bytes"])]})
    return runs


def median_of(runs: list[dict], field: str) -> float | None:
    values = [value for run in runs for value in run.get(field, [])]
    return statistics.median(values) if values else None


def table(runs: dict[str, list[dict]], steps: int) -> str:
    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}" if abs(value) < 0.01 else f"{value:.3f}"

    lines = ["| seconds | DCP | Tesserae | DCP / Tesserae |", "|---|--:|--:|--:|"]
    for field, title in ROWS:
        dcp, ours = median_of(runs["dcp"], field), median_of(runs["ours"], field)
        ratio = f"{dcp / ours:,.1f}" if dcp is not None and ours is not None and ours > 0 else ""
        lines.append(f"| {title.format(steps=steps)} | {cell(dcp)} | {cell(ours)} | {ratio} |")
    lines.append(f"| a plain file of that size, written and synced | {cell(median_of(runs['disk'], 'save'))} | | |")
    return "\n".join(lines)


def main() -> None:
    options = parse()
    about = report.about() | {"rounds": options.rounds, "saves": options.saves}
    report.warn_if_busy("checkpoint", about)
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        runs = measure(options, Path(folder))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint.json").write_text(json.dumps({"about": about, **runs}, indent=1))
    ours = runs["ours"][0]
    text = (
        f"{ours['parameters'] / 1e6:,.0f} M parameters and AdamW's state ({ours['bytes'] / 1e9:.2f} GB), "
        f"{ours['ranks']} ranks:\n\n{table(runs, options.steps)}\n\n"
        f"{report.describe(about, f'{options.rounds} rounds of {options.saves} saves of each kind')}"
    )
    print(text)
    if options.update_docs:
        report.update_performance("checkpoint", text)


if __name__ == "__main__":
    main()
