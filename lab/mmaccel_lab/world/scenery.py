"""The eight scenes as numbers: sky and ground colours, a ridge line between them, and a texture.

A texture is a sum of four products `wave(x) * wave(y)`, so it costs lines rather than planes; its strength
goes through one clamp, which turns soft waves into stripes, windows or dots. Frequencies in x are whole
numbers, thus a drift may be reduced modulo one without a jump.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmaccel_lab.world.words import SCENES

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Wave:
    """`weight * bend(fx * x + px) * bend(fy * y + py)`; a `gain` above one squares the wave off."""

    fx: int
    fy: int
    px: float = 0.0
    py: float = 0.0
    gain: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True)
class Ridge:
    height: float
    fx: int
    gain: float = 1.0


# A wave of frequency zero and this phase is the constant one.
ONE = 0.75
FLAT = Wave(0, 0, weight=0.0)


@dataclass(frozen=True)
class Scenery:
    sky: tuple[Rgb, Rgb]
    ground: tuple[Rgb, Rgb]
    horizon: float
    ridges: tuple[Ridge, Ridge]
    waves: tuple[Wave, Wave, Wave, Wave]
    gain: float
    bias: float
    sky_ink: Rgb
    ground_ink: Rgb
    sway: float = 0.0


def _slanted(fx: int, fy: int, weight: float = 1.0) -> tuple[Wave, Wave]:
    return Wave(fx, fy, 0.0, 0.25, weight=weight), Wave(fx, fy, 0.25, 0.0, weight=weight)


SCENERY: dict[str, Scenery] = {
    "beach": Scenery(
        sky=((70, 165, 215), (30, 140, 180)),
        ground=((228, 206, 148), (210, 172, 106)),
        horizon=0.45,
        ridges=(Ridge(0.035, 1), Ridge(0.015, 3)),
        waves=(Wave(0, 9, px=ONE), Wave(2, 6, weight=0.6), Wave(5, 11, weight=0.4), FLAT),
        gain=0.5,
        bias=0.35,
        sky_ink=(110, 70, 50),
        ground_ink=(26, 22, 26),
    ),
    "forest": Scenery(
        sky=((30, 110, 48), (22, 74, 32)),
        ground=((24, 58, 22), (14, 36, 14)),
        horizon=0.8,
        ridges=(Ridge(0.03, 2), Ridge(0.02, 5)),
        waves=(Wave(4, 0, py=ONE, gain=2.0), Wave(7, 0, py=ONE, gain=2.0), Wave(9, 7, weight=0.4), FLAT),
        gain=1.6,
        bias=-0.9,
        sky_ink=(62, -28, -4),
        ground_ink=(12, 22, 4),
    ),
    "city": Scenery(
        sky=((176, 182, 196), (214, 206, 204)),
        ground=((82, 86, 104), (58, 60, 74)),
        horizon=0.4,
        ridges=(Ridge(0.11, 2, gain=30.0), Ridge(0.07, 5, gain=30.0)),
        waves=(Wave(7, 8, gain=2.5), FLAT, FLAT, FLAT),
        gain=3.0,
        bias=-2.0,
        sky_ink=(0, 0, 0),
        ground_ink=(120, 96, 20),
    ),
    "desert": Scenery(
        sky=((250, 176, 96), (252, 214, 150)),
        ground=((184, 94, 36), (130, 54, 18)),
        horizon=0.5,
        ridges=(Ridge(0.12, 1), Ridge(0.05, 2)),
        waves=(*_slanted(3, 8), *_slanted(5, 3, 0.5)),
        gain=0.5,
        bias=0.5,
        sky_ink=(8, 8, 8),
        ground_ink=(60, 44, 20),
    ),
    "snow": Scenery(
        sky=((146, 168, 198), (186, 204, 224)),
        ground=((242, 248, 252), (222, 234, 244)),
        horizon=0.55,
        ridges=(Ridge(0.2, 2), Ridge(0.05, 6)),
        waves=(Wave(9, 8), Wave(14, 11, weight=0.8), FLAT, FLAT),
        gain=3.0,
        bias=-2.0,
        sky_ink=(46, 36, 24),
        ground_ink=(-34, -26, -14),
        sway=1.0,
    ),
    "ocean": Scenery(
        sky=((10, 70, 150), (8, 56, 132)),
        ground=((8, 62, 140), (2, 22, 72)),
        horizon=0.2,
        ridges=(Ridge(0.02, 3), Ridge(0.01, 8)),
        waves=(Wave(0, 10, px=ONE), *_slanted(2, 11, 0.7), Wave(6, 13, weight=0.5)),
        gain=0.55,
        bias=0.4,
        sky_ink=(12, 20, 24),
        ground_ink=(24, 88, 100),
        sway=1.0,
    ),
    "meadow": Scenery(
        sky=((150, 214, 250), (206, 236, 246)),
        ground=((126, 206, 66), (84, 168, 40)),
        horizon=0.36,
        ridges=(Ridge(0.05, 1), Ridge(0.03, 3)),
        waves=(Wave(8, 9), Wave(13, 6, weight=0.7), FLAT, FLAT),
        gain=5.0,
        bias=-4.0,
        sky_ink=(20, 10, 2),
        ground_ink=(120, 20, 90),
    ),
    "night": Scenery(
        sky=((14, 10, 52), (56, 30, 104)),
        ground=((8, 8, 22), (4, 4, 12)),
        horizon=0.78,
        ridges=(Ridge(0.08, 1), Ridge(0.03, 4)),
        waves=(Wave(10, 9), Wave(17, 13, weight=0.8), FLAT, FLAT),
        gain=8.0,
        bias=-9.5,
        sky_ink=(190, 190, 150),
        ground_ink=(6, 6, 10),
    ),
}


@lru_cache(maxsize=8)
def constants(device: torch.device) -> dict[str, Tensor]:
    """The scenes' numbers by row, in the order of `SCENES`, float32."""
    if device.type != "cpu":
        return {name: value.to(device) for name, value in constants(torch.device("cpu")).items()}
    rows = [SCENERY[name] for name in SCENES]
    numbers: dict[str, list[Any]] = {
        "sky": [r.sky for r in rows],
        "ground": [r.ground for r in rows],
        "ink": [(r.sky_ink, r.ground_ink) for r in rows],
        "level": [(r.horizon, r.gain, r.bias, r.sway) for r in rows],
        "ridge": [[astuple(ridge) for ridge in r.ridges] for r in rows],
        "wave": [[astuple(wave) for wave in r.waves] for r in rows],
    }
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in numbers.items()}


