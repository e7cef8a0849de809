"""Training state on a disk under a memory limit: what fits, and what it costs.

python bench/offload.py                       # all: bench/out/offload.json and docs/images/offload.png
python bench/offload.py --only fits           # a third of the state: with offload it trains, without it is killed
python bench/offload.py --only speed          # tokens/s and memory against the limit, beside a plain copy and a peer
python bench/offload.py --rounds 3 --steps 8
python bench/offload.py --deepspeed /tmp/ds/bin/python   # with DeepSpeed beside it (bench/offload_deepspeed.py)
python bench/offload.py --only table          # what was measured last, as docs/offload.md has it

A limit is a control group of its own (v1 or v2, whichever the host has; it needs the right to make one), in which the
whole job runs. Measurements are interleaved: round after round all variants, each beside a plain O_DIRECT copy of as
many bytes as a step of it moves. The peer is what one writes without a library: PyTorch with parameters, gradients and
AdamW's state in files that are mapped into memory (torch.from_file), under the same limit.

"Least" is what no implementation goes below that keeps the numbers. The norm of all gradients is known when the
backward ends, and a unit's forward needs its update: so what updates read and write can hide behind the forward only
(28 of the 36 bytes that a parameter moves in fp32: values, gradient, two moments in; values, moments out), the rest
(values in, gradient out) behind the backward. Least is the longer of the two in the forward plus the longer in the
backward, with the computation's parts as the monitor measured them in memory and the disk's as the plain copy did.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build/release/cli/tesserae"
OUT = ROOT / "bench/out/offload.json"
IMAGE = ROOT / "docs/images/offload.png"
STATE_BYTES = 16  # of fp32 parameters, gradients and AdamW's two moments, each element
ON_DISK = [f"offload.{state}=disk" for state in ("parameters", "gradients", "optimizer")]


@dataclass(frozen=True)
class Model:
    name: str
    dimension: int
    layers: int
    heads: int
    feed_forward: int
    parameters: int  # as `tesserae train` counts them

    @property
    def state(self) -> int:
        return self.parameters * STATE_BYTES


MODELS = {
    "114M": Model("114M", 768, 16, 12, 2048, 113_550_000),
    "350M": Model("350M", 1024, 28, 16, 2752, 354_500_000),
}


class Group:
    """A control group with a memory limit; nothing is kept of it."""

    def __init__(self, limit: int) -> None:
        v2 = Path("/sys/fs/cgroup/cgroup.controllers")
        self.version = 2 if v2.exists() and "memory" in v2.read_text().split() else 1
        root = Path("/sys/fs/cgroup") if self.version == 2 else Path("/sys/fs/cgroup/memory")
        self.folder = root / f"tesserae-offload-{os.getpid()}-{time.monotonic_ns()}"
        self.folder.mkdir()
        (self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")).write_text(str(limit))

    def join(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        return int((self.folder / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")).read_text())

    def remove(self) -> None:
        for _ in range(100):
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.1)


@dataclass
class Run:
    code: int
    output: str
    peak: int  # of the group
    metrics: list[dict] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)  # seconds of a step, by stage


IN_FORWARD = 28 / 36  # of the bytes of a step


def in_group(command: list[str], limit: int, folder: Path) -> Run:
    group = Group(limit)
    try:
        done = subprocess.run(
            command, cwd=folder, preexec_fn=group.join, capture_output=True, text=True, env={**os.environ}, check=False
        )
        return Run(done.returncode, done.stdout + done.stderr, group.peak)
    finally:
        group.remove()


def configuration(model: Model, steps: int, tokens: int) -> dict:
    return {
        "data": {"path": "python:stdlib", "sequence_length": 256},
        "model": {
            "dimension": model.dimension,
            "layers": model.layers,
            "heads": model.heads,
            "feed_forward": model.feed_forward,
            "checkpoint_activations": True,
        },
        "run": {"nproc": 1, "seed": 3, "log_every": 1},
        "precision": "fp32",
        "train": {"steps": steps, "batch_per_rank": tokens // 256, "clip_norm": 1.0, "eval_batches": 0},
        "optimizer": {"name": "adamw", "lr": 0.0003, "schedule": "constant"},
    }


def train(model: Model, steps: int, tokens: int, limit: int, settings: list[str], folder: Path) -> Run:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(configuration(model, steps, tokens)))
    command = [str(PROGRAM), "train", "job.json", "--set", "run.folder=run"]
    for setting in settings:
        command += ["--set", setting]
    run = in_group(command, limit, folder)
    now = folder / "run/monitor/now.json"
    if now.exists():
        board = json.loads(now.read_text())
        if board["usual"]:  # a step was heard of before it was killed
            run.stages = dict(zip(board["stages"], board["usual"][0], strict=True))
    metrics = folder / "run/metrics.jsonl"
    if metrics.exists():
        run.metrics = [json.loads(line) for line in metrics.read_text().splitlines()]
    return run


def plain_copy(folder: Path, read: int, written: int) -> float:
    """Seconds for as many bytes past the page cache, by four threads in blocks of 2 MiB."""
    block, path = 2 << 20, folder / "copy"
    size = max(read, written) // block * block + block
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.unlink(path)
    try:
        os.posix_fallocate(file, 0, size)
        buffers = [mmap.mmap(-1, block) for _ in range(4)]

        def work(index: int, total: int, call) -> None:
            for offset in range(index * block, total, 4 * block):
                call(file, [buffers[index]], offset)

        def all_of(total: int, call) -> None:
            threads = [threading.Thread(target=work, args=(i, total, call)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        all_of(size, os.pwritev)  # what is read must be there
        begin = time.perf_counter()
        all_of(written, os.pwritev)
        all_of(read, os.preadv)
        return time.perf_counter() - begin
    finally:
        os.close(file)


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def fits(options: argparse.Namespace, scratch: Path) -> list[dict]:
    rows = []
    for model in options.models:
        limit = model.state // 3
        for name, settings in (("in memory", []), ("on disk", ON_DISK)):
            run = train(model, 3, 512, limit, [*settings, f"offload.folder={scratch}"], scratch / "fits")
            row = {
                "model": model.name,
                "state": model.state,
                "limit": limit,
                "variant": name,
                "code": run.code,
                "steps": len(run.metrics),
                "peak": run.peak,
                "losses": [line["loss"] for line in run.metrics],
            }
            how = "trained" if run.code == 0 else "killed" if run.code in (-9, 137) else f"ended with {run.code}"
            print(
                f"{model.name}: state {model.state / 2**20:.0f} MiB, limit {limit / 2**20:.0f} MiB, {name}: {how} "
                f"after {row['steps']} steps, peak {run.peak / 2**20:.0f} MiB",
                flush=True,
            )
            rows.append(row)
        if options.deepspeed:
            row = deepspeed(options, model, 512, limit, scratch)
            row |= {"model": model.name, "state": model.state, "limit": limit, "variant": "DeepSpeed"}
            row["steps"] = len(row["seconds"])
            print(f"{model.name}: DeepSpeed ended with {row['code']}, peak {row['peak'] / 2**20:.0f} MiB", flush=True)
            rows.append(row)
    return rows


def speed(options: argparse.Namespace, scratch: Path) -> list[dict]:
    model = options.models[0]
    whole = model.state + (600 << 20)
    variants: list[tuple[str, int, list[str]]] = [("in memory", 8 << 30, [])]
    for share in (1.2, 0.8, 0.6, 0.45, 1 / 3):
        limit = int(model.state * share)
        variants.append((f"{share:.2f}", limit, [*ON_DISK, f"memory_limit={limit}"]))
    variants.append(("mapped files (peer)", model.state // 3, []))
    if options.deepspeed:
        variants.append(("DeepSpeed (peer)", int(model.state * 0.65), []))  # it does not run with less
    rows = []
    for tokens in options.tokens:
        for round_ in range(options.rounds):
            for name, limit, settings in variants:
                if name.endswith("(peer)"):
                    if round_ > 0 and not options.peer_in_every_round:
                        continue
                    run_peer = mapped_files if name.startswith("mapped") else deepspeed
                    row = run_peer(options, model, tokens, limit, scratch)
                else:
                    group = max(limit, 1) if settings else whole * 2
                    run = train(
                        model, options.steps, tokens, group, [*settings, f"offload.folder={scratch}"], scratch / "speed"
                    )
                    if run.code != 0:
                        print(run.output, file=sys.stderr)
                    steady = run.metrics[2:]
                    read = median([line.get("disk_read_bytes", 0) for line in steady])
                    written = median([line.get("disk_written_bytes", 0) for line in steady])
                    row = {
                        "seconds": [line["step_ms"] / 1e3 for line in steady],
                        "read": read,
                        "written": written,
                        "copy_seconds": plain_copy(scratch, int(read), int(written)) if read else 0.0,
                        "stages": run.stages,
                        "peak": run.peak,
                        "code": run.code,
                        "last_loss": run.metrics[-1]["loss"] if run.metrics else None,
                    }
                row |= {"variant": name, "limit": limit, "tokens": tokens, "round": round_, "model": model.name}
                rows.append(row)
                print(
                    f"{model.name}, {tokens} tokens, round {round_ + 1}, {name}: "
                    f"{median(row['seconds']):.2f} s a step, "
                    f"disk {row['read'] / 2**20:.0f} MiB in {row['written'] / 2**20:.0f} out, copied plainly in "
                    f"{row['copy_seconds']:.2f} s, peak {row['peak'] / 2**20:.0f} MiB",
                    flush=True,
                )
    return rows


def mapped_files(options: argparse.Namespace, model: Model, tokens: int, limit: int, scratch: Path) -> dict:
    return peer([sys.executable, "offload_peer.py"], model, tokens, limit, scratch)


def deepspeed(options: argparse.Namespace, model: Model, tokens: int, limit: int, scratch: Path) -> dict:
    return peer([str(options.deepspeed), "offload_deepspeed.py"], model, tokens, limit, scratch)


def peer(program: list[str], model: Model, tokens: int, limit: int, scratch: Path) -> dict:
    command = [program[0], str(ROOT / "bench" / program[1]), str(scratch), "--dimension", str(model.dimension)]
    command += ["--layers", str(model.layers), "--heads", str(model.heads), "--feed-forward", str(model.feed_forward)]
    command += ["--tokens", str(tokens), "--steps", "3"]
    run = in_group(command, limit, scratch)
    if run.code != 0:
        print(run.output, file=sys.stderr)
    seconds = [float(line.split()[1]) for line in run.output.splitlines() if line.startswith("step ")]
    return {"seconds": seconds[1:], "read": 0, "written": 0, "copy_seconds": 0.0, "peak": run.peak, "code": run.code}


def least(rows: list[dict], row: dict) -> float:
    """Seconds below which a step of `row` cannot be; of the same run's steps in memory. See above."""
    stages = [other["stages"] for other in rows if other["variant"] == "in memory" and other["tokens"] == row["tokens"]]
    forward = median([stage["forward"] for stage in stages])
    backward = median([stage["backward"] for stage in stages])
    disk = row["copy_seconds"]
    return max(forward, IN_FORWARD * disk) + max(backward, (1 - IN_FORWARD) * disk)


