"""The `sf_fixed` pattern (Sparse Transformer, fixed): a query's own segment, and summary tokens of earlier segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import KeySpan, Part
from mmaccel.core.errors import RecipeError, quoted
from mmaccel.core.layout import TEXT
from mmaccel.core.prefill.plan import FAR, pad_rows, span_by_range
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.sparse.orders import AttentionRegion, IntraPattern, ceil_block_count, max_touched_blocks

FRAMELESS = 128
"""The stride of a sequence without a frame, that of Sparse Transformer on text (arXiv 1904.10509)."""


@dataclass(frozen=True, eq=False)
class FrameAndTextSegments:
    """The segments (frames, or runs of text) of the keys of each sequence, by rank among the keys.

    number [B, N]: segment of each key; offset [B, N]: its index in the segment; stride [B, 1]: most tokens of a segment;
    size: upper bound of the strides; count: upper bound of the number of segments (both known on the host).
    """

    number: Tensor
    offset: Tensor
    stride: Tensor
    size: int
    count: int


@dataclass(frozen=True, kw_only=True)
class SegmentedPattern(IntraPattern):
    """Base of the Sparse Transformer patterns, which divide keys into segments: frames, or runs of equally many tokens."""

    stride: int | Literal["frame"] = "frame"
    min_stride: int = 8
    max_stride: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        stride, low, high = self.stride, self.min_stride, self.max_stride
        if stride != "frame" and (not isinstance(stride, int) or isinstance(stride, bool) or stride < 1):
            raise RecipeError(
                f"{self.name}: stride is {quoted(stride)}; give 'frame' or a number of tokens, at least 1."
            )
        if low < 1 or high < low:
            raise RecipeError(
                f"{self.name}: min_stride {low} and max_stride {high} are no range from 1 upwards."
            )

    @property
    def stride_range(self) -> tuple[int, int]:
        """The smallest and the largest stride (tokens of a segment) that a sequence may have."""
        return (self.min_stride, self.max_stride) if self.stride == "frame" else (self.stride, self.stride)

    def key_segments(self, region: AttentionRegion) -> FrameAndTextSegments:
        """Return the segments of the region's keys: of `stride` tokens each, or frames (see the docstring of `SFFixed`)."""
        low, high = self.stride_range
        most = max(1, ceil_block_count(region.max_keys, low))
        rank = torch.arange(len(region.keys), device=region.at.device).expand_as(region.keys.row)
        if self.stride != "frame":
            return FrameAndTextSegments(
                rank // high, rank % high, torch.full_like(rank[:, :1], high), high, most
            )
        layout, here = region.layer.k_layout, region.keys.row >= 0
        row = region.keys.row.clamp(min=0).long()
        text = layout.modality.gather(1, row) == TEXT
        latest = layout.frame.gather(1, row).masked_fill(~here, -1).cummax(1).values
        begins = torch.ones_like(text)
        begins[:, 1:] = (text[:, 1:] != text[:, :-1]) | (~text & (latest > latest.roll(1, 1)))[:, 1:]
        offset = rank - torch.where(begins, rank, 0).cummax(1).values
        longest = torch.where(here & ~text, offset + 1, 0).amax(1, keepdim=True)
        stride = torch.where(longest > 0, longest, FRAMELESS).clamp(low, high)
        offset = offset % stride
        number = (offset == 0).long().cumsum(1) - 1
        count = here.sum(1, keepdim=True)
        fits = torch.where(here, number + 1, 0).amax(1, keepdim=True) * low <= count + low - 1
        number = torch.where(fits, number, rank // stride)
        return FrameAndTextSegments(number, torch.where(fits, offset, rank % stride), stride, high, most)

    def max_stride_and_segments(self, region: AttentionRegion) -> tuple[int, int]:
        """Return the largest stride and number of segments of a sequence; for frames, read once from the device."""
        if self.stride != "frame":
            return self.stride, max(1, ceil_block_count(region.max_keys, self.stride))

        def looked() -> tuple[int, int]:
            segments = self.key_segments(region)
            last = torch.where(region.keys.row >= 0, segments.number, 0).amax()
            stride, count = torch.stack([segments.stride.amax(), last + 1]).tolist()
            return stride, count

        return region.get_or_compute(("segments", *self.stride_range), looked)


@register("sparse", "sf_fixed")
@dataclass(frozen=True, kw_only=True)
class SFFixed(SegmentedPattern):
    """A query sees its own segment up to itself, and `summary` tokens of each earlier segment: Sparse Transformer, fixed.

    side="last"     the summary is the last tokens of a segment (Child et al. 2019, arXiv 1904.10509)
    side="first"    it is the first ones, as MMInference describes its baseline (section 4.1)

    stride="frame"  a segment is a frame, with the separator tokens in it; text is cut into segments as long as the longest
                    frame of its sequence, from the token after the frame on, so that timestamps are segments of their own.
                    Frames longer than max_stride are cut alike; a sequence without frames has segments of 128. A sequence
                    whose segments are on average shorter than min_stride is cut evenly instead. So min_stride and max_stride
                    bound the number of blocks before planning, the tighter the nearer they are to the length of the frames.
                    In chunked prefill the longest frame is that of the keys so far
    an int          segments of so many tokens, counted from the first

    Exact: all other keys of a block are masked. One column a frame is the pattern of MMInference (Table 2: local and stride
    of the lines are the tokens of a frame); Child et al. have 8 to 32.
    """

    summary: int = limited(1, at_least(0, " tokens of a segment"))
    side: Literal["last", "first"] = "last"

    def build_plan_parts(self, region: AttentionRegion) -> tuple[Part, ...]:
        segments, at = self.key_segments(region), region.at.clamp(min=0).long()
        # The keys of the segment of each query: segments lie two sizes apart, so that no two are within one.
        block, size = self.block, segments.size
        pos = segments.number * (2 * size) + segments.offset
        pos = as_int32_if_fits(pos, 2 * size * (segments.count + 1))
        q_pos = pos.gather(1, at).masked_fill(region.at < 0, -1)[:, None]
        order = region.q_row, region.keys.row[:, None], q_pos, pos[:, None]
        spans = [span_by_range(*order, 0, size, block, block, ordered=region.keys.count)]
        if self.summary:
            spans.append(self._summaries(region, segments, at - segments.offset.gather(1, at)))
        return (region.plan_part(spans),)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        (least, most), block, keys = self.stride_range, self.block, ceil_block_count(n_key, self.block)
        near = min(max_touched_blocks(block + most - 1, block), keys)
        columns = ceil_block_count(min(n_key, self.summary * ceil_block_count(n_key, least)), block)
        # Queries ascend: what their blocks see beyond one segment is, all together, no more than the keys.
        return near + columns, keys if gaps else 0

    def estimate_blocks(self, rows: int, keys: int, share: float, region: AttentionRegion | None) -> float:
        if region is None:
            return super().estimate_blocks(rows, keys, share, region)
        longest, count = self.max_stride_and_segments(region)
        # A query sees half of its own segment, on the mean; its block reaches a block's length further.
        near = longest / (2 * self.block) + 1.5
        return ceil_block_count(rows, self.block) * (near + share * self.summary * count / self.block + 0.5)

    def _summaries(self, region: AttentionRegion, segments: FrameAndTextSegments, begin: Tensor) -> KeySpan:
        """The summary tokens, gathered; each query sees those of the segments before its own, which begins at `begin`."""
        block, keys, here = self.block, region.keys, region.keys.row >= 0
        member = here & (segments.offset < self.summary)
        if self.side == "last":
            sizes = torch.zeros_like(segments.number)
            number = segments.number.clamp(max=sizes.shape[1] - 1)
            sizes = sizes.scatter_add(1, number, here.long())
            member = here & (segments.offset >= sizes.gather(1, number) - self.summary)
        most = min(len(keys), self.summary * segments.count)
        rank = member.long().cumsum(1)
        slot = torch.where(member, rank - 1, most)
        k_row = torch.full_like(keys.row[:, :1], -1).repeat(1, most + 1)
        k_row = pad_rows(k_row.scatter_(1, slot, keys.row)[:, :most].contiguous(), block)
        before = (rank - member.long()).gather(1, begin).masked_fill(region.at < 0, 0).to(torch.int32)
        k_pos = torch.arange(k_row.shape[1], dtype=torch.int32, device=k_row.device).expand_as(k_row)
        order = region.q_row, k_row[:, None], before[:, None] - 1, k_pos[:, None]
        return span_by_range(*order, 0, FAR, block, block)


def as_int32_if_fits(pos: Tensor, most: int) -> Tensor:
    """Return the positions `pos` as int32 if `most`, the largest one, fits in 32 bits; else as int64."""
    return pos.to(torch.int64 if most >= 2**31 - 1 else torch.int32)