def wave(turns: Tensor) -> Tensor:
    """A sine drawn with parabolas: period one, range [-1, 1]. Made of exactly rounded operations only."""
    t = turns - turns.floor() - 0.5
    return (0.5 - t.abs()) * t * 16


def background(scene: Tensor, drift: Tensor, light: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Scenes without balls or cards.

    `scene` [T] indexes `SCENES`, `drift` [T, 2] and `light` [T] come from the table, `x` [W] and `y` [H] are
    the pixels' centres. Returns float32 [T, 3, H, W], grey levels, not yet clamped.

    Only operations that IEEE arithmetic rounds exactly are used, each on its own: no fused multiply-add, sine
    or matrix product. So a pixel's value is the same in any batch, on any device.
    """
    c = constants(scene.device)
    horizon, gain, bias, sway = c["level"][scene].unbind(1)
    across = x + drift[:, :1]
    down = y + drift[:, 1:] * sway[:, None]

    height, fx, bend = c["ridge"][scene].unsqueeze(-1).unbind(2)
    bumps = (wave(across[:, None] * fx) * bend).clamp(-1, 1) * height
    line = bumps[:, 0] + bumps[:, 1] + horizon[:, None]
    ground = ((y[:, None] - line[:, None, :]) * y.numel() + 0.5).clamp_(0, 1)

    fx, fy, px, py, bend, weight = c["wave"][scene].unsqueeze(-1).unbind(2)
    p = (wave(across[:, None] * fx + px) * bend).clamp(-1, 1) * (weight * gain[:, None, None])
    q = (wave(down[:, None] * fy + py) * bend).clamp(-1, 1)
    ink = p[:, 0, None, :] * q[:, 0, :, None]
    for k in range(1, p.shape[1]):
        ink += p[:, k, None, :] * q[:, k, :, None]
    ink = ink.add_(bias[:, None, None]).clamp_(0, 1)
    inked_ground = ink * ground

    # [T, 3, H, 1]: each colour runs from the frame's top to its bottom.
    y = y[:, None]
    light = light[:, None, None, None]
    sky, soil = ((pair[:, 0, :, None, None] * (1 - y) + pair[:, 1, :, None, None] * y) * light
                 for pair in (c["sky"][scene], c["ground"][scene]))  # fmt: skip
    sky_ink, soil_ink = (c["ink"][scene][:, i, :, None, None] * light for i in (0, 1))
    image = ground[:, None] * (soil - sky)
    image += sky
    image += ink[:, None] * sky_ink
    image += inked_ground[:, None] * (soil_ink - sky_ink)
    return image
