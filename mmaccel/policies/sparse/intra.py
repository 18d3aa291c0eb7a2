"""Patterns over orders: some queries of a layer over some of its keys, by themselves or within modality boundaries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import AttentionPlan, HeadRun, KeySpan, Part, remember, span_by_range
from mmaccel.core.sparse import SparsePattern
from mmaccel.policies.sparse.estimate import Asking, LastQueries
from mmaccel.policies.sparse.orders import Order, at_or_before, natural, whole_blocks
from mmaccel.policies.sparse.slashes import Breaks, Shapes


@dataclass(frozen=True, eq=False)
class Sight:
    """Some queries of a layer, and some of its keys as they see them.

    queries, keys   both by position; whatever a pattern measures it measures in ranks among `keys`
    at [B, P]       place of each query: the number of `keys` not after it, minus one; -1 where there is none
    q_row [B, 1, P] the rows of the queries; a part that has this very tensor is in their order
    kinds           the modality of the queries and that of the keys, None for all of them
    ordered         as of a `Part` with q_row
    """

    layer: Layer
    queries: Order
    keys: Order
    at: Tensor
    q_row: Tensor
    kinds: tuple[int | None, int | None]
    ordered: int | None = None

    def part(self, spans: Sequence[KeySpan], merge_group: int = 0) -> Part:
        """The part of all queries over `spans`."""
        return Part(self.q_row, tuple(spans), None, merge_group, self.ordered, self.ordered)

    @property
    def known(self) -> dict[str, Any]:
        """What the host knows of a span with the rows and ranks of `keys`."""
        return dict(ordered=self.keys.count, ranks=True)

    @property
    def q_first(self) -> int | None:
        """The first place of `at`, where the places of the queries follow each other; None where the host does not know."""
        if self.ordered is None or not self.final:
            return None
        return self.layer.k_layout.length - self.layer.q_layout.length

    def span(self, lo: int, hi: int, first: int | None = None) -> KeySpan:
        """The keys, or the `first` of them, whose places are in a range before those of the queries."""
        k_row, k_pos, known, block = self.keys.row, self.keys.rank, self.known, self.layer.block
        if first is not None:
            width = min(whole_blocks(first, block) * block, len(self.keys))
            k_row, k_pos = k_row[:, :width].masked_fill(k_pos[:, :width] >= first, -1), k_pos[:, :width]
            known["ordered"] = None if self.keys.count is None else min(first, self.keys.count)
        order = self.q_row, k_row[:, None], self.at[:, None], k_pos[:, None]
        return span_by_range(*order, lo, hi, block, block, q_first=self.q_first, **known)

    @property
    def width(self) -> int:
        """The most keys there can be, a number of the host."""
        return min(len(self.keys), self.layer.key.shape[2])

    @property
    def final(self) -> bool:
        """Whether these are all queries and all keys, and the last of them, as `Orders.final` says."""
        return self.kinds == (None, None) and self.layer.orders.final

    @property
    def ties(self) -> bool:
        """Whether queries may have the same place: the keys between them are left out."""
        return self.kinds[1] is not None and self.kinds[0] != self.kinds[1]

    @property
    def breaks(self) -> Breaks:
        """How the places of the queries run, from what the host knows of their layout."""
        query, key = self.kinds
        if query == key:
            return Breaks(2, 0, 1)
        runs = self.layer.q_layout.runs
        # In each run of the sequence whole blocks have one shape; one more where it begins, and one where it ends.
        shapes = 3 * sum(count for count, _ in runs.values()) + 3
        if query is None:
            return Breaks(shapes, 0, 1)
        most, least = runs[query]
        return Breaks(shapes, most, 2 + (self.layer.block - 2) // max(least, 1))

    def shapes(self, heads: int) -> Shapes:
        """The shapes of the blocks of queries, made once for a prompt; for lists of `heads` heads."""
        held, block = self.layer.orders.held, self.layer.block
        name = "shapes", self.kinds, heads
        if name not in held:
            blocks = len(self.keys) // block
            held[name] = Shapes.of(self.q_row, self.at[:, None], blocks, heads, block, self.breaks)
        found: Shapes = held[name]
        return found

    def last(self, count: int, pooled: bool = False) -> LastQueries:
        """What the last `count` of the queries give to the keys: their shares of all that those queries see.

        `pooled`: the mean over the query heads that share a key head, for each of them.
        """
        layer = self.layer
        total = None
        if self.keys is not layer.keys():
            total = layer.totals(self.kinds[0], count)
        asking = layer.orders.asking(*self.kinds, count)
        return LastQueries(layer.asked(asking), layer.key, asking, total, pooled)


@dataclass(frozen=True, eq=False)
class Orders:
    """The orders of a prompt's queries and keys, made once for all layers: they follow from the layouts alone.

    held  what patterns derived of the layouts alone
    """

    q_layout: TokenLayout
    k_layout: TokenLayout
    block: int
    held: dict[Any, Any] = field(default_factory=dict)
    _queries: dict[int | None, tuple[Order, Tensor]] = field(default_factory=dict)
    _keys: dict[int | None, Order] = field(default_factory=dict)
    _at: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)
    _asking: dict[tuple[int | None, int | None, int], Asking] = field(default_factory=dict)

    @classmethod
    def of(cls, q_layout: TokenLayout, k_layout: TokenLayout, block: int) -> Orders:
        """Those of two layouts; kept with the queries'."""
        name = "orders", id(k_layout), block
        found: Orders | None = q_layout.memo.get(name)
        if found is None:
            found = q_layout.memo[name] = cls(q_layout, k_layout, block)
        return found

    @property
    def final(self) -> bool:
        """Whether no query and no key is padding, and the queries are the last of the keys, as far as the host knows: of
        layouts of one memory."""
        queries, keys = self.q_layout, self.k_layout

        def last() -> bool:
            whole = not (queries.padded or keys.padded)
            return whole and queries.position.is_set_to(keys.position[:, keys.length - queries.length :])

        return remember(self.held, "final", last)

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

    def at(self, query: int | None, key: int | None) -> Tensor:
        """[B, P]: the places of the queries of one modality among the keys of another; None stands for all of them."""
        name = _told_apart(self.q_layout, query), _told_apart(self.k_layout, key)
        if name not in self._at:
            keys, queries = self.keys(key), self.queries(query)[0]
            if name == (None, None) and self.final:
                n, rank = self.q_layout.length, queries.rank
                self._at[name] = torch.where(rank < n, rank + (self.k_layout.length - n), -1)
            else:
                self._at[name] = at_or_before(keys, queries)
        return self._at[name]

    def asking(self, query: int | None, key: int | None, count: int) -> Asking:
        """The last `count` queries of one modality and what they see of the keys of another."""
        kinds = _told_apart(self.q_layout, query), _told_apart(self.k_layout, key)
        name = (*kinds, count)
        if name not in self._asking:
            gathered = kinds[1] is not None or self.k_layout.padded
            # Only where a modality is left and met again do places jump.
            runs = 1
            if kinds[0] is not None and kinds[0] != kinds[1]:
                runs = 2 + count // max(self.q_layout.runs[kinds[0]][1], 1)
            self._asking[name] = Asking.of(
                self.queries(query)[0],
                self.keys(key),
                self.at(query, key),
                min(count, self.q_layout.length),
                min(len(self.keys(key)), self.k_layout.length),
                gathered,
                kinds == (None, None) and self.final,
                runs,
            )
        return self._asking[name]


