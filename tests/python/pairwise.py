"""A small set of cases that has every pair: for any two axes, each combination of their values that is possible at all.

Most faults of options that meet need no more than two of them.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

Values = dict[str, object]
Pair = tuple[tuple[str, object], tuple[str, object]]


def pairwise(
    axes: Mapping[str, Sequence[object]], possible: Callable[[Values], bool], fixed: Values, seed: int = 1
) -> list[Values]:
    """Cases with the values that are `fixed` which have every possible pair of the others; those that add most pairs
    come first. `possible` is asked about some of the axes, too: those that are left out do not count.

    Greedy, and the same in every process: a case starts at a pair that is still missing; each further axis takes the
    value that adds the most missing pairs; the best of some tries is taken.
    """
    choice = random.Random(seed)
    missing = {
        pair
        for a, b in itertools.combinations(axes, 2)
        for pair in itertools.product(((a, x) for x in axes[a]), ((b, y) for y in axes[b]))
        if possible(fixed | dict(pair)) and all(fixed.get(axis, value) == value for axis, value in pair)
    }
    cases: list[Values] = []
    while missing:
        start = fixed | dict(min(missing, key=repr))
        tries = (_complete(start, missing, choice, axes, possible) for _ in range(40))
        best = max(tries, key=lambda case: len(missing.intersection(_pairs(case))))
        cases.append(best)
        missing.difference_update(_pairs(best))
    return cases


def _pairs(case: Values) -> Iterator[Pair]:
    return itertools.combinations(case.items(), 2)


def _complete(
    start: Values,
    missing: set[Pair],
    choice: random.Random,
    axes: Mapping[str, Sequence[object]],
    possible: Callable[[Values], bool],
) -> Values:
    values = dict(start)
    order = {axis: place for place, axis in enumerate(axes)}

    def gain(axis: str, value: object) -> tuple[int, float]:
        pairs = [((a, values[a]), (axis, value)) for a in values]
        new = missing.intersection(pair if order[pair[0][0]] < order[axis] else pair[::-1] for pair in pairs)
        return len(new), choice.random()

    for axis in sorted((axis for axis in axes if axis not in values), key=lambda _: choice.random()):
        options = [value for value in axes[axis] if possible(values | {axis: value})]
        values[axis] = max(options, key=functools.partial(gain, axis))
    return {axis: values[axis] for axis in axes}
