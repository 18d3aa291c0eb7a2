"""Patterns that are planned by `AttentionRegion`: some queries of a layer over some keys, each sorted by position."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import KeySpan, Part, memoize
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.merge_heads import Share
from mmaccel.core.prefill.plan import FAR, AttentionPlan, HeadRun, select_heads, span_by_range
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.policies.sparse.estimate import LastQueryAttention, SampledQueryLayout, modality_run_limits

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Some tokens of each sequence, sorted by position.

    row [B, n]: rows of the tensor that holds the tokens, -1 past the last; position [B, n]: their positions, FAR past the
    last; rank [B, n] int32: 0, 1, 2, ...; count: how many, if the host knows that `row` is 0 .. count - 1 in each sequence.
    """

    row: Tensor
    position: Tensor
    count: int | None = None
    rank: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rank = torch.arange(len(self), dtype=torch.int32, device=self.row.device)
        object.__setattr__(self, "rank", rank.expand(len(self.row), -1))

    def __len__(self) -> int:
        return self.row.shape[1]


def sequence_order(
    layout: TokenLayout, member: Tensor | None = None, *, block: int, size: int | None = None
) -> TokenOrder:
    """Return the valid tokens of `layout` (only those in `member`, bool [B, S]) in sequence order, padded to whole blocks.

    `size` is the most tokens of any sequence, if the host knows it; otherwise the length of the layout.
    """
    chosen = layout.valid if member is None else layout.valid & member
    B, S = chosen.shape
    n = S if size is None else size
    n += -n % block if n else block
    if member is None and size is None and not layout.has_padding:
        ends = torch.nn.functional.pad(layout.position.long(), (0, n - S), value=FAR)
        row = torch.arange(n, dtype=torch.int32, device=chosen.device)
        return TokenOrder(row.masked_fill(row >= S, -1).repeat(B, 1), ends, S)
    # Tokens that are not chosen, and those past `size`, fall into a last column that is cut off.
    slot = torch.where(chosen, chosen.long().cumsum(1) - 1, n).clamp(max=n)
    index = torch.arange(S, device=chosen.device, dtype=torch.int32).expand(B, S)
    row = torch.full((B, n + 1), -1, dtype=torch.int32, device=chosen.device).scatter_(1, slot, index)
    position = torch.full((B, n + 1), FAR, dtype=torch.long, device=chosen.device)
    position.scatter_(1, slot, layout.position.long())
    return TokenOrder(row[:, :n].contiguous(), position[:, :n].contiguous())


def rank_at_or_before(keys: TokenOrder, queries: TokenOrder) -> Tensor:
    """Return the rank [B, n] int32 of each query among `keys`: the number of keys up to it, minus one; -1 for padding."""
    rank = torch.searchsorted(keys.position, queries.position, right=True) - 1
    return rank.masked_fill(queries.row < 0, -1).to(torch.int32)


