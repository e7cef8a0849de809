"""Compares Tesserae with DDP, FSDP1 and FSDP2 of the same torch on the same model, and prints ratios with their spread.

Rounds are interleaved: each runs every candidate once, as freshly started ranks, in a rotated order, so that a slow
minute of the machine hits all alike. Ratios are taken round by round. A case is measured with each of its models, whose
rounds take turns; A/gpt2 is case A with that one alone. Run it on a machine that does nothing else:

    python bench/compare.py --cases A,C --rounds 5               # E: fewer, where the CPU has no bf16
    python bench/compare.py --cases tiny,tiny-hosts --quick      # tries every candidate once: proves that all work
    python bench/compare.py --candidates fsdp2,ours,ours:ZERO_2  # ours under other strategies or degrees (ours:2,2,4)
    python bench/compare.py --cases D --candidates fsdp2,ours:best  # the best of our layouts, found by a short trial

A case with several hosts (D) needs root and iproute2, see bench/hosts.sh. A case or a candidate that is missing is a
failure, whatever the reason: the rest is measured, and the exit status says it (77 if this machine or this build cannot
run what is missing, 1 if something broke). Results are added to bench/out/compare.json, which bench/plot.py draws;
--update-docs puts the tables of all cases that are in it between the markers in docs/performance.md, with what was
asked and reached, also of what host_cost.py and transport.py measured, and a table of a line for each case and model
into README.md. --report-only does so with what is there, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import report
import warm
from cases import (
    BEST,
    CASES,
    ROOT,
    WITHOUT_COMMUNICATION,
    Case,
    candidates_of,
    command,
    is_candidate,
    layouts,
    newest_program,
    title,
)
from launch import UNAVAILABLE, Run, Unavailable, launch

ALL = "A,B,C,D,L,E"
BF16 = "E"  # a matter of matrix products: has a section of its own
# The first loss is of the parameters that all start with, the second of an optimizer's first step: those after it tell
# whether gradients were shared and parameters moved.
LEAST_STEPS = 3
# Relative. fp32 differs in the order of sums only, by 1e-7. With bf16, or int8 on the wire, correct runs differ by
# 1e-4, as each rounds where it will; ranks that keep their gradients to themselves by 6e-4 (E) and 1e-3 (D), an
# optimizer that never updates by 3e-3 (E) and 4e-4 (D).
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 3e-4, "int8": 3e-4}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=ALL, help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--candidates",
        default="",
        help="separated by commas, or by spaces if degrees are given; default: those of the case, see bench/cases.py",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those")
    parser.add_argument("--quick", action="store_true", help="1 round of 2 steps after 1")
    parser.add_argument("--deadline", type=float, default=900, help="seconds a run")
    parser.add_argument("--step-program", type=Path, help="default: the newest bench_step below build/")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--warm", action="store_true", help="tests: imports are done once, and no figure is one")
    parser.add_argument("--update-docs", action="store_true")
    parser.add_argument("--report-only", action="store_true", help="measure nothing; for --update-docs")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.warmup = 1, 2, 1
    if not options.report_only and options.warmup + options.steps < LEAST_STEPS:
        parser.error(f"--warmup and --steps: {LEAST_STEPS} steps together, or losses show nothing of the optimizer")
    if options.warm and options.update_docs:
        parser.error("--warm is for tests: what it measures is not for documents")
    options.cases = options.cases.split(",")
    separator = None if " " in options.candidates.strip() else ","
    options.candidates = options.candidates.split(separator) if options.candidates else []
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; cases are {', '.join(CASES)}")
    if unknown := [name for name in options.candidates if not is_candidate(name)]:
        parser.error(f"unknown candidate {unknown[0]!r}; see TITLES in bench/cases.py")
    if options.report_only:
        return options
    if not options.candidates or any(name.startswith("ours") for name in options.candidates):
        options.step_program = options.step_program or newest_program("bench_step")
        if not options.step_program:
            parser.error(
                "no bench_step below build/: build it (cmake --build build/release --target bench_step) "
                "or name it with --step-program"
            )
    return options


def for_case(name: str, options: argparse.Namespace) -> argparse.Namespace:
    """Fewer and shorter rounds where a step takes half a minute, as many steps as check() must see; more where a step
    takes milliseconds."""
    if (steps := CASES[name].steps) > options.steps and not options.quick:
        return argparse.Namespace(**{**vars(options), "steps": steps, "warmup": max(options.warmup, 5)})
    if CASES[name].precision != "bf16" or report.computes_bf16():
        return options
    few = {"rounds": min(options.rounds, 3), "steps": 1, "warmup": LEAST_STEPS - 1}
    progress(f"{name}: this CPU has no bf16: {few['rounds']} rounds of {LEAST_STEPS} steps", done=True)
    return argparse.Namespace(**{**vars(options), **few})


def models_of(name: str, options: argparse.Namespace) -> list[str]:
    """The case with each model for which a candidate was asked."""
    every = [name] if "/" in name else [name, f"{name}/gpt2"]
    return [each for each in every if each in CASES and candidates_of(CASES[each], options.candidates)]


class Comparison:
    """One case with one model. `rounds`: one dictionary a round, by candidate; `trial`: what a trial of our layouts
    found, if one was asked for (ms a step); `status`: that of the program. A candidate that is missing or fails is
    reported, and left out from then on."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.name, self.case, self.options, self.status = name, CASES[name], options, 0
        self.rounds: list[dict[str, Run]] = []
        self.trial: dict[str, float] = {}
        self.asked = candidates_of(self.case, options.candidates)
        if any(candidate.endswith(BEST) for candidate in self.asked):
            self.trial = try_layouts(name, self.case, options)
            best = min(self.trial, key=lambda layout: self.trial[layout])
            named = [c.removesuffix(BEST) + f":{best}" if c.endswith(BEST) else c for c in self.asked]
            self.asked = list(dict.fromkeys(named))
        self.candidates = list(self.asked)

    def round(self, index: int) -> None:
        name, options, candidates, runs = self.name, self.options, self.candidates, dict[str, Run]()
        shift = index % max(len(candidates), 1)
        for candidate in candidates[shift:] + candidates[:shift]:
            where = f"{name}, round {index + 1}/{options.rounds}: {title(candidate):35}"
            progress(where)
            try:
                runs[candidate] = run(candidate, self.case, options, options.steps, options.warmup)
            except Unavailable as reason:
                progress(f"{name}: {title(candidate)} is missing: {reason}", done=True)
                candidates.remove(candidate)
                self.status = self.status or UNAVAILABLE
                continue
            except RuntimeError as error:
                progress(f"{name}: {title(candidate)} failed and is left out\n{error}", done=True)
                candidates.remove(candidate)
                self.status = 1
                continue
            progress(f"{where} {statistics.median(runs[candidate].report['step_ms']):9,.1f} ms a step", done=True)
        self.rounds.append({candidate: runs[candidate] for candidate in self.asked if candidate in runs})


