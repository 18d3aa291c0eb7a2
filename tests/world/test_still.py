"""Stretches of a world in which nothing moves."""

from __future__ import annotations

import pytest
import torch

from mmaccel.core.errors import WorldError
from mmaccel_lab.world import World, render


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_so_much_of_a_world_stands_still(share: float) -> None:
    found = 0.0
    for seed in range(6):
        world = World.generate(seed, 900)
        moving, standing = world.table(), world.table(still=share)
        for name in ("scene", "shape", "colour", "place", "look"):
            assert torch.equal(moving[name], standing[name])
        held = (standing["drift"][1:] == standing["drift"][:-1]).all(1)
        found += float(held.float().mean()) / 6
        assert not (moving["drift"][1:] == moving["drift"][:-1]).all(1).any()
        cuts = [segment.start for segment in world.segments[1:]]
        assert not any(held[cut - 1] for cut in cuts), "a cut is never inside a still stretch"
        runs = [len(run) for run in "".join("x" if h else " " for h in held.tolist()).split()]
        assert max(runs) <= 40
    # Each stretch has one frame more than it has pairs of equal ones.
    assert abs(found - share * 23 / 24) < 0.08


def test_still_frames_are_the_same_picture_but_for_cards() -> None:
    world = World.generate(3, 200)
    table = world.table(still=0.6)
    frames = render(table, 42, 70)
    cards = {card.frame for card in world.cards}
    same = [t for t in range(1, 200) if torch.equal(table["drift"][t], table["drift"][t - 1])]
    assert len(same) > 60
    for t in same:
        if not {t, t - 1} & cards:
            assert torch.equal(frames[t], frames[t - 1])
    assert torch.equal(world.table(still=0.0)["ball"], world.table()["ball"])


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_that_cannot_be_is_told(share: float) -> None:
    with pytest.raises(WorldError, match="still must be from 0 to 1"):
        World.generate(0, 9).table(still=share)


def test_all_of_a_world_may_stand_still() -> None:
    world = World.generate(4, 60)
    table = world.table(still=1.0)
    assert len(torch.unique(table["drift"], dim=0)) <= 60 // 8 + len(world.segments)