def ceil_block_count(n: int, block: int) -> int:
    """Return the number of blocks of `block` tokens that cover `n` tokens."""
    return -(-n // block)


def max_touched_blocks(n: int, block: int) -> int:
    """Return the largest number of blocks that a run of `n` tokens can touch."""
    return (n + block - 2) // block + 1 if n > 0 else 0


def max_window_sink_blocks(n_key: int, sink: int, window: int, block: int, *, gaps: bool) -> tuple[int, int]:
    """Return the most blocks that `AttentionRegion.window_and_sink` lists, as (each, more) of `IntraPattern.max_blocks`."""
    keys = ceil_block_count(n_key, block)
    near = min(max_touched_blocks(block + window - 1, block), keys) if window else 0
    # Queries ascend: what their blocks see beyond one window is, all together, no more than the keys.
    return near + ceil_block_count(min(sink, n_key), block), keys if gaps and window else 0


def memoize_while_tracing(memo: dict[Hashable, Any], name: Hashable, make: Callable[[], T]) -> T:
    """Return the entry `name` of the cache `memo`, made by `make` if missing. Unlike `memoize` it also stores what is made
    while torch.compile traces or a CUDA graph is captured."""
    if name not in memo:
        memo[name] = make()
    entry: T = memo[name]
    return entry


@dataclass(frozen=True, eq=False)
class AttentionRegion:
    """A region of a layer's attention matrix: the queries of one modality (or all), over the keys of one modality (or all).

    kinds           the modality of the queries and that of the keys, None for all
    q_row [B, 1, P] rows of the queries in the query tensor, sorted by position; a `Part` with this tensor has this order
    at [B, P]       rank of each query among `keys`: the number of keys up to it, minus one; -1 for none
    keys            the keys, sorted by position; patterns measure all distances in ranks among them
    ordered         number of queries if the host knows that their rows are 0, 1, 2, ...; else None (as in `Part`)
    """

    layer: LayerInputs
    kinds: tuple[int | None, int | None]
    q_row: Tensor
    at: Tensor
    keys: TokenOrder
    ordered: int | None

    def plan_part(self, spans: Sequence[KeySpan], merge_group: int = 0) -> Part:
        """Return the plan's `Part` for all queries of this region over key `spans`."""
        return Part(self.q_row, tuple(spans), None, merge_group, self.ordered, self.ordered)

    @property
    def first_query_rank(self) -> int | None:
        """The rank of the first query, if the host knows that the queries' ranks are consecutive; else None."""
        if self.ordered is None or not self.queries_are_last_keys:
            return None
        return self.layer.k_layout.length - self.layer.q_layout.length

    def key_span(self, lo: int, hi: int, first: int | None = None) -> KeySpan:
        """Return a span of the keys, or of the `first` ones only: a query sees those from lo to hi - 1 ranks before it."""
        k_row, k_pos, ordered, block = self.keys.row, self.keys.rank, self.keys.count, self.layer.block
        if first is not None:
            width = min(ceil_block_count(first, block) * block, len(self.keys))
            k_row, k_pos = k_row[:, :width].masked_fill(k_pos[:, :width] >= first, -1), k_pos[:, :width]
            ordered = None if ordered is None else min(first, ordered)
        order = self.q_row, k_row[:, None], self.at[:, None], k_pos[:, None]
        known: dict[str, Any] = dict(ordered=ordered, ranks=True, q_first=self.first_query_rank)
        return span_by_range(*order, lo, hi, block, block, **known)

    def window_and_sink(self, sink: int, window: int) -> tuple[KeySpan, ...]:
        """Return spans of the last `window` keys up to each query, and of the first `sink` keys; 0 leaves that span out."""
        near = (self.key_span(0, window),) if window else ()
        return (*near, self.key_span(window, FAR, first=sink)) if sink else near

    @property
    def max_keys(self) -> int:
        """The largest number of keys that the region can have, known on the host."""
        return min(len(self.keys), self.layer.key.shape[2])

    @property
    def queries_are_last_keys(self) -> bool:
        """Whether the region has all queries and keys, and the host knows that the queries are the last keys."""
        return self.kinds == (None, None) and self.layer.queries_are_last_keys

    @property
    def queries_may_share_rank(self) -> bool:
        """Whether several queries may have the same rank, because the tokens between them are not among the keys."""
        return self.kinds[1] is not None and self.kinds[0] != self.kinds[1]

    def get_or_compute(self, name: Hashable, make: Callable[[], T]) -> T:
        """Get the cached value `name`, which depends only on the layouts; `make` computes it once for all layers."""
        return memoize_while_tracing(self.layer.memo, (name, self.kinds), make)

    def last_query_attention(self, count: int, pooled: bool = False) -> LastQueryAttention:
        """Return the `LastQueryAttention` of this region: on demand, weights of its last `count` queries over its keys.

        The softmax runs over all keys that a query sees, also those outside the region. `pooled`: every query head gets the
        mean of the weights of the query heads that share its key head.
        """
        layer, (query_kind, key_kind) = self.layer, self.kinds
        sample = self.get_or_compute(("sample", count), lambda: self._sample(count))
        query = sample.select_queries(layer.query)
        total = None
        if key_kind is not None:
            everything = layer.region(query_kind, None)
            total = memoize_while_tracing(
                layer.totals, (query_kind, count), lambda: everything.last_query_attention(count).logsumexp()
            )
        # No other row of the queries is copied where heads lie apart.
        return LastQueryAttention(
            select_heads(layer.planned_head_indices, query), layer.key, sample, total, pooled, layer.runs
        )

    def _sample(self, count: int) -> SampledQueryLayout:
        """Which the last `count` queries are and what they see of the keys; no host read."""
        (query_kind, key_kind), layout = self.kinds, self.layer.q_layout
        # Only where a modality is left and met again do ranks jump.
        runs = 1
        if query_kind is not None and query_kind != key_kind:
            runs = 2 + count // max(modality_run_limits(layout)[query_kind][1], 1)
        rows, keys = self.q_row[:, 0], self.keys.row[:, : self.max_keys]
        L = min(count, layout.length, rows.shape[1])
        last = (rows >= 0).sum(1, keepdim=True) - L + torch.arange(L, device=rows.device)
        # A sequence may be all padding here.
        row = rows.gather(1, last.clamp(min=0)).long().clamp(min=0)
        at = torch.where(last >= 0, self.at.gather(1, last.clamp(min=0)).long(), -1)
        seen = (keys >= 0) & (torch.arange(self.max_keys, device=rows.device) <= at[:, -1:])
        gathered = key_kind is not None or self.layer.k_layout.has_padding
        return SampledQueryLayout(
            row, at, keys.clamp(min=0).long() if gathered else None, seen, self.queries_are_last_keys, runs
        )


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The queries and keys of one layer, the layouts of their tokens, and the block size `block` of its plan.

    query [B, H, n_query, D]; key [B, G, n_key, D]; runs: the query heads to plan; empty: all. totals: a cache, by
    (modality, L), of the log-sum-exp [B, h, L] that the last L queries of a modality have over all keys.
    """

    query: Tensor
    key: Tensor
    q_layout: TokenLayout
    k_layout: TokenLayout
    block: int
    runs: tuple[HeadRun, ...] = ()
    totals: dict[Hashable, Tensor] = field(default_factory=dict)

    @classmethod
    def from_layouts(cls, q_layout: TokenLayout, k_layout: TokenLayout, block: int) -> LayerInputs:
        """Create the inputs of a plan from token layouts alone, with empty queries and keys."""
        nothing = torch.empty(0, 0, k_layout.length, 0)
        return cls(nothing, nothing, q_layout, k_layout, block)

    @property
    def memo(self) -> dict[Hashable, Any]:
        """Cache of values that depend only on the layouts: all layers share it, as it is kept with the queries' layout."""
        # The layout of the keys is held, so that its id stays its own.
        name = "regions", id(self.k_layout), self.block
        held: tuple[Any, dict[Hashable, Any]] = memoize_while_tracing(
            self.q_layout.memo, name, lambda: (self.k_layout, {})
        )
        return held[1]

    @property
    def planned_head_indices(self) -> tuple[int, ...]:
        """The numbers of the query heads to plan."""
        return tuple(head for run in self.runs for head in run.heads) or tuple(range(self.query.shape[1]))

    @property
    def head_count(self) -> int:
        """Number of query heads to plan."""
        return len(self.planned_head_indices)

    @property
    def queries_are_last_keys(self) -> bool:
        """Whether the host knows that no token is padding and that the queries are the last keys."""
        queries, keys = self.q_layout, self.k_layout

        def last() -> bool:
            whole = not (queries.has_padding or keys.has_padding)
            return whole and queries.position.is_set_to(keys.position[:, keys.length - queries.length :])

        return memoize(self.memo, "final", last)

    def region(self, query: int | None = None, key: int | None = None) -> AttentionRegion:
        """Return the `AttentionRegion` of the queries of modality `query` over the keys of modality `key`; None: of all."""
        query, key = _apart(self.q_layout, query), _apart(self.k_layout, key)

        def of_queries() -> tuple[TokenOrder, Tensor]:
            order = _order(self.q_layout, query, self.block)
            return order, order.row[:, None]

        queries, q_row = memoize_while_tracing(self.memo, ("queries", query), of_queries)
        keys = memoize_while_tracing(self.memo, ("keys", key), lambda: _order(self.k_layout, key, self.block))

        def ranks() -> Tensor:
            if query is not None or key is not None or not self.queries_are_last_keys:
                return rank_at_or_before(keys, queries)
            # Nothing is searched for the last of the keys.
            first = self.k_layout.length - self.q_layout.length
            return (queries.rank + first).masked_fill(queries.row < 0, -1)

        at = memoize_while_tracing(self.memo, ("at", query, key), ranks)
        return AttentionRegion(self, (query, key), q_row, at, keys, queries.count)

    def plan(self, parts: Sequence[Part]) -> AttentionPlan:
        """Return the plan made of `parts`; without parts, a plan in which no query sees a key."""
        if not parts:
            region = self.region()
            blind = replace(region, at=torch.full_like(region.at, -1), ordered=None)
            parts = [region.plan_part([blind.key_span(0, 1)])]
        (B, _, n, _), N = self.query.shape, self.key.shape[2]
        return AttentionPlan(tuple(parts), self.block, self.block, B, self.head_count, n, N)


def _apart(layout: TokenLayout, modality: int | None) -> int | None:
    """None for a modality that all tokens are of: their order is that of the whole."""
    if modality is None:
        return None
    others = sum(count for m, count in layout.max_tokens_by_modality.items() if m != modality)
    return modality if others or not layout.max_tokens_by_modality[modality] else None


def _order(layout: TokenLayout, modality: int | None, block: int) -> TokenOrder:
    if modality is None:
        return sequence_order(layout, block=block)
    size = layout.max_tokens_by_modality[modality]
    return sequence_order(layout, layout.modality == modality, block=block, size=size)


@dataclass(frozen=True, kw_only=True)
class RegionPlannedPattern(SparsePattern):
    """Base of patterns that are planned region by region: one region of all queries and keys or, within a modality
    boundary, one for each pair of query modality and key modality. `plan` fills caches on the token layouts, and so
    cannot be compiled (`torch.compile`)."""

    compiles: ClassVar[bool] = False

    @abstractmethod
    def layer_plan_parts(self, layer: LayerInputs) -> Sequence[Part]:
        """Return the `Part`s of one layer's attention plan."""

    @cached_property
    def _key(self) -> str:
        """`repr`, made once: equal patterns of different layers have the same."""
        return repr(self)

    @property
    def reads_layer(self) -> bool:
        """Whether the plan depends on a layer's queries and keys; if not, it is made once for all layers."""
        return self.adaptive

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        return self._plan(LayerInputs(query, key, q_layout, k_layout, self.block))

    def plan_heads(
        self,
        runs: Sequence[HeadRun],
        query: Tensor,
        key: Tensor,
        q_layout: TokenLayout,
        k_layout: TokenLayout,
    ) -> list[Share]:
        layer = LayerInputs(query, key, q_layout, k_layout, self.block, tuple(runs))
        return [(layer.planned_head_indices, self._plan(layer))]

    def _plan(self, layer: LayerInputs) -> AttentionPlan | None:
        if self.dense:
            return None
        if self.reads_layer:
            return layer.plan(self.layer_plan_parts(layer))
        name = "plan", self._key, layer.head_count, *layer.query.shape[::2], layer.key.shape[2]
        return memoize(layer.memo, name, lambda: layer.plan(self.layer_plan_parts(layer)))


@dataclass(frozen=True, kw_only=True)
class IntraPattern(RegionPlannedPattern):
    """Base of patterns that can plan any region, and so can be used within a modality boundary (MMInference, section 3.2).

    Used alone, over the whole sequence, it ignores modalities: the paper's no-boundary head.
    """

    @abstractmethod
    def build_plan_parts(self, region: AttentionRegion) -> tuple[Part, ...]:
        """Return the plan's `Part`s for the queries of `region`; each query sees at most the region's keys up to it."""

    def cached_plan_parts(self, region: AttentionRegion) -> tuple[Part, ...]:
        """Return the plan's parts for a region; cached for all layers if the pattern depends on the layout alone."""
        if self.adaptive:
            return self.build_plan_parts(region)
        return memoize(region.layer.memo, (self._key, region.kinds), lambda: self.build_plan_parts(region))

    def layer_plan_parts(self, layer: LayerInputs) -> tuple[Part, ...]:
        return self.cached_plan_parts(layer.region())

    @abstractmethod
    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        """Return upper bounds (each, more) of listed key blocks: `each` for every query block, plus `more` in total.

        gaps: keys may lie between consecutive queries; ties: several queries may have the same rank.
        """

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        each, more = self.max_blocks(n_query, n_key, gaps=False, ties=False)
        return ceil_block_count(n_query, self.block) * each + more

    def estimate_blocks(self, rows: int, keys: int, share: float, region: AttentionRegion | None) -> float:
        """Estimate the number of listed blocks for `rows` queries over `keys` keys; `share`: of the keys, seen causally.
        `region` (without tensors): given if the layout is known. Assumes the best case for what depends on the data."""
        return min(
            self.max_blocks_total(rows, keys),
            ceil_block_count(rows, self.block) * (share * keys / self.block + 1),
        )

    def expected_blocks(
        self, n_query: int, n_key: int, layouts: tuple[TokenLayout, TokenLayout] | None = None
    ) -> float:
        region = None if layouts is None else LayerInputs.from_layouts(*layouts, self.block).region()
        return self.estimate_blocks(n_query, n_key, mean_causal_share(n_query, n_key), region)


def mean_causal_share(n_query: int, n_key: int) -> float:
    """Return the share (0 to 1) of `n_key` keys that the last `n_query` queries see causally, a mean over these queries."""
    return (2 * n_key - n_query + 1) / (2 * n_key)
