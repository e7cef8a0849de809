"""What parity is proved for: the axes, what FSDP1 itself cannot do, and a small set of cases that has every pair."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, fields, replace

from models import MODELS
from pairwise import pairwise

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
EXACT = 14


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
    """What FSDP1 trains to know what is right: options that change no number, and that it cannot do or does wrongly,
    are left out.

    It offloads only with an accelerator. Under reentrant checkpointing, torch 2.13's fails for a root with blocks of
    its own and for a unit that is called twice, or trains to other numbers than the model without FSDP. Under NO_SHARD
    gradients of another dtype than their parameters' cannot wait for the next backward if a parameter is tied.
    """
    checkpoint = "no_reentrant" if case.checkpoint == "reentrant" else case.checkpoint
    waits = (
        case.strategy == "NO_SHARD" and case.accumulate == "no_sync" and case.precision in ("bf16", "pure_bf16", "fp16")
    )
    strategy = "FULL_SHARD" if waits and case.use_orig_params else case.strategy
    return replace(case, offload=case.offload and accelerator, checkpoint=checkpoint, strategy=strategy)


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


@functools.cache
def cover() -> list[ParityCase]:
    """Every pair of values; and, because low precision hides small faults, more cases where all numbers are compared
    closely."""
    exact: dict[str, object] = {"precision": "fp32", "optimizer": "sgd"}
    cases = pairwise(AXES, possible, {}) + pairwise(AXES, possible, exact)[:EXACT]
    return list(dict.fromkeys(ParityCase(**values) for values in cases))  # type: ignore[arg-type]