@dataclass(frozen=True, eq=False)
class Layer:
    """The tensors of one layer, and the orders of its prompt.

    query [B, H, n_query, D]; run: of its heads those that are planned, None for all. key [B, G, n_key, D]: their keys.
    """

    query: Tensor
    key: Tensor
    q_layout: TokenLayout
    k_layout: TokenLayout
    block: int
    run: HeadRun | None = None
    _totals: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        run: HeadRun,
        query: Tensor,
        key: Tensor,
        q_layout: TokenLayout,
        k_layout: TokenLayout,
        block: int,
    ) -> Layer:
        """That of some heads of the tensors of a layer."""
        return cls(query, key[:, run.groups], q_layout, k_layout, block, run)

    @property
    def heads(self) -> int:
        """How many heads are planned."""
        return self.query.shape[1] if self.run is None else len(self.run.heads)

    def asked(self, asking: Asking) -> Tensor:
        """[B, heads, L, D]: the queries that ask. No other row is copied where heads lie apart."""
        picked = asking.picked(self.query)
        return picked if self.run is None else self.run.of(picked)

    @property
    def orders(self) -> Orders:
        """What follows from the layouts alone."""
        return Orders.of(self.q_layout, self.k_layout, self.block)

    def queries(self, modality: int | None = None) -> tuple[Order, Tensor]:
        """As `Orders.queries`."""
        return self.orders.queries(modality)

    def keys(self, modality: int | None = None) -> Order:
        """As `Orders.keys`."""
        return self.orders.keys(modality)

    def sight(self, query: int | None = None, key: int | None = None) -> Sight:
        """The queries of one modality over the keys of another; None stands for all of them."""
        (queries, q_row), keys = self.queries(query), self.keys(key)
        kinds = _told_apart(self.q_layout, query), _told_apart(self.k_layout, key)
        return Sight(self, queries, keys, self.orders.at(query, key), q_row, kinds, queries.count)

    def once(self, pattern: SparsePattern, make: Callable[[], AttentionPlan]) -> AttentionPlan:
        """The plan that `make` gives of a pattern which looks at the layouts alone, made once for all layers."""
        sizes = self.query.shape[0], self.query.shape[2], self.key.shape[2]
        return remember(self.orders.held, ("plan", written(pattern), self.heads, *sizes), make)

    def totals(self, query: int | None, count: int) -> Tensor:
        """[B, H, L]: the log-sum-exp over all keys of the last `count` queries of a modality."""
        name = (query, count)
        if name not in self._totals:
            asking = self.orders.asking(query, None, count)
            self._totals[name] = LastQueries(self.asked(asking), self.key, asking, None, False).totals()
        return self._totals[name]

    def plan(self, parts: Sequence[Part]) -> AttentionPlan:
        """The plan of this layer made of `parts`, or one in which nothing is seen if there are none."""
        if not parts:
            sight = self.sight()
            order = sight.q_row, sight.keys.row[:, None], -1 - 0 * sight.at[:, None], sight.keys.rank[:, None]
            parts = [sight.part([span_by_range(*order, 0, 1, self.block, self.block, **sight.known)])]
        return AttentionPlan(
            parts=tuple(parts),
            block_q=self.block,
            block_k=self.block,
            batch=self.query.shape[0],
            heads=self.heads,
            n_query=self.query.shape[2],
            n_key=self.key.shape[2],
        )


