"""Does tsm.plan tell the truth of a Python script? Random jobs of bench/peers.py (a Llama style and a GPT-2 style
model, fully_shard after tsm.init) are traced and planned with what `tesserae probe` has measured on this machine, and
then run.

    python bench/script_predictions.py                       # 16 jobs, about 10 minutes
    python bench/script_predictions.py --jobs 4 --seed 3     # some of them

Of each job are compared the median step, and the most memory that its processes had together (PSS) beyond what they had
before there was a model. The machine is probed before the first job and after every --reprobe.

Writes bench/out/script_predictions.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cases import ROOT, find_tesserae
from launch import launch
from predictions import error, probe
from train_run import newest_tesserae
from transformer import Shape, batch_of

WARM, STEPS = 3, 8
STRATEGIES = {"FULL_SHARD": False, "SHARD_GRAD_OP": True, "HYBRID_SHARD": False}  # what is gathered is kept


@dataclass(frozen=True)
class Job:
    model: str
    dimension: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    ranks: int
    strategy: str

    @property
    def degree(self) -> int:
        return 2 if self.strategy == "HYBRID_SHARD" else self.ranks

    @property
    def name(self) -> str:
        size = f"{self.layers} x {self.dimension}, {self.batch} x {self.sequence} tokens"
        return f"{self.model} {size}, {self.ranks} ranks, {self.strategy}"

    def words(self) -> list[str]:
        words = ["--mode", "tesserae2", "--strategy", self.strategy, "--warmup", str(WARM), "--steps", str(STEPS)]
        for name in ("model", "dimension", "layers", "heads", "vocabulary", "sequence", "batch"):
            words += [f"--{name}", str(getattr(self, name))]
        return words + (["--degree", "2"] if self.strategy == "HYBRID_SHARD" else [])


def draw(random_: random.Random) -> Job:
    ranks = random_.choice([2, 4])
    dimension = random_.choice([128, 256, 384, 512])
    return Job(
        model=random_.choice(["llama", "gpt2"]),
        dimension=dimension,
        layers=random_.choice([2, 4, 6, 8]),
        heads=dimension // 64,
        vocabulary=random_.choice([512, 2048, 8192]),
        sequence=random_.choice([128, 256, 512]),
        batch=random_.choice([1, 2, 4]),
        ranks=ranks,
        strategy=random_.choice([*STRATEGIES][: 3 if ranks == 4 else 2]),
    )


def plan(job: Job, machine: Path) -> dict:
    import tesserae as tsm
    from peers import MODELS, default_feed_forward

    shape = Shape(
        dimension=job.dimension,
        layers=job.layers,
        heads=job.heads,
        kv_heads=job.heads,
        feed_forward=default_feed_forward(job.dimension),
        vocabulary=job.vocabulary,
        sequence=job.sequence,
    )

    def model_fn() -> torch.nn.Module:
        model = MODELS[job.model][0](shape, torch.device("cpu"))
        model.fill(torch.device("cpu"))
        return model

    planned = tsm.plan(
        model_fn,
        batch_of(shape, 1, 0, 0, 1, torch.device("cpu")),
        dtype="fp32",
        devices=job.ranks,
        machine=str(machine),
        step_batch=job.batch * job.ranks,
        micro_batch=job.batch,
        keep_activations=True,
        keep_gathered=STRATEGIES[job.strategy],
    )
    wanted = (job.degree,) * 3
    return next(
        layout
        for layout in planned.layouts
        if (layout["parameters"], layout["gradients"], layout["optimizer"]) == wanted
    )


def run(job: Job, deadline: float) -> dict:
    done = launch([sys.executable, str(ROOT / "bench/peers.py"), *job.words()], job.ranks, deadline)
    return {"step": statistics.median(done.report["step_ms"]) / 1e3, "memory": done.peak_pss}


def idle_memory(ranks: int, deadline: float) -> int:
    """What the same script has at most with hardly a model: interpreters, libraries, groups."""
    least = Job("llama", 64, 1, 1, 64, 16, 1, ranks, "FULL_SHARD")
    return launch([sys.executable, str(ROOT / "bench/peers.py"), *least.words()], ranks, deadline).peak_pss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reprobe", type=int, default=8, help="probe again after so many jobs (8)")
    parser.add_argument("--deadline", type=float, default=300, help="seconds that a run may take (300)")
    parser.add_argument("--tesserae", type=Path, default=newest_tesserae(), help="the program")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/out")
    options = parser.parse_args()
    if options.tesserae is None or not find_tesserae():
        print("script_predictions: build first: make build", file=sys.stderr)
        return 1
    random_ = random.Random(options.seed)
    machines: dict[int, Path] = {}
    idle: dict[int, int] = {}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.jobs):
            job = draw(random_)
            if number % options.reprobe == 0:
                machines.clear()
            if job.ranks not in machines:
                machines[job.ranks] = probe(options.tesserae, 1, job.ranks, Path(folder))
                idle[job.ranks] = idle_memory(job.ranks, options.deadline)
            entry, seen = plan(job, machines[job.ranks]), run(job, options.deadline)
            said = entry["memory"]["total"] - entry["memory"]["process"]
            held = seen["memory"] - idle[job.ranks]
            results.append({"job": asdict(job), "name": job.name, "planned": entry, "seen": seen, "held": held})
            results[-1] |= {
                "time": error(entry["seconds"]["step"], seen["step"]),
                "space": error(said + idle[job.ranks], seen["memory"]),
                "model_space": error(said, held),
            }
            print(
                f"{number + 1:3}/{options.jobs} {job.name}: step {1e3 * entry['seconds']['step']:.0f} for "
                f"{1e3 * seen['step']:.0f} ms ({100 * results[-1]['time']:+.0f} %), the model's memory "
                f"{said / 1e6:.0f} for {held / 1e6:.0f} MB ({100 * results[-1]['model_space']:+.1f} %; of all "
                f"{100 * results[-1]['space']:+.1f} %)",
                flush=True,
            )
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "script_predictions.json").write_text(json.dumps(results, indent=1))
    for what in ("time", "model_space", "space"):
        errors = [abs(result[what]) for result in results]
        print(f"{what}: median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
