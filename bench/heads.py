"""Planted heads: queries and keys that look where heads of vision-language models were seen to look.

Lines at multiples of a frame, lines that follow the place in the frame through a change of resolution, columns, a
neighbourhood, and kinds of these that hold for one modality or one pair of modalities only; a sink and noise lie over every
head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.search.measure import Inside

SIZE = 128
HEADS = 2
"""Draws of a head side by side, each with keys of its own."""
ISLANDS = 32
USUAL = 1 << 14
"""Gains are for this many tokens. In longer prompts what does not recur stands out by so much more as there is more
background, so that the parts of a head weigh against one another as they do here."""


def normal(shape: tuple[int, ...], rng: torch.Generator, device: torch.device) -> Tensor:
    """Normal draws on the device, by the device where it is no CPU: a million tokens have hundreds of millions of them."""
    if device.type != "cpu":
        rng = torch.Generator(device).manual_seed(int(torch.randint(1 << 62, (), generator=rng)))
    return torch.randn(shape, generator=rng, device=device)


@dataclass
class Canvas:
    """Query and key features of one head, written dimension by dimension; a product of two features adds to the score."""

    n: int
    rng: torch.Generator
    device: torch.device

    def __post_init__(self) -> None:
        self.query = torch.zeros(self.n, SIZE, device=self.device)
        self.key = torch.zeros(self.n, SIZE, device=self.device)
        self.used = 0

    def draw(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.rng).to(self.device)

    def once(self, gain: float) -> float:
        """The gain of what is there once, however long the prompt."""
        return gain + max(0.0, math.log(self.n / USUAL))

    def add(self, query: Tensor, key: Tensor) -> None:
        """One dimension."""
        self.query[:, self.used], self.key[:, self.used] = query, key
        self.used += 1

    def line(
        self, place: Tensor, waves: Tensor, gain: float, shift: float, rows: Tensor, columns: Tensor
    ) -> None:
        """`gain` where the places of query and key differ by `shift` up to what the waves (radians a place) cannot tell
        apart; only for `rows` over `columns` (weights 0 or 1)."""
        # Waves of a large place lose their phase in single precision.
        turns = (place.double()[:, None] * waves / (2 * math.pi)) % 1
        late = (turns + shift * waves / (2 * math.pi)) % 1
        each = math.sqrt(gain / waves.numel())
        for f in (torch.cos, torch.sin):
            q = (each * f(2 * math.pi * turns)).float() * rows[:, None]
            k = (each * f(2 * math.pi * late)).float() * columns[:, None]
            for d in range(waves.numel()):
                self.add(q[:, d], k[:, d])

    def finish(self, noise: float = 1.0) -> tuple[Tensor, Tensor]:
        """Noise in the dimensions that are left; query and key, so that scores come out after the usual scale."""
        left = SIZE - self.used
        for x in (self.query, self.key):
            x[:, self.used :] = normal((self.n, left), self.rng, self.device) * (noise / left**0.5) ** 0.5
        return self.query * SIZE**0.25, self.key * SIZE**0.25


def periods(count: int, period: int, c: Canvas) -> Tensor:
    """Waves of one period, of random harmonics: together a line of one token, and noise beside it."""
    chosen = torch.randperm(period // 2, generator=c.rng)[:count] + 1
    return 2 * math.pi * chosen.double().to(c.device) / period


def nearby(count: int, width: float, c: Canvas) -> Tensor:
    """Waves that agree within about `width` places only."""
    return torch.randn(count, generator=c.rng).abs().double().to(c.device) / width


@dataclass(frozen=True)
class Place:
    """Where the tokens of a prompt are, for planting."""

    layout: TokenLayout
    at: Tensor
    cell: Tensor
    text: Tensor
    video: Tensor
    rank: Tensor
    frame: int


def placed(layout: TokenLayout, frame: int) -> Place:
    text = (layout.modality[0] == TEXT).float()
    video = 1 - text
    rank = torch.where(text.bool(), text.cumsum(0), video.cumsum(0)) - 1
    at = torch.arange(layout.length, device=layout.device).float()
    return Place(layout, at, layout.cell[0].float(), text, video, rank, frame)


def common(c: Canvas, p: Place, local: float, width: float) -> None:
    """A sink, and a neighbourhood."""
    c.add(torch.ones_like(p.at), c.once(5.0) * (p.at < 4))
    c.line(p.at, nearby(6, width, c), c.once(local), 0.0, torch.ones_like(p.at), torch.ones_like(p.at))


def lines(c: Canvas, p: Place) -> None:
    """Slash, vertical and horizontal lines of the frame's stride: rows of one class are flat, and need every key."""
    common(c, p, 4.0, 16.0)
    column, row = (int(x * p.frame) for x in c.draw(2))
    flat = (p.at % p.frame == row).float()
    c.query *= (1 - flat)[:, None]
    c.line(p.at, periods(40, p.frame, c), 9.0, float(column), 1 - flat, torch.ones_like(p.at))
    c.add(1 - flat, 7.0 * (p.at % p.frame == column))


