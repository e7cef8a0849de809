"""Draws what the other scripts of bench/ measured: bench/out/*.json become docs/images/*.png.

python bench/plot.py                      # all of which there are results
python bench/plot.py --only speed,dial    # of speed, memory, growth, dial, auto, dial_cost, auto_sweep, recovery,
                                          # predictions
python bench/plot.py --out /tmp/out --images /tmp/images
"""

from __future__ import annotations

import argparse
import bisect
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

try:
    import matplotlib
except ImportError:
    print("plot: matplotlib is not installed: pip install -r requirements-dev.txt", file=sys.stderr)
    sys.exit(77)

matplotlib.use("Agg")  # no display needed

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

import report
from cases import CASES, CEILINGS, ROOT, title
from report import Summary

OURS, CEILING, PEER, INK, FAINT = "#d9622b", "#c9ced6", "#6f7d8f", "#222222", "#dddddd"
WIDTH = 10  # inches, at DPI: what a README shows without scaling
DPI = 100

STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
}


def colour(candidate: str) -> str:
    if report.is_ours(candidate):
        return OURS
    return CEILING if candidate in (*CEILINGS, *CEILINGS.values()) else PEER


def bars(axes: Axes, rows: Sequence[tuple[str, float, float, float, str]], text: Callable[[float], str]) -> None:
    """Rows from top to bottom: label, value, lowest, highest, colour."""
    for at, (_, value, low, high, paint) in enumerate(rows):
        axes.barh(at, value, color=paint, height=0.72)
        if high > low:
            axes.plot([low, high], [at, at], color=INK, linewidth=1.1, solid_capstyle="butt")
        axes.annotate(text(value), (max(value, high), at), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * max(high for *_, high, _ in rows))
    axes.xaxis.set_major_locator(NullLocator())
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.grid(axis="y", color=FAINT, linewidth=0.6)


def label(candidate: str) -> str:
    return (
        title(candidate).replace(": computation + 1/N of the optimizer", "").replace("reshard_after_forward", "reshard")
    )


def short(case: str) -> str:
    return f"{report.heading(case)}: " + CASES[case].title.replace(" parameters", "").replace(
        " tokens a rank", " tokens"
    )


def case_figure(
    cases: dict[str, list[Summary]], rows_of: Callable[[Summary], tuple], text: Callable, heading: str
) -> Figure:
    """A panel a case, two in a row."""
    names = list(cases)
    lines = [names[at : at + 2] for at in range(0, len(names), 2)]
    heights = [max(len(cases[name]) for name in line) for line in lines]
    figure, panels = pyplot.subplots(
        len(lines),
        2 if len(names) > 1 else 1,
        figsize=(WIDTH, 0.75 + sum(0.24 * height + 0.5 for height in heights)),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
    )
    for axes in panels.flat:
        axes.axis("off")
    for line, row in zip(lines, panels, strict=True):
        for name, axes in zip(line, row, strict=False):
            axes.axis("on")
            bars(axes, [rows_of(summary) for summary in cases[name]], text)
            axes.spines["left"].set_visible(False)
            axes.set_title(textwrap.fill(short(name), 46), loc="right")  # over the labels, too
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.99), w_pad=2)
    return figure


def measured_cases(out: Path, wanted: Sequence[str]) -> dict[str, list[Summary]]:
    file = out / "compare.json"
    cases = json.loads(file.read_text())["cases"] if file.exists() else {}
    return {name: report.summaries_of(cases[name]) for name in wanted if "about" in cases.get(name, {})}


def speed(out: Path) -> Figure | None:
    wanted = [name for name in sorted(CASES) if CASES[name].precision == "fp32" and not name.startswith("tiny")]
    cases = measured_cases(out, wanted) or measured_cases(out, list(CASES))
    if not cases:
        return None

    def row(s: Summary) -> tuple:
        spread = s.tokens_per_second
        return label(s.candidate), spread.median, spread.low, spread.high, colour(s.candidate)

    heading = "Tokens a second of all ranks: median; line: lowest to highest round"
    return case_figure(cases, row, lambda value: f"{value:,.0f}", heading)


