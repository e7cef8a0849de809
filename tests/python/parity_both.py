"""Trains cases of parity_test.py on FSDP1 and on ours, in the same rank, and says what differs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from closeness import distance, furthest, way_off
from parity_cases import ParityCase, reference
from parity_train import Outcome, train


@dataclass(frozen=True)
class Tolerance:
    """Relative. In low precision both sides round at the same places, but sums are taken in another order, and what
    differs in the last bit of a sum may round to another neighbour: 2^-8 away in bf16, 2^-11 in fp16, a few times over.
    """

    loss: float
    gradients: float  # their norm, and parameters that have moved along them
    way_sgd: float  # see way_off(); three to five times what was seen
    way_adamw: float  # its steps have one length: where a small gradient is rounded to the other sign, they go back


TOLERANCES = {
    # AdamW makes whole steps of gradients that are nothing but rounding: those of biases of keys.
    "fp32": Tolerance(1e-5, 1e-5, way_sgd=1e-4, way_adamw=3e-4),
    "reduce_bf16": Tolerance(1e-3, 4e-3, way_sgd=2e-2, way_adamw=0.2),
    "bf16": Tolerance(2e-2, 2e-2, way_sgd=0.3, way_adamw=0.7),
    "pure_bf16": Tolerance(2e-2, 2e-2, way_sgd=0.3, way_adamw=0.7),
    "fp16": Tolerance(4e-3, 4e-3, way_sgd=0.15, way_adamw=0.7),
}


def differences(case: ParityCase, ours: Outcome, theirs: Outcome) -> list[str]:
    tolerance, found = TOLERANCES[case.precision], []
    other_kernels = case.checkpoint == "reentrant"  # which runs forward without gradients; the reference does not
    # No sum over ranks has happened yet.
    if not other_kernels and ours.losses[0] != theirs.losses[0]:
        found.append(f"the first loss is {ours.losses[0]}, not exactly {theirs.losses[0]}")
    if not furthest(ours.losses, theirs.losses) <= tolerance.loss:
        found.append(f"losses {ours.losses}, not {theirs.losses}")
    if not furthest(ours.norms, theirs.norms) <= tolerance.gradients:
        found.append(f"norms {ours.norms}, not {theirs.norms}")
    if ours.names != theirs.names:
        found.append(f"parameters are called {ours.names}, not {theirs.names}")
    if list(ours.state) != list(theirs.state):
        found.append(f"state dict has {list(ours.state)}, not {list(theirs.state)}")
        return found
    for name, expected in theirs.state.items():
        value = ours.state[name]
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            found.append(f"{name} is {value.dtype} {list(value.shape)}, not {expected.dtype} {list(expected.shape)}")
        # In low precision what began as zeros has the rounding of its way, which is looked at below.
        elif case.optimizer == "sgd" and (case.precision == "fp32" or theirs.initial[name].any()):
            if not distance(value, expected) <= tolerance.gradients * (1.5 if other_kernels else 1):
                found.append(f"{name} is {distance(value, expected):.1e} away")
        off = way_off(value, expected, theirs.initial[name])
        way_adamw = tolerance.way_adamw * (5 if other_kernels else 1)
        if not off <= (tolerance.way_sgd if case.optimizer == "sgd" else way_adamw):
            found.append(f"{name} ended off by {off:.1e} of its way")
    return found


def train_both(rank: int, world_size: int, cases: list[ParityCase]) -> list[list[str]]:
    """What differs, for each case."""
    theirs = [train(reference(case, torch.accelerator.is_available())) for case in cases]

    import tesserae as tsm

    tsm.init()
    found = []
    for case, expected in zip(cases, theirs):
        print(case, flush=True)  # in the report, if it is the last
        found.append(differences(case, train(case), expected))
    tsm.uninstall()
    return found
