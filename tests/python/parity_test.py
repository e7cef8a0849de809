"""Training on Tesserae is training on torch's own FSDP1: same losses, same norms, same parameters, same state dicts.

Each case is trained twice in the same processes: first on FSDP1, then, after tsm.init(), on ours. Cases share launches,
because starting ranks costs more than training tiny models. A launch that fails is repeated case by case, so that one
fault does not hide the others, and to say whose it is; if it does not come again, all cases of the launch have failed.

test_cover has every pair of values of the axes in parity_cases.py; test_product, marked parity_full, is the product of
all options of FSDP (`make parity`).
"""

from __future__ import annotations

import pytest

from parity_both import train_both
from parity_cases import ParityCase, cover, product
from ranks import RankFailed, run_ranks

A_LAUNCH = 24  # cases


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