def cells(c: Canvas, p: Place) -> None:
    """The same cell of other frames, whatever the frames' size."""
    common(c, p, 4.0, 16.0)
    seen = p.cell.clamp(min=0)
    c.line(seen, periods(40, p.frame, c), 10.0, 0.0, p.video, p.video)


def columns(c: Canvas, p: Place) -> None:
    """Some columns anywhere, and a wide neighbourhood."""
    common(c, p, 6.0, 256.0)
    chosen = (c.draw(p.at.numel()) < 200 / p.at.numel()).float()
    c.add(torch.ones_like(p.at), c.once(8.0) * chosen)


def local(c: Canvas, p: Place) -> None:
    """A neighbourhood of a thousand tokens."""
    common(c, p, 9.0, 512.0)


def by_query(c: Canvas, p: Place) -> None:
    """Video follows its frames, text looks nearby and at columns of everything (a Q-boundary)."""
    c.add(torch.ones_like(p.at), c.once(5.0) * (p.at < 4))
    c.line(p.rank, nearby(6, 32.0, c), c.once(8.0), 0.0, p.text, torch.ones_like(p.at))
    c.line(p.cell.clamp(min=0), periods(40, p.frame, c), 10.0, 0.0, p.video, p.video)
    chosen = (c.draw(p.at.numel()) < 200 / p.at.numel()).float()
    c.add(p.text, c.once(8.0) * chosen)


def by_pair(c: Canvas, p: Place) -> None:
    """Video follows its frames in video and columns in text; text its neighbourhood in text and columns in video."""
    c.add(torch.ones_like(p.at), c.once(5.0) * (p.at < 4))
    c.line(p.rank, nearby(6, 32.0, c), c.once(9.0), 0.0, p.text, p.text)
    c.line(p.cell.clamp(min=0), periods(40, p.frame, c), 10.0, 0.0, p.video, p.video)
    chosen = (c.draw(p.at.numel()) < 200 / p.at.numel()).float()
    c.add(p.text, c.once(8.0) * chosen * p.video)
    c.add(p.video, c.once(8.0) * chosen * p.text)


PLANTED: Mapping[str, tuple[Callable[[Canvas, Place], None], bool, bool]] = {
    "grid": (lines, False, False),
    "changing stride": (cells, False, True),
    "columns": (columns, False, False),
    "local": (local, False, False),
    "q boundary": (by_query, True, False),
    "2d boundary": (by_pair, True, False),
}
"""Name -> how it is planted, whether text stands between the video, whether the video's resolution changes."""


def layout_of(n: int, frame: int, text: bool, changing: bool, device: torch.device) -> TokenLayout:
    """Frames of `frame` tokens; the second half of a changing video has frames of three quarters of that."""
    place = torch.arange(n)
    words = torch.zeros(n, dtype=torch.bool)
    if text:
        pitch = n // min(ISLANDS, n // 64)
        words = place % pitch >= pitch - pitch // 4
    rank = (~words).long().cumsum(0) - 1
    sizes = torch.full((n // frame + 1,), frame)
    if changing:
        first = n // 2 // frame
        sizes = torch.cat([sizes[:first], torch.full((n // (frame * 3 // 4) + 1,), frame * 3 // 4)])
    number = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)[rank.clamp(min=0)]
    modality = torch.where(words, TEXT, VIDEO)[None].to(device)
    return TokenLayout.build(modality, frame=torch.where(words, -1, number)[None].to(device))


def draw(name: str, n: int, frame: int, seed: int, dtype: torch.dtype, device: torch.device) -> Inside:
    """Query, key and value [1, HEADS, n, SIZE] of planted heads."""
    paint, text, changing = PLANTED[name]
    layout = layout_of(n, frame, text, changing, device)
    rng = torch.Generator().manual_seed(seed)
    place = placed(layout, frame)
    made = []
    for _ in range(HEADS):
        canvas = Canvas(n, rng, device)
        paint(canvas, place)
        made.append(tuple(x.to(dtype) for x in canvas.finish()))
    query, key = (torch.stack(x)[None] for x in zip(*made, strict=True))
    value = normal((1, HEADS, n, SIZE), rng, device).to(dtype)
    return Inside(0, query, key, value, SIZE**-0.5, layout)
