"""The `sf_strided` pattern (Sparse Transformer, strided): a local window, and every stride-th earlier key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmaccel.backends.ops.block_attend import Part
from mmaccel.core.prefill.plan import span_by_range
from mmaccel.core.registry import register
from mmaccel.policies.sparse.orders import AttentionRegion, ceil_block_count, max_touched_blocks
from mmaccel.policies.sparse.sf_fixed import FrameAndTextSegments, SegmentedPattern, as_int32_if_fits


@register("sparse", "sf_strided")
@dataclass(frozen=True, kw_only=True)
class SFStrided(SegmentedPattern):
    """A query sees the last `stride` tokens, itself included, and every stride-th token before: Sparse Transformer, strided.

    stride="frame"  the window is as long as the longest frame of the sequence; beyond it a query sees the keys at its own
                    offset in their segments: its own cell in every earlier frame. Segments are those of `sf_fixed`, so
                    neither frames of unequal size nor timestamps shift the lines
    an int          a window of so many tokens and every key with (query - key) mod stride = 0

    The two sets need different key orders, the original one and (offset, position), so that each row is in two parts over
    disjoint keys, merged by their log-sum-exps. Exact: all other keys of a block are masked. After Child et al. 2019 (arXiv
    1904.10509) with the sizes of MMInference (Table 2: both the tokens of a frame).
    """

    def build_plan_parts(self, region: AttentionRegion) -> tuple[Part, ...]:
        segments = self.key_segments(region)
        return (self._window(region, segments), self._lines(region, segments))

    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        (least, most), block, keys = self.stride_range, self.block, ceil_block_count(n_key, self.block)
        window = min(max_touched_blocks(block + most - 1, block), keys)
        line = min(max_touched_blocks(ceil_block_count(n_key, least), block), keys)
        # Queries ascend: what their blocks see beyond one window is, all together, no more than the keys. In the order of
        # the lines a block of queries has one offset, and one more for each that begins in it.
        return window + line, keys + 2 * min(most, n_query) + (keys if gaps else 0)

    def estimate_blocks(self, rows: int, keys: int, share: float, region: AttentionRegion | None) -> float:
        if region is None:
            return super().estimate_blocks(rows, keys, share, region)
        longest, count = self.max_stride_and_segments(region)
        each = longest / self.block + 1.5 + share * count / self.block + 1
        return ceil_block_count(rows, self.block) * each

    def _window(self, region: AttentionRegion, segments: FrameAndTextSegments) -> Part:
        """The keys less than a stride before each query.

        The stride differs between sequences and the range of a span does not: counted in strides of `size`, of which the
        tokens fill the first, tokens are less than `size` apart exactly when they are less than a stride apart.
        """
        block, size, stride = self.block, segments.size, segments.stride
        # Even cuts of min_stride or more are no more than `count`, one that is cut short among them.
        most = size * (segments.count + len(region.keys) - region.max_keys + 1)
        number = torch.arange(len(region.keys), device=stride.device)
        k_pos = as_int32_if_fits(number // stride * size + number % stride, most)
        at = region.at.long()
        q_pos = as_int32_if_fits(at // stride * size + at % stride, most).masked_fill(at < 0, -1)[:, None]
        order = (region.q_row, region.keys.row[:, None], q_pos, k_pos[:, None])
        return region.plan_part([span_by_range(*order, 0, size, block, block, ordered=region.keys.count)])

    def _lines(self, region: AttentionRegion, segments: FrameAndTextSegments) -> Part:
        """The keys at the offset of each query, a stride or more before it; queries and keys by (offset, rank)."""
        block, count = self.block, segments.count
        rows, at = region.keys.row, region.at.long()
        base = len(region.keys) + 1
        offset = torch.where(rows >= 0, segments.offset, segments.size)
        code, order = (offset * base + torch.arange(base - 1, device=rows.device)).sort(1)
        k_row, offset = rows.gather(1, order), code // base
        k_pos = torch.arange(base - 1, device=rows.device) - torch.searchsorted(code, offset * base)
        own = torch.where(at >= 0, segments.offset.gather(1, at.clamp(min=0)), segments.size + 1)
        order = (own * base + at).argsort(1)
        own, at, q_row = own.gather(1, order), at.gather(1, order), region.q_row[:, 0].gather(1, order)
        start = torch.searchsorted(code, own * base)
        end = torch.searchsorted(code, own * base + at - segments.stride, right=True)
        end = torch.where(at >= segments.stride, end, start)
        # Offsets lie twice `count` apart, so that no pair of two offsets is within the range.
        most = 2 * count * (segments.size + 2)
        q_pos = as_int32_if_fits(own * (2 * count) + end - start - 1, most).masked_fill(q_row < 0, -1)
        k_pos = as_int32_if_fits(offset * (2 * count) + k_pos, most).masked_fill(k_row < 0, 0)
        tokens = (q_row[:, None], k_row[:, None], q_pos[:, None], k_pos[:, None])
        return Part(q_row[:, None], (span_by_range(*tokens, 0, count, block, block),), merge_group=1)
