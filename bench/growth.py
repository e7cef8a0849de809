"""What more ranks cost.

1. On this machine: a step of the same model, with the same tokens a rank, on 1, 2, 4 and 8 ranks under full sharding,
   beside FSDP2. There are as many ranks as in a job on one host but not as many cores: what grows is read from tokens/s
   of the whole machine and from CPU time a step and rank, which stay level if ranks cost nothing.
2. Beyond this machine: what the engine costs the host for each unit and step where a job has 64, 1024 or 16384 ranks
   and no byte is moved (bench_host_cost on the transport `null`), and what set-up takes and leaves on the heap.

    python bench/growth.py                       # about 15 minutes
    python bench/growth.py --quick               # proves in two minutes that it works

Writes bench/out/growth.json, which bench/plot.py draws; --update-docs puts the tables between the markers `growth` in
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import report
from cases import CASES, ROOT, command, newest_program, title
from launch import Run, launch

CANDIDATES = ("fsdp2", "ours")
CASE = replace(CASES["C"], title="34 M parameters, 128 tokens a rank, fp32", sequence=128)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8", help="of the first part")
    parser.add_argument("--worlds", default="8,64,1024,16384", help="ranks of the second part")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps a run")
    parser.add_argument("--quick", action="store_true", help="1 round of 2 steps, 1 and 2 ranks")
    parser.add_argument("--deadline", type=float, default=900, help="seconds a run")
    parser.add_argument("--step-program", type=Path, help="default: the newest bench_step below build/")
    parser.add_argument("--host-cost-program", type=Path, help="default: the newest bench_host_cost below build/")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.ranks = 1, 2, "1,2"
    options.ranks = [int(ranks) for ranks in options.ranks.split(",")]
    options.worlds = [int(ranks) for ranks in options.worlds.split(",")]
    options.step_program = options.step_program or newest_program("bench_step")
    options.host_cost_program = options.host_cost_program or newest_program("bench_host_cost")
    if not options.step_program or not options.host_cost_program:
        parser.error("bench_step and bench_host_cost are not built: make build")
    return options


def spread(values: list[float]) -> dict[str, float]:
    return vars(report.Spread.of(values))


def grow(options: argparse.Namespace) -> dict[str, list[dict]]:
    """By candidate, a line for each number of ranks. Rounds are interleaved."""
    runs: dict[tuple[str, int], list[Run]] = {}
    timing = ["--steps", str(options.steps), "--warmup", "1"]
    for index in range(options.rounds):
        for ranks in options.ranks:
            for candidate in CANDIDATES:
                case = replace(CASE, ranks=ranks)
                arguments = [*command(candidate, options.step_program, case), *case.arguments(), *timing]
                run = launch(arguments, ranks, options.deadline)
                runs.setdefault((candidate, ranks), []).append(run)
                step = statistics.median(run.report["step_ms"])
                where = f"growth: round {index + 1}/{options.rounds}, {ranks:2} ranks, {title(candidate):14}"
                print(f"{where} {step:9,.1f} ms a step", file=sys.stderr)
    return {
        candidate: [
            {
                "ranks": ranks,
                "step_ms": spread([statistics.median(run.report["step_ms"]) for run in runs[candidate, ranks]]),
                "tokens_per_second": spread([run.report["tokens_per_second"] for run in runs[candidate, ranks]]),
                "memory": max(run.peak_pss or run.peak_rss for run in runs[candidate, ranks]),
            }
            for ranks in options.ranks
        ]
        for candidate in CANDIDATES
    }


def engine(options: argparse.Namespace) -> list[dict]:
    """What the engine adds to a unit and step, by the number of ranks of a job whose bytes go nowhere."""
    repeats = ["--repeats", "3" if options.quick else "7", "--steps", "10" if options.quick else "20"]
    figures: dict[int, list[dict]] = {}
    for _ in range(options.rounds):
        for ranks in options.worlds:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "cost.json")
                arguments = [str(options.host_cost_program), "--ranks", str(ranks), *repeats, "--json", str(file)]
                subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
                cost = json.loads(file.read_text())
                figures.setdefault(ranks, []).append(cost["sharded"] | {"set_up": cost["set_up"]})
            print(f"growth: {ranks:6} ranks, {figures[ranks][-1]['per_unit_us']:.1f} us a unit", file=sys.stderr)
    return [
        {
            "ranks": ranks,
            "per_unit_us": spread([figure["per_unit_us"] for figure in figures[ranks]]),
            "cpu_per_unit_us": spread([figure["cpu_per_unit_us"] for figure in figures[ranks]]),
            "set_up_ms": spread([figure["set_up"]["ms"] for figure in figures[ranks]]),
            "set_up_bytes": statistics.median(figure["set_up"]["bytes"] for figure in figures[ranks]),
        }
        for ranks in options.worlds
    ]


def markdown(data: dict) -> str:
    lines = [
        "![Speed, memory and host cost by the number of ranks](images/growth.png)",
        "",
        f"{data['case']}, full sharding:",
        "",
        "| ranks | " + " | ".join(f"{title(c)}, ms a step | tokens/s | host memory" for c in CANDIDATES) + " |",
        "|--:|" + "--:|" * 3 * len(CANDIDATES),
    ]
    for rows in zip(*(data["growth"][candidate] for candidate in CANDIDATES), strict=True):
        cells = [
            f"{row['step_ms']['median']:,.0f} ({row['step_ms']['low']:,.0f} to {row['step_ms']['high']:,.0f}) "
            f"| {row['tokens_per_second']['median']:,.0f} | {row['memory'] / 2**20:,.0f} MiB"
            for row in rows
        ]
        lines.append(f"| {rows[0]['ranks']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| ranks of the job | engine, µs a unit and step | the same, CPU time | set-up, ms | heap of a rank, KiB |",
        "|--:|--:|--:|--:|--:|",
    ]
    for row in data["engine"]:
        cost = row["per_unit_us"]
        lines.append(
            f"| {row['ranks']:,} | {cost['median']:.1f} ({cost['low']:.1f} to {cost['high']:.1f}) "
            f"| {row['cpu_per_unit_us']['median']:.1f} "
            f"| {row['set_up_ms']['median']:.1f} ({row['set_up_ms']['low']:.1f} to {row['set_up_ms']['high']:.1f}) "
            f"| {row['set_up_bytes'] / 1024:,.0f} |"
        )
    first, last = data["engine"][0], data["engine"][-1]
    if last["ranks"] > first["ranks"]:
        more = (last["set_up_bytes"] - first["set_up_bytes"]) / (last["ranks"] - first["ranks"])
        lines += [
            "",
            f"From {first['ranks']} to {last['ranks']:,} ranks the heap grows by {more:.1f} bytes a rank of the job.",
        ]
    about = data["about"]
    lines += ["", report.describe(about, f"{about['rounds']} rounds of {about['steps']} steps")]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parse()
    about = report.about() | {"rounds": options.rounds, "steps": options.steps}
    report.warn_if_busy("growth", about)
    data = {"about": about, "case": CASE.title, "growth": grow(options), "engine": engine(options)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "growth.json").write_text(json.dumps(data, indent=1) + "\n")
    text = markdown(data)
    print(text)
    if options.update_docs:
        report.update_performance("growth", text)


if __name__ == "__main__":
    main()
