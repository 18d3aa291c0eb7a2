"""Pictures of a stream's memory: lanes in order of time, and what questions retrieved beside what they rest on."""

from __future__ import annotations

import pytest
import torch

from mmaccel.cli.draw import LANES, Truth, retrieved, runs, timeline
from mmaccel.core.decoding.generate import Evidence
from mmaccel_lab.world import World

pytest.importorskip("matplotlib")


def test_runs_are_in_order_of_time() -> None:
    assert runs([5, 5, 2, 5, 2, 2]) == {5: [(0, 2), (3, 4)], 2: [(2, 3), (4, 6)]}
    assert list(runs([5, 5, 2])) == [5, 2] and runs([]) == {}


def test_a_lane_for_each_cluster_and_one_for_many_small_ones() -> None:
    world = World.generate(3, 60)
    visual = torch.arange(60)[None] // 10
    semantic = torch.stack([torch.zeros(120, dtype=torch.long), torch.arange(120) // 2])
    shown = [2.0 * n for n in range(60)]
    truth = Truth(world.truth())
    drawn = timeline({"visual": visual, "semantic": semantic}, shown, 1, truth)
    scenes, above, below = drawn.axes
    assert len(scenes.texts) == len(world.segments) and len(above.collections) == 6
    assert len(below.collections) == LANES and below.get_ylabel().startswith("60 semantic")
    assert "layer 1" in below.get_ylabel() and "layer" not in above.get_ylabel()
    (first, *_), (x0, x1) = above.collections, above.get_xlim()
    assert (x0, x1) == (0, 120) and first.get_paths()[0].get_extents().x1 == 20
    assert len(timeline({"visual": visual}, shown, 0).axes) == 1


def test_what_a_question_rests_on_is_marked() -> None:
    world = World.generate(3, 60)
    (question, *_) = world.questions(["order"])
    evidence = [Evidence((n, n), float(n), 0.5, 4, 0.3) for n in (3, 9)]
    told = Truth(world.truth())
    assert told.moments(question.text) == tuple(float(n) for n in question.frames)
    asked = question.text.capitalize().replace(" ?", "?").replace(" ,", ",")
    assert asked != question.text and told.moments("what else ?") == ()
    drawn = retrieved([(asked, "star", evidence), ("what else ?", "no", evidence)], 60.0, told)
    assert [len(axes.lines) for axes in drawn.axes] == [2, 0]
    assert [len(axes.collections[0].get_segments()) for axes in drawn.axes] == [2, 2]
