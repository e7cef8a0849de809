"""Turns the runs of a comparison into figures and tables; bench/plot.py draws them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cases import (
    BEST,
    CASES,
    CEILINGS,
    FSDP1,
    FSDP2,
    GOALS,
    MODELS,
    OURS_PYTHON,
    REFERENCE,
    ROOT,
    Goal,
    title,
)
from launch import Run

QUIET_LOAD = 0.5
GOALS_HEAD = "| case | | against | target | reached (lowest to highest round) |\n|---|---|---|--:|--:|"
Rounds = list[dict[str, dict]]  # as compare.json has them
# What was asked of what host_cost.py (the part of FSDP2's) and transport.py measure.
HOST_COST_GOALS = {
    "sharded": ("Tesserae, C++", 20),
    "tesserae": ("Tesserae, Python, FSDP1's script", 8),
    "tesserae2": ("Tesserae, Python, FSDP2's script", 8),
}
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
    ratio: Spread | None  # of tokens/s to the fastest line of FSDP2, taken round by round; None: none ran
    memory: int  # the peak of all processes together, in bytes (PSS; RSS where the system has no PSS); 0: none ran
    memory_ratio: float | None  # to the line of FSDP2 that needs least
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
    plain = [{name: asdict(run) for name, run in one.items()} for one in rounds]
    fastest, leanest = fastest_of(plain, FSDP2), leanest_of(plain, FSDP2)
    return [summarize_candidate(candidate, rounds, plain, fastest, leanest) for candidate in rounds[0]]


def summarize_candidate(
    candidate: str, rounds: list[dict[str, Run]], plain: Rounds, fastest: str | None, leanest: str | None
) -> Summary:
    runs = [round_[candidate] for round_ in rounds if candidate in round_]
    memory = memory_of(plain, candidate)
    return Summary(
        candidate=candidate,
        step_ms=Spread.of([statistics.median(run.report["step_ms"]) for run in runs]),
        tokens_per_second=Spread.of([run.report["tokens_per_second"] for run in runs]),
        ratio=ratio_of(plain, candidate, fastest),
        memory=memory,
        memory_ratio=memory / memory_of(plain, leanest) if leanest else None,
        cpu_seconds=statistics.median(run.cpu_seconds for run in runs),
    )


def ratio_of(rounds: Rounds, candidate: str | None, against: str | None) -> Spread | None:
    """Of tokens/s, round by round."""
    pairs = [(one[candidate], one[against]) for one in rounds if candidate in one and against in one]
    ratios = [a["report"]["tokens_per_second"] / b["report"]["tokens_per_second"] for a, b in pairs]
    return Spread.of(ratios) if ratios else None


def fastest_of(rounds: Rounds, candidates: Sequence[str]) -> str | None:
    """The one of them with the highest median of tokens/s; None if none ran."""

    def speed(name: str) -> float:
        return statistics.median(one[name]["report"]["tokens_per_second"] for one in rounds if name in one)

    return max((name for name in candidates if rounds and name in rounds[0]), key=speed, default=None)


def leanest_of(rounds: Rounds, candidates: Sequence[str]) -> str | None:
    """The one of them that needs the least memory; None if none ran."""
    ran = (name for name in candidates if rounds and name in rounds[0] and memory_of(rounds, name))
    return min(ran, key=lambda name: memory_of(rounds, name), default=None)


def memory_of(rounds: Rounds, candidate: str) -> int:
    runs = [round_[candidate] for round_ in rounds if candidate in round_]
    return max((run["peak_pss"] or run["peak_rss"] for run in runs), default=0)


def markdown(case: str, entry: dict) -> str:
    """`entry`: what compare.json says of the case."""
    lines = [
        f"**{heading(case)}**: {CASES[case].title}",
        "",
        "| | ms a step | tokens/s | of the fastest FSDP2 (lowest to highest round) | host memory, all ranks "
        "| of the leanest FSDP2 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for s in summaries_of(entry):
        name = f"**{title(s.candidate)}**" if is_ours(s.candidate) else title(s.candidate)
        memory = f"{s.memory / 2**20:,.0f} MiB" if s.memory else ""
        memory_ratio = f"{s.memory_ratio:.2f}" if s.memory and s.memory_ratio else ""
        lines.append(
            f"| {name} | {s.step_ms.median:,.0f} | {s.tokens_per_second.median:,.0f} | {told(s.ratio)} "
            f"| {memory} | {memory_ratio} |"
        )
    lines += ["", describe(entry["about"], f"{entry['about']['rounds']} rounds of {entry['about']['steps']} steps")]
    if imports := entry["about"].get("imports_bytes"):
        lines.append(
            f"Of a Python rank's memory {imports / 2**20:,.0f} MiB are the interpreter and torch, imported alone."
        )
    if entry.get("trial_ms"):
        lines.append(f"The layout was chosen by a short trial of {len(entry['trial_ms'])}.")
    return "\n".join(lines) + "\n"


def heading(case: str) -> str:
    return f"{case.partition('/')[0]}, {MODELS[CASES[case].model]}"


def told(ratio: Spread | None) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""


def headline(cases: dict[str, dict]) -> str:
    """For the README: a line for each case and model, of our Python face beside PyTorch; nothing if none was
    measured."""
    lines, ratios, ddp, tokens, about = [], [], [], [], {}
    for name, entry in cases.items():
        rounds = entry["rounds"]
        ours, fsdp2, leanest = fastest_of(rounds, OURS_PYTHON), fastest_of(rounds, FSDP2), leanest_of(rounds, FSDP2)
        ratio = ratio_of(rounds, ours, fsdp2)
        if not ours or not ratio or not leanest:
            continue
        about = about or entry["about"]
        ratios.append(ratio)
        speed = Spread.of([one[ours]["report"]["tokens_per_second"] for one in rounds if ours in one])
        others = [ratio_of(rounds, ours, other) for other in (fastest_of(rounds, FSDP1), "ddp", "ceiling")]
        ddp += [others[1].median] if others[1] else []
        tokens.append(CASES[name].sequence * CASES[name].batch)
        cells = [
            f"{heading(name)}: {CASES[name].title}",
            f"{speed.median:,.0f}",
            told(ratio),
            *(f"{other.median:.2f}" if other else "" for other in others),
            f"{memory_of(rounds, ours) / memory_of(rounds, leanest):.2f}",
            told(ratio_of(rounds, fastest_of(rounds, ours_in_cpp(rounds)), fsdp2)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return ""
    machine, low, high = about["machine"], min(one.low for one in ratios), max(one.high for one in ratios)
    columns = ("Tesserae, Python: tokens/s", "of FSDP2 (lowest to highest round)", "of FSDP1", "of DDP")
    columns += ("of the ceiling", "memory, of FSDP2's", "Tesserae, C++: of FSDP2 (lowest to highest round)")
    of_more = [f"{name.partition('/')[0]}: {CASES[name].steps}" for name in cases if CASES[name].steps > about["steps"]]
    longer = f" ({', '.join(dict.fromkeys(of_more))})" if of_more else ""
    of_ddp = f", and {min(ddp):.2f} to {max(ddp):.2f} times as many as DDP (medians)" if ddp else ""
    above = (
        f"On Tesserae the faster of the FSDP1 and the FSDP2 script trains {low:.2f} to {high:.2f} times as many tokens "
        f"a second as torch's FSDP2 (over all rounds of all cases){of_ddp}: {machine['cores']} cores "
        f"({machine['cpu']}), one thread and {min(tokens)} to {max(tokens)} tokens a rank, torch {about['torch']}, the "
        "peers over Gloo, ours through shared memory within a host and over Gloo between hosts."
    )
    below = (
        "Each library in its fastest variant; memory against FSDP2's leanest. The ceiling is a step whose "
        f"communication is free: computation and 1/N of the optimizer. {about['rounds']} rounds of {about['steps']} "
        f"steps{longer}, {about['date']}: `make bench BENCH=compare`."
    )
    table = [f"| case | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}", *lines]
    return "\n".join([textwrap.fill(above, 120), "", *table, "", textwrap.fill(below, 120)]) + "\n"


def ours_in_cpp(rounds: Rounds) -> list[str]:
    """Those that send exact numbers."""
    return [name for name in rounds[0] if name.partition(":")[0] == "ours"] if rounds else []


def goals(cases: dict[str, dict], out: Path | None = None) -> str:
    """What was asked, and what was reached, of the cases that were measured and of what other scripts left in `out`."""
    lines = [GOALS_HEAD, *(line for goal in GOALS for line in goal_line(goal, cases))]
    if out:
        lines += host_cost_goals(out / "host_cost.json") + transport_goals(out / "transport.json")
    return "\n".join(lines) + "\n"


def goal_line(goal: Goal, cases: dict[str, dict]) -> list[str]:
    """None of a case that was not measured."""
    rounds = cases.get(goal.case, {}).get("rounds", [])
    candidate = goal.candidate
    if candidate.endswith(BEST) and rounds:
        chosen = candidate.removesuffix(BEST) + ":"
        candidate = next((name for name in rounds[0] if name.startswith(chosen)), candidate)
    against = (leanest_of if goal.memory else fastest_of)(rounds, goal.against)
    ratio = ratio_of(rounds, candidate, against)
    if not ratio or not against:
        return []
    if goal.memory:
        reached = f"{memory_of(rounds, candidate) / memory_of(rounds, against):.2f}"
        asked = f"memory <= {goal.bound:.2f} x"
    else:
        reached, asked = told(ratio), f"tokens/s >= {goal.bound:.2f} x"
    return [f"| {goal.case} | {title(candidate)} | {title(against)} | {asked} | {reached} |"]


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


def update_performance(name: str, text: str) -> bool:
    """The same of docs/performance.md, where it says so if one is missing."""
    updated = update_between_markers(ROOT / "docs" / "performance.md", name, text)
    if not updated:
        print(f"{name}: docs/performance.md lacks the markers {name}:begin and {name}:end", file=sys.stderr)
    return updated


def as_json(summaries: list[Summary]) -> list[dict]:
    return [asdict(summary) for summary in summaries]


def summaries_of(entry: dict) -> list[Summary]:
    """The inverse of as_json."""

    def spread(values: dict | None) -> Spread | None:
        return Spread(**values) if values else None

    spreads = ("step_ms", "tokens_per_second", "ratio")
    return [Summary(**(row | {name: spread(row[name]) for name in spreads})) for row in entry["summary"]]
