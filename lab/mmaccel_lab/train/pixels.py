"""From render tables to what the vision tower sees, on the device: drawing, codec loss, resize, normalisation.

The resize is the one of the packaged processors (bicubic with antialiasing on 8-bit values), written as two matrix
products; its weights are read off `torch.nn.functional.interpolate`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel_lab import world
from mmaccel_lab.tiny.configs import Spec

NATIVE_HEIGHT, NATIVE_WIDTH = 168, 280
CHUNK = 1024
CODEC_CHUNK = 512


@lru_cache(maxsize=16)
def _resize_weight(source: int, target: int, device: str, dtype: torch.dtype) -> Tensor:
    eye = torch.eye(source)[None, None]
    weight = F.interpolate(eye, size=(target, source), mode="bicubic", antialias=True, align_corners=False)
    return weight[0, 0].to(device=device, dtype=dtype)


def resize(frames: Tensor, height: int, width: int) -> Tensor:
    """uint8-valued frames [F, 3, h, w] of any float type -> [F, 3, height, width], rounded to whole grey levels."""
    device = str(frames.device)
    if frames.shape[-1] != width:
        weight = _resize_weight(frames.shape[-1], width, device, frames.dtype)
        frames = (frames @ weight.T).round_().clamp_(0, 255)
    if frames.shape[-2] != height:
        weight = _resize_weight(frames.shape[-2], height, device, frames.dtype)
        frames = (weight @ frames).round_().clamp_(0, 255)
    return frames


@lru_cache(maxsize=16)
def _cosines(size: int, block: int, device: str) -> Tensor:
    """Block-diagonal orthonormal DCT-II of `block` samples, [size, size]."""
    k = torch.arange(block, dtype=torch.float64)
    basis = torch.cos(math.pi * (k[None] + 0.5) * k[:, None] / block) * math.sqrt(2 / block)
    basis[0] /= math.sqrt(2)
    return torch.block_diag(*[basis] * (size // block)).float().to(device)


def _quantise(plane: Tensor, step: Tensor, block: int) -> Tensor:
    """Round the block cosine coefficients of [F, h, w] to multiples of `step` [F], small ones to zero."""
    down = _cosines(plane.shape[-2], block, str(plane.device))
    across = _cosines(plane.shape[-1], block, str(plane.device))
    step = step[:, None, None]
    coefficients = down @ plane @ across.T
    kept = torch.sign(coefficients) * (coefficients.abs() / step + 0.4).floor() * step
    return down.T @ kept @ across


def codec(frames: Tensor, strength: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """What a lossy codec leaves of frames [F, 3, h, w] in 0..255 (h and w multiples of 8), in float32.

    `strength` [F] in (0, 1] sets the coarseness. 4:2:0 chroma, quantised block cosines, the softness of a deblocking
    filter, and a small error of brightness and contrast.
    """
    x = frames.float()
    size = strength.shape
    noise = torch.rand((4, *size), device=x.device, generator=generator)
    step = 3.0 * (12.0**strength)
    gain = (1 + (noise[0] - 0.5) * 0.1 * strength)[:, None, None]
    lift = ((noise[1] - 0.5) * 12 * strength)[:, None, None]
    red, green, blue = x[:, 0], x[:, 1], x[:, 2]
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    chroma = torch.stack(((blue - luma) * 0.564, (red - luma) * 0.713), 1)
    luma = _quantise((luma - 128) * gain + lift, step, 8) + 128
    chroma = F.avg_pool2d(chroma, 2)
    chroma = _quantise(chroma.flatten(0, 1), step.repeat_interleave(2) * 1.3, 4).view(chroma.shape)
    chroma = F.interpolate(chroma, scale_factor=2, mode="bilinear", align_corners=False)
    soft = (noise[2] * 0.5 * strength)[:, None, None]
    luma = luma + (F.avg_pool2d(luma[:, None], 3, 1, 1, count_include_pad=False)[:, 0] - luma) * soft
    cb, cr = chroma[:, 0], chroma[:, 1]
    red, blue = luma + cr * 1.403, luma + cb * 1.773
    green = luma - cr * 0.714 - cb * 0.344
    return torch.stack((red, green, blue), 1).round_().clamp_(0, 255)


def draw(
    table: dict[str, Tensor],
    spec: Spec,
    strength: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Normalised frames [F, 3, height, width] of a render table, ready for the vision tower; call outside autocast.

    `strength` [F] on the CPU: how lossy the codec of each frame is, 0 is not at all.
    """
    device = table["scene"].device
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    mean = torch.tensor(spec.mean, device=device).view(3, 1, 1) * 255
    std = torch.tensor(spec.std, device=device).view(3, 1, 1) * 255
    count = table["scene"].shape[0]
    done = []
    native = strength is None or bool(strength.any())
    for start in range(0, count, CHUNK):
        part = {name: column[start : start + CHUNK] for name, column in table.items()}
        if not native:
            done.append((world.render(part, spec.height, spec.width).float() - mean) / std)
            continue
        frames = world.render(part, NATIVE_HEIGHT, NATIVE_WIDTH).to(dtype)
        if strength is not None:
            for some in torch.nonzero(strength[start : start + CHUNK])[:, 0].split(CODEC_CHUNK):
                chosen = some.to(device)
                lossy = codec(frames[chosen], strength[start : start + CHUNK][some].to(device), generator)
                frames[chosen] = lossy.to(dtype)
        small = resize(frames, spec.height, spec.width).float()
        done.append((small - mean) / std)
    return torch.cat(done)
