"""Turns the runs of a comparison into figures, tables and a plot."""

from __future__ import annotations

import os
import platform
import re
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from cases import CASES, REFERENCE, title
from launch import Run


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


def markdown(case: str, summaries: list[Summary]) -> str:
    lines = [
        f"**{case}**: {CASES[case].title}",
        "",
        "| | ms a step | tokens/s | of FSDP2 (lowest to highest round) | host memory, all ranks | of FSDP2 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for s in summaries:
        name = f"**{title(s.candidate)}**" if s.candidate in ("ours", "ours-python") else title(s.candidate)
        ratio = f"{s.ratio.median:.2f} ({s.ratio.low:.2f} to {s.ratio.high:.2f})" if s.ratio else ""
        memory_ratio = f"{s.memory_ratio:.2f}" if s.memory_ratio else ""
        lines.append(
            f"| {name} | {s.step_ms.median:,.0f} | {s.tokens_per_second.median:,.0f} | {ratio} "
            f"| {s.memory / 2**20:,.0f} MiB | {memory_ratio} |"
        )
    return "\n".join(lines) + "\n"


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


def describe(data: dict) -> str:
    m = data["machine"]
    return (
        f"{m['cores']} cores ({m['cpu']}), {m['memory_bytes'] / 2**30:.0f} GiB, torch {data['torch']}, Gloo, "
        f"one thread a rank; medians over {data['rounds']} rounds of {data['steps']} steps, {data['date']}."
    )


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


def plot(results: dict[str, list[Summary]], file: Path) -> bool:
    """Tokens/s and memory against the reference, a group of bars a case. False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 1.2 + 0.35 * sum(map(len, results.values()))
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, height), sharey=True)
    labels, position = [], 0.0
    for case, summaries in results.items():
        for s in summaries:
            colour = "tab:orange" if s.candidate.startswith("ours") else "tab:gray"
            if s.ratio:
                error = [[s.ratio.median - s.ratio.low], [s.ratio.high - s.ratio.median]]
                speed.barh(position, s.ratio.median, xerr=error, color=colour)
            memory.barh(position, s.memory / 2**30, color=colour)
            labels.append((position, f"{case}: {title(s.candidate)}"))
            position += 1
        position += 0.7
    speed.set_yticks([p for p, _ in labels], [text for _, text in labels])
    speed.invert_yaxis()
    speed.axvline(1.0, color="black", linewidth=0.8)
    speed.set_xlabel("tokens/s, FSDP2 = 1 (bar: median; line: lowest to highest round)")
    memory.set_xlabel("host memory of all ranks, GiB")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    return True


def as_json(summaries: list[Summary]) -> list[dict]:
    return [asdict(summary) for summary in summaries]
