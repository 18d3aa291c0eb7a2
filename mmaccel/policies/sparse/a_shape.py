"""Sink and local window."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import FAR, AttentionPlan, KeySpan, Part, span_from_ranges
from mmaccel.core.registry import register
from mmaccel.core.sparse import SparsePattern
from mmaccel.policies.sparse.orders import (
    Order,
    at_or_before,
    natural,
    places,
    row_ranges,
    touched,
    whole_blocks,
)


@register("sparse", "a_shape")
@dataclass(frozen=True, kw_only=True)
class AShape(SparsePattern):
    """Every query sees the first `sink` tokens and the last `window`, itself counted; the rest is skipped.

    Exact: no block is rounded up, and with sink + window >= length it is dense attention. After MMInference (section 3.1,
    Tables 2 and 3: sink 128, local 1024 to 4096) and StreamingLLM (arXiv 2309.17453); unlike the latter, keys keep their
    positions. Appendix C.3 of the former speaks of seven sinks; its tables, followed here, of 128.
    """

    sink: int = 128
    window: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink < 0:
            raise RecipeError(f"a_shape: sink is {self.sink}; give 0 or more.")
        if self.window < 1:
            raise RecipeError(f"a_shape: window is {self.window}; give at least 1, the token itself.")

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        queries, keys = natural(q_layout, block=self.block), natural(k_layout, block=self.block)
        part = Part(queries.row[:, None], near_and_first(queries, keys, self.sink, self.window, self.block))
        return AttentionPlan(
            parts=(part,),
            block_q=self.block,
            block_k=self.block,
            batch=query.shape[0],
            heads=query.shape[1],
            n_query=query.shape[2],
            n_key=key.shape[2],
        )

    def bound(self, n_query: int, n_key: int) -> int:
        near = touched(self.block + self.window - 1, self.block)
        return whole_blocks(n_query, self.block) * min(
            near + whole_blocks(self.sink, self.block),
            whole_blocks(n_key, self.block) + whole_blocks(min(self.sink, n_key), self.block),
        )


def near_and_first(queries: Order, keys: Order, sink: int, window: int, block: int) -> tuple[KeySpan, ...]:
    """Spans of `queries` over `keys`: the last `window` of the keys not after a query, and the first `sink` of them.

    Both count in keys of the span alone, so they serve a modality as they serve the whole sequence.
    """
    q_row, q_place = queries.row[:, None], at_or_before(keys, queries)[:, None]
    k_row, k_place = keys.row[:, None], places(keys)[:, None]
    spans = []
    if window:
        start, stop = row_ranges(q_place - window + 1, q_place + 1, block, block)
        span = span_from_ranges(q_row, k_row, q_place, k_place, 0, window, start, stop, block, block)
        spans.append(span)
    if sink:
        head = min(whole_blocks(sink, block) * block, len(keys))
        k_place = k_place[..., :head]
        k_row = k_row[..., :head].masked_fill(k_place >= sink, -1)
        # A row reaches its sinks once they are `window` behind it: key 0 first.
        start, stop = row_ranges(0 * q_place, (q_place - window + 1).clamp(max=sink), block, block)
        span = span_from_ranges(q_row, k_row, q_place, k_place, window, FAR, start, stop, block, block)
        spans.append(span)
    return tuple(spans)
