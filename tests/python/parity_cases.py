"""What parity is proved for: the axes, what FSDP1 itself cannot do, and a small set of cases that has every pair.

A pairwise cover contains, for any two axes, every combination of their values that is possible at all. Most faults
of options that meet need no more than two of them.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace

from models import MODELS

AXES: dict[str, tuple[object, ...]] = {
    "model": tuple(MODELS),
    "policy": ("none", "transformer", "size", "lambda", "module", "manual"),
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
    "precision": ("fp32", "bf16", "pure_bf16", "fp16", "reduce_bf16"),
    "accumulate": ("none", "no_sync", "every"),  # every: two backwards a step, both reduced
    "world": (2, 4),
    "offload": (False, True),
    "use_orig_params": (True, False),
    "optimizer": ("sgd", "adamw"),
    "clip": (False, True),
    "checkpoint": ("none", "no_reentrant", "reentrant"),
}
OPTIONS = ("strategy", "precision", "accumulate", "offload", "use_orig_params", "policy")
ORDER = {axis: place for place, axis in enumerate(AXES)}
EXACT = 14
Pair = tuple[tuple[str, object], tuple[str, object]]


@dataclass(frozen=True)
class ParityCase:
    model: str
    policy: str
    strategy: str
    precision: str
    accumulate: str
    world: int
    offload: bool
    use_orig_params: bool
    optimizer: str
    clip: bool
    checkpoint: str

    def __str__(self) -> str:
        flags = {
            "offload": self.offload,
            "flat": not self.use_orig_params,
            "clip": self.clip,
            self.checkpoint: self.checkpoint != "none",
        }
        words = [
            self.model,
            self.policy,
            self.strategy,
            self.precision,
            f"accumulate={self.accumulate}",
            f"{self.world} ranks",
            self.optimizer,
            *(name for name, on in flags.items() if on),
        ]
        return ",".join(words).replace(" ", "")

    def pairs(self) -> Iterator[Pair]:
        return itertools.combinations(asdict(self).items(), 2)


assert tuple(AXES) == tuple(field.name for field in fields(ParityCase))


def possible(values: dict[str, object]) -> bool:
    """Whether FSDP1 can do it; axes that `values` leaves open do not count."""
    model = MODELS.get(str(values.get("model")))
    if model is None or model.uniform:
        return True
    # "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`". And reentrant checkpointing
    # gives no gradient to a block whose input needs none, as the first one after a frozen embedding; in FSDP1 it does.
    return values.get("use_orig_params") is not False and values.get("checkpoint") != "reentrant"


def reference(case: ParityCase, accelerator: bool) -> ParityCase:
    """What FSDP1 trains to know what is right: options that change no number, and that it can not do or does wrongly,
    are left out.

    It offloads only with an accelerator. Under reentrant checkpointing, torch 2.13's fails for a root with blocks of
    its own and for a unit that is called twice, or trains to other numbers than the model without FSDP.
    """
    checkpoint = "no_reentrant" if case.checkpoint == "reentrant" else case.checkpoint
    return replace(case, offload=case.offload and accelerator, checkpoint=checkpoint)


def product(seed: int = 1) -> list[ParityCase]:
    """Every combination of the options of FSDP; the axes beside those (model, ranks, optimizer) are drawn for each."""
    choice = random.Random(seed)
    cases = []
    for combination in itertools.product(*(AXES[axis] for axis in OPTIONS)):
        options = dict(zip(OPTIONS, combination))
        while not possible(values := {axis: choice.choice(AXES[axis]) for axis in AXES} | options):
            if not possible(options):
                break
        else:
            cases.append(ParityCase(**values))  # type: ignore[arg-type]
    return cases


def cover() -> list[ParityCase]:
    """Every pair of values; and, because low precision hides small faults, more cases where all numbers are compared
    closely."""
    exact: dict[str, object] = {"precision": "fp32", "optimizer": "sgd"}
    return list(dict.fromkeys(pairwise({}) + pairwise(exact)[:EXACT]))


def pairwise(fixed: dict[str, object], seed: int = 1) -> list[ParityCase]:
    """Cases with these values that have every possible pair of the others; those that add most pairs come first.

    Greedy, and the same in every process: a case starts at a pair that is still missing; each further axis takes the
    value that adds the most missing pairs; the best of some tries is taken.
    """
    choice = random.Random(seed)
    missing = {
        pair
        for a, b in itertools.combinations(AXES, 2)
        for pair in itertools.product(((a, x) for x in AXES[a]), ((b, y) for y in AXES[b]))
        if possible(fixed | dict(pair)) and all(fixed.get(axis, value) == value for axis, value in pair)
    }
    cases: list[ParityCase] = []
    while missing:
        start = fixed | dict(min(missing, key=repr))
        best = max(
            (complete(start, missing, choice) for _ in range(40)),
            key=lambda case: len(missing.intersection(case.pairs())),
        )
        cases.append(best)
        missing.difference_update(best.pairs())
    return cases


def complete(start: dict[str, object], missing: set[Pair], choice: random.Random) -> ParityCase:
    values = dict(start)

    def gain(axis: str, value: object) -> tuple[int, float]:
        pairs = [((a, values[a]), (axis, value)) for a in values]
        new = missing.intersection(pair if ORDER[pair[0][0]] < ORDER[axis] else pair[::-1] for pair in pairs)
        return len(new), choice.random()

    for axis in sorted((axis for axis in AXES if axis not in values), key=lambda _: choice.random()):
        options = [value for value in AXES[axis] if possible(values | {axis: value})]
        values[axis] = max(options, key=functools.partial(gain, axis))
    return ParityCase(**values)  # type: ignore[arg-type]
