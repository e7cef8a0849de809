"""Turns the runs of a comparison into figures and tables; bench/plot.py draws them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cases import BEST, CASES, CEILINGS, GOALS, REFERENCE, title
from launch import Run

QUIET_LOAD = 0.5
# What was asked of what host_cost.py and transport.py measure.
HOST_COST_GOALS = {"sharded": ("Tesserae, C++", 20), "tesserae": ("Tesserae, Python", 8)}  # the part of FSDP2's
TRANSPORT_MIB, TRANSPORT_VERBS, TRANSPORT_GOAL = 64, ("all_gather_into_tensor", "reduce_scatter_tensor"), 8


@dataclass(frozen=True)
class Spread:
    """Over the rounds of a comparison."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Summary:
    candidate: str
    step_ms: Spread
    tokens_per_second: Spread
    ratio: Spread | None  # of tokens/s to the reference, taken round by round; None: no reference ran
    memory: int  # the largest sum of PSS that was seen, or of RSS where there is no PSS
    memory_ratio: float | None
    cpu_seconds: float


def with_ceilings(rounds: list[dict[str, Run]]) -> list[dict[str, Run]]:
    """The same, with the ceiling behind each candidate without communication, round by round."""
    wider: list[dict[str, Run]] = []
    for round_ in rounds:
        wider.append({})
        for candidate, run in round_.items():
            wider[-1][candidate] = run
            if candidate in CEILINGS:
                wider[-1][CEILINGS[candidate]] = ceiling_of(run)
    return wider


def ceiling_of(run: Run) -> Run:
    """The fastest that ranks which share the optimizer's work could be: what the run computed in forward and backward,
    and of its optimizer step (zero_grad included) the part of one rank."""
    spared = 1 - 1 / run.report["ranks"]
    parts = zip(run.report["step_ms"], run.report["optimizer_ms"], strict=True)
    step_ms = [step - spared * optimizer for step, optimizer in parts]
    tokens_per_second = run.report["tokens_per_step"] / statistics.median(step_ms) * 1e3
    figures = run.report | {"step_ms": step_ms, "tokens_per_second": tokens_per_second}
    return replace(run, report=figures, peak_pss=0, peak_rss=0, cpu_seconds=0)  # nothing ran


def summarize(rounds: list[dict[str, Run]]) -> list[Summary]:
    """One line a candidate, in the order in which they were asked for; rounds in which a candidate failed lack it."""
    reference = memory_of(rounds, REFERENCE)
    return [summarize_candidate(candidate, rounds, reference) for candidate in rounds[0]]


def summarize_candidate(candidate: str, rounds: list[dict[str, Run]], reference_memory: int) -> Summary:
    runs = [round_[candidate] for round_ in rounds if candidate in round_]
    speed = [run.report["tokens_per_second"] for run in runs]
    ratios = [
        round_[candidate].report["tokens_per_second"] / round_[REFERENCE].report["tokens_per_second"]
        for round_ in rounds
        if candidate in round_ and REFERENCE in round_
    ]
    memory = memory_of(rounds, candidate)
    return Summary(
        candidate=candidate,
        step_ms=Spread.of([statistics.median(run.report["step_ms"]) for run in runs]),
        tokens_per_second=Spread.of(speed),
        ratio=Spread.of(ratios) if ratios else None,
        memory=memory,
        memory_ratio=memory / reference_memory if reference_memory else None,
        cpu_seconds=statistics.median(run.cpu_seconds for run in runs),
    )


def memory_of(rounds: list[dict[str, Run]], candidate: str) -> int:
    runs = [round_[candidate] for round_ in rounds if candidate in round_]
    return max((run.peak_pss or run.peak_rss for run in runs), default=0)


