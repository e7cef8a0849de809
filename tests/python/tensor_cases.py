"""What parity of tensor parallelism is proved for: the axes, and a small set of cases that has every pair."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, fields

from pairwise import Values, pairwise

LAYOUTS = tuple(
    (p, g, o) for p, g, o in itertools.product((1, 2, 4), repeat=3) if g % p == 0 and o % g == 0
)  # of four data-parallel ranks
AXES: dict[str, tuple[object, ...]] = {
    "model": ("llama", "mistral", "gpt_neox", "gpt2", "t5"),
    "job": ((4, 2), (4, 4), (8, 2), (8, 4)),  # ranks, and how many of them are tensor-parallel
    "layout": LAYOUTS,
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP"),
    "precision": ("fp32", "bf16"),
    "accumulate": (False, True),
    "clip": (True, False),
    "checkpoint": (False, True),
    "use_orig_params": (True, False),
    "optimizer": ("sgd", "adamw"),
    "sequence": (False, True),
}


@dataclass(frozen=True)
class TensorCase:
    model: str
    job: tuple[int, int]
    layout: tuple[int, int, int]
    strategy: str
    precision: str
    accumulate: bool
    clip: bool
    checkpoint: bool
    use_orig_params: bool
    optimizer: str
    sequence: bool

    def __str__(self) -> str:
        flags = ("accumulate", "clip", "checkpoint", "sequence")
        words = [
            self.model,
            f"{self.job[0]} ranks of which {self.job[1]} split",
            "P={} G={} O={}".format(*self.layout),
            self.strategy,
            self.precision,
            self.optimizer,
            *(name for name in flags if getattr(self, name)),
            *(() if self.use_orig_params else ("flat",)),
        ]
        return ", ".join(words)

    @property
    def data_ranks(self) -> int:
        return self.job[0] // self.job[1]


assert tuple(AXES) == tuple(field.name for field in fields(TensorCase))


def possible(values: Values) -> bool:
    """Each degree divides the number of data-parallel ranks; axes that `values` leaves open do not count."""
    if "job" not in values or "layout" not in values:
        return True
    ranks, split = values["job"]  # type: ignore[misc]
    return max(values["layout"]) <= ranks // split  # type: ignore[call-overload]


@functools.cache
def cover() -> list[TensorCase]:
    """Every pair of values."""
    return [TensorCase(**values) for values in pairwise(AXES, possible, {})]  # type: ignore[arg-type]


def product() -> list[TensorCase]:
    """Every combination of models, jobs and layouts with what computes otherwise; clipping, lifetimes and the rest
    are drawn for each."""
    exhaustive = ("model", "job", "layout", "precision", "accumulate", "checkpoint")
    rest = [axis for axis in AXES if axis not in exhaustive]
    choice = random.Random(1)
    cases = []
    for combination in itertools.product(*(AXES[axis] for axis in exhaustive)):
        values: Values = dict(zip(exhaustive, combination, strict=True))
        if possible(values):
            drawn = {axis: choice.choice(AXES[axis]) for axis in rest}
            cases.append(TensorCase(**values, **drawn))  # type: ignore[arg-type]
    return cases
