"""Own segment, and the summary columns of the segments before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError, check_choice
from mmaccel.core.plan import FAR, KeySpan, Part, pad_rows, span_by_range
from mmaccel.core.registry import register
from mmaccel.policies.sparse.intra import IntraPattern, Sight
from mmaccel.policies.sparse.orders import touched, whole_blocks
from mmaccel.policies.sparse.segments import Segments, Stride, check_stride, fitting


@register("sparse", "sf_fixed")
@dataclass(frozen=True, kw_only=True)
class SFFixed(IntraPattern):
    """A query sees its own segment up to itself, and `summary` tokens of each segment before: Sparse Transformer, fixed.

    side="last"   the summary is the last tokens of a segment (Child et al. 2019, arXiv 1904.10509)
    side="first"  its first ones, as MMInference describes its baseline (section 4.1)

    stride="frame"  a segment is a frame with the marks in it; text is cut into segments as long as the longest frame of
                    its sequence, from the token after the frame on, so that timestamps are segments of their own. Frames
                    longer than max_stride are cut alike; a sequence without frames has segments of 128. A sequence whose
                    segments are on average shorter than min_stride is cut evenly instead, so that `max_blocks` may count on
                    it: the nearer to the frames, the tighter. In chunked prefill the longest frame is that of the keys
                    so far
    an int          segments of so many tokens, counted from the first

    Exact: no block is rounded up. One column a frame is the pattern of MMInference (Table 2: local and stride of the lines
    are the tokens of a frame); Child et al. have 8 to 32.
    """

    stride: Stride = "frame"
    summary: int = 1
    side: Literal["last", "first"] = "last"
    min_stride: int = 8
    max_stride: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stride("sf_fixed", self.stride, self.min_stride, self.max_stride)
        if self.summary < 0:
            raise RecipeError(f"sf_fixed: summary is {self.summary}; give 0 or more tokens of a segment.")
        check_choice("sf_fixed", "side", self.side, ("last", "first"))

    def parts(self, sight: Sight) -> tuple[Part, ...]:
        segments = Segments.of(sight, self.stride, self.min_stride, self.max_stride)
        own = sight.at.clamp(min=0).long()
        begin = own - segments.offset.gather(1, own)
        spans = [self._own(sight, segments, own)]
        if self.summary:
            spans.append(self._summaries(sight, segments, begin))
        return (sight.part(spans),)

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        block, keys = self.block, whole_blocks(n_key, self.block)
        least, most = (self.min_stride, self.max_stride) if self.stride == "frame" else (self.stride,) * 2
        near = min(touched(block + most - 1, block), keys)
        columns = whole_blocks(min(n_key, self.summary * whole_blocks(n_key, least)), block)
        # Queries ascend: what their blocks see beyond one segment is, all together, no more than the keys.
        return near + columns, keys if gaps else 0

    def estimate_blocks(self, rows: int, keys: int, share: float, sight: Sight | None) -> float:
        if sight is None:
            return super().estimate_blocks(rows, keys, share, sight)
        longest, count = Segments.sizes(sight, self.stride, self.min_stride, self.max_stride)
        # A query sees half of its own segment, on the mean; its block reaches a block's length further.
        near = longest / (2 * self.block) + 1.5
        return whole_blocks(rows, self.block) * (near + share * self.summary * count / self.block + 0.5)

    def _own(self, sight: Sight, segments: Segments, own: Tensor) -> KeySpan:
        """The keys of the segment of each query. Segments lie two sizes apart, so that no two are within one."""
        block, size = self.block, segments.size
        place = fitting(segments.number * (2 * size) + segments.offset, 2 * size * (segments.count + 1))
        q_pos = place.gather(1, own).masked_fill(sight.at < 0, -1)[:, None]
        order = (sight.q_row, sight.keys.row[:, None], q_pos, place[:, None])
        return span_by_range(*order, 0, size, block, block, ordered=sight.keys.count)

    def _summaries(self, sight: Sight, segments: Segments, begin: Tensor) -> KeySpan:
        """The summary tokens, gathered; each query sees those of the segments before its own."""
        block, here = self.block, sight.keys.row >= 0
        member = here & (segments.offset < self.summary)
        if self.side == "last":
            sizes = torch.zeros_like(segments.number)
            number = segments.number.clamp(max=sizes.shape[1] - 1)
            sizes = sizes.scatter_add(1, number, here.long())
            member = here & (segments.offset >= sizes.gather(1, number) - self.summary)
        room = min(len(sight.keys), self.summary * segments.count)
        rank = member.long().cumsum(1)
        slot = torch.where(member, rank - 1, room)
        k_row = torch.full_like(sight.keys.row[:, :1], -1).repeat(1, room + 1)
        k_row = pad_rows(k_row.scatter_(1, slot, sight.keys.row)[:, :room].contiguous(), block)
        before = (rank - member.long()).gather(1, begin).masked_fill(sight.at < 0, 0).to(torch.int32)[:, None]
        k_pos = torch.arange(k_row.shape[1], dtype=torch.int32, device=k_row.device).expand_as(k_row)
        order = (sight.q_row, k_row[:, None], before - 1, k_pos[:, None])
        return span_by_range(*order, 0, FAR, block, block)
