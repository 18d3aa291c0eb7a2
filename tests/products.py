"""Products of cases: always a part that holds each value (or each pair) of its axes; the rest of them is `slow`."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def product(
    *axes: Iterable[Any], together: int = 1, where: Callable[..., bool] = lambda *case: True
) -> list[Any]:
    """Cases for `parametrize`, all of a product for which `where` holds; `slow` but for some that hold every choice of
    `together` axes."""
    values = [list(axis) for axis in axes]
    numbers = itertools.product(*(range(len(axis)) for axis in values))
    cases = [case for case in numbers if where(*(axis[n] for axis, n in zip(values, case, strict=True)))]
    some = list(itertools.combinations(range(len(values)), together))
    left = {(axes, tuple(case[n] for n in axes)) for case in cases for axes in some}
    kept = set()
    while left:
        gains = {case: left & {(axes, tuple(case[n] for n in axes)) for axes in some} for case in cases}
        best = max(cases, key=lambda case: len(gains[case]))
        kept.add(best)
        left -= gains[best]
    slow = {case: () if case in kept else (pytest.mark.slow,) for case in cases}
    return [
        pytest.param(*(axis[n] for axis, n in zip(values, case, strict=True)), marks=slow[case])
        for case in cases
    ]


def crossed(
    *fixtures: str, together: int = 1, where: Callable[..., bool] = lambda *case: True, **axes: Iterable[Any]
) -> pytest.MarkDecorator:
    """`parametrize` by the `product` of `axes`, each by the name of its argument; of these `fixtures` are fixtures."""
    cases = product(*axes.values(), together=together, where=where)
    return pytest.mark.parametrize(tuple(axes), cases, indirect=list(fixtures))
