"""The shapes on the cards as one atlas of signed distances.

Each shape is a polygon inside the unit disc's box [-1, 1]² (y down). The atlas holds, for every shape, the
signed distance to its outline (negative inside) on a square grid that reaches `REACH`; the renderer reads it
bilinearly, so an outline is sharp at any frame size.
"""

from __future__ import annotations

from functools import lru_cache
from math import cos, pi, sin

import torch
from torch import Tensor

from mmaccel_lab.world.words import SHAPES

SIZE = 96
REACH = 1.3
RING_HALF_WIDTH = 0.19

Point = tuple[float, float]


def _arc(radius: float, start: float, stop: float, steps: int, centre: Point = (0.0, 0.0)) -> list[Point]:
    angles = [start + (stop - start) * i / (steps - 1) for i in range(steps)]
    return [(centre[0] + radius * cos(a), centre[1] + radius * sin(a)) for a in angles]


def _circle(radius: float) -> list[Point]:
    return _arc(radius, 0.0, 2 * pi * 47 / 48, 48)


def _star() -> list[Point]:
    spokes = [(1.0 if i % 2 == 0 else 0.42, -pi / 2 + i * pi / 5) for i in range(10)]
    return [(radius * cos(angle), 0.06 + radius * sin(angle)) for radius, angle in spokes]


def _heart() -> list[Point]:
    turns = [2 * pi * i / 48 for i in range(48)]
    across = [16 * sin(t) ** 3 for t in turns]
    down = [13 * cos(t) - 5 * cos(2 * t) - 2 * cos(3 * t) - cos(4 * t) for t in turns]
    return [(x / 16.5, -(y + 2.5) / 16.5) for x, y in zip(across, down, strict=True)]


def _moon() -> list[Point]:
    # Two arcs that meet at the horns: the outer disc and a bite out of its right side.
    outer = _arc(0.96, 0.28 * pi, 1.72 * pi, 32)
    horn_x, horn_y = outer[0]
    bite = 0.55
    radius = ((horn_x - bite) ** 2 + horn_y**2) ** 0.5
    inner = _arc(radius, -0.5 * pi, -1.5 * pi, 24, (bite, 0.0))
    return outer + [p for p in inner if abs(p[1]) < abs(horn_y)]


POLYGONS: dict[str, list[Point]] = {
    "circle": _circle(0.88),
    "square": [(-0.92, -0.92), (0.92, -0.92), (0.92, 0.92), (-0.92, 0.92)],
    "triangle": [(0.0, -0.92), (1.0, 0.82), (-1.0, 0.82)],
    "star": _star(),
    "ring": _circle(0.96 - RING_HALF_WIDTH),
    "cross": [
        (-0.3, -0.95), (0.3, -0.95), (0.3, -0.3), (0.95, -0.3), (0.95, 0.3), (0.3, 0.3),
        (0.3, 0.95), (-0.3, 0.95), (-0.3, 0.3), (-0.95, 0.3), (-0.95, -0.3), (-0.3, -0.3),
    ],
    "heart": _heart(),
    "moon": _moon(),
    "arrow": [(-1.0, -0.27), (0.1, -0.27), (0.1, -0.82), (1.0, 0.0), (0.1, 0.82), (0.1, 0.27), (-1.0, 0.27)],
    "diamond": [(0.0, -1.0), (0.7, 0.0), (0.0, 1.0), (-0.7, 0.0)],
    "hourglass": [
        (-0.85, -0.95), (0.85, -0.95), (0.1, 0.0), (0.85, 0.95), (-0.85, 0.95), (-0.1, 0.0),
    ],
    "bolt": [(0.3, -1.0), (-0.62, 0.2), (-0.1, 0.2), (-0.35, 1.0), (0.62, -0.28), (0.08, -0.28)],
}  # fmt: skip


def polygon_distance(points: list[Point], at: Tensor) -> Tensor:
    """Signed distance, negative inside, of each point of `at` [..., 2] to a simple polygon."""
    corner = torch.tensor(points, dtype=at.dtype)
    edge = corner.roll(-1, 0) - corner
    to = at.unsqueeze(-2) - corner
    along = ((to * edge).sum(-1) / (edge * edge).sum(-1)).clamp(0, 1)
    nearest = (to - along.unsqueeze(-1) * edge).square().sum(-1).amin(-1).sqrt()
    # Even-odd rule: edges that a ray to the right of the point crosses.
    below, above = to[..., 1] >= 0, at[..., 1:] < corner.roll(-1, 0)[:, 1]
    side = edge[:, 0] * to[..., 1] - edge[:, 1] * to[..., 0]
    crossed = (below & above & (side < 0)) | (~below & ~above & (side > 0))
    return torch.where(crossed.sum(-1) % 2 == 1, -nearest, nearest)


@lru_cache(maxsize=8)
def atlas(device: torch.device) -> Tensor:
    """Signed distances [shape, SIZE, SIZE], float32, in the order of `SHAPES`."""
    if device.type != "cpu":
        return atlas(torch.device("cpu")).to(device)
    axis = (torch.arange(SIZE, dtype=torch.float64) * 2 / (SIZE - 1) - 1) * REACH
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    layers = [polygon_distance(POLYGONS[name], grid) for name in SHAPES]
    ring = SHAPES.index("ring")
    layers[ring] = layers[ring].abs() - RING_HALF_WIDTH
    return torch.stack(layers).float()
