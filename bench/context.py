"""What context parallelism costs and what it saves.

1. Attention, forward and backward, of a sequence that C ranks share out: the CPU time of the busiest rank, against 1/C
   of what torch's attention takes of one process for the whole sequence. CPU time, because a machine may have fewer
   cores than ranks.
2. The longest sequence that four ranks can train on under a memory limit for all of them together (a memory cgroup),
   by C: `tesserae train` for two steps, longer and longer until the kernel kills it.

    python bench/context.py                  # about 15 minutes
    python bench/context.py --quick          # proves in a minute or two that it works

The second part makes a cgroup, and so needs to be root; without that it says so and is left out. Writes
bench/out/context.json; --update-docs puts the tables between the markers `context` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report
from cases import ROOT, find_tesserae, newest_program
from launch import launch

METHODS = ("shared", "p2p", "all_gather", "all_to_all")
WIDTH = 64  # of a head
CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # version 1, version 2
MODEL = ("model.dimension=256", "model.heads=4", "model.layers=6", "train.batch_per_rank=1", "train.steps=2")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lengths", default="2048,4096,8192", help="of part 1, in tokens")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="of part 1")
    parser.add_argument("--limit", type=float, default=3.0, help="of part 2, in GiB, for all ranks together")
    parser.add_argument("--precise", type=float, default=0.04, help="of part 2: how far the longest may be off")
    parser.add_argument("--deadline", type=float, default=1800, help="of part 1, in seconds a run")
    parser.add_argument("--only", choices=("attention", "memory"), help="one part")
    parser.add_argument("--quick", action="store_true", help="one length, 2 rounds, a rough search under 1.2 GiB")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.rounds, options.limit, options.precise = "2048", 2, 1.2, 0.3
    return options


# ---- 1. attention ----
def work(options: argparse.Namespace) -> None:
    """A rank of part 1. Rank 0 writes what each round took."""
    find_tesserae()
    import torch
    import torch.distributed as dist
    from torch.nn.functional import scaled_dot_product_attention

    import tesserae as tsm
    from peers import leave
    from tesserae import _C
    from tesserae.job.fabrics import context_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    length, method = options.worker.split(":")
    tsm.init({"context_parallel_degree": ranks, "context_parallel_method": method})
    sequence = _C.ContextSequence(context_of(torch.device("cpu")), int(length))

    def inputs(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(1, options.heads, tokens, WIDTH, requires_grad=True) for _ in range(3)]

    own, whole = inputs(sequence.tokens), inputs(int(length))

    def cpu_seconds(call) -> float:
        dist.barrier()
        before = time.process_time()
        call()
        return time.process_time() - before

    def ours() -> None:
        _C.context_attention(*own, sequence).sum().backward()

    def alone() -> None:
        scaled_dot_product_attention(*whole, is_causal=True).sum().backward()

    rounds = []
    for round_ in range(options.rounds + 1):
        mine = torch.tensor([cpu_seconds(ours), float(sequence.pairs)], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        one = cpu_seconds(alone if rank == 0 else lambda: None)  # the others wait: it has the machine to itself
        if rank == 0 and round_ > 0:
            pairs = int(length) * (int(length) + 1) / 2
            rounds.append({"rank": mine[0].item(), "alone": one, "pairs": mine[1].item() * ranks / pairs})
    if rank == 0:
        options.json.write_text(json.dumps({"rounds": rounds}))
    leave()


def attention(options: argparse.Namespace) -> list[dict]:
    rows = []
    for length in options.lengths.split(","):
        for method in METHODS:
            print(f"context: attention over {length} tokens, {method}", file=sys.stderr, flush=True)
            command = [sys.executable, __file__, "--worker", f"{length}:{method}"]
            command += ["--rounds", str(options.rounds), "--heads", str(options.heads)]
            rounds = launch(command, options.ranks, options.deadline).report["rounds"]
            rows.append({"length": int(length), "method": method, "rounds": rounds})
    return rows


# ---- 2. memory ----
class Cgroup:
    """A memory limit for a process and its children."""

    def __init__(self, limit: int) -> None:
        self.path = None
        for root in CGROUPS:
            if not (root / "cgroup.procs").exists():
                continue
            path = root / f"tesserae-bench-{os.getpid()}"
            try:
                path.mkdir()
            except OSError:
                continue
            knobs = [name for name in ("memory.limit_in_bytes", "memory.max") if (path / name).exists()]
            if not knobs:
                path.rmdir()
                continue
            (path / knobs[0]).write_text(str(limit))
            for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
                if (path / swap).exists():
                    (path / swap).write_text(str(limit) if "memsw" in swap else "0")
            self.path = path
            return

    def run(self, command: list[str]) -> subprocess.CompletedProcess:
        assert self.path is not None
        procs = self.path / "cgroup.procs"
        return subprocess.run(
            command,
            preexec_fn=lambda: procs.write_text(str(os.getpid())),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            capture_output=True,
            timeout=3600,
        )

    def remove(self) -> None:
        if self.path is not None:
            self.path.rmdir()


def fits(options: argparse.Namespace, group: Cgroup, degree: int, length: int) -> bool:
    program = newest_program("../cli/tesserae")
    if program is None:
        sys.exit("context: tesserae is not built: make build")
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *MODEL,
            f"context_parallel_degree={degree}",
            f"data.sequence_length={length}",
            f"run.folder={folder}",
        ]
        settings += ["train.eval_every=0", "train.eval_batches=0", "train.sample_tokens=0", "precision=fp32"]
        settings += [f"hybrid_shard_degree={options.ranks}", "run.deadline_seconds=3000"]
        command = [str(program), "train", str(ROOT / "examples" / "python-source.json"), "--nproc", str(options.ranks)]
        for setting in settings:
            command += ["--set", setting]
        run = group.run(command)
    killed = run.returncode != 0
    if killed and "killed" not in run.stderr + run.stdout and "memory" not in run.stderr + run.stdout:
        sys.exit(f"context: {' '.join(command)} failed, and not for memory\n{(run.stdout + run.stderr)[-3000:]}")
    print(f"context: C = {degree}, {length} tokens: {'killed' if killed else 'trains'}", file=sys.stderr, flush=True)
    return not killed


def longest(options: argparse.Namespace, group: Cgroup, degree: int) -> int:
    step, good = 1024, 0
    while fits(options, group, degree, good + step):
        good += step
        step *= 2
    bad = good + step
    while bad - good > max(options.precise * bad, 64):
        middle = (good + bad) // 2 // 16 * 16
        good, bad = (middle, bad) if fits(options, group, degree, middle) else (good, middle)
    return good


def memory(options: argparse.Namespace) -> list[dict]:
    group = Cgroup(int(options.limit * 2**30))
    if group.path is None:
        print("context: no memory cgroup can be made here (are you root?); part 2 is left out", file=sys.stderr)
        return []
    try:
        degrees = [degree for degree in (1, 2, 4, 8) if options.ranks % degree == 0]
        return [{"degree": degree, "tokens": longest(options, group, degree)} for degree in degrees]
    finally:
        group.remove()


# ---- ----
def table(result: dict) -> str:
    lines = []
    if result["attention"]:
        lines += [
            f"Attention, forward and backward, {result['heads']} heads of {WIDTH}, fp32, causal: CPU seconds of one "
            f"process, and of the busiest of {result['ranks']} ranks as a multiple of 1/{result['ranks']} of that "
            "(lowest to highest round).",
            "",
            "| tokens | one process | " + " | ".join(METHODS) + " | pairs, largest/mean |",
            "|--:|--:|" + "--:|" * (len(METHODS) + 1),
        ]
        for length in sorted({row["length"] for row in result["attention"]}):
            rows = {row["method"]: row["rounds"] for row in result["attention"] if row["length"] == length}
            alone = report.Spread.of([one["alone"] for rounds in rows.values() for one in rounds])
            cells = []
            for method in METHODS:
                ratio = report.Spread.of([one["rank"] * result["ranks"] / one["alone"] for one in rows[method]])
                cells.append(f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
            pairs = max(one["pairs"] for rounds in rows.values() for one in rounds)
            lines.append(f"| {length:,} | {alone.median:.2f} s | {' | '.join(cells)} | {pairs:.3f} |")
    if result["memory"]:
        first = result["memory"][0]["tokens"]
        lines += [
            "",
            f"The longest sequence that {result['ranks']} ranks train on under {result['limit']:g} GiB for all of "
            "them (memory cgroup), one sequence a batch rank, activations kept:",
            "",
            "| C | tokens | times C = 1 |",
            "|--:|--:|--:|",
        ]
        lines += [f"| {row['degree']} | {row['tokens']:,} | {row['tokens'] / first:.2f} |" for row in result["memory"]]
    return "\n".join(lines)


def main() -> None:
    options = parse()
    if options.worker:
        return work(options)
    file = options.out / "context.json"
    result = json.loads(file.read_text()) if file.exists() else {"attention": [], "memory": []}
    result |= {"ranks": options.ranks, "heads": options.heads}
    if options.only != "memory":
        result["attention"] = attention(options)
    if options.only != "attention":
        result |= {"memory": memory(options), "limit": options.limit}
    options.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1))
    text = table(result)
    print(text)
    if options.update_docs:
        report.update_performance("context", text)


if __name__ == "__main__":
    main()