def memory(out: Path) -> Figure | None:
    cases = measured_cases(out, ("A", "A/gpt2", "B", "B/gpt2")) or measured_cases(out, list(CASES))
    if not cases:
        return None
    cases = {name: [s for s in rows if s.memory] for name, rows in cases.items()}  # nothing runs at a ceiling

    def row(s: Summary) -> tuple:
        gigabytes = s.memory / 2**30
        return label(s.candidate), gigabytes, gigabytes, gigabytes, colour(s.candidate)

    return case_figure(cases, row, lambda value: f"{value:.2f} GiB", "Peak host memory of all ranks (sum of PSS)")


def growth(out: Path) -> Figure | None:
    file = out / "growth.json"
    if not file.exists():
        return None
    data = json.loads(file.read_text())
    figure, (speed_axes, memory_axes, engine_axes) = pyplot.subplots(1, 3, figsize=(WIDTH, 3.1))
    for candidate, rows in data["growth"].items():
        ranks = [row["ranks"] for row in rows]
        line = {"color": colour(candidate), "marker": "o", "markersize": 4, "label": title(candidate)}
        rates = [row["tokens_per_second"] for row in rows]
        speed_axes.plot(ranks, [rate["median"] for rate in rates], **line)
        lows, highs = [rate["low"] for rate in rates], [rate["high"] for rate in rates]
        speed_axes.fill_between(ranks, lows, highs, color=line["color"], alpha=0.18, linewidth=0)
        memory_axes.plot(ranks, [row["memory"] / 2**30 for row in rows], **line)
    powers_of_two(speed_axes, [row["ranks"] for row in rows])
    powers_of_two(memory_axes, [row["ranks"] for row in rows])
    speed_axes.set(title="Tokens a second, all ranks", xlabel="ranks on one host")
    memory_axes.set(title="Host memory of all ranks, GiB", xlabel="ranks on one host")
    costs = [row["per_unit_us"] for row in data["engine"]]
    worlds = [row["ranks"] for row in data["engine"]]
    engine_axes.plot(worlds, [cost["median"] for cost in costs], color=OURS, marker="o", markersize=4)
    engine_axes.fill_between(
        worlds, [c["low"] for c in costs], [c["high"] for c in costs], color=OURS, alpha=0.18, linewidth=0
    )
    powers_of_two(engine_axes, worlds)
    engine_axes.set(title="Engine, µs a unit and step", xlabel="ranks of the job (no bytes moved)")
    for axes in (speed_axes, memory_axes, engine_axes):
        from_zero(axes)
    speed_axes.legend(loc="lower left")
    figure.tight_layout(w_pad=2)
    return figure


