"""A world's frames as rows of numbers: all the randomness that the renderer will see.

Rows are independent: select, repeat or concatenate them (also across worlds) along dimension 0 and render the
result. Columns, `T` frames:

- `scene` int64 [T]: row of `SCENES`.
- `drift` float32 [T, 2]: how far the scene has moved in x and y, modulo one.
- `light` float32 [T]: brightness, around one.
- `ball` float32 [T, 3, 3]: centre x in [0, 5/3], centre y in [0, 1], radius; frame heights; radius 0 is
  nothing.
- `look` int64 [T, 3]: a ball's colour, or a bird.
- `shape`, `colour` int64 [T]: rows of `SHAPES` and `COLOURS`, -1 where the frame has no card.
- `place` float32 [T, 3]: the card's centre x, y and half its height.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel_lab.world.drawing import ASPECT, BALL_COLOURS, BALL_LARGEST, CARD_LARGEST, CARD_WIDTH
from mmaccel_lab.world.words import COLOURS, SCENES, SHAPES

if TYPE_CHECKING:
    from mmaccel_lab.world.world import World

BALLS = 3
CARD_SMALLEST = 0.33
SCENE, SHAPE, COLOUR = ({name: i for i, name in enumerate(names)} for names in (SCENES, SHAPES, COLOURS))
"""The row of each name."""
STILL_SHORTEST, STILL_LONGEST = 8, 40


def make_table(world: World, still: float = 0.0) -> dict[str, Tensor]:
    """The table of a world; see this module's description. In a share `still` of it nothing moves, but for cards that
    come and go; all else is as without."""
    rng = Random(world.seed * 16 + 1)
    uniform = rng.random
    time = torch.arange(world.frames, dtype=torch.float64)[:, None]
    scene = torch.tensor([SCENE[s.scene] for s in world.segments])
    scene = scene.repeat_interleave(torch.tensor([s.stop - s.start for s in world.segments]))

    # A scene that returns is the same place, seen a little later.
    origin = torch.tensor([[uniform(), uniform()] for _ in SCENES], dtype=torch.float64)
    speed = torch.tensor([rng.choice((-1, 1)) * (0.002 + 0.006 * uniform()), 0.004], dtype=torch.float64)
    drift = (origin[scene] + time * speed).frac_()
    drift += drift < 0
    light = 1 + 0.05 * torch.sin(time[:, 0] * (0.02 + 0.05 * uniform()) + 6.3 * uniform())

    # Balls and birds fly to and fro: their coordinates are triangle waves of time. A cut moves them
    # elsewhere.
    size = [BALL_LARGEST * (0.5 + 0.5 * uniform()) if uniform() < 0.7 else 0.0 for _ in range(BALLS)]
    rate = [[0.01 + 0.05 * uniform(), 0.01 + 0.03 * uniform()] for _ in range(BALLS)]
    phase = [[uniform(), uniform()] for _ in range(BALLS)]
    turns = time[:, None] * torch.tensor(rate, dtype=torch.float64) + torch.tensor(phase, dtype=torch.float64)
    swing = ((turns + 0.37 * scene[:, None, None]).frac_() * 2 - 1).abs_()
    swing *= torch.tensor([ASPECT, 1.0], dtype=torch.float64)
    radius = torch.tensor(size, dtype=torch.float64).expand(world.frames, BALLS)
    look = torch.tensor([rng.randrange(len(BALL_COLOURS) + 2) for _ in range(BALLS)])

    shape = torch.full((world.frames,), -1)
    colour = shape.clone()
    place = torch.zeros(world.frames, 3)
    if world.cards:
        at = torch.tensor([c.frame for c in world.cards])
        shape[at] = torch.tensor([SHAPE[c.shape] for c in world.cards])
        colour[at] = torch.tensor([COLOUR[c.colour] for c in world.cards])
        place[at] = torch.tensor([_card_place(rng) for _ in world.cards])
    seen = torch.arange(world.frames) if not still else _standing(world, still)
    return {
        "scene": scene,
        "drift": drift.float()[seen],
        "light": light.float()[seen],
        "ball": torch.cat((swing, radius[:, :, None]), 2).float()[seen],
        "look": look.expand(world.frames, BALLS).contiguous(),
        "shape": shape,
        "colour": colour,
        "place": place,
    }


def _standing(world: World, share: float) -> Tensor:
    """[T]: the frame whose scenery each frame shows. Stretches of 8 to 40 frames stand still, within one segment each."""
    rng = Random(world.seed * 16 + 14)
    seen = torch.arange(world.frames)
    for segment in world.segments:
        at = segment.start
        while at < segment.stop:
            length = rng.randint(STILL_SHORTEST, STILL_LONGEST)
            move = round(length * (1 - share) / share)
            ahead = rng.randint(0, move)
            begin, end = min(at + ahead, segment.stop), min(at + ahead + length, segment.stop)
            seen[begin:end] = begin
            at += move + length
    return seen


def _card_place(rng: Random) -> tuple[float, float, float]:
    half = CARD_SMALLEST + (CARD_LARGEST - CARD_SMALLEST) * rng.random()
    room_x, room_y = half * CARD_WIDTH + 0.02, half + 0.01
    return room_x + (ASPECT - 2 * room_x) * rng.random(), room_y + (1 - 2 * room_y) * rng.random(), half
