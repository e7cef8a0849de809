"""What it costs a step of `tesserae train` to be able to go on after a loss, and to find a bit that changes.

    python bench/protection_train.py                 # 34 M parameters, 4 ranks, degree 2; about 6 minutes

Jobs take turns, each as freshly started ranks: without protection, with lost ranks replaced (replicas hold the state),
with a copy in memory of the host after every step, and with replicas compared. Ratios are taken round by round; what a
comparison takes is spread over the steps between two of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from cases import add_model
from train_run import TrainRun, newest_tesserae, train

WARM = 4  # steps: buffers are made
EVERY = 8  # steps between comparisons here
ASKED = 100  # between them in a long run
KINDS: dict[str, dict[str, object]] = {
    "unprotected": {},
    "lost ranks are replaced": {"recovery.replacements": 8},
    "and a copy in memory after every step": {"recovery.replacements": 8, "checkpoint.memory_every_steps": 1},
    "and replicas are compared": {"recovery.replacements": 8, "recovery.check_replicas_every_steps": EVERY},
}


def steps_of(run: TrainRun) -> list[float]:
    """Milliseconds, without the steps after which replicas were compared: what that takes is told apart."""
    return [record["step_ms"] for record in run.steps[WARM:] if not record.get("replica_check_ms")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, sequence=128)
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of a run")
    options = parser.parse_args()
    program = newest_tesserae()
    if program is None:
        sys.exit("protection_train: build first: make build")
    job = {f"model.{key}": getattr(options, key) for key in ("dimension", "layers", "heads", "vocabulary")}
    job |= {
        "data.sequence_length": options.sequence,
        "train.batch_per_rank": 1,
        "train.accumulate": 1,
        "train.steps": options.steps,
        "hybrid_shard_degree": options.degree,
    }
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    checks: list[float] = []
    copies: list[dict] = []
    for turn in range(options.rounds):
        kinds = list(KINDS)
        kinds = kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]
        for kind in kinds:
            run = train(program, {**job, **KINDS[kind]}, options.ranks, deadline=600)
            medians[kind].append(statistics.median(steps_of(run)))
            checks += [record["replica_check_ms"] for record in run.steps if record.get("replica_check_ms")]
            if in_memory := run.summary.get("checkpoints", {}).get("in_memory"):
                copies.append(in_memory)
            print(f"round {turn + 1} of {options.rounds}, {kind}: {medians[kind][-1]:.1f} ms a step", file=sys.stderr)
    base = medians["unprotected"]
    print("| | a step, ms (lowest to highest round) | of the first, by round |\n|---|--:|--:|")
    for kind, found in medians.items():
        ratios = [mine / other for mine, other in zip(found, base, strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"| {kind} | {statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f}) | {spread} |")
    check, step = statistics.median(checks), statistics.median(base)
    print(
        f"\nTo compare takes {check:.1f} ms ({min(checks):.1f} to {max(checks):.1f}), {100 * check / step / ASKED:.2f} "
        f"% of a step if it is done every {ASKED} steps."
    )
    each = [copy["seconds"] / copy["copies"] for copy in copies]
    waited = [copy["waited_seconds"] / copy["copies"] for copy in copies]
    print(
        f"A copy is {copies[0]['bytes'] / 1e6:.0f} MB a rank and takes {1e3 * statistics.median(each):.0f} ms beside "
        f"forward and backward, for which training waits {1e3 * statistics.median(waited):.1f} ms a step."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
