"""The bookkeeping of slots against plain sets, and where owners come to lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmaccel.policies.kv.store.slot_allocator import Allotment, runs


@given(
    block=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans(), st.randoms()), max_size=60),
)
def test_slots_are_given_once_and_none_is_lost(block: int, steps: list) -> None:
    allotment, held = Allotment(block), list[tuple[int, int]]()
    for owner, count, crowd, draw in steps:
        if owner == 4:
            allotment.grow(count * block)
        elif owner == 3 and held:
            gone = draw.sample(held, min(count, len(held)))
            allotment.give(slot for _, slot in gone)
            held = [one for one in held if one not in gone]
        else:
            before = allotment.free
            taken = allotment.take(owner, count, crowd)
            if taken is None:
                assert allotment.free == before and (before < count or not crowd)
                continue
            assert len(taken) == count == len(set(taken)) and not {slot for _, slot in held} & set(taken)
            held += [(owner, slot) for slot in taken]
        assert allotment.free == allotment.size - len(held)
    everything = allotment.take("all", allotment.free, crowd=True)
    assert everything is not None and len(everything) + len(held) == allotment.size


def test_an_owner_fills_its_blocks_and_goes_on_next_to_them() -> None:
    allotment = Allotment(4)
    allotment.grow(32)
    assert allotment.take("a", 3) == [0, 1, 2]
    assert allotment.take("b", 2) == [4, 5]
    assert allotment.take("a", 6) == [3, 8, 9, 10, 11, 12]
    assert allotment.take("c", 1) == [16]
    assert allotment.take("b", 4) == [6, 7, 20, 21]
    allotment.give([9, 4])
    assert allotment.take("a", 1) == [9] and allotment.take("b", 1) == [4]
    assert allotment.take("d", 9) is None
    assert allotment.take("d", 9, crowd=True) == [24, 25, 26, 27, 28, 29, 30, 31, 13]
    allotment.give([16])
    assert allotment.take("e", 4) == [16, 17, 18, 19], "a block that is empty again is anyone's"
    with pytest.raises(ValueError, match="free already"):
        allotment.give([14])


def test_giving_and_taking_for_ever_does_not_grow_the_bookkeeping() -> None:
    allotment = Allotment(2)
    allotment.grow(64)
    for turn in range(5000):
        taken = allotment.take(turn, 7)
        assert taken is not None
        allotment.give(taken)
    assert len(allotment._queue) <= 200 and not allotment._rooms and not allotment._last


@pytest.mark.parametrize(
    ("slots", "per", "expected"),
    [
        ([], 4, []),
        ([3], 4, [(0, 1)]),
        ([0, 1, 2, 3, 4, 5], 4, [(0, 4), (4, 6)]),
        ([1, 2, 5, 6, 6, 9], 100, [(0, 2), (2, 4), (4, 5), (5, 6)]),
    ],
)
def test_runs_are_consecutive_and_stay_within_a_slab(slots: list, per: int, expected: list) -> None:
    assert runs(slots, per) == expected