def powers_of_two(axes: Axes, values: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def timeline(out: Path, kind: str, heading: str) -> Figure | None:
    """Tokens/s and memory over the steps of runs that do the same, with each change of the degree."""
    file = out / "dial_timeline.json"
    run = json.loads(file.read_text()).get(kind) if file.exists() else None
    if not run:
        return None
    steps = [record["step"] for record in run["steps"]]
    figure, (speed_axes, memory_axes) = pyplot.subplots(
        2, 1, figsize=(WIDTH, 4.4), sharex=True, gridspec_kw={"height_ratios": (3, 2)}
    )
    speed_axes.plot(steps, [r["tokens_per_second"] for r in run["steps"]], color=OURS, linewidth=1.3)
    if "low" in run["steps"][0]:
        low, high = ([record[end] for record in run["steps"]] for end in ("low", "high"))
        speed_axes.fill_between(steps, low, high, color=OURS, alpha=0.18, linewidth=0)
    if run.get("runs", 1) > 1:
        heading += f" (median of {run['runs']} runs; shaded: slowest to fastest)"
    speed_axes.set(title=heading, ylabel="tokens/s, all ranks")
    used = [(r["step"], r["memory_bytes"] / 2**30) for r in run["steps"] if r.get("memory_bytes")]
    if used:
        memory_axes.plot(*zip(*used, strict=True), color=PEER, linewidth=1.3)
    memory_axes.set(ylabel="fullest rank, GiB", xlabel="step")
    for axes in (speed_axes, memory_axes):
        from_zero(axes)
    top = speed_axes.get_ylim()[1]
    many = len(run["changes"]) > 6
    speed_axes.set_ylim(0, top * (1.5 if many else 1.18))
    for change in run["changes"]:
        for axes in (speed_axes, memory_axes):
            axes.axvline(change["step"] + 0.5, color=INK, linewidth=0.7, linestyle=(0, (4, 3)))
        where = (change["step"] + 0.5, top * (1.49 if many else 1.17))
        if many:  # only where it goes, upright
            speed_axes.annotate(
                change["to"], where, (1, 0), textcoords="offset points", va="top", rotation=90, fontsize=7
            )
            continue
        told = f"{change['from']} → {change['to']}" + (f"\n{change['seconds']:.2f} s" if change.get("seconds") else "")
        speed_axes.annotate(told, where, (3, 0), textcoords="offset points", va="top", fontsize=8)
    figure.tight_layout()
    return figure


def dial(out: Path) -> Figure | None:
    return timeline(out, "schedule", "The sharding degree is changed while training goes on")


def auto(out: Path) -> Figure | None:
    return timeline(out, "auto", '"hybrid_shard_degree": "auto" settles')


def recovery(out: Path) -> Figure | None:
    """The speed of a job whose ranks die (recovery_time.py), of steps that nobody had made before."""
    file = out / "recovery.json"
    if not file.exists():
        return None
    run = json.loads(file.read_text())
    if "tokens" not in run:
        return None  # of an older recovery_time.py
    names = {
        "tesserae": ("Tesserae: lost ranks are replaced", OURS),
        "elastic": ("Tesserae in Python: the others keep their processes", OURS),
        "script": ("Tesserae in Python: all ranks begin again", OURS),
        "torchrun": ("FSDP2, torchrun and DCP", PEER),
    }
    sides = {side: found for side, found in run["sides"].items() if side in names}
    size = WIDTH, 0.6 + 1.25 * len(sides)
    figure, places = pyplot.subplots(len(sides), 1, figsize=size, sharex=True, sharey=True, squeeze=False)
    for axes, (side, found) in zip(places[:, 0], sides.items(), strict=True):
        name, paint = names[side]
        seconds, speeds = speed_over_time(found["times"], run["tokens"], run["seconds"])
        undisturbed = run["tokens"] / found["step_seconds"]
        axes.fill_between(seconds, speeds, color=paint, alpha=0.25, linewidth=0)
        axes.plot(seconds, speeds, color=paint, linewidth=1.2)
        axes.axhline(undisturbed, color=CEILING, linewidth=1)
        for kill in found["kills"]:
            axes.axvline(kill, color=INK, linewidth=0.7, linestyle=(0, (4, 3)))
        axes.set_title(f"{name}: {100 * found['effective']:.0f} % of its time", loc="left", fontsize=9)
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.25 * undisturbed))
        axes.set_xlim(0, run["seconds"])
    places[-1, 0].set_xlabel(f"seconds; a rank is killed every {run['every']:.0f} s (dashed)")
    figure.supylabel("tokens/s, of new steps in the last 5 s", fontsize=9)
    figure.tight_layout()
    return figure


def speed_over_time(ends: list[float], tokens: int, seconds: float) -> tuple[list[float], list[float]]:
    """Twice a second: the tokens of the steps that ended in the five seconds before, a second."""
    window = 5.0
    at = [0.5 * half for half in range(2 * int(seconds) + 1)]
    counts = [bisect.bisect_right(ends, time) - bisect.bisect_right(ends, time - window) for time in at]
    return at, [tokens * count / min(max(time, 1.0), window) for time, count in zip(at, counts, strict=True)]