def table(result: dict) -> str:
    rows = result["speed"]
    lines = [
        "| tokens a step | limit, MiB | limit / state, or who | step, s (range) | disk in + out, MiB | plain copy, s "
        "| step / longer of computation and copy | step / least | peak, MiB |",
        "|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for tokens in sorted({row["tokens"] for row in rows}):
        here = [row for row in rows if row["tokens"] == tokens]
        computing = median([second for row in here if row["variant"] == "in memory" for second in row["seconds"]])
        for name in dict.fromkeys(row["variant"] for row in here):
            same = [row for row in here if row["variant"] == name]
            seconds = [second for row in same for second in row["seconds"]]
            begin = f"| {tokens} | {same[0]['limit'] / 2**20:.0f} | {name}"
            if not seconds:
                lines.append(f"{begin} | killed | | | | | |")
                continue
            step = median(seconds)
            ours = same[0]["read"] > 0
            copy = median([row["copy_seconds"] for row in same])
            ratio = f"{step / max(computing, copy):.2f}" if ours else ""
            bound = f"{step / median([least(rows, row) for row in same]):.2f}" if ours else ""
            moved = f"{same[0]['read'] / 2**20:.0f} + {same[0]['written'] / 2**20:.0f}" if ours else ""
            copied = f"{copy:.2f}" if ours else ""
            peak = max(row["peak"] for row in same) / 2**20
            lines.append(
                f"{begin} | {step:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {moved} | {copied} | {ratio} "
                f"| {bound} | {peak:.0f} |"
            )
    return "\n".join(lines)


def rates(rows: list[dict]) -> list[float]:
    """Tokens/s of each step of these."""
    return [row["tokens"] / second for row in rows for second in row["seconds"]]


def draw(result: dict) -> None:
    from matplotlib import pyplot

    import plot

    rows = [row for row in result["speed"] if row["code"] == 0]
    counts = sorted({row["tokens"] for row in rows})
    with pyplot.rc_context(plot.STYLE):
        figure, axes = pyplot.subplots(1, len(counts) + 1, figsize=(plot.WIDTH, 3.6), dpi=plot.DPI)
        for axis, tokens in zip(axes, counts, strict=False):
            here = [row for row in rows if row["tokens"] == tokens]
            points = [row for row in here if row["variant"] != "in memory" and not row["variant"].endswith("(peer)")]
            limits = sorted({row["limit"] for row in points})
            medians = [median(rates([row for row in points if row["limit"] == limit])) for limit in limits]
            axis.plot([limit / 2**20 for limit in limits], medians, color=plot.OURS, marker="o", label="state on disk")
            for row in points:
                axis.scatter(
                    [row["limit"] / 2**20] * len(row["seconds"]), rates([row]), s=8, color=plot.OURS, alpha=0.4
                )
            axis.axhline(median(rates([row for row in here if row["variant"] == "in memory"])), color=plot.INK, ls=":")
            mapped = [row for row in here if row["variant"] == "mapped files (peer)"]
            if mapped:
                axis.scatter(
                    [mapped[0]["limit"] / 2**20],
                    [median(rates(mapped))],
                    color=plot.PEER,
                    marker="s",
                    label="mapped files",
                )
            axis.set_title(f"{tokens} tokens a step")
            axis.set_xlabel("memory limit, MiB (dotted: no limit)")
            axis.set_ylabel("tokens/s")
            axis.set_ylim(bottom=0)
            axis.legend()
        axis = axes[-1]
        points = [row for row in rows if row["variant"] != "in memory" and not row["variant"].endswith("(peer)")]
        axis.plot([0, 2200], [0, 2200], color=plot.FAINT)
        axis.scatter([row["limit"] / 2**20 for row in points], [row["peak"] / 2**20 for row in points], color=plot.OURS)
        axis.set_title("Memory")
        axis.set_xlabel("memory limit, MiB")
        axis.set_ylabel("most that was used, MiB")
        figure.tight_layout()
        IMAGE.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(IMAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["fits", "speed", "plot", "table"])
    parser.add_argument("--models", type=lambda text: [MODELS[name] for name in text.split(",")], default="114M,350M")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default="512,2048")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--peer-in-every-round", action="store_true")
    parser.add_argument("--deepspeed", type=Path, help="a Python that has DeepSpeed: it is measured, too")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="of a local disk, for scratch files")
    options = parser.parse_args()
    result = json.loads(OUT.read_text()) if OUT.exists() else {}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        if options.only in (None, "fits"):
            result["fits"] = fits(options, Path(scratch))
        if options.only in (None, "speed"):
            result["speed"] = speed(options, Path(scratch))
    result["models"] = {model.name: asdict(model) for model in options.models}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1))
    if "speed" in result:
        print(table(result))
        draw(result)


if __name__ == "__main__":
    main()
