"""Patterns over orders: some queries of a layer over some of its keys, by themselves or within modality boundaries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import AttentionPlan, Part, span_from_table
from mmaccel.core.sparse import SparsePattern
from mmaccel.policies.sparse.estimate import LastQueries
from mmaccel.policies.sparse.orders import Order, at_or_before, natural, places, whole_blocks


@dataclass(frozen=True, eq=False)
class Sight:
    """Some queries of a layer, and some of its keys as they see them.

    queries, keys   both by position; whatever a pattern measures it measures in ranks among `keys`
    at [B, P]       place of each query: the number of `keys` not after it, minus one; -1 where there is none
    q_row [B, 1, P] the rows of the queries; a part that has this very tensor stands in their order
    """

    layer: Layer
    queries: Order
    keys: Order
    at: Tensor
    q_row: Tensor

    @property
    def width(self) -> int:
        """The most keys there can be, a number of the host."""
        return min(len(self.keys), self.layer.key.shape[2])

    def last(self, count: int, pooled: bool = False) -> LastQueries:
        """What the last `count` of the queries give to the keys: their shares of all that those queries see.

        `pooled`: the mean over the query heads that share a key head, for each of them.
        """
        layer = self.layer
        whole = layer.keys()
        total = None
        if self.keys is not whole:
            total = layer.totals(self.queries, count)
        gathered = self.keys is not whole or layer.k_layout.padded
        return LastQueries.of(
            layer.query, layer.key, self.queries, self.keys, self.at, count, gathered, total, pooled
        )


@dataclass(frozen=True, eq=False)
class Layer:
    """The tensors of one layer, and the orders made of them once."""

    query: Tensor
    key: Tensor
    q_layout: TokenLayout
    k_layout: TokenLayout
    block: int
    _queries: dict[int | None, tuple[Order, Tensor]] = field(default_factory=dict)
    _keys: dict[int | None, Order] = field(default_factory=dict)
    _totals: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def queries(self, modality: int | None = None) -> tuple[Order, Tensor]:
        """The queries of a modality, or all, and their rows [B, 1, P]."""
        modality = _told_apart(self.q_layout, modality)
        if modality not in self._queries:
            order = _order(self.q_layout, modality, self.block)
            self._queries[modality] = (order, order.row[:, None])
        return self._queries[modality]

    def keys(self, modality: int | None = None) -> Order:
        """The keys of a modality, or all."""
        modality = _told_apart(self.k_layout, modality)
        if modality not in self._keys:
            self._keys[modality] = _order(self.k_layout, modality, self.block)
        return self._keys[modality]

    def sight(self, query: int | None = None, key: int | None = None) -> Sight:
        """The queries of one modality over the keys of another; None stands for all of them."""
        (queries, q_row), keys = self.queries(query), self.keys(key)
        return Sight(self, queries, keys, at_or_before(keys, queries), q_row)

    def totals(self, queries: Order, count: int) -> Tensor:
        """[B, H, L]: the log-sum-exp over all keys of the last `count` of `queries`."""
        name = (id(queries), count)
        if name not in self._totals:
            whole = self.keys()
            at = at_or_before(whole, queries)
            sample = LastQueries.of(
                self.query, self.key, queries, whole, at, count, self.k_layout.padded, None, False
            )
            self._totals[name] = sample.totals()
        return self._totals[name]

    def plan(self, parts: Sequence[Part], overlap: bool = False) -> AttentionPlan:
        """The plan of this layer made of `parts`, or one in which nothing is seen if there are none."""
        if not parts:
            sight = self.sight()
            nothing = torch.zeros(
                1, 1, len(sight.queries) // self.block, len(sight.keys) // self.block, dtype=torch.bool
            )
            order = (sight.q_row, sight.keys.row[:, None], sight.at[:, None], places(sight.keys)[:, None])
            table = nothing.to(self.key.device).expand(self.key.shape[0], -1, -1, -1)
            parts = [
                Part(sight.q_row, (span_from_table(*order, 0, 1, table, self.block, self.block),)),
            ]
        return AttentionPlan(
            parts=tuple(parts),
            block_q=self.block,
            block_k=self.block,
            batch=self.query.shape[0],
            heads=self.query.shape[1],
            n_query=self.query.shape[2],
            n_key=self.key.shape[2],
            overlap=overlap,
        )


@dataclass(frozen=True, kw_only=True)
class IntraPattern(SparsePattern):
    """A pattern that can be planned for any queries over any keys, and so within modality boundaries (section 3.2).

    Over the whole sequence it is the paper's no-boundary head: the modalities of tokens do not count.

    shares_rows  the parts of one sight may have queries in common, over disjoint keys
    """

    shares_rows: ClassVar[bool] = False

    @abstractmethod
    def parts(self, sight: Sight) -> tuple[Part, ...]:
        """Parts over the queries of `sight`, all its keys not after them at most; disjoint, unless `shares_rows`."""

    @abstractmethod
    def toll(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        """The most blocks listed: so many for each block of queries, and so many more in all.

        gaps: keys may lie between queries that follow each other; ties: queries may have the same place.
        """

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        layer = Layer(query, key, q_layout, k_layout, self.block)
        return layer.plan(self.parts(layer.sight()), self.shares_rows)

    def bound(self, n_query: int, n_key: int) -> int:
        each, more = self.toll(n_query, n_key, gaps=False, ties=False)
        return whole_blocks(n_query, self.block) * each + more


def _told_apart(layout: TokenLayout, modality: int | None) -> int | None:
    """None for a modality that all tokens are of: their order is that of the whole."""
    if modality is None:
        return None
    others = sum(count for m, count in layout.census.items() if m != modality)
    return modality if others or not layout.census[modality] else None


def _order(layout: TokenLayout, modality: int | None, block: int) -> Order:
    if modality is None:
        return natural(layout, block=block)
    member = layout.modality == modality
    return natural(layout, member, block=block, size=layout.census[modality])
