"""Training on Tesserae is training on torch's own FSDP1: same losses, same norms, same parameters, same state dicts.

Each case is trained twice in the same processes: first on FSDP1, then, after tsm.init(), on ours. Cases share launches,
because starting ranks costs more than training tiny models. A launch that fails is repeated case by case, so that one
fault does not hide the others, and to say whose it is; if it does not come again, all cases of the launch have failed.

test_cover has every pair of values of the axes in parity_cases.py; test_product, marked parity_full, is the product of
all options of FSDP (`make parity`).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor

from parity_cases import ParityCase, cover, product, reference
from parity_train import Outcome, train
from ranks import RankFailed, run_ranks

A_LAUNCH = 24  # cases


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
    "fp32": Tolerance(1e-5, 1e-5, way_sgd=1e-4, way_adamw=1e-4),
    "reduce_bf16": Tolerance(1e-3, 4e-3, way_sgd=2e-2, way_adamw=0.2),
    "bf16": Tolerance(2e-2, 2e-2, way_sgd=0.3, way_adamw=0.7),
    "pure_bf16": Tolerance(2e-2, 2e-2, way_sgd=0.3, way_adamw=0.7),
    "fp16": Tolerance(4e-3, 4e-3, way_sgd=0.15, way_adamw=0.7),
}


def furthest(ours: list[float], theirs: list[float]) -> float:
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """max |a - b| / max |b|"""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)).item() if theirs.numel() else 0.0


def way_off(ours: Tensor, theirs: Tensor, initial: Tensor) -> float:
    """How far ours ended from theirs, as a share of the way that theirs has gone: 1 for an optimizer that does nothing,
    whatever it does to losses. What did not move has not moved here either."""
    if theirs.equal(initial):
        return 0.0 if ours.equal(theirs) else float("inf")
    ours, theirs, initial = ours.double(), theirs.double(), initial.double()
    return ((ours - theirs).norm() / (theirs - initial).norm()).item()


def differences(case: ParityCase, ours: Outcome, theirs: Outcome) -> list[str]:
    tolerance, found = TOLERANCES[case.precision], []
    # No sum over ranks has happened yet. (Reentrant checkpointing runs forward without gradients, on other kernels.)
    if case.checkpoint != "reentrant" and ours.losses[0] != theirs.losses[0]:
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
        elif case.optimizer == "sgd" and not distance(value, expected) <= tolerance.gradients:
            found.append(f"{name} is {distance(value, expected):.1e} away")
        off = way_off(value, expected, theirs.initial[name])
        if not off <= (tolerance.way_sgd if case.optimizer == "sgd" else tolerance.way_adamw):
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


def launch(cases: list[ParityCase]) -> list[str]:
    """For each case, what differs on any rank, or how it failed; '' if it holds."""
    try:
        ranks = run_ranks(train_both, cases[0].world, cases, deadline=120 + 10 * len(cases))
    except RankFailed as failure:
        if len(cases) == 1:
            return [str(failure)]
        alone = [text for case in cases for text in launch([case])]
        return alone if any(alone) else [f"failed in a launch of {len(cases)} cases, not alone: {failure}"] * len(cases)
    return [
        "\n".join(f"rank {rank}: {text}" for rank, found in enumerate(ranks) for text in found[index])
        for index in range(len(cases))
    ]


class Results(dict[ParityCase, str]):
    """Launches the group of cases to which one belongs when the first of them is asked for."""

    def __init__(self, cases: list[ParityCase]) -> None:
        super().__init__()
        self.cases = sorted(cases, key=lambda case: case.world)

    def __missing__(self, case: ParityCase) -> str:
        same_world = [other for other in self.cases if other.world == case.world]
        start = same_world.index(case) // A_LAUNCH * A_LAUNCH
        group = same_world[start : start + A_LAUNCH]
        self.update(zip(group, launch(group)))
        return self[case]


def test_a_failure_that_does_not_come_again_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, launches = cover()[:3], []

    def fails_once(function: object, world: int, launched: list[ParityCase], deadline: float) -> list[list[list[str]]]:
        launches.append(len(launched))
        if len(launches) == 1:
            raise RankFailed(1, "went away")
        return [[[] for _ in launched]] * world

    monkeypatch.setitem(globals(), "run_ranks", fails_once)
    assert all("rank 1 went away" in text for text in launch(cases))
    assert launches == [3, 1, 1, 1]


def test_a_failure_that_comes_again_is_that_of_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = cover()[:3]

    def fails(function: object, world: int, launched: list[ParityCase], deadline: float) -> list[list[list[str]]]:
        if cases[1] in launched:
            raise RankFailed(0, "went away")
        return [[[] for _ in launched]] * world

    monkeypatch.setitem(globals(), "run_ranks", fails)
    assert launch(cases) == ["", "rank 0 went away", ""]


COVER, PRODUCT = Results(cover()), Results(product())


@pytest.mark.parametrize("case", COVER.cases, ids=str)
def test_cover(case: ParityCase) -> None:
    assert COVER[case] == ""


@pytest.mark.parity_full
@pytest.mark.parametrize("case", PRODUCT.cases, ids=str)
def test_product(case: ParityCase) -> None:
    assert PRODUCT[case] == ""
