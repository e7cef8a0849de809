"""What it costs to change the sharding degree of a model in training: live (bench_dial), beside what people do today,
which is to save, stop and go on from the checkpoint (FSDP2 with DCP, bench/dial_peer.py). Both in turn, in each round:

    python bench/dial.py                          # 118 M parameters + AdamW, 4 ranks, degrees 4 -> 2 -> 1 -> 4
    python bench/dial.py --links gloo,1gbit       # live only, over Gloo on this host and between 2 hosts x 2 ranks
    python bench/dial.py --timeline               # runs of `tesserae train` with a schedule, and one with "auto"
    python bench/dial.py --case tiny --quick      # proves that it works

The restart is timed from the outside: from the end of the last step of the old processes to the end of the first step
of the new ones, less a step. It contains saving, the end of the old processes, the start and imports of new ones,
building the model and loading. The checkpoint lies in --folder; on /dev/shm it costs no disk.

Free memory of a virtual machine may be lent to its host, and getting it back takes many times as long as writing it. So
both sides are measured twice in a round. Once memory is touched beforehand: right before it is needed, all ranks take
as much and give it back (bench_dial before a change to more memory, dial_peer.py before it builds the model, both
before the first step after that; its time is taken off). And once it is not, and they pay for it. Over --links memory
is touched; in the runs of --timeline it is not.

A live change should take little more than its bytes need where they go. For links between hosts these are the bytes
that left a host's network interface meanwhile, at the rate of the link; on one host (Gloo; shared memory, of which the
live changes of the first table are), what an all-gather of as many bytes takes.

Writes bench/out/dial.json (and dial_timeline.json), which bench/plot.py draws: what was measured now takes the place
of what the file had of it. --update-docs puts the tables between the markers `dial` in docs/performance.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import report
import warm
from cases import CASES, FIRST_MODEL, HERE, ROOT, Case, newest_program
from launch import Run, Unavailable, launch
from train_run import TrainRun, name_of, newest_tesserae, schedule_of, train

LINKS = {"gloo": ("gloo", 1, ""), "100mbit": ("auto", 2, "100mbit"), "1gbit": ("auto", 2, "1gbit")}
SHM = "shm"  # what the ranks of a host have without a word of --links
RATE = {"100mbit": 100e6, "1gbit": 1e9}  # bits a second


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="B", choices=FIRST_MODEL)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--degrees", default="4,2,1,4", help="the first one, and those that it is changed to")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps before and after each change")
    parser.add_argument("--links", default="", help=f"measure only live changes over these: {', '.join(LINKS)}")
    parser.add_argument("--timeline", action="store_true", help="measure only the timelines of `tesserae train`")
    parser.add_argument("--quick", action="store_true", help="1 round of 2 steps")
    parser.add_argument("--folder", type=Path, help="of the peer's checkpoints; default: a temporary one")
    parser.add_argument("--deadline", type=float, default=1800, help="seconds a run")
    parser.add_argument("--program", type=Path, help="default: the newest bench_dial below build/")
    parser.add_argument("--tesserae", type=Path, help="default: the newest cli/tesserae below build/")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--warm", action="store_true", help="tests: imports are done once, and no figure is one")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    if options.warm and options.update_docs:
        parser.error("--warm is for tests: what it measures is not for documents")
    if options.quick:
        options.rounds, options.steps = 1, 2
    options.case = replace(CASES[options.case], ranks=options.ranks, hosts=1, rate="")
    options.degrees = [int(degree) for degree in options.degrees.split(",")]
    options.links = [link for link in options.links.split(",") if link]
    if unknown := [link for link in options.links if link not in LINKS]:
        parser.error(f"unknown link {unknown[0]!r}; there are {', '.join(LINKS)}")
    options.program = options.program or newest_program("bench_dial")
    options.tesserae = options.tesserae or newest_tesserae()
    if not options.program or not options.tesserae:
        parser.error("bench_dial and tesserae are not built: make build")
    return options


def live(
    options: argparse.Namespace,
    link: str = "",
    degrees: list[int] | None = None,
    memory: bool = False,
    touched: bool = True,
) -> Run:
    case: Case = options.case
    backend, hosts, rate = LINKS.get(link, ("auto", 1, ""))
    turns = ",".join(map(str, degrees or options.degrees))
    command = [str(options.program), "--degrees", turns, "--steps", str(options.steps), "--backend", backend]
    if memory:
        command.append("--memory")
    if touched:
        command.append("--touch")
    return launch([*command, *case.arguments()], case.ranks, options.deadline, hosts, rate)


def state_bytes(case: Case) -> int:
    """About what parameters, gradients and two moments of the model take, in fp32."""
    return 16 * (12 * case.dimension**2 * case.layers + 2 * case.vocabulary * case.dimension)


def restart(options: argparse.Namespace, folder: Path, touched: bool = True) -> list[dict]:
    """For each change, how long training stood still, in seconds, and where the time went."""
    case: Case = options.case
    command = [sys.executable, str(HERE / "dial_peer.py"), *case.arguments(), "--steps", str(options.steps)]
    lives: list[dict] = []
    for index, degree in enumerate(options.degrees):
        arguments = ["--degree", str(degree)]
        if touched:
            arguments += ["--touch", str(state_bytes(case) // degree // 2**20)]
        if index > 0:
            arguments += ["--load", str(folder / str(index - 1))]
        if index + 1 < len(options.degrees):
            arguments += ["--save", str(folder / str(index))]
        lives.append(launch([*command, *arguments], case.ranks, options.deadline).report)
        shutil.rmtree(folder / str(index - 1), ignore_errors=True)
    changes = []
    for old, new in itertools.pairwise(lives):
        left, first = old["steps"][-1][1], new["steps"][0][1]
        step = statistics.median(end - start for start, end in new["steps"][1:])
        changes.append(
            {
                "lost_seconds": first - left - step - new["touched"] - new["touched_later"],
                "save": old["saved"] - left,
                "processes": new["born"] - old["saved"],
                "imports_and_model": new["ready"] - new["born"] - new["touched"],
                "load": new["loaded"] - new["ready"],
            }
        )
    return changes


def warm_up(options: argparse.Namespace, folder: Path) -> None:
    """The first import of torch compiles it, and reads it from the disk: no restart should pay for that."""
    once = argparse.Namespace(**vars(options))
    once.case, once.degrees, once.steps = replace(CASES["tiny"], ranks=options.ranks), options.degrees[:2], 2
    restart(once, folder)


def same_losses(changed: Run, unchanged: Run) -> None:
    """A change of the degree changes no number but by rounding."""
    pairs = zip(changed.report["losses"], unchanged.report["losses"], strict=False)
    for step, (a, b) in enumerate(pairs):
        if not math.isclose(a, b, rel_tol=1e-3):
            raise RuntimeError(f"after changes of the degree the loss of step {step} is {a}, without them {b}")


def spread(values: list[float]) -> dict[str, float]:
    return vars(report.Spread.of(values))


def measure(options: argparse.Namespace) -> dict:
    """Live changes and restarts, with memory touched beforehand and without, in turn."""
    live_runs: dict[bool, list[Run]] = {True: [], False: []}
    restarts: dict[bool, list[list[dict]]] = {True: [], False: []}
    turns = list(itertools.product(("live", "restart"), (True, False)))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if not options.warm:
            warm_up(options, Path(folder))
        for index in range(options.rounds):
            for who, touched in turns if index % 2 == 0 else reversed(turns):
                if who == "live":
                    live_runs[touched].append(live(options, touched=touched))
                    lost = [change["lost_seconds"] for change in live_runs[touched][-1].report["changes"]]
                else:
                    restarts[touched].append(restart(options, Path(folder), touched))
                    lost = [change["lost_seconds"] for change in restarts[touched][-1]]
                figures = ", ".join(f"{seconds:.2f}" for seconds in lost)
                how = "memory touched before" if touched else "not touched"
                print(f"dial: round {index + 1}/{options.rounds}: {who:7} {figures} s, {how}", file=sys.stderr)
    unchanged = live(replace_steps(options), degrees=[options.degrees[0]])
    for run in (live_runs[True][0], live_runs[False][0]):
        same_losses(run, unchanged)
    sampled = live(options, memory=True).report["changes"]
    table = []
    for at, change in enumerate(live_runs[True][0].report["changes"]):
        mine = [run.report["changes"][at] for run in live_runs[True]]
        table.append(
            {
                "from": change["from"],
                "to": change["to"],
                "bytes": change["bytes"],
                "seconds": spread([c["seconds"] for c in mine]),
                "steps_before": spread([c["steps"]["before"] for c in mine]),
                "steps_after": spread([c["steps"]["after"] for c in mine]),
                **lost_of(at, live_runs[True], restarts[True]),
                "not_touched": lost_of(at, live_runs[False], restarts[False]),
                "before_pss": sampled[at]["before_pss"],
                "peak_pss": sampled[at]["peak_pss"],
                "after_pss": sampled[at]["after_pss"],
            }
        )
    return {
        "table": table,
        "live": [run.report for run in live_runs[True]],
        "restart": restarts[True],
        "not_touched": {"live": [run.report for run in live_runs[False]], "restart": restarts[False]},
        "memory": sampled,
    }


def lost_of(at: int, live_runs: list[Run], restarts: list[list[dict]]) -> dict:
    """Of one change: for how long training stands still, live and by a restart; and the ratio, round by round."""
    mine = [run.report["changes"][at]["lost_seconds"] for run in live_runs]
    theirs = [changes[at]["lost_seconds"] for changes in restarts]
    ratios = [restart / live for live, restart in zip(mine, theirs, strict=True)]
    return {"ours": spread(mine), "restart": spread(theirs), "ratio": spread(ratios)}


def replace_steps(options: argparse.Namespace) -> argparse.Namespace:
    """For one run without changes that has as many steps as one with all of them."""
    longer = argparse.Namespace(**vars(options))
    longer.steps = options.steps + (options.steps + 1) * (len(options.degrees) - 1)
    return longer


def measure_links(options: argparse.Namespace) -> dict[str, list[dict]]:
    measured = {}
    for link in options.links:
        try:
            runs = [live(options, link).report["changes"] for _ in range(options.rounds)]
        except Unavailable as reason:
            print(f"dial: {link} is left out: {reason}", file=sys.stderr)
            continue
        measured[link] = link_rows(runs, link)
        for row in measured[link]:
            print(f"dial: {link}: {row}", file=sys.stderr)
    return measured


def link_rows(runs: list[list[dict]], link: str) -> list[dict]:
    """`runs`: the changes of each round. For each change, what it took beside what its bytes need."""
    rows = []
    for at, change in enumerate(runs[0]):
        needed = [needed_seconds(run[at], link) for run in runs]
        seconds = [run[at]["seconds"] for run in runs]
        rows.append(
            {
                "from": change["from"],
                "to": change["to"],
                "bytes": change["bytes"],
                "link_bytes": change["link_bytes"],
                "seconds": spread(seconds),
                "needed_seconds": spread(needed),
                # Where nothing needs to move, the ratio says nothing.
                "ratio": spread([s / n for s, n in zip(seconds, needed, strict=True)]) if min(needed) > 0.01 else None,
            }
        )
    return rows


def needed_seconds(change: dict, link: str) -> float:
    return change["link_bytes"] * 8 / RATE[link] if link in RATE else change["needed_seconds"]


def measure_timelines(options: argparse.Namespace) -> dict:
    """The metrics of runs of `tesserae train`, of the demo's transformer made larger: several with the same schedule,
    and the beginning of one long job with "auto", which does not decide the same twice."""
    steps, settling = (24, 24) if options.quick else (90, 130)
    dimension, layers, heads = (32, 2, 2) if options.quick else (384, 6, 6)
    model = {"model.dimension": dimension, "model.layers": layers, "model.heads": heads}
    turns = [(degree, degree, degree) for degree in (options.ranks, 1, options.ranks // 2)]
    how: dict[str, dict[str, object]] = {
        "schedule": {
            "train.steps": steps,
            "hybrid_shard_degree": options.ranks,
            "dial.schedule": schedule_of(turns, steps // len(turns)),
        },
        "auto": {"train.steps": settling, "hybrid_shard_degree": "auto", "dial.planned_steps": 10000},
    }
    measured: dict = {"about": report.about()}
    for kind, settings in how.items():
        settings = {**settings, **model}
        times = options.rounds if kind == "schedule" else 1
        try:  # layouts differ most where a link is slow
            hosts, rate = (2, "1gbit") if kind == "auto" and not options.quick else (1, "")
            runs = [
                train(options.tesserae, settings, options.ranks, options.deadline, hosts, rate) for _ in range(times)
            ]
        except Unavailable as reason:
            print(f"dial: {kind} runs on one host: {reason}", file=sys.stderr)
            runs = [train(options.tesserae, settings, options.ranks, options.deadline)]
        measured[kind] = {"runs": len(runs), "steps": steps_of(runs), "changes": changes_of(runs)}
        print(f"dial: {kind}: {measured[kind]['changes']}", file=sys.stderr)
    return measured


def steps_of(runs: list[TrainRun]) -> list[dict]:
    """Each step of runs that do the same: medians, and the slowest and fastest. What one run alone shows may be
    something else on the machine."""
    steps = []
    for records in zip(*(run.steps for run in runs), strict=True):
        speed = report.Spread.of([record["tokens_per_second"] for record in records])
        memory = [record["memory_bytes"] for record in records if record.get("memory_bytes")]
        step = {"step": records[0]["step"], "tokens_per_second": speed.median, "low": speed.low, "high": speed.high}
        steps.append(step | ({"memory_bytes": statistics.median(memory)} if memory else {}))
    return steps


def changes_of(runs: list[TrainRun]) -> list[dict]:
    changes = []
    for same in zip(*(run.changes() for run in runs), strict=True):
        seconds = [change["seconds"] for change in same if change["seconds"]]
        named = {"from": name_of(same[0]["from"]), "to": name_of(same[0]["to"])}
        changes.append(same[0] | named | {"seconds": statistics.median(seconds) if seconds else None})
    return changes


def about_parts(data: dict) -> dict[str, dict]:
    """Where and when the table and each link were measured. Older files have one for all of them."""
    about = data.get("about", {})
    return dict.fromkeys(("table", *data.get("links", {})), about) if "machine" in about else about


def lost_cells(row: dict | None) -> str:
    if not row:  # of a file from before that was measured
        return "| |"
    ratio = row["ratio"]
    return (
        f"{row['ours']['median']:.2f} s | {row['restart']['median']:.2f} s "
        f"| {ratio['median']:,.0f} ({ratio['low']:,.0f} to {ratio['high']:,.0f})"
    )


def markdown(data: dict) -> str:
    text = ""
    described = {part: report.describe(about, f"{about['rounds']} rounds") for part, about in about_parts(data).items()}
    if table := data.get("table"):
        text += "![Time that a change takes](images/dial_cost.png)\n\n"
        live_run = data["live"][0]
        text += (
            f"{live_run['parameters'] / 1e6:.0f} M parameters with AdamW, {live_run['ranks']} ranks, shared memory:\n\n"
        )
        text += (
            "| degree | bytes moved | live: seconds | in steps, before / after | training stands still | "
            "restart from a checkpoint | ratio (lowest to highest) | memory not touched before: stands still "
            "| restart | ratio | memory before, peak, after |\n"
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
        )
        for row in table:
            memory = ", ".join(f"{row[key] / 2**20:,.0f}" for key in ("before_pss", "peak_pss", "after_pss"))
            text += (
                f"| {row['from']} → {row['to']} | {row['bytes'] / 1e6:,.0f} MB | {row['seconds']['median']:.3f} "
                f"| {row['steps_before']['median']:.2f} / {row['steps_after']['median']:.2f} "
                f"| {lost_cells(row)} | {lost_cells(row.get('not_touched'))} | {memory} MiB |\n"
            )
        text += f"\n{described['table']}\n"
    # The live changes of the table are those over shared memory.
    links = {SHM: link_rows([run["changes"] for run in data["live"]], SHM)} if "live" in data else {}
    links |= data.get("links", {})
    if links:
        text += (
            "\n| link | degree | bytes | seconds | its bytes need | ratio (lowest to highest) |\n"
            "|---|---|--:|--:|--:|--:|\n"
        )
    for link, rows in links.items():
        for row in rows:
            moved = row["link_bytes" if link in RATE else "bytes"]
            ratio = "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["ratio"]) if row["ratio"] else "-"
            text += (
                f"| {link} | {row['from']} → {row['to']} | {moved / 1e6:,.0f} MB | {row['seconds']['median']:.2f} "
                f"| {row['needed_seconds']['median']:.2f} | {ratio} |\n"
            )
    if links:
        of_each = {link: described["table" if link == SHM else link] for link in links}
        text += "\n" + "\n\n".join(report.describe_each(of_each)) + "\n"
    text += "\n![Tokens a second and memory while the degree changes](images/dial.png)\n"
    text += "\n![The same while auto settles](images/auto.png)\n"
    return text


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    about = report.about() | {"rounds": options.rounds}
    report.warn_if_busy("dial", about)
    if options.warm:
        warm.prepare()
    if options.timeline:
        timelines = measure_timelines(options)
        (options.out / "dial_timeline.json").write_text(json.dumps(timelines, indent=1) + "\n")
        return
    file = options.out / "dial.json"
    data = json.loads(file.read_text()) if file.exists() else {}
    data["about"] = about_parts(data)
    if options.links:
        measured = measure_links(options)
        data["links"] = data.get("links", {}) | measured
        data["about"] |= dict.fromkeys(measured, about)
    else:
        data |= measure(options)
        data["about"]["table"] = about
    file.write_text(json.dumps(data, indent=1) + "\n")
    text = markdown(data)
    print(text)
    if options.update_docs:
        report.update_performance("dial", text)


if __name__ == "__main__":
    main()
