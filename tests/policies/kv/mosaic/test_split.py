"""Clusters: running statistics against recomputation, the threshold of equation 5, and k-means against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.policies.kv.mosaic.clusters import ClusterTable, merge, pooled, summary
from mmaccel.policies.kv.mosaic.split import CAP, FLOOR, Bounds, Rules, bisect, halve, kmeans, unit


def cohesion(x: Tensor, label: Tensor, k: int) -> float:
    """What k-means by direction makes as large as it can: the lengths of the clusters' sums."""
    return float(sum(x[label == one].sum(0).norm() for one in range(k)))


def groups(n: int, k: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    centre = torch.eye(5, dtype=torch.float64)[:k]
    at = torch.arange(n) * k // n
    return unit(centre[at] + noise * torch.randn(n, 5, generator=g, dtype=torch.float64)), at


@pytest.mark.parametrize("seed", range(12))
def test_groups_in_order_are_found_as_brute_force_finds_them(seed: int) -> None:
    x, _ = groups(8, 2, 0.15, seed)
    best = max(
        cohesion(x, torch.tensor(label), 2)
        for label in itertools.product((0, 1), repeat=8)
        if 0 < sum(label) < 8
    )
    found = kmeans(x[None], 2)[0]
    assert cohesion(x, found, 2) == pytest.approx(best, abs=1e-9)
    assert cohesion(x, bisect(x[None], torch.ones(1, 8, dtype=torch.bool))[0], 2) == pytest.approx(
        best, abs=1e-9
    )


def test_sets_of_a_batch_and_absent_points_do_not_meet() -> None:
    sets = [groups(n, 3, 0.4, n)[0] for n in (12, 7, 9)]
    x = torch.full((3, 14, 5), 7.0, dtype=torch.float64)
    present = torch.zeros(3, 14, dtype=torch.bool)
    for row, own in enumerate(sets):
        place = torch.arange(14)[row % 2 :: 1][: len(own)]
        x[row, place], present[row, place] = own, True
    together, halves = kmeans(x, 3, present=present), bisect(x, present)
    assert torch.equal(together >= 0, present) and torch.equal(halves >= 0, present)
    for row, own in enumerate(sets):
        everyone = torch.ones(1, len(own), dtype=torch.bool)
        assert torch.equal(together[row][present[row]], kmeans(own[None], 3)[0])
        assert torch.equal(halves[row][present[row]], bisect(own[None], everyone)[0])


def test_each_point_is_with_its_nearest_centre_once_nothing_moves() -> None:
    x, _ = groups(40, 5, 0.5, 3)
    label = kmeans(x[None], 5, iterations=100, tolerance=0)[0]
    centre = unit(torch.stack([x[label == one].sum(0) for one in range(5)]))
    assert torch.equal((x @ centre.T).argmax(1), label)


def test_the_first_centres_are_at_equal_steps_of_time() -> None:
    x, _ = groups(12, 3, 0.3, 5)
    one = kmeans(x[None], 3, iterations=1)[0]
    assert torch.equal(one, (x @ x[[2, 6, 10]].T).argmax(1))


def test_no_label_stays_empty_and_the_farthest_point_fills_it() -> None:
    x = unit(
        torch.tensor([[1, 0], [1, 0.01], [1, 0.02], [1, 0.03], [1, 0.3], [1, 0.04]], dtype=torch.float64)
    )
    seeds = unit(torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [-1.0, 0.1]]], dtype=torch.float64))
    label = kmeans(x[None], 3, seeds=seeds, iterations=1)[0]
    assert label[4] == 1 and sorted(label.unique().tolist()) == [0, 1, 2]
    same = torch.ones(1, 6, 2, dtype=torch.float64) / 2**0.5
    assert torch.bincount(kmeans(same, 4)[0], minlength=4).min() == 1


def test_ties_go_to_the_lowest_label_and_nothing_is_random() -> None:
    x = unit(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]], dtype=torch.float64))
    seeds = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    assert kmeans(x, 2, seeds=seeds, iterations=1)[0].tolist() == [0, 1, 0]
    y = torch.randn(2, 30, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kmeans(unit(y), 4), kmeans(unit(y), 4))


def test_halves_by_order() -> None:
    present = torch.tensor([[True, False, True, True, True, True], [True, True, False, False, False, False]])
    assert halve(present).tolist() == [[0, -1, 0, 0, 1, 1], [0, 1, -1, -1, -1, -1]]


def test_a_row_of_zeros_stays_zero() -> None:
    assert unit(torch.zeros(2, 3)).abs().sum() == 0
    assert kmeans(torch.zeros(1, 4, 3), 2)[0].max() == 1


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