def compare(names: Sequence[str], options: argparse.Namespace) -> list[Comparison]:
    """The case with each of its models: their rounds take turns."""
    comparisons = [Comparison(name, options) for name in names]
    for index in range(options.rounds):
        for each in comparisons if index % 2 == 0 else reversed(comparisons):
            each.round(index)
    for each in comparisons:
        check(each.name, each.rounds)
        each.rounds = report.with_ceilings(each.rounds)
    return comparisons


def try_layouts(name: str, case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step under each layout, from a short run each. Layouts that are nearly as fast may change
    places; the rounds measure the one that is chosen anew."""
    trial = {}
    for layout in layouts(case.ranks):
        figures = run(f"ours:{layout}", case, options, steps=min(3, options.steps), warmup=1).report
        trial[layout] = statistics.median(figures["step_ms"])
        progress(f"{name}, trial: {title(f'ours:{layout}'):35} {trial[layout]:9,.1f} ms a step", done=True)
    return trial


def run(candidate: str, case: Case, options: argparse.Namespace, steps: int, warmup: int) -> Run:
    timing = ["--steps", str(steps), "--warmup", str(warmup)]
    arguments = [*command(candidate, options.step_program, case), *case.arguments(), *timing]
    return launch(arguments, case.ranks, options.deadline, case.hosts, case.rate)


def imports_bytes(case: Case, options: argparse.Namespace) -> int:
    """What a rank holds that has imported torch in Python and nothing else: it is part of every such line's memory. As
    many ranks as the case has, since they share what is mapped from files."""
    program = "import sys, time, torch; time.sleep(2); open(sys.argv[-1], 'w').write('{}')"
    alone = launch([sys.executable, "-c", program], case.ranks, options.deadline, case.hosts, case.rate)
    return (alone.peak_pss or alone.peak_rss) // case.ranks


def check(name: str, rounds: list[dict[str, Run]]) -> None:
    """The comparison is only fair if all train the same thing, in all rounds. Raises RuntimeError if they do not, or if
    there were too few steps to tell."""
    reports = [(candidate, run.report) for round_ in rounds for candidate, run in round_.items()]
    for key in ("parameters", "tokens_per_step", "precision"):
        values = {(candidate, report[key]) for candidate, report in reports}
        if len({value for _, value in values}) > 1:
            raise RuntimeError(f"case {name}: candidates differ in {key}: {sorted(values)}")
    for candidate, figures in reports:
        if (seen := len(figures["losses"])) < LEAST_STEPS:
            raise RuntimeError(f"case {name}: {candidate} has {seen} losses, {LEAST_STEPS} are compared")
    # All start from the same parameters and see the same tokens. Without communication a rank knows its own loss only.
    for alone in (False, True):
        losses = [(c, report["losses"]) for c, report in reports if (c in WITHOUT_COMMUNICATION) == alone]
        exact = (values for c, values in losses if not c.startswith("ours-int8"))
        reference = next(exact, losses[0][1] if losses else [])
        for candidate, values in losses:
            tolerance = LOSS_TOLERANCE["int8" if candidate.startswith("ours-int8") else CASES[name].precision]
            if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(values, reference, strict=True)):
                raise RuntimeError(f"case {name}: candidates differ in losses: {losses}")


def progress(text: str, done: bool = False) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if done else "", file=sys.stderr, flush=True)
    elif done:
        print(text, file=sys.stderr, flush=True)


def main() -> int:
    asked = parse()
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "compare.json"
    data = json.loads(file.read_text()) if file.exists() else {}
    cases = data["cases"] = {name: case for name, case in data.get("cases", {}).items() if "about" in case}
    if asked.report_only:
        print(report.goals(cases, asked.out))
        if asked.update_docs:
            update_documents(cases, asked.out)
        return 0
    if asked.warm:
        warm.prepare()
    statuses = set()
    measured = set[str]()
    for name in asked.cases:
        options = for_case(name, asked)
        models = [each for each in models_of(name, options) if each not in measured]  # "A,A/gpt2" is A
        measured.update(models)
        about = report.about() | {"rounds": options.rounds, "steps": options.steps, "warmup": options.warmup}
        if name == asked.cases[0]:  # later it is this program's own load
            report.warn_if_busy("compare", about)
        try:
            about["imports_bytes"] = imports_bytes(CASES[name], options)
            comparisons = compare(models, options)
        except Unavailable as reason:
            print(f"compare: case {name} is missing: {reason}", file=sys.stderr)
            statuses.add(UNAVAILABLE)
            continue
        for each in comparisons:
            statuses.add(each.status)
            if not each.rounds[0]:
                continue
            cases[each.name] = {
                "case": asdict(each.case),
                "about": about,
                "summary": report.as_json(report.summarize(each.rounds)),
                "trial_ms": each.trial,
                "rounds": [{c: asdict(r) for c, r in round_.items()} for round_ in each.rounds],
            }
            print(report.markdown(each.name, cases[each.name]))
        # What is done survives a Ctrl-C.
        file.write_text(json.dumps(data, indent=1) + "\n")
        if options.update_docs:
            update_documents(cases, options.out)
    return 1 if 1 in statuses else max(statuses)


def update_documents(cases: dict[str, dict], out: Path) -> None:
    performance, readme = ROOT / "docs" / "performance.md", ROOT / "README.md"
    told = {name: cases[name] for name in in_order(cases) if name != BF16}
    if told:
        pictures = "![Tokens a second, case by case](images/speed.png)\n![Memory](images/memory.png)\n"
        tables = [report.markdown(name, entry) for name, entry in told.items()]
        update(performance, "bench", "\n".join([pictures, *tables, report.goals(told, out)]))
    if BF16 in cases:
        only = {BF16: cases[BF16]}
        update(performance, "bf16", f"{report.markdown(BF16, cases[BF16])}\n{report.goals(only)}")
    if headline := report.headline(told):
        update(readme, "bench", f"![Tokens a second, case by case](docs/images/speed.png)\n\n{headline}")


def in_order(cases: dict[str, dict]) -> list[str]:
    """Each case with its models one after the other; those that only prove that it works are not for documents."""
    names = [each for name in ALL.split(",") for each in (name, f"{name}/gpt2")]
    return [name for name in names if name in cases]


def update(document: Path, marker: str, text: str) -> None:
    if not report.update_between_markers(document, marker, text):
        print(f"compare: {document.name} has no <!-- {marker}:begin --> and :end: left alone", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
