"""Standing questions on planted events: how changes are matched with cards, and that a short run of the script works."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel_lab.world import World

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
standing: Any = importlib.import_module("standing")


@pytest.mark.parametrize(
    ("told", "right", "late"),
    [
        ([], 0, []),
        ([11.0], 1, [1.0]),
        ([11.0, 11.5], 1, [1.0]),  # the same card once more
        ([11.0, 13.0], 2, [1.0]),  # another card of the same event
        ([9.0, 20.0], 0, []),  # before it, and too late
        ([14.0, 53.0], 2, [4.0, 3.0]),
    ],
)
def test_changes_are_matched_with_cards(told: list[float], right: int, late: list[float]) -> None:
    assert standing.matched([[10.0, 12.0], [50.0]], told, 7.0) == (right, late)


def test_cards_near_each_other_are_one_event() -> None:
    world = World.generate(900, 200, "caption", 260)
    shape = max({card.shape for card in world.cards}, key=[card.shape for card in world.cards].count)
    shown = [float(card.frame) for card in world.cards if card.shape == shape]
    found = standing.events(world, shape, 9.0)
    assert [second for event in found for second in event] == shown and len(shown) > 1
    assert all(b[0] - a[-1] >= 9.0 for a, b in itertools.pairwise(found))
    assert standing.events(world, shape, 0.5) == [[second] for second in shown]


def test_a_short_stream(shipped: Any) -> None:
    shipped("tiny-ov")
    parts = mmaccel.load_model("tiny-ov", dtype=torch.float32), mmaccel.load_processor("tiny-ov")
    world = World.generate(900, 12, "caption", 60)
    run = standing.watched(parts, {"name": "rekv", "window": 8}, world, 4.0, 7.0)
    row = standing.summed([run])
    assert row["events"] >= 1 and row["found"] <= row["events"] and row["right"] <= row["told"]
    assert len(run["asks"]) >= 6 and 0 < row["words_share"] < 0.1
