"""Draw frames from a table: background, then balls and birds, then cards.

The renderer holds no randomness and looks at each frame alone. Coordinates are continuous: y runs from 0 to 1
and x from 0 to `ASPECT`, so any height and width show the same picture (stretched where their ratio differs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.core.errors import WorldError
from mmaccel_lab.world.scenery import background
from mmaccel_lab.world.shapes import REACH, SIZE, atlas
from mmaccel_lab.world.words import COLOURS

ASPECT = 5 / 3
CARD_WIDTH = 0.9  # of its height
CARD_LARGEST = 0.42  # half a card's height, at most; heights of a frame
SHAPE_SIZE = 0.74  # of half the card's height
BALL_LARGEST = 0.055
BALL_COLOURS = ((150, 100, 60), (90, 130, 130), (120, 120, 125), (170, 170, 110))
PAPER, BORDER = 246.0, 40.0

# Pixels drawn at once: about 0.7 GiB of float32 at work on an accelerator, near the caches on a CPU.
CHUNK_PIXELS = {"cpu": 2**20}
CHUNK_PIXELS_DEVICE = 2**24


def render(table: dict[str, Tensor], height: int, width: int) -> Tensor:
    """Frames of a table (see `mmaccel_lab.world.table`), or of any selection or concatenation of its rows.

    Returns uint8 [T, 3, height, width] on the table's device. Raises `WorldError` for a side below one pixel.
    """
    if height < 1 or width < 1:
        raise WorldError(f"height and width must be at least 1 pixel, not {height}x{width}.")
    scene = table["scene"]
    device = scene.device
    count = scene.shape[0]
    frames = torch.empty(count, 3, height, width, dtype=torch.uint8, device=device)
    y = (torch.arange(height, device=device, dtype=torch.float32) + 0.5) * (1 / height)
    x = (torch.arange(width, device=device, dtype=torch.float32) + 0.5) * (ASPECT / width)
    step = max(1, CHUNK_PIXELS.get(device.type, CHUNK_PIXELS_DEVICE) // (height * width))
    for start in range(0, count, step):
        part = slice(start, start + step)
        image = background(scene[part], table["drift"][part], table["light"][part], x, y)
        frames[part] = image.add_(0.5).clamp_(0, 255)
    if count:
        pixels = (height * width / ASPECT) ** 0.5
        _balls(frames, table, x, y, pixels, step)
        _cards(frames, table, x, y, pixels, step)
    return frames


class _Region:
    """A rectangle of each chosen frame around a centre, read and written through index tensors.

    `dx`, `dy` [N, 1, w] and [N, h, 1]: distance of each pixel from the centre. The rectangle is as large as
    the largest thing drawn in it and is pushed back inside the frame at its edges.
    """

    def __init__(
        self, frame: Tensor, centre: Tensor, half: tuple[float, float], x: Tensor, y: Tensor
    ) -> None:
        columns = self._span(centre[:, 0], half[0], x.numel(), ASPECT)
        rows = self._span(centre[:, 1], half[1], y.numel(), 1.0)
        self.at = (frame[:, None, None], slice(None), rows[:, :, None], columns[:, None, :])
        self.dx = x[columns][:, None, :] - centre[:, 0, None, None]
        self.dy = y[rows][:, :, None] - centre[:, 1, None, None]

    @staticmethod
    def _span(centre: Tensor, half: float, size: int, length: float) -> Tensor:
        count = min(size, int(2 * half * size / length) + 3)
        first = ((centre - half) * (size / length)).floor().long() - 1
        return first.clamp(0, size - count)[:, None] + torch.arange(count, device=centre.device)


def _cover(distance: Tensor, pixels: float) -> Tensor:
    """How much of a pixel lies inside an outline, from its signed distance."""
    return (0.5 - distance * pixels).clamp(0, 1)


def _blend(frames: Tensor, region: _Region, layers: list[tuple[Tensor, Tensor | float]]) -> None:
    image = frames[region.at].float()
    for cover, colour in layers:
        image += (colour - image) * cover[..., None]
    frames[region.at] = image.add_(0.5).clamp_(0, 255).to(torch.uint8)


def _balls(frames: Tensor, table: dict[str, Tensor], x: Tensor, y: Tensor, pixels: float, step: int) -> None:
    colours = torch.tensor(BALL_COLOURS, dtype=torch.float32, device=frames.device)
    half = (BALL_LARGEST * 1.5, BALL_LARGEST * 1.5)
    index = torch.arange(frames.shape[0], device=frames.device)
    # Regions are small, so many more frames than a full-size chunk fit at once.
    for start in range(0, index.numel(), step * 8):
        some = index[start : start + step * 8]
        for k in range(table["ball"].shape[1]):
            place, look = table["ball"][some, k], table["look"][some, k]
            region = _Region(some, place, half, x, y)
            radius = place[:, 2, None, None]
            disc = (region.dx * region.dx + region.dy * region.dy).sqrt() - radius
            # A bird is a wide open V whose wings taper towards the tips.
            side = region.dx.abs()
            wing = (region.dy + side * 0.5 - radius * 0.3).abs() - (radius * 1.4 - side) * 0.25
            bird = torch.maximum(wing, side - radius * 1.4)
            is_bird = look[:, None, None] >= len(BALL_COLOURS)
            cover = _cover(torch.where(is_bird, bird, disc), pixels)
            cover = torch.where(radius > 0, cover, torch.zeros_like(cover))
            ink = torch.where(is_bird[:, 0], 30.0, colours[look % len(BALL_COLOURS)])
            _blend(frames, region, [(cover, ink[:, None, None])])


def _cards(frames: Tensor, table: dict[str, Tensor], x: Tensor, y: Tensor, pixels: float, step: int) -> None:
    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32, device=frames.device)
    half = (CARD_LARGEST * CARD_WIDTH, CARD_LARGEST)
    index = torch.nonzero(table["shape"] >= 0)[:, 0]
    for start in range(0, index.numel(), step):
        some = index[start : start + step]
        place = table["place"][some]
        region = _Region(some, place, half, x, y)
        size = place[:, 2, None, None]
        corner = size * 0.14
        over_x = region.dx.abs() - (size * CARD_WIDTH - corner)
        over_y = region.dy.abs() - (size - corner)
        out_x, out_y = over_x.clamp(min=0), over_y.clamp(min=0)
        outside = (out_x * out_x + out_y * out_y).sqrt()
        card = outside + torch.maximum(over_x, over_y).clamp(max=0) - corner
        radius = size * SHAPE_SIZE
        shape = _read_atlas(table["shape"][some], region.dx / radius, region.dy / radius) * radius
        ink = palette[table["colour"][some]][:, None, None]
        layers: list[tuple[Tensor, Tensor | float]] = [
            (_cover(card, pixels), BORDER),
            (_cover(card + size * 0.05, pixels), PAPER),
            (_cover(shape, pixels), ink),
        ]
        _blend(frames, region, layers)


def _read_atlas(shape: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Bilinear reading of the distance atlas at `u` [N, 1, w], `v` [N, h, 1]."""
    grid = atlas(shape.device).flatten()
    scale = (SIZE - 1) / (2 * REACH)
    u = ((u + REACH) * scale).clamp(0, SIZE - 1.001)
    v = ((v + REACH) * scale).clamp(0, SIZE - 1.001)
    left, top = u.floor(), v.floor()
    u, v = u - left, v - top
    at = (shape[:, None, None] * SIZE + top.long()) * SIZE + left.long()
    upper = grid[at] * (1 - u) + grid[at + 1] * u
    lower = grid[at + SIZE] * (1 - u) + grid[at + SIZE + 1] * u
    return upper * (1 - v) + lower * v
