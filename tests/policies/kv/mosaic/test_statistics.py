"""Running statistics against recomputation, and the threshold of equation 5."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmaccel.policies.kv.mosaic.clusters import ClusterTable, merge, pooled, summary
from mmaccel.policies.kv.mosaic.split import CAP, FLOOR, Bounds, Rules, unit


def points(n: int, seed: int, d: int = 5) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g, dtype=torch.float64)


@given(a=st.integers(1, 20), b=st.integers(1, 20), seed=st.integers(0, 99))
def test_merging_equals_all_at_once_and_conserves_scatter(a: int, b: int, seed: int) -> None:
    x = points(a + b, seed)
    left, right = (summary(rows, torch.ones(len(rows), dtype=torch.bool)) for rows in (x[:a], x[a:]))
    c, s2 = merge(*left, *right)
    whole_c, whole_s2, n = summary(x, torch.ones(a + b, dtype=torch.bool))
    assert torch.allclose(c, whole_c, atol=1e-12) and torch.allclose(s2, whole_s2, atol=1e-12)
    between = a * b / (a + b) * (left[0] - right[0]).square().sum()
    within = pooled(left[1], left[2], right[1], right[2]) * n
    assert torch.allclose(within + between, whole_s2 * n, atol=1e-10)


def test_points_of_unit_length_need_only_their_centroid() -> None:
    x = unit(points(12, 0))
    c, s2, _ = summary(x, torch.ones(12, dtype=torch.bool))
    assert torch.allclose(s2, 1 - c.square().sum(), atol=1e-12)
    none = summary(x, torch.zeros(12, dtype=torch.bool))
    assert [float(part.abs().sum()) for part in none] == [0, 0, 0]


def test_the_threshold_moves_from_one_bound_to_the_other() -> None:
    small, large = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.6])
    layer, n = torch.tensor([0, 1, 1]), torch.tensor([1, 1, 9])
    grown = 1 - math.exp(-8 / 8)
    found = Bounds(small, large, 8.0, 4, 32).threshold(layer, n)
    assert found.tolist() == pytest.approx([0.1, 0.2, 0.2 + 0.4 * grown])


def test_few_units_are_split_where_they_are_strangers() -> None:
    small = torch.tensor([0.1])
    layer, n, s2 = (
        torch.zeros(4, dtype=torch.long),
        torch.tensor([2, 2, 1, 4]),
        torch.tensor([0.19, 0.21, 0, 0.11]),
    )
    rules = Rules(visual=1, semantic=1, init=2, buffer=0)
    for visual, found in ((True, [False, True, False, True]), (False, [False, False, False, True])):
        bounds = rules.bounds(small, small, visual)
        assert bounds.exceeded(layer, n, s2, torch.zeros(4)).tolist() == found


def test_the_threshold_is_calibrated_layer_by_layer() -> None:
    s2 = torch.tensor([[0.1, 0.4], [0.0, 0.0], [0.9, 0.9]])
    n = torch.tensor([[3, 1], [2, 2], [4, 4]])
    level = ClusterTable(3, 1, torch.float32)
    level.variance, level.size = s2, n
    level._count_ids()
    made = Rules(visual=1, semantic=1, init=2, buffer=0).calibrate(level, visual=False)
    assert made.small.tolist() == pytest.approx([1.25 * 0.175, FLOOR, CAP])
    assert made.large.tolist() == pytest.approx([2 * 0.175, FLOOR, CAP])
