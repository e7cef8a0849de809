"""Compares Tesserae with DDP, FSDP1 and FSDP2 of the same torch on the same model, and prints ratios with their spread.

Rounds are interleaved: each runs every candidate once, as freshly started ranks, in a rotated order, so that a slow
minute of the machine hits all alike. Ratios are taken round by round. Run it on a machine that does nothing else:

    python bench/compare.py --cases A,C --rounds 5               # E: fewer, where the CPU has no bf16
    python bench/compare.py --cases tiny,tiny-hosts --quick      # proves in a minute that it works
    python bench/compare.py --candidates fsdp2,ours,ours:ZERO_2  # ours under other strategies or degrees (ours:2,2,4)
    python bench/compare.py --cases D --candidates fsdp2,ours:best  # the best of our layouts, found by a short trial

A case with several hosts (D) needs root and iproute2, see bench/hosts.sh. A case or a candidate that is missing is a
failure, whatever the reason: the rest is measured, and the exit status says it (77 if this machine or this build cannot
run what is missing, 1 if something broke). Results are added to bench/out/compare.json, which bench/plot.py draws;
--update-docs puts the tables of all cases that are in it between the markers in docs/performance.md, and that of case A
into README.md; in both, what was asked and reached, also of what host_cost.py and transport.py measured. --report-only
does so with what is there, and measures nothing.
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
from cases import (
    BEST,
    CASES,
    ROOT,
    WITHOUT_COMMUNICATION,
    Case,
    command,
    default_candidates,
    is_candidate,
    layouts,
    newest_program,
    title,
)
from launch import UNAVAILABLE, Run, Unavailable, launch

ALL = "A,B,C,D,E"
IN_README = ("A",)
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
    parser.add_argument("--steps", type=int, default=3, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 2 steps after 1")
    parser.add_argument("--deadline", type=float, default=900, help="seconds a run")
    parser.add_argument("--step-program", type=Path, help="default: the newest bench_step below build/")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    parser.add_argument("--report-only", action="store_true", help="measure nothing; for --update-docs")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.warmup = 2, 2, 1
    if not options.report_only and options.warmup + options.steps < LEAST_STEPS:
        parser.error(f"--warmup and --steps: {LEAST_STEPS} steps together, or losses show nothing of the optimizer")
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
    """Fewer and shorter rounds where a step takes half a minute; as many steps as check() must see."""
    if CASES[name].precision != "bf16" or report.computes_bf16():
        return options
    few = {"rounds": min(options.rounds, 3), "steps": 1, "warmup": LEAST_STEPS - 1}
    progress(f"{name}: this CPU has no bf16: {few['rounds']} rounds of {LEAST_STEPS} steps", done=True)
    return argparse.Namespace(**{**vars(options), **few})


def compare(name: str, options: argparse.Namespace) -> tuple[list[dict[str, Run]], dict[str, float], int]:
    """One dictionary a round, by candidate; what a trial of our layouts found, if one was asked for (ms a step); and
    the exit status. A candidate that is missing or fails is reported, and left out from then on."""
    case, status = CASES[name], 0
    asked = list(options.candidates or default_candidates(case))
    trial: dict[str, float] = {}
    if any(candidate.endswith(BEST) for candidate in asked):
        trial = try_layouts(name, case, options)
        best = min(trial, key=lambda layout: trial[layout])
        asked = list(dict.fromkeys(c.removesuffix(BEST) + f":{best}" if c.endswith(BEST) else c for c in asked))
    candidates, rounds = list(asked), []
    for index in range(options.rounds):
        runs: dict[str, Run] = {}
        shift = index % max(len(candidates), 1)
        for candidate in candidates[shift:] + candidates[:shift]:
            where = f"{name}, round {index + 1}/{options.rounds}: {title(candidate):35}"
            progress(where)
            try:
                runs[candidate] = run(candidate, case, options, options.steps, options.warmup)
            except Unavailable as reason:
                progress(f"{name}: {title(candidate)} is missing: {reason}", done=True)
                candidates.remove(candidate)
                status = status or UNAVAILABLE
                continue
            except RuntimeError as error:
                progress(f"{name}: {title(candidate)} failed and is left out\n{error}", done=True)
                candidates.remove(candidate)
                status = 1
                continue
            progress(f"{where} {statistics.median(runs[candidate].report['step_ms']):9,.1f} ms a step", done=True)
        rounds.append({candidate: runs[candidate] for candidate in asked if candidate in runs})
    check(name, rounds)
    return report.with_ceilings(rounds), trial, status


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
    statuses = set()
    for name in asked.cases:
        options = for_case(name, asked)
        about = report.about() | {"rounds": options.rounds, "steps": options.steps, "warmup": options.warmup}
        if name == asked.cases[0]:  # later it is this program's own load
            report.warn_if_busy("compare", about)
        try:
            rounds, trial, status = compare(name, options)
        except Unavailable as reason:
            print(f"compare: case {name} is missing: {reason}", file=sys.stderr)
            statuses.add(UNAVAILABLE)
            continue
        statuses.add(status)
        if not rounds[0]:
            continue
        cases[name] = {
            "case": asdict(CASES[name]),
            "about": about,
            "summary": report.as_json(report.summarize(rounds)),
            "trial_ms": trial,
            "rounds": [{c: asdict(r) for c, r in round_.items()} for round_ in rounds],
        }
        print(report.markdown(name, cases[name]))
        # What is done survives a Ctrl-C.
        file.write_text(json.dumps(data, indent=1) + "\n")
        if options.update_docs:
            update_documents(cases, options.out)
    return 1 if 1 in statuses else max(statuses)


def update_documents(cases: dict[str, dict], out: Path) -> None:
    goals = report.goals(cases, out)
    update(ROOT / "docs" / "performance.md", cases, [name for name in CASES if name in ALL], goals)
    update(ROOT / "README.md", cases, IN_README, goals)


def update(document: Path, cases: dict[str, dict], names: Sequence[str], goals: str) -> None:
    images = "images" if document.parent.name == "docs" else "docs/images"
    pictures = f"![Tokens a second, case by case]({images}/speed.png)\n![Memory]({images}/memory.png)\n"
    tables = [report.markdown(name, cases[name]) for name in names if name in cases]
    text = "\n".join([pictures, *tables, goals])
    if cases and not report.update_between_markers(document, "bench", text):
        print(
            f"compare: {document.name} has no <!-- bench:begin --> ... <!-- bench:end -->: left alone", file=sys.stderr
        )


if __name__ == "__main__":
    sys.exit(main())
