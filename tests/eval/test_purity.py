"""Clusters against the truth: what a unit shows, and figures worked out by hand."""

from __future__ import annotations

import pytest
import torch

from mmaccel_lab.eval.purity import adjusted_rand, clusterings, contingency, purity, shown
from mmaccel_lab.world import World
from mmaccel_lab.world.records import Card, Segment


def world() -> World:
    segments = (Segment(0, 4, "beach"), Segment(4, 8, "city"), Segment(8, 12, "beach"))
    return World(7, 12, "needle", (Card(5, "red", "star"),), segments)


def test_a_unit_shows_its_scene_or_its_card() -> None:
    assert shown(world(), 1).tolist() == [0] * 4 + [1, 2, 1, 1] + [0] * 4
    assert shown(world(), 2).tolist() == [0, 0, 2, 1, 0, 0]
    assert shown(world(), 5).tolist() == [1, 2], "frames of a unit that is not complete are in no cluster"


def test_figures_by_hand() -> None:
    truth = torch.tensor([0, 0, 0, 1, 1, 2])
    counts = contingency(torch.tensor([9, 9, 4, 4, 4, 4]), truth)
    assert counts.tolist() == [[1, 2, 1], [2, 0, 0]]
    assert purity(counts) == pytest.approx(4 / 6)
    # Pairs together: 2 in both, 7 in clusters, 4 in things, of 15.
    assert adjusted_rand(counts) == pytest.approx((2 - 28 / 15) / (5.5 - 28 / 15))
    assert adjusted_rand(contingency(truth + 5, truth)) == 1.0


def test_levels_are_judged_by_layer() -> None:
    good = torch.tensor([0, 0, 0, 0, 1, 2, 1, 1, 3, 3, 3, 3])
    one = torch.zeros(12, dtype=torch.long)
    found = clusterings(world(), {"visual": good[None], "semantic": torch.stack([good, one])}, 1)
    assert (found["visual"].clusters, found["visual"].purity, found["visual"].cards) == (4, 1.0, 1.0)
    # Pairs together: 15 in both and in clusters, 31 in things, of 66.
    assert found["visual"].rand == pytest.approx((15 - 15 * 31 / 66) / (23 - 15 * 31 / 66))
    assert found["visual"].chance < 1
    both = found["semantic"]
    assert (both.clusters, both.purity, both.cards) == (2.5, pytest.approx((1 + 8 / 12) / 2), 0.5)
    tiles = clusterings(world(), {"semantic": good.repeat_interleave(3)[None]}, 1)["semantic"]
    assert tiles.purity == 1.0 and tiles.cards == 1.0
    assert clusterings(world(), {}, 1) == {}
