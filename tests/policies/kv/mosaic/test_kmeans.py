"""Spherical k-means, bisection and halves against brute force."""

import itertools

import pytest
import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.split import bisect, halve, kmeans, unit_length


def cohesion(x: Tensor, label: Tensor, k: int) -> float:
    """What k-means by direction makes as large as it can: the lengths of the clusters' sums."""
    return float(sum(x[label == one].sum(0).norm() for one in range(k)))


def groups(n: int, k: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    centre = torch.eye(5, dtype=torch.float64)[:k]
    at = torch.arange(n) * k // n
    return unit_length(centre[at] + noise * torch.randn(n, 5, generator=g, dtype=torch.float64)), at


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
    centre = unit_length(torch.stack([x[label == one].sum(0) for one in range(5)]))
    assert torch.equal((x @ centre.T).argmax(1), label)


def test_the_first_centres_are_at_equal_steps_of_time() -> None:
    x, _ = groups(12, 3, 0.3, 5)
    one = kmeans(x[None], 3, iterations=1)[0]
    assert torch.equal(one, (x @ x[[2, 6, 10]].T).argmax(1))


def test_no_label_stays_empty_and_the_farthest_point_fills_it() -> None:
    x = unit_length(
        torch.tensor([[1, 0], [1, 0.01], [1, 0.02], [1, 0.03], [1, 0.3], [1, 0.04]], dtype=torch.float64)
    )
    seeds = unit_length(torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [-1.0, 0.1]]], dtype=torch.float64))
    label = kmeans(x[None], 3, seeds=seeds, iterations=1)[0]
    assert label[4] == 1 and sorted(label.unique().tolist()) == [0, 1, 2]
    same = torch.ones(1, 6, 2, dtype=torch.float64) / 2**0.5
    assert torch.bincount(kmeans(same, 4)[0], minlength=4).min() == 1


def test_ties_go_to_the_lowest_label_and_nothing_is_random() -> None:
    x = unit_length(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]], dtype=torch.float64))
    seeds = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    assert kmeans(x, 2, seeds=seeds, iterations=1)[0].tolist() == [0, 1, 0]
    y = torch.randn(2, 30, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kmeans(unit_length(y), 4), kmeans(unit_length(y), 4))


def test_halves_by_order() -> None:
    present = torch.tensor([[True, False, True, True, True, True], [True, True, False, False, False, False]])
    assert halve(present).tolist() == [[0, -1, 0, 0, 1, 1], [0, 1, -1, -1, -1, -1]]


def test_a_row_of_zeros_stays_zero() -> None:
    assert unit_length(torch.zeros(2, 3)).abs().sum() == 0
    assert kmeans(torch.zeros(1, 4, 3), 2)[0].max() == 1