def markdown(case: str, entry: dict) -> str:
    """`entry`: what compare.json says of the case."""
    lines = [
        f"**{case}**: {CASES[case].title}",
        "",
        "| | ms a step | tokens/s | of FSDP2 (lowest to highest round) | host memory, all ranks | of FSDP2 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for s in summaries_of(entry):
        name = f"**{title(s.candidate)}**" if is_ours(s.candidate) else title(s.candidate)
        ratio = f"{s.ratio.median:.2f} ({s.ratio.low:.2f} to {s.ratio.high:.2f})" if s.ratio else ""
        memory_ratio = f"{s.memory_ratio:.2f}" if s.memory_ratio else ""
        lines.append(
            f"| {name} | {s.step_ms.median:,.0f} | {s.tokens_per_second.median:,.0f} | {ratio} "
            f"| {f'{s.memory / 2**20:,.0f} MiB' if s.memory else ''} | {memory_ratio} |"
        )
    lines += ["", describe(entry["about"], f"{entry['about']['rounds']} rounds of {entry['about']['steps']} steps")]
    if entry.get("trial_ms"):
        lines.append(f"The layout was chosen by a short trial of {len(entry['trial_ms'])}.")
    return "\n".join(lines) + "\n"


def goals(cases: dict[str, dict], out: Path) -> str:
    """What was asked, and what was reached, of the cases that were measured and of what other scripts left in `out`."""
    lines = ["| case | | against | asked | reached (lowest to highest round) |", "|---|---|---|--:|--:|"]
    for goal in GOALS:
        rounds = cases.get(goal.case, {}).get("rounds", [])
        candidate = goal.candidate
        if candidate.endswith(BEST) and rounds:
            chosen = candidate.removesuffix(BEST) + ":"
            candidate = next((name for name in rounds[0] if name.startswith(chosen)), candidate)
        pairs = [(one[candidate], one[goal.against]) for one in rounds if candidate in one and goal.against in one]
        if not pairs:
            continue
        if goal.memory:
            most = [max(run["peak_pss"] or run["peak_rss"] for run in side) for side in zip(*pairs, strict=True)]
            reached = f"{most[0] / most[1]:.2f}"
            asked = f"memory <= {goal.bound:.2f} x"
        else:
            ratio = Spread.of([a["report"]["tokens_per_second"] / b["report"]["tokens_per_second"] for a, b in pairs])
            reached = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
            asked = f"tokens/s >= {goal.bound:.2f} x"
        lines.append(f"| {goal.case} | {title(candidate)} | {title(goal.against)} | {asked} | {reached} |")
    lines += host_cost_goals(out / "host_cost.json") + transport_goals(out / "transport.json")
    return "\n".join(lines) + "\n"


def host_cost_goals(file: Path) -> list[str]:
    lines = []
    for mode, (name, share) in HOST_COST_GOALS.items():
        rounds = [one for one in read(file).get("rounds", []) if mode in one]
        if not rounds:  # not measured, or no Python face was built
            continue
        times = Spread.of([one[REFERENCE]["per_unit_us"] / one[mode]["per_unit_us"] for one in rounds])
        reached = f"1/{times.median:.0f} (1/{times.high:.0f} to 1/{times.low:.0f})"
        lines.append(f"| host cost | {name} | {title(REFERENCE)} | µs a unit and step <= 1/{share} | {reached} |")
    return lines


def transport_goals(file: Path) -> list[str]:
    figures = read(file)
    lines = []
    for ranks, seconds in figures.get("seconds", {}).items() if figures.get("mib") == TRANSPORT_MIB else ():
        for verb in TRANSPORT_VERBS:
            pairs = zip(seconds[verb]["gloo"], seconds[verb]["tesserae"], strict=True)
            times = Spread.of([theirs / ours for theirs, ours in pairs])
            lines.append(
                f"| {TRANSPORT_MIB} MiB, {ranks} ranks | `{verb}` in shared memory | Gloo "
                f"| speed >= {TRANSPORT_GOAL:.2f} x | {times.median:.2f} ({times.low:.2f} to {times.high:.2f}) |"
            )
    return lines


def read(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}


def is_ours(candidate: str) -> bool:
    return candidate.startswith("ours") and candidate not in ("ours-plain", "ours-ceiling")


def machine() -> dict[str, object]:
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model.group(1).strip() if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def computes_bf16() -> bool:
    """Whether this CPU has instructions for products of bf16; without, they take thirty times as long as fp32's."""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return bool(flags and {"avx512_bf16", "amx_bf16", "bf16"} & set(flags.group(1).split()))


def about() -> dict[str, object]:
    """What a file of results says of where and when it was measured."""
    import torch

    return {"machine": machine(), "torch": torch.__version__, "date": datetime.date.today().isoformat()}


def warn_if_busy(program: str, about: dict) -> None:
    if about["machine"]["load_before"] > QUIET_LOAD:
        print(f"{program}: the machine is busy (load {os.getloadavg()[0]:.1f}): figures will be off", file=sys.stderr)


def describe(about: dict, over: str) -> str:
    m = about["machine"]
    return (
        f"{m['cores']} cores ({m['cpu']}), {m['memory_bytes'] / 2**30:.0f} GiB, torch {about['torch']}, "
        f"one thread a rank; medians over {over}, {about['date']}."
    )


def describe_each(described: dict[str, str]) -> list[str]:
    """What describe() says of each name, said once where it is the same for several."""
    names: dict[str, list[str]] = {}
    for name, text in described.items():
        names.setdefault(text, []).append(name)
    return [f"{', '.join(of)}: {text}" for text, of in names.items()] if len(names) > 1 else list(names)


def update_between_markers(file: Path, name: str, text: str) -> bool:
    """Replaces what stands between <!-- name:begin --> and <!-- name:end -->. False if one is missing."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    old = file.read_text() if file.exists() else ""
    before, found, rest = old.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        return False
    file.write_text(f"{before}{begin}\n{text.rstrip()}\n{end}{after}")
    return True


def as_json(summaries: list[Summary]) -> list[dict]:
    return [asdict(summary) for summary in summaries]


def summaries_of(entry: dict) -> list[Summary]:
    """The inverse of as_json."""

    def spread(values: dict | None) -> Spread | None:
        return Spread(**values) if values else None

    spreads = ("step_ms", "tokens_per_second", "ratio")
    return [Summary(**(row | {name: spread(row[name]) for name in spreads})) for row in entry["summary"]]
