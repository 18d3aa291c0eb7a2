"""Choosing frames, without any video."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmaccel.media.sampling import grid, half_tick, nearest, uniform


@given(st.integers(1, 500), st.integers(1, 500))
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


@given(st.floats(1, 120), st.floats(0.01, 1), st.floats(0, 1), st.integers(2, 60), st.booleans())
def test_even_frames_are_taken_as_the_nearest(
    rate: float, share: float, start: float, count: int, rounded: bool
) -> None:
    """At a rate of at most the source's; also where the container rounds times to milliseconds."""
    times = [round(n / rate, 3) if rounded else n / rate for n in range(count)]
    stream, fps = list(zip(times, range(count), strict=True)), rate * share
    ticks = list(grid(start / fps, fps, times[-1]))
    assert list(nearest(stream, ticks, early=half_tick(fps))) == list(nearest(stream, ticks))


def test_a_still_moment_shows_the_frame_that_stands() -> None:
    stream = [(0.0, "a"), (0.4, "b"), (10.0, "c"), (11.0, "d")]
    found = [item for _, item in nearest(stream, grid(0.0, 2.0, 11.1), early=half_tick(2.0))]
    assert found == ["a", *"b" * 19, "c", "c", "d"], "c comes at 10 s, tick 20"
    late = [
        item
        for _, item in nearest(
            [(0.0, "a"), (9.7, "c"), (20.0, "d")], grid(0.0, 1.0, 12), early=half_tick(1.0)
        )
    ]
    assert late == [*"a" * 10, "c", "c"], "c comes 0.7 s after tick 9 and 0.3 s before tick 10"
    early = [
        item
        for _, item in nearest(
            [(0.0, "a"), (9.3, "c"), (20.0, "d")], grid(0.0, 1.0, 11), early=half_tick(1.0)
        )
    ]
    assert early == [*"a" * 9, "c", "c"], "c comes 0.3 s after tick 9: the nearest tick shows it"
    first = [item for _, item in nearest([(3.0, "a"), (9.0, "b")], grid(0.0, 1.0, 10), early=half_tick(1.0))]
    assert first == [*"a" * 9, "b"], "before the first frame nothing stands"


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