def dial_cost(out: Path) -> Figure | None:
    """What a change costs, beside a restart from a checkpoint."""
    file = out / "dial.json"
    changes = json.loads(file.read_text()).get("table", []) if file.exists() else []
    if not changes:
        return None
    figure, axes = pyplot.subplots(figsize=(WIDTH, 0.9 + 0.62 * len(changes)))
    rows = []
    for change in changes:
        name = f"{change['from']} → {change['to']}"
        for who, paint, key in (("Tesserae, live", OURS, "ours"), ("FSDP2, checkpoint and restart", PEER, "restart")):
            spread = change[key]
            rows.append((f"{name}   {who}", spread["median"], spread["low"], spread["high"], paint))
    bars(axes, rows, lambda value: f"{value:.2f} s")
    axes.spines["left"].set_visible(False)
    axes.set_title("Training time that a change of the sharding degree takes")
    figure.tight_layout()
    return figure


def auto_sweep(out: Path) -> Figure | None:
    """For each job: every layout, by how much slower than the best it is, and the one that auto chose."""
    file = out / "auto_sweep.json"
    jobs = json.loads(file.read_text())["jobs"] if file.exists() else []
    if not jobs:
        return None
    figure, axes = pyplot.subplots(figsize=(WIDTH, 1.1 + 0.28 * len(jobs)))
    for at, row in enumerate(jobs):
        times = row["step_ms"]
        best = min(times.values())
        chosen = ",".join(map(str, row["chosen"]))
        ratios = [value / best for layout, value in times.items() if layout != chosen]
        axes.plot(ratios, [at] * len(ratios), "o", color=CEILING, markersize=5)
        axes.plot([times[chosen] / best], [at], "o", color=OURS, markersize=7)
    axes.axvspan(1, 1.05, color=FAINT, alpha=0.6, linewidth=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 5, 10, 20, 50]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_yticks(range(len(jobs)), [row["job"]["name"] for row in jobs])
    axes.invert_yaxis()
    axes.set(
        title="Step time of every layout (grey) and of the one that auto chose", xlabel="times the best layout's step"
    )
    figure.tight_layout()
    return figure


def predictions(out: Path) -> Figure | None:
    """What the plan said, beside what was measured: seconds of a step, and bytes of a job."""

    def results_of(*names: str) -> list[dict]:
        file = next((out / name for name in names if (out / name).exists()), None)
        return json.loads(file.read_text())["results"] if file else []

    both_runs = {
        "step": results_of("predictions.json"),
        "memory": results_of("predictions-memory.json", "predictions.json"),
    }
    if not any(both_runs.values()):
        return None
    figure, places = pyplot.subplots(1, 2, figsize=(WIDTH, 4.6))
    for axes, key, scale, unit in ((places[0], "step", 1e3, "ms a step"), (places[1], "memory", 1e-6, "MB of a job")):
        both = [(result["predicted"][key], result["free"][key]) for result in both_runs[key]]
        if not both:
            axes.set_axis_off()
            continue
        said, seen = ([scale * each[side] for each in both] for side in (0, 1))
        ends = [0.8 * min(said + seen), 1.25 * max(said + seen)]
        axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=FAINT, linewidth=0)
        axes.plot(ends, ends, color=CEILING, linewidth=1)
        axes.plot(seen, said, "o", color=OURS, markersize=4)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([step * 10**power for power in range(1, 5) for step in (1, 2, 5)]))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
        axes.set(title=f"{unit}: predicted against measured", xlabel="measured (grey: within 10 %)", ylabel="predicted")
    figure.tight_layout()
    return figure


PLOTS = {
    "speed": speed,
    "memory": memory,
    "growth": growth,
    "dial": dial,
    "auto": auto,
    "dial_cost": dial_cost,
    "auto_sweep": auto_sweep,
    "recovery": recovery,
    "predictions": predictions,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out", help="where the results are")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", default=",".join(PLOTS))
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(PLOTS):
        parser.error(f"unknown plot {unknown.pop()!r}; there are {', '.join(PLOTS)}")
    options.images.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(STYLE):
        for name in options.only.split(","):
            figure = PLOTS[name](options.out)
            if figure is None:
                print(f"plot: no results for {name} in {options.out}", file=sys.stderr)
                continue
            # Without the version and date that matplotlib notes, equal results make equal files.
            figure.savefig(options.images / f"{name}.png", dpi=DPI, metadata={"Software": None})
            pyplot.close(figure)
            print(options.images / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
