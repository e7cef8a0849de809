"""Does `"hybrid_shard_degree": "auto"` find the best layout? For each of a dozen jobs (model size, batch, one host or
two with links of different speed) every layout is measured, and compared with the one on which "auto" settles.

    python bench/auto_sweep.py                                 # about 25 minutes; jobs with links need root
    python bench/auto_sweep.py --jobs "M b1,S b1 100mbit"      # some of them
    python bench/auto_sweep.py --quick                         # one job: proves that it works
    python bench/auto_sweep.py --settle-only --auto-steps 60   # only after how many steps "auto" has settled, and where

Both are runs of `tesserae train`: one with "auto", and one whose schedule goes through all layouts, four times and in
opposite orders, so that a slow minute of the machine hits all alike; each time for about as long (--visit). A layout
counts as right if its step is at most 5 % longer than that of the best. The fastest of ten noisy numbers is too fast:
so the best is the one of one half of that run, both are timed by the other half, and that both ways.

Writes bench/out/auto_sweep.json, which bench/plot.py draws: with --jobs, the other jobs that are in it stay. Why a run
with "auto" settled where it did is in bench/out/auto_sweep/JOB.jsonl (its dial.jsonl) and JOB.log (what it said, the
first choice among it). --update-docs puts the table between the markers `auto` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import report
from cases import ROOT, layouts
from launch import Unavailable
from train_run import Degrees, TrainRun, name_of, newest_tesserae, schedule_of, train

MODELS: dict[str, dict[str, object]] = {
    "S": {"model.dimension": 128, "model.layers": 4, "model.heads": 4, "data.sequence_length": 128},
    "M": {"model.dimension": 256, "model.layers": 6, "model.heads": 4, "data.sequence_length": 128},
    "L": {"model.dimension": 384, "model.layers": 8, "model.heads": 6, "data.sequence_length": 128},
}
WITHIN = 1.05  # of the best


@dataclass(frozen=True)
class Job:
    model: str
    batch: int  # sequences a rank
    rate: str = ""  # of the links between two hosts; empty: one host
    ranks: int = 4

    @property
    def name(self) -> str:
        return f"{self.model} b{self.batch}" + (f" {self.rate}" if self.rate else "")

    def run(self, options: argparse.Namespace, settings: dict[str, object], record: Path | None = None) -> TrainRun:
        settings = {**MODELS[self.model], "train.batch_per_rank": self.batch, **settings}
        hosts = 2 if self.rate else 1
        return train(options.tesserae, settings, self.ranks, options.deadline, hosts, self.rate, record)


JOBS = [
    Job("S", 1),
    Job("S", 8),
    Job("M", 1),
    Job("M", 8),
    Job("L", 1),
    Job("S", 1, "100mbit"),
    Job("S", 8, "100mbit"),
    Job("S", 1, "1gbit"),
    Job("M", 1, "1gbit"),
    Job("M", 8, "1gbit"),
    Job("S", 1, "10gbit"),
    Job("M", 1, "10gbit"),
    Job("L", 1, "10gbit"),
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(job.name for job in JOBS))
    parser.add_argument("--visit", type=float, default=1.2, help="seconds of a layout, four times; 4 to 20 steps")
    parser.add_argument("--auto-steps", type=int, default=130, help="the first ones of the run with auto")
    parser.add_argument("--planned-steps", type=int, default=10000, help="of the job that begins with those")
    parser.add_argument("--settle-only", action="store_true", help="no layout is measured beside what auto tries")
    parser.add_argument("--quick", action="store_true", help="one job")
    parser.add_argument("--deadline", type=float, default=600, help="seconds a run")
    parser.add_argument("--tesserae", type=Path, help="default: the newest cli/tesserae below build/")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    wanted = ["S b1"] if options.quick else options.jobs.split(",")
    named = {job.name: job for job in JOBS}
    if unknown := [name for name in wanted if name not in named]:
        parser.error(f"unknown job {unknown[0]!r}; there are {', '.join(named)}")
    options.jobs = [named[name] for name in wanted]
    options.tesserae = options.tesserae or newest_tesserae()
    if not options.tesserae:
        parser.error("tesserae is not built: make build")
    return options


def all_layouts(ranks: int) -> list[Degrees]:
    degrees = [tuple(map(int, layout.split(","))) for layout in layouts(ranks)]
    return [(p, g, o) for p, g, o in degrees]


def sweep(job: Job, options: argparse.Namespace, step_ms: float) -> TrainRun:
    """A run through all layouts, the same way in both of its halves; `step_ms`: what a step takes, about."""
    forth = all_layouts(job.ranks)
    order = 2 * (forth + forth[::-1])
    steps = min(20, max(4, math.ceil(1e3 * options.visit / step_ms)))
    p, g, o = order[0]
    settings = {
        "train.steps": steps * len(order),
        "hybrid_shard_degree": 0,  # the layout is said below
        "degrees": {"parameters": p, "gradients": g, "optimizer": o},
        "dial.schedule": schedule_of(order, steps),
    }
    return job.run(options, settings)


def of_the_best(chosen: Degrees, halves: list[dict[Degrees, float]]) -> float:
    """How much longer a step takes than under the best layout: the best of one half, timed by the other."""
    both_ways = [(halves[0], halves[1]), (halves[1], halves[0])]
    return statistics.mean(
        timed[chosen] / timed[min(found, key=lambda each: found[each])] for found, timed in both_ways
    )


def record_of(job: Job, options: argparse.Namespace) -> Path:
    """Where what the tuner of its run with "auto" was told and decided is kept."""
    return options.out / "auto_sweep" / f"{job.name.replace(' ', '_')}.jsonl"


def searches(record: Path) -> list[int]:
    """The steps after which the tuner ended a search: the first, and others if the job's speed changed."""
    lines = (json.loads(line) for line in record.read_text().splitlines())
    return [line["step"] for line in lines if "measured (predicted)" in line.get("decision", {}).get("why", "")]


