"""Running statistics against recomputation, and the threshold of equation 5."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from mmaccel.policies.kv.mosaic.clusters import ClusterTable, merge, pooled, summary
from mmaccel.policies.kv.mosaic.maintain import Hierarchy
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


def test_cluster_assignment_is_one_graph_by_inductor() -> None:
    """The nearest of some clusters in each layer, and its statistics with the unit in it; -1 is no cluster."""
    torch._dynamo.reset()
    tree, level = Hierarchy.__new__(Hierarchy), ClusterTable(3, 7, torch.float32)
    tree.semantic, layer, ids = level, torch.arange(3), torch.tensor([[4, 0, -1], [1, 2, 3], [2, -1, -1]])
    level.centroid, level.variance = torch.empty(3, 5, 7), torch.empty(3, 5)
    level.size = torch.randint(1, 9, (3, 5))

    def assign(u: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tree._nearest(layer, ids, tree._cosines(layer, ids, u), u)

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(assign, fullgraph=True, dynamic=False, backend=counter)
    for _ in range(3):
        level.centroid.normal_()
        level.variance.uniform_()
        u = torch.randn(3, 7)
        got, want = compiled(u), assign(u)
        assert torch.equal(got[0], want[0]) and int(got[0][2]) == 2
        torch.testing.assert_close(got[1:], want[1:], rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()
