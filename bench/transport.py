"""The collectives of sharded training on torch.distributed's backend "tesserae" (shared memory) against Gloo: both in
one run of the same processes, in turn, one thread a rank.

    python bench/transport.py [--ranks 2 4] [--mib 64] [--rounds 9] [--out FOLDER] [--update-docs]

`--mib` is the whole tensor: what all_gather_into_tensor gives and reduce_scatter_tensor takes. A round times both
backends once; a ratio is taken within a round. The last column is what one copy of the whole tensor takes in one rank
while all ranks copy: the speed of memory here. Writes transport.json in --out; --update-docs puts the tables between
the markers `transport` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import report
from cases import ROOT, find_tesserae

BACKENDS = ("tesserae", "gloo")


def timed(call: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - began


def measure(rank: int, ranks: int, elements: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    find_tesserae()
    import tesserae  # noqa: F401 - registers the backend

    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("tesserae", store=store, rank=rank, world_size=ranks)
    groups = {"tesserae": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    whole, other, piece = torch.ones(elements), torch.ones(elements), torch.ones(elements // ranks)
    verbs: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(whole, piece, group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(piece, whole, group=group),
        "all_reduce": lambda group: dist.all_reduce(other, dist.ReduceOp.AVG, group),
        "broadcast": lambda group: dist.broadcast(other, 0, group),
    }
    seconds: dict[str, dict[str, list[float]]] = {verb: {name: [] for name in (*BACKENDS, "copy")} for verb in verbs}
    for index in range(rounds + 1):
        for verb, call in verbs.items():
            for name in BACKENDS if index % 2 else BACKENDS[::-1]:
                seconds[verb][name].append(timed(lambda: call(groups[name])))  # noqa: B023
            seconds[verb]["copy"].append(timed(lambda: other.copy_(whole)))
    if rank == 0:
        kept = {verb: {name: times[1:] for name, times in by_name.items()} for verb, by_name in seconds.items()}
        Path(folder, "figures").write_text(json.dumps(kept))
    dist.destroy_process_group()


def table(ranks: int, mib: float, seconds: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        f"{ranks} ranks, {mib:g} MiB; ms: median of the rounds (lowest to highest)",
        "",
        "| | tesserae | Gloo | Gloo / tesserae | a copy |",
        "|---|--:|--:|--:|--:|",
    ]
    for verb, by_name in seconds.items():
        cells = []
        for name in BACKENDS:
            spread = report.Spread.of([1e3 * value for value in by_name[name]])
            cells.append(f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f})")
        pairs = zip(by_name["gloo"], by_name["tesserae"], strict=True)
        ratio = report.Spread.of([theirs / ours for theirs, ours in pairs])
        cells.append(f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
        cells.append(f"{report.Spread.of([1e3 * value for value in by_name['copy']]).median:.1f}")
        lines.append(f"| `{verb}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    if not find_tesserae():
        parser.error("no tesserae for Python below build/, and none installed: make build")
    os.environ["OMP_NUM_THREADS"] = "1"
    about = report.about() | {"rounds": options.rounds}
    report.warn_if_busy("transport", about)
    found, tables = {}, []
    for ranks in options.ranks:
        elements = int(options.mib * 2**20) // 4 // ranks * ranks
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (ranks, elements, options.rounds, folder), ranks)
            found[ranks] = json.loads(Path(folder, "figures").read_text())
        tables.append(table(ranks, options.mib, found[ranks]))
        print(tables[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    figures = {"about": about, "mib": options.mib, "seconds": found}
    (options.out / "transport.json").write_text(json.dumps(figures) + "\n")
    text = "\n".join([*tables, report.describe(about, f"{options.rounds} rounds")]) + "\n"
    if options.update_docs and not report.update_between_markers(ROOT / "docs" / "performance.md", "transport", text):
        print("transport: docs/performance.md lacks the markers transport:begin and transport:end")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
