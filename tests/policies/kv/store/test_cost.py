"""Which way across the wire is cheaper."""

from __future__ import annotations

import pytest

from mmaccel.policies.kv.store.transfer import Cost


@pytest.mark.parametrize(
    ("runs", "nbytes", "expected"),
    [(1, 2**30, "copies"), (64, 2**24, "gather"), (1, 1000, "copies"), (20, 1000, "gather")],
)
def test_the_cheaper_way_is_taken(runs: int, nbytes: int, expected: str) -> None:
    """At 55 GB/s and 8 us a copy, 51 GB/s and 40 us a launch."""
    cost = Cost(copy=8e-6, copy_byte=1 / 55e9, launch=40e-6, launch_byte=1 / 51e9)
    assert cost.way(runs, nbytes) == expected