@dataclass(frozen=True, kw_only=True)
class IntraPattern(SparsePattern):
    """A pattern that can be planned for any queries over any keys, and so within modality boundaries (section 3.2).

    Over the whole sequence it is the paper's no-boundary head: the modalities of tokens do not count.
    """

    @abstractmethod
    def parts(self, sight: Sight) -> tuple[Part, ...]:
        """Parts over the queries of `sight`, all its keys not after them at most."""

    def found(self, sight: Sight) -> tuple[Part, ...]:
        """The parts of a sight; of a pattern that looks at the layout alone, made once for all layers."""
        if self.adaptive:
            return self.parts(sight)
        name = written(self), sight.kinds
        return remember(sight.layer.orders.held, name, lambda: self.parts(sight))

    @abstractmethod
    def max_blocks(self, n_query: int, n_key: int, *, gaps: bool, ties: bool) -> tuple[int, int]:
        """The most blocks listed: so many for each block of queries, and so many more in all.

        gaps: keys may lie between queries that follow each other; ties: queries may have the same place.
        """

    def estimate_blocks(self, rows: int, keys: int, share: float, sight: Sight | None) -> float:
        """About how many blocks are listed for `rows` queries over `keys` keys, of which each is after `share` of them on
        the mean; `sight` without tensors, where the layout is known. At best, where only the data tell."""
        each, more = self.max_blocks(rows, keys, gaps=False, ties=False)
        blocks = whole_blocks(rows, self.block)
        return min(blocks * each + more, blocks * (share * keys / self.block + 1))

    def expected_blocks(
        self, n_query: int, n_key: int, layouts: tuple[TokenLayout, TokenLayout] | None = None
    ) -> float:
        sight = None if layouts is None else shown(*layouts, self.block).sight()
        return self.estimate_blocks(n_query, n_key, seen_share(n_query, n_key), sight)

    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        return self._planned(Layer(query, key, q_layout, k_layout, self.block))

    def plan_of(
        self, run: HeadRun, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        return self._planned(Layer.of(run, query, key, q_layout, k_layout, self.block))

    def _planned(self, layer: Layer) -> AttentionPlan:
        def made() -> AttentionPlan:
            return layer.plan(self.found(layer.sight()))

        return made() if self.adaptive else layer.once(self, made)

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        each, more = self.max_blocks(n_query, n_key, gaps=False, ties=False)
        return whole_blocks(n_query, self.block) * each + more


def written(pattern: SparsePattern) -> str:
    """`repr` of a pattern, made once: equal patterns of different layers have the same."""
    known: str | None = getattr(pattern, "_written", None)
    if known is None:
        known = repr(pattern)
        object.__setattr__(pattern, "_written", known)
    return known


def seen_share(n_query: int, n_key: int) -> float:
    """The mean share of the keys that is not after the last `n_query` of them."""
    return (2 * n_key - n_query + 1) / (2 * n_key)


def shown(q_layout: TokenLayout, k_layout: TokenLayout, block: int) -> Layer:
    """A layer of which the layouts alone are known."""
    nothing = torch.empty(0, 0, k_layout.length, 0)
    return Layer(nothing, nothing, q_layout, k_layout, block)


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
