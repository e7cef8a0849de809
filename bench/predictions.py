"""Does the plan tell the truth? Random jobs (model, layout, ranks, precision, recomputation, accumulation) are planned
with the numbers that `tesserae probe` has measured on this machine, and then run.

    python bench/predictions.py                          # times: an hour; two hosts need root
    python bench/predictions.py --memory                 # memory, in steps that are enough for that: half an hour
    python bench/predictions.py --go-on                  # those to which an earlier call did not come
    python bench/predictions.py --jobs 10 --seed 3       # some of them
    python bench/predictions.py --jobs 36 --again        # and how much one job differs from itself: 20 minutes
    python bench/predictions.py --quick                  # three: proves that it works

Of each job is compared the time of a step, the median of those after the first ones; or with --memory the most that
all its processes had together (PSS: who reads it over and over makes steps take longer). Then every job runs once more
under a limit of its memory (a control group, which needs root), drawn at random around what was predicted: one that the
plan says fits must not be killed.

The machine is probed for each number of ranks and hosts, first and again after every --reprobe jobs: what is
predicted is that minute's machine. --again measures every job a second time, in the opposite order: two measurements
of one job differ, too, and no prediction is nearer to both than half of that.

Writes bench/out/predictions.json, or predictions-memory.json with --memory, which bench/plot.py draws (--only
predictions).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cases import ROOT
from launch import UNAVAILABLE, Unavailable
from memory import Memory
from train_run import Degrees, newest_tesserae, on_hosts

GROUPS = Path("/sys/fs/cgroup/memory")  # of v1, where a test may make one of its own as root
STEPS, WARM = 12, 4
ENOUGH = 4  # steps, for memory: the fullest is the second, when there is optimizer state
HEADROOM = 0.03  # of the limit: what the plan is asked to leave free
LIMITS = (0.75, 1.5)  # of what is predicted
RATE = "1gbit"  # of the link between two hosts


@dataclass(frozen=True)
class Job:
    ranks: int
    hosts: int
    dimension: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    accumulate: int
    precision: str
    recompute: bool
    tensor: int
    layout: Degrees
    limit: float  # of what is predicted

    @property
    def name(self) -> str:
        p, g, o = self.layout
        return (
            f"{self.layers} x {self.dimension}, {self.accumulate} x {self.batch} x {self.sequence} tokens, "
            f"{self.precision}{', recomputed' if self.recompute else ''}, "
            f"{self.hosts} x {self.ranks // self.hosts} ranks, T={self.tensor} P={p} G={g} O={o}"
        )

    def model(self) -> dict[str, object]:
        return {
            "dimension": self.dimension,
            "layers": self.layers,
            "heads": self.heads,
            "vocabulary": self.vocabulary,
        }

    def config(self, folder: str, steps: int) -> dict[str, object]:
        p, g, o = self.layout
        return {
            "degrees": {"parameters": p, "gradients": g, "optimizer": o},
            "tensor_parallel_degree": self.tensor,
            "monitor": {"enabled": False},
            "run": {"folder": folder, "log_every": 1_000_000},
            "model": {**self.model(), "checkpoint_activations": self.recompute},
            "data": {"path": "python:stdlib", "sequence_length": self.sequence},
            "train": {
                "batch_per_rank": self.batch,
                "accumulate": self.accumulate,
                "steps": steps,
                "eval_every": 0,
                "eval_batches": 0,
                "sample_tokens": 0,
            },
            "precision": self.precision,
        }


def draw(random_: random.Random, hosts_too: bool) -> Job:
    hosts = random_.choice([1, 1, 1, 2]) if hosts_too else 1
    ranks = 4 if hosts == 2 else random_.choice([2, 4])
    tensor = random_.choice([1, 1, 2])
    degrees = [d for d in (1, 2, 4) if d <= ranks // tensor]
    layout = tuple(sorted(random_.choice(degrees) for _ in range(3)))
    dimension = random_.choice([128, 192, 256, 384, 512])
    return Job(
        ranks=ranks,
        hosts=hosts,
        dimension=dimension,
        layers=random_.choice([2, 4, 6, 8]),
        heads=random_.choice([dimension // size for size in (32, 64) if dimension // size % tensor == 0]),
        vocabulary=random_.choice([512, 2048, 8192]),
        sequence=random_.choice([128, 256, 512]),
        batch=random_.choice([1, 2, 4]),
        accumulate=random_.choice([1, 1, 2]),
        precision=random_.choice(["fp32", "fp32", "bf16"]),
        recompute=random_.random() < 0.25,
        tensor=tensor,
        layout=layout,
        limit=random_.uniform(*LIMITS),
    )


def probe(program: Path, hosts: int, ranks: int, folder: Path) -> Path:
    out = folder / f"machine-{hosts}-{ranks}.json"
    command = [str(program), "probe", "--out", str(out), "--dtype", "fp32", "--dtype", "bf16"]
    done = subprocess.run(on_hosts(command, hosts, ranks, RATE), capture_output=True, text=True, check=False)
    if done.returncode == UNAVAILABLE:
        raise Unavailable(done.stderr.strip())
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return out


def plan(program: Path, job: Job, machine: Path, memory: float | None = None) -> dict:
    """What the plan says of the job's layout."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"model": job.model(), "data": {"path": "python:stdlib"}}, file)
        file.flush()
        command = [str(program), "plan", "--json", "--all", "--model", file.name, "--machine", str(machine)]
        command += ["--devices", str(job.ranks), "--per-host", str(job.ranks // job.hosts)]
        command += ["--batch", str(job.batch * job.accumulate * job.ranks // job.tensor)]
        command += ["--micro-batch", str(job.batch), "--sequence", str(job.sequence), "--context", "1"]
        command += ["--dtype", job.precision, "--reduce", "fp32", "--accumulation", "local"]  # what training does
        command += ["--headroom", str(HEADROOM)]
        command += [f"--keep-activations={json.dumps(not job.recompute)}"]  # the file says nothing of it
        command += ["--memory", str(int(memory))] if memory else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    for entry in json.loads(done.stdout)["layouts"]:
        layout = (entry["parameters"], entry["gradients"], entry["optimizer"])
        if entry["tensor"] == job.tensor and layout == job.layout:
            return entry
    raise RuntimeError(f"the plan lacks {job.name}")


@contextlib.contextmanager
def limited(limit: float | None) -> Iterator[Path | None]:
    """A control group whose processes have at most so many bytes together."""
    if limit is None:
        yield None
        return
    group = GROUPS / f"tesserae-predictions-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(int(limit)))
        with contextlib.suppress(OSError):  # where the kernel counts no swap
            (group / "memory.memsw.limit_in_bytes").write_text(str(int(limit)))
        yield group
    finally:
        deadline = time.monotonic() + 60
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


def run(program: Path, job: Job, deadline: float, *, watched: bool = False, limit: float | None = None) -> dict:
    """Its median step in seconds, or, `watched`, its peak in bytes, or that it did not survive its limit."""
    steps = ENOUGH if watched else STEPS
    with tempfile.TemporaryDirectory() as folder, limited(limit) as group:
        config = Path(folder, "job.json")
        config.write_text(json.dumps(job.config(f"{folder}/run", steps)))
        command = on_hosts([str(program), "train", str(config)], job.hosts, job.ranks, RATE)
        if group:
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"', *command]
        log = Path(folder, "log")
        memory = Memory(copies=True)  # `tesserae train` makes its ranks so
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
            end = time.monotonic() + deadline
            while process.poll() is None:
                if watched:
                    memory.look([process.pid])
                if time.monotonic() > end:
                    process.kill()
                time.sleep(0.02)
        killed = 0
        if group:
            found = re.search(r"oom_kill (\d+)", (group / "memory.oom_control").read_text())
            killed = int(found[1]) if found else 0
        if process.returncode != 0:
            text = log.read_text()
            if group and (killed or "cannot allocate" in text or "can't allocate memory" in text):
                return {"survived": False, "killed": killed, "output": text[-2000:]}
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}\n{text}")
        if watched:
            return {"survived": True, "memory": memory.peak}
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        times = [line["step_ms"] / 1e3 for line in lines[WARM:]]
        return {"step": statistics.median(times), "steps": times}


def error(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def repeated(results: list[dict]) -> dict:
    """How far two measurements of one job are apart."""
    apart = [
        abs(error(r["again"][key], r["free"][key]))
        for r in results
        if "again" in r
        for key in ("step", "memory")
        if key in r["free"]
    ]
    if not apart:
        return {}
    return {"again_mean": statistics.mean(apart), "again_median": statistics.median(apart), "again_worst": max(apart)}


def summary(results: list[dict]) -> dict:
    times = [abs(error(r["predicted"]["step"], r["free"]["step"])) for r in results if "step" in r["free"]]
    if times:
        return {
            "jobs": len(results),
            "time_mean": statistics.mean(times),
            "time_median": statistics.median(times),
            "time_worst": max(times),
        } | repeated(results)
    peaks = [abs(error(r["predicted"]["memory"], r["free"]["memory"])) for r in results]
    judged = [r for r in results if r.get("limited") is not None]
    fits = [r for r in judged if r["fits"]]
    refused = [r for r in judged if not r["fits"]]
    ran = [r for r in refused if r["limited"]["survived"]]
    return {
        "jobs": len(results),
        "memory_median": statistics.median(peaks),
        "memory_worst": max(peaks),
        **repeated(results),
        "said_to_fit": len(fits),
        "of_them_died": sum(not r["limited"]["survived"] for r in fits),
        "refused": len(refused),
        "of_them_ran": len(ran),
        # What others have mapped already (libraries in the cache of files) is not charged to a control group.
        "of_these_within_their_limit": sum(r["limited"]["memory"] <= r["limit"] for r in ran),
    }


def file_of(options: argparse.Namespace) -> Path:
    return options.out / ("predictions-memory.json" if options.memory else "predictions.json")


def write(options: argparse.Namespace, results: list[dict]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        "seed": options.seed,
        "summary": summary(results),
        "results": results,
    }
    file_of(options).write_text(json.dumps(document, indent=1))


def earlier(options: argparse.Namespace) -> list[dict]:
    """What an earlier call has found, of the same jobs as this one's first."""
    file = file_of(options)
    if not options.go_on or not file.exists():
        return []
    document = json.loads(file.read_text())
    if document["seed"] != options.seed:
        raise SystemExit(f"predictions: {file} is of another seed ({document['seed']}): move it away")
    return document["results"][: options.jobs]


def measured_by(options: argparse.Namespace) -> tuple[str, float, str]:
    """What is compared, and the unit in which people read it."""
    return ("memory", 1e-6, "MB") if options.memory else ("step", 1e3, "ms")


def measure(options: argparse.Namespace, folder: Path) -> list[dict]:
    random_ = random.Random(options.seed)
    results = earlier(options)
    done = len(results)
    machines: dict[tuple[int, int], Path] = {}
    hosts_too = os.geteuid() == 0 and not options.one_host
    can_limit = options.memory and not options.no_limits and os.geteuid() == 0 and (GROUPS / "cgroup.procs").exists()
    for number in range(options.jobs):
        job = draw(random_, hosts_too)
        if number < done:
            if results[number]["name"] != job.name:
                raise SystemExit("predictions: what was measured before is of other jobs: move it away")
            continue
        if number % options.reprobe == 0:
            machines.clear()
        key = (job.hosts, job.ranks)
        if key not in machines:
            machines[key] = probe(options.tesserae, *key, folder)
        entry = plan(options.tesserae, job, machines[key])
        predicted = {"step": entry["seconds"]["step"], "memory": entry["memory"]["total"] * job.hosts, "entry": entry}
        result = {"job": asdict(job), "name": job.name, "predicted": predicted}
        result["free"] = run(options.tesserae, job, options.deadline, watched=options.memory)
        if can_limit:
            limit = job.limit * predicted["memory"]
            result["limit"] = limit
            # A host's share of the limit: hosts are planned alike.
            result["fits"] = plan(options.tesserae, job, machines[key], limit / job.hosts)["fits"]
            result["limited"] = run(options.tesserae, job, options.deadline, watched=True, limit=limit)
        results.append(result)
        write(options, results)  # whatever becomes of the next one
        key, scale, unit = measured_by(options)
        found, measured = predicted[key], result["free"][key]
        said = f"{key} {scale * found:.0f} for {scale * measured:.0f} {unit} ({100 * error(found, measured):+.1f} %)"
        if can_limit:
            said += f"; under {result['limit'] / 1e6:.0f} MB said to {'fit' if result['fits'] else 'not fit'}, "
            said += "survived" if result["limited"]["survived"] else "died"
        print(f"{number + 1:3}/{options.jobs} {job.name}: {said}", flush=True)
    if options.again:
        measure_again(options, results)
    return results


def measure_again(options: argparse.Namespace, results: list[dict]) -> None:
    for number, result in reversed(list(enumerate(results, 1))):
        if options.go_on and "again" in result:
            continue
        fields = result["job"]
        job = Job(**(fields | {"layout": tuple(fields["layout"])}))
        result["again"] = run(options.tesserae, job, options.deadline, watched=options.memory)
        write(options, results)
        key, scale, unit = measured_by(options)
        first, second = result["free"][key], result["again"][key]
        said = f"{key} {scale * first:.0f}, then {scale * second:.0f} {unit} ({100 * error(second, first):+.1f} %)"
        print(f"{number:3}/{options.jobs} {job.name}: {said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reprobe", type=int, default=25, help="probe again after so many jobs (25)")
    parser.add_argument("--memory", action="store_true", help="compare memory, in short runs, and run under limits")
    parser.add_argument("--go-on", action="store_true", help="keep what an earlier call with this seed has measured")
    parser.add_argument("--again", action="store_true", help="measure each job twice")
    parser.add_argument("--one-host", action="store_true", help="no jobs on two hosts")
    parser.add_argument("--no-limits", action="store_true", help="do not run under limits of memory")
    parser.add_argument("--quick", action="store_true", help="three jobs on one host, no limits")
    parser.add_argument("--deadline", type=float, default=300, help="seconds that a run may take (300)")
    parser.add_argument("--tesserae", type=Path, default=newest_tesserae(), help="the program")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    options = parser.parse_args()
    if options.quick:
        options.jobs, options.one_host, options.no_limits = 3, True, True
    if options.tesserae is None:
        print("predictions: build first: make build", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = measure(options, Path(folder))
        except Unavailable as reason:
            print(f"predictions: {reason}; --one-host does without", file=sys.stderr)
            return UNAVAILABLE
    print(json.dumps(summary(results), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
