"""Compares Tesserae with DDP, FSDP1 and FSDP2 of the same torch on the same model, and prints ratios with their spread.

Rounds are interleaved: each runs every candidate once, as freshly started ranks, in a rotated order, so that a slow
minute of the machine hits all alike. Ratios are taken round by round. Run it on a machine that does nothing else:

    python bench/compare.py --cases A,C --rounds 5
    python bench/compare.py --cases tiny --quick                 # proves in seconds that it works
    python bench/compare.py --candidates fsdp2,ours,ours:ZERO_2  # ours under other strategies or degrees (ours:2,2,4)

Writes bench/out/compare.json and, where matplotlib is installed, bench/out/compare.png; --update-docs puts the table
between the markers in README.md and docs/performance.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import report
from cases import CASES, DEFAULT, ROOT, WITHOUT_COMMUNICATION, Case, command, is_candidate, newest_program, title
from launch import Run, launch

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
QUIET_LOAD = 0.5
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2}  # relative; fp32 differs in the order of sums only


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="A,C", help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--candidates", default=",".join(DEFAULT), help="separated by commas, or by spaces if degrees are given"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps a run")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 2 steps after 1")
    parser.add_argument("--deadline", type=float, default=900, help="seconds a run")
    parser.add_argument("--step-program", type=Path, help="default: the newest bench_step below build/")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.warmup = 2, 2, 1
    options.cases = options.cases.split(",")
    separator = None if " " in options.candidates.strip() else ","
    options.candidates = options.candidates.split(separator)
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; cases are {', '.join(CASES)}")
    if unknown := [name for name in options.candidates if not is_candidate(name)]:
        parser.error(f"unknown candidate {unknown[0]!r}; see TITLES in bench/cases.py")
    if any(name.startswith("ours") for name in options.candidates):
        options.step_program = options.step_program or newest_program("bench_step")
        if not options.step_program:
            parser.error(
                "no bench_step below build/: build it (cmake --build build/release --target bench_step) "
                "or name it with --step-program"
            )
    return options


def compare(name: str, options: argparse.Namespace) -> list[dict[str, Run]]:
    """One dictionary a round, by candidate. A candidate that fails is reported and left out from then on."""
    case, candidates = CASES[name], list(options.candidates)
    rounds: list[dict[str, Run]] = []
    for index in range(options.rounds):
        runs: dict[str, Run] = {}
        shift = index % max(len(candidates), 1)
        for candidate in candidates[shift:] + candidates[:shift]:
            where = f"{name}, round {index + 1}/{options.rounds}: {title(candidate):28}"
            progress(where)
            try:
                runs[candidate] = run(candidate, case, options)
            except RuntimeError as error:
                progress(f"{name}: {title(candidate)} failed and is left out\n{error}", done=True)
                candidates.remove(candidate)
                continue
            progress(f"{where} {statistics.median(runs[candidate].report['step_ms']):9,.1f} ms a step", done=True)
        rounds.append({candidate: runs[candidate] for candidate in options.candidates if candidate in runs})
    check(name, rounds)
    return rounds


def run(candidate: str, case: Case, options: argparse.Namespace) -> Run:
    timing = ["--steps", str(options.steps), "--warmup", str(options.warmup)]
    return launch([*command(candidate, options.step_program), *case.arguments(), *timing], case.ranks, options.deadline)


def check(name: str, rounds: list[dict[str, Run]]) -> None:
    """The comparison is only fair if all train the same thing. Raises RuntimeError if they do not."""
    reports = {candidate: run.report for round_ in rounds for candidate, run in round_.items()}
    for key in ("parameters", "tokens_per_step", "precision"):
        values = {candidate: report[key] for candidate, report in reports.items()}
        if len(set(values.values())) > 1:
            raise RuntimeError(f"case {name}: candidates differ in {key}: {values}")
    # All start from the same parameters and see the same tokens. Without communication a rank knows its own loss only.
    for alone in (False, True):
        losses = {c: r["losses"] for c, r in reports.items() if (c in WITHOUT_COMMUNICATION) == alone}
        reference = next(iter(losses.values()), [])
        for values in losses.values():
            if not all(
                math.isclose(a, b, rel_tol=LOSS_TOLERANCE[CASES[name].precision])
                for a, b in zip(values, reference, strict=True)
            ):
                raise RuntimeError(f"case {name}: candidates differ in losses: {losses}")


def progress(text: str, done: bool = False) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if done else "", file=sys.stderr, flush=True)
    elif done:
        print(text, file=sys.stderr, flush=True)


def main() -> int:
    options = parse()
    import torch

    data = {
        "machine": report.machine(),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "steps": options.steps,
        "warmup": options.warmup,
        "date": datetime.date.today().isoformat(),
        "cases": {},
    }
    if data["machine"]["load_before"] > QUIET_LOAD:
        print(f"compare: the machine is busy (load {os.getloadavg()[0]:.1f}): figures will be off", file=sys.stderr)
    summaries, complete = {}, True
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.cases:
        rounds = compare(name, options)
        complete = complete and all(set(round_) == set(options.candidates) for round_ in rounds)
        if not rounds[0]:
            continue
        summaries[name] = report.summarize(rounds)
        data["cases"][name] = {
            "case": asdict(CASES[name]),
            "summary": report.as_json(summaries[name]),
            "rounds": [{c: asdict(r) for c, r in round_.items()} for round_ in rounds],
        }
        (options.out / "compare.json").write_text(json.dumps(data, indent=1) + "\n")  # what is done survives a Ctrl-C

    tables = [report.markdown(name, summary) for name, summary in summaries.items()]
    text = "\n".join([*tables, report.describe(data)])
    print(text)
    if not report.plot(summaries, options.out / "compare.png"):
        print("compare: no plot: matplotlib is not installed", file=sys.stderr)
    if options.update_docs:
        for document in DOCUMENTS:
            if not report.update_between_markers(document, "bench", text):
                print(
                    f"compare: {document.name} has no <!-- bench:begin --> ... <!-- bench:end -->: left alone",
                    file=sys.stderr,
                )
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
