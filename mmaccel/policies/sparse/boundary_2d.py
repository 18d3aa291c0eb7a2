"""Queries and keys sorted by modality, with a pattern of its own for each pair of modalities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mmaccel.core.errors import RecipeError, UnknownName
from mmaccel.core.layout import MODALITIES, TokenLayout
from mmaccel.core.plan import AttentionPlan, KeySpan, Part
from mmaccel.core.registry import register
from mmaccel.core.sparse import SparsePattern
from mmaccel.policies.sparse.a_shape import near_and_first
from mmaccel.policies.sparse.orders import natural, touched, whole_blocks

PAIRS = tuple(f"{q}>{k}" for q in MODALITIES.values() for k in MODALITIES.values())


@register("sparse", "boundary_2d")
@dataclass(frozen=True, kw_only=True)
class Boundary2D(SparsePattern):
    """A query sees, of each modality, the first `sink` tokens and the last `window` that are not after it.

    Sinks and windows count in tokens of the key's modality, so that they run on across whatever stands between its
    segments (MMInference, Algorithm 3 and section 2.4); a query and a key of one modality are `window` apart exactly when
    so many of its tokens lie between. `pairs` gives a pair of its own to a query and a key modality, as
    ``{"video>text": (sink, window)}``; (0, 0) leaves a pair out. Exact: nothing is rounded to blocks.

    The paper chooses among its three patterns for each pair; here every pair has sinks and a window.
    """

    sink: int = 128
    window: int = 1024
    pairs: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink < 0 or self.window < 1:
            raise RecipeError(
                f"boundary_2d: sink {self.sink} and window {self.window} must be at least 0 and at least 1."
            )
        for pair, extent in self.pairs.items():
            if pair not in PAIRS:
                raise UnknownName("pair of boundary_2d", pair, PAIRS)
            if len(extent) != 2 or min(extent) < 0:
                raise RecipeError(
                    f"boundary_2d: pairs[{pair!r}] is {extent!r}; give (sink, window), 0 or more."
                )
            query, key = pair.split(">")
            if query == key and extent[1] < 1:
                raise RecipeError(
                    f"boundary_2d: pairs[{pair!r}] has no window; give at least 1, the token itself."
                )

    def extent(self, query: str, key: str) -> tuple[int, int]:
        """(sink, window) of queries of one modality over keys of another."""
        sink, window = self.pairs.get(f"{query}>{key}", (self.sink, self.window))
        return sink, window

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        block = self.block
        q_size, k_size = q_layout.census, k_layout.census
        keys = {
            m: natural(k_layout, k_layout.modality == m, block=block, size=size)
            for m, size in k_size.items()
            if size
        }
        parts = []
        for m, size in q_size.items():
            if not size:
                continue
            queries = natural(q_layout, q_layout.modality == m, block=block, size=size)
            spans: list[KeySpan] = []
            for other, order in keys.items():
                extent = self.extent(MODALITIES[m], MODALITIES[other])
                spans += near_and_first(queries, order, *extent, block)
            parts.append(Part(queries.row[:, None], tuple(spans)))
        if not parts:  # all padding
            return None
        return AttentionPlan(
            parts=tuple(parts),
            block_q=block,
            block_k=block,
            batch=query.shape[0],
            heads=query.shape[1],
            n_query=query.shape[2],
            n_key=key.shape[2],
        )

    def bound(self, n_query: int, n_key: int) -> int:
        block = self.block
        rows = whole_blocks(n_query, block) + len(MODALITIES) - 1
        keys = whole_blocks(n_key, block) + len(MODALITIES) - 1
        total = 0
        for other in MODALITIES.values():
            sinks, windows = zip(*(self.extent(m, other) for m in MODALITIES.values()), strict=True)
            # The rows of a part ascend: what its blocks see beyond one window is, all together, no more than the keys.
            near = rows * touched(block + max(windows) - 1, block) + len(MODALITIES) * keys
            total += min(near, rows * keys) + rows * whole_blocks(min(max(sinks), n_key), block)
        return total
