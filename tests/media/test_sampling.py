"""Choosing frames, without any video."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmaccel.media.sampling import grid, nearest, uniform


@given(st.integers(1, 500), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_uniform_starts_at_the_first_frame_and_spreads_evenly(total: int, count: int) -> None:
    if count > total:
        return
    numbers = uniform(total, count)
    assert numbers == (np.arange(count) * total // count).tolist()
    assert len(set(numbers)) == count and numbers[0] == 0 and numbers[-1] < total


def test_grid_ends_before_stop() -> None:
    assert list(grid(1.0, 4, 2.0)) == [1.0, 1.25, 1.5, 1.75]
    assert list(itertools.islice(grid(0.0, 3), 4)) == [0.0, 1 / 3, 2 / 3, 1.0]


@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=40, unique=True),
    st.integers(1, 40),
    st.integers(0, 3000),
)
@settings(max_examples=150, deadline=None)
def test_nearest_agrees_with_a_search_over_all(places: list[int], fps: int, tail: int) -> None:
    times = np.sort(np.array(places)) / 1000
    end = times[-1] + tail / 1000
    kept = [
        round(place * 1000)
        for place, _ in nearest(
            zip(times, times, strict=True), grid(0.0, fps), None, lambda place, _: place + tail / 1000
        )
    ]
    wanted = list(itertools.takewhile(lambda target: target <= times[-1] or target < end, grid(0.0, fps)))
    gaps = np.abs(times[None] - np.array(wanted)[:, None])
    first = np.argmax(gaps <= gaps.min(1, keepdims=True) + 1e-9, axis=1)
    assert kept == [round(times[place] * 1000) for place in first]


def test_nearest_holds_two_items_at_a_time() -> None:
    class Item:
        pass

    alive: weakref.WeakSet[Item] = weakref.WeakSet()
    most = 0

    def stream() -> Iterator[tuple[float, Item]]:
        nonlocal most
        for place in range(5000):
            item = Item()
            alive.add(item)
            most = max(most, len(alive))
            yield float(place), item

    picked = sum(1 for _ in nearest(stream(), grid(0.0, 0.1)))
    assert picked == 500
    assert most <= 4


@pytest.mark.parametrize("target", [[], [5.0]])
def test_nearest_of_nothing_is_nothing(target: list[float]) -> None:
    assert list(nearest([], target)) == []
