"""Segments of a sequence, a frame or as many tokens of text each: what the patterns of Sparse Transformer count in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError, shown
from mmaccel.core.layout import TEXT
from mmaccel.policies.sparse.intra import Sight
from mmaccel.policies.sparse.orders import whole_blocks

Stride = int | Literal["frame"]

FRAMELESS = 128
"""The stride of a sequence without a frame, that of Sparse Transformer on text (arXiv 1904.10509)."""


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of the keys of each sequence, by place.

    number [B, N] number of the segment of each key, offset [B, N] its place in it, stride [B, 1] the most tokens of a
    segment; size bounds the strides and count the segments, numbers of the host.
    """

    number: Tensor
    offset: Tensor
    stride: Tensor
    size: int
    count: int

    @classmethod
    def of(cls, sight: Sight, stride: Stride, low: int, high: int) -> Segments:
        """Segments of `stride` tokens each; under "frame" those that the class docstring of `SFFixed` tells."""
        place = torch.arange(len(sight.keys), device=sight.at.device).expand_as(sight.keys.row)
        if stride != "frame":
            every = torch.full_like(place[:, :1], stride)
            return cls(
                place // stride, place % stride, every, stride, max(1, whole_blocks(sight.width, stride))
            )
        row = sight.keys.row.clamp(min=0).long()
        here = sight.keys.row >= 0
        text = sight.layer.k_layout.modality.gather(1, row) == TEXT
        latest = sight.layer.k_layout.frame.gather(1, row).masked_fill(~here, -1).cummax(1).values
        begins = torch.ones_like(text)
        begins[:, 1:] = (text[:, 1:] != text[:, :-1]) | (~text & (latest > latest.roll(1, 1)))[:, 1:]
        offset = place - torch.where(begins, place, 0).cummax(1).values
        longest = torch.where(here & ~text, offset + 1, 0).amax(1, keepdim=True)
        every = torch.where(longest > 0, longest, FRAMELESS).clamp(low, high)
        offset = offset % every
        number = (offset == 0).long().cumsum(1) - 1
        count = here.sum(1, keepdim=True)
        fits = torch.where(here, number + 1, 0).amax(1, keepdim=True) * low <= count + low - 1
        number = torch.where(fits, number, place // every)
        offset = torch.where(fits, offset, place % every)
        return cls(number, offset, every, high, max(1, whole_blocks(sight.width, low)))

    @classmethod
    def sizes(cls, sight: Sight, stride: Stride, low: int, high: int) -> tuple[int, int]:
        """The stride and the most segments of a sequence: of frames, by one look at the layout."""
        if stride != "frame":
            return stride, max(1, whole_blocks(sight.width, stride))
        held = sight.layer.orders.held
        name = "segments", sight.kinds, low, high
        if name not in held:
            segments = cls.of(sight, stride, low, high)
            last = torch.where(sight.keys.row >= 0, segments.number, 0).amax()
            held[name] = tuple(torch.stack([segments.stride.amax(), last + 1]).tolist())
        found: tuple[int, int] = held[name]
        return found


def check_stride(name: str, stride: Stride, low: int, high: int) -> None:
    """Refuses what is not a stride, and bounds that are no range."""
    if stride != "frame" and (not isinstance(stride, int) or isinstance(stride, bool) or stride < 1):
        raise RecipeError(
            f"{name}: stride is {shown(stride)}; give 'frame' or a number of tokens, at least 1."
        )
    if low < 1 or high < low:
        raise RecipeError(f"{name}: min_stride {low} and max_stride {high} are no range from 1 upwards.")


def fitting(place: Tensor, most: int) -> Tensor:
    """`place` in 32 bits where no place exceeds `most`, a number of the host, that does not fit."""
    return place.to(torch.int64 if most >= 2**31 - 1 else torch.int32)