def settle(job: Job, options: argparse.Namespace) -> TrainRun:
    """The beginning of a long job: two of a hundred of its planned steps may be spent on trying."""
    planned = {"dial.planned_steps": options.planned_steps, "hybrid_shard_degree": "auto"}
    record = record_of(job, options)
    run = job.run(options, {"train.steps": options.auto_steps, **planned}, record)
    record.with_suffix(".log").write_text(run.output)
    return run


def measure(job: Job, options: argparse.Namespace) -> dict:
    auto = settle(job, options)
    tail = [record["step_ms"] for record in auto.steps[-10:]]
    swept = sweep(job, options, statistics.median(tail))
    times, middle = swept.step_ms(), len(swept.steps) // 2
    halves = [swept.step_ms(end=middle), swept.step_ms(begin=middle)]
    chosen = auto.layout(-1)
    ends = searches(record_of(job, options))
    best = min(times, key=lambda layout: times[layout])
    return {
        "job": asdict(job) | {"name": job.name},
        "step_ms": {",".join(map(str, layout)): value for layout, value in times.items()},
        "best": best,
        "chosen": chosen,
        "ratio": of_the_best(chosen, halves),
        "halves_differ": statistics.median(abs(halves[0][each] / halves[1][each] - 1) for each in times),
        "changes": len(auto.changes()),
        "tried": len({tuple(step["degrees"]) for step in auto.steps}),
        "settled_after": ends[0] if ends else len(auto.steps),
        "searches": len(ends),
        "auto_step_ms": statistics.median(tail),
    }


def markdown(data: dict) -> str:
    rows = data["jobs"]
    right = sum(row["ratio"] <= WITHIN for row in rows)
    after = [row["settled_after"] for row in rows]
    lines = [
        "![Every layout of every job, and the one that auto chose](images/auto_sweep.png)",
        "",
        f'"auto" settles within 5 % of the best layout in {right} of {len(rows)} jobs, after '
        f"{min(after)} to {max(after)} steps ({statistics.median(after):.0f} at the median).",
        "",
        "| job (model, sequences a rank, link between 2 hosts) | best | ms a step | worst | auto | ms a step "
        "| of the best | halves differ by | layouts tried | settled after step |",
        "|---|---|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        times = row["step_ms"]
        best, chosen = (times[",".join(map(str, row[key]))] for key in ("best", "chosen"))
        lines.append(
            f"| {row['job']['name']} | {name_of(row['best'])} | {best:,.0f} | {max(times.values()):,.0f} "
            f"| {name_of(row['chosen'])} | {chosen:,.0f} | {row['ratio']:.2f} | {100 * row['halves_differ']:.0f} % "
            f"| {row['tried']} "
            f"| {row['settled_after']} |"
        )
    over = "the steps of each layout, the first after a change left out"
    measured = report.describe_each({row["job"]["name"]: report.describe(row["about"], over) for row in rows})
    return "\n".join([*lines, "", "\n\n".join(measured)]) + "\n"


def settle_only(options: argparse.Namespace) -> str:
    """A table of the jobs: where "auto" began, where its first search ended, and after how many steps."""
    lines = ["| job | begins with | keeps | layouts tried | settled after step |", "|---|---|---|--:|--:|"]
    for job in options.jobs:
        try:
            auto = settle(job, options)
        except Unavailable as reason:
            print(f"auto_sweep: {job.name} is left out: {reason}", file=sys.stderr)
            continue
        end = next(iter(searches(record_of(job, options))), len(auto.steps))
        tried = len({auto.layout(at) for at in range(end)})
        kept = auto.layout(min(end + 1, len(auto.steps) - 1))
        lines.append(f"| {job.name} | {name_of(auto.layout(0))} | {name_of(kept)} | {tried} | {end} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def with_row(rows: list[dict], row: dict) -> list[dict]:
    """In the order of JOBS; a job that is there already is replaced."""
    order = [job.name for job in JOBS]
    others = [other for other in rows if other["job"]["name"] != row["job"]["name"]]
    return sorted([*others, row], key=lambda each: order.index(each["job"]["name"]))


def measured_before(file: Path) -> list[dict]:
    data = json.loads(file.read_text()) if file.exists() else {"jobs": []}
    # Older files have one `about` for all jobs, and compare with the fastest of all steps: nothing to put beside these.
    return [{"about": data.get("about"), **row} for row in data["jobs"] if "halves_differ" in row]


def main() -> None:
    options = parse()
    about = report.about()
    report.warn_if_busy("auto_sweep", about)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.settle_only:
        print(settle_only(options))
        return
    file = options.out / "auto_sweep.json"
    data: dict = {"jobs": measured_before(file) if len(options.jobs) < len(JOBS) else []}
    for job in options.jobs:
        try:
            row = measure(job, options) | {"about": about}
        except Unavailable as reason:
            print(f"auto_sweep: {job.name} is left out: {reason}", file=sys.stderr)
            continue
        data["jobs"] = with_row(data["jobs"], row)
        file.write_text(json.dumps(data, indent=1) + "\n")
        best, chosen = name_of(row["best"]), name_of(row["chosen"])
        print(f"auto_sweep: {job.name}: best {best}, auto {chosen}, {row['ratio']:.2f} of the best", file=sys.stderr)
    text = markdown(data)
    print(text)
    if options.update_docs:
        report.update_performance("auto", text)


if __name__ == "__main__":
    main()
