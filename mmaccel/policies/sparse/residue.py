"""The order (class, position) of a grid head: its lines are runs of keys in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmaccel.backends.ops.lines import turned_classes
from mmaccel.core.plan import FAR, KeySpan, Part, span_by_range
from mmaccel.policies.sparse.intra import Sight
from mmaccel.policies.sparse.orders import Order, whole_blocks
from mmaccel.policies.sparse.stride import Classes, Frames, by_class


@dataclass(frozen=True)
class Beyond:
    """What other spans of a head cover, and its lines leave out: the last `window` keys of a query, and the first `sink`."""

    window: int = 0
    sink: int = 0

    def places(self, at: Tensor) -> Tensor:
        """The place of the last key that a line shows each query, [B, P] as `at`; -1 where there is none."""
        return (at - self.window).clamp(min=-1) if self.window else at

    def rows(self, keys: Order) -> Tensor:
        """[B, N]: the rows of the keys, -1 for the first ones."""
        return keys.row.masked_fill(keys.rank < self.sink, -1) if self.sink else keys.row


@dataclass(frozen=True, eq=False)
class Residue:
    """Keys by (class, position), queries by (class of the keys they pair with, position).

    code [B, h, N] class * base + place of each key, ascending, and k_row [B, h, N] its row; for each query, [B, h, P] or
    [B, H, P], its row, the place of the last key that it may see, its own class, and `pair`, the class of the keys its
    slashes lead to. base exceeds any place.
    """

    classes: Classes
    block: int
    base: int
    code: Tensor
    k_row: Tensor
    q_row: Tensor
    q_at: Tensor
    own: Tensor
    pair: Tensor

    @classmethod
    def of(cls, sight: Sight, classes: Classes, beyond: Beyond, *, slash: bool) -> Residue:
        """The order of the queries and keys of `sight`; without slashes the queries stay in the order they are in."""
        keys, at = sight.keys, sight.at
        base = len(keys) + 1
        order = by_class(classes.number, classes.most)
        code = (classes.number * base + keys.rank[:, None]).gather(2, order)
        k_row = beyond.rows(keys)[:, None].expand_as(order).gather(2, order)
        own = query_classes(classes, at)
        pair = (own - classes.shift) % classes.stride if slash else own
        q_row, q_at = sight.q_row.expand_as(pair), beyond.places(at)[:, None].expand_as(pair)
        own = own.expand_as(pair)
        if slash:
            order = by_class(torch.where(q_row >= 0, pair, classes.most), classes.most)
            q_row, q_at, own, pair = (t.gather(2, order) for t in (q_row, q_at, own, pair))
        return cls(classes, sight.layer.block, base, code, k_row, q_row, q_at, own, pair)

    def slash(self, q_row: Tensor, owned: bool) -> KeySpan:
        """Each query and the keys of its paired class; `owned`: the keys of the vertical line are another span's."""
        begin = self.pair * self.base
        start, end = self._find(begin), self._find(begin + self.q_at, right=True)
        number = self.code // self.base
        rank = torch.arange(self.code.shape[2], device=self.code.device) - self._find(number * self.base)
        # Classes lie two rooms apart: then no pair of two classes is within one room of each other.
        room = self.classes.room
        q_pos, k_pos = self.pair * (2 * room) + end - start - 1, number * (2 * room) + rank
        k_row = torch.where(number == self.classes.line, -1, self.k_row) if owned else self.k_row
        return self._span(q_row, k_row, q_pos, k_pos, room)

    def vertical(self, q_row: Tensor) -> KeySpan:
        """Each query and the keys of the vertical line."""
        begin = self.classes.line * self.base
        start, end = self._find(begin), self._find(begin + self.q_at, right=True)
        k_row = torch.where(self.code // self.base == self.classes.line, self.k_row, -1)
        k_pos = torch.arange(self.code.shape[2], device=self.code.device) - start
        return self._span(q_row, k_row, end - start - 1, k_pos, FAR)

    def _find(self, code: Tensor, right: bool = False) -> Tensor:
        """Where `code` [B, x, n] falls among the codes of the keys; x is h, or any number when h is 1."""
        B, h, _ = self.code.shape
        flat = code.reshape(B, h, -1) if h == 1 else code.contiguous()
        return torch.searchsorted(self.code, flat, right=right).view_as(code)

    def _span(self, q_row: Tensor, k_row: Tensor, q_pos: Tensor, k_pos: Tensor, hi: int) -> KeySpan:
        wide = 2 * self.classes.room * self.classes.most >= FAR
        q_pos = torch.where(q_row >= 0, q_pos, -1).to(torch.int64 if wide else torch.int32)
        k_pos = torch.where(k_row >= 0, k_pos, 0).to(q_pos.dtype)
        return span_by_range(q_row, k_row, q_pos, k_pos, 0, hi, self.block, self.block)


@dataclass(frozen=True, eq=False)
class ClassOrder:
    """Queries and keys by (class, place) where all heads share the classes: from the layouts alone.

    queries [3, B, P] int32: row, place of the last key that it may see, and class; keys [3, B, N] int32: row, place and
    class; q_begin, k_begin [B, C + 1] int32 where classes begin.
    k_row, k_pos [B, 1, N]: the rows and places of the keys as the slashes of every head have them, with classes two rooms
    apart, so that no pair of two classes is within one room of each other. Queries without a place see nothing, and are left
    out.
    """

    queries: Tensor
    q_begin: Tensor
    keys: Tensor
    k_begin: Tensor
    k_row: Tensor
    k_pos: Tensor

    @classmethod
    def of(cls, sight: Sight, frames: Frames, beyond: Beyond) -> ClassOrder:
        """That of the queries and keys of `sight`, made once for a prompt."""
        name = "order", sight.kinds, beyond
        if name not in frames.held:
            frames.held[name] = cls._made(sight, frames, beyond)
        found: ClassOrder = frames.held[name]
        return found

    @classmethod
    def _made(cls, sight: Sight, frames: Frames, beyond: Beyond) -> ClassOrder:
        number, at = frames.number[:, 0], sight.at.long()
        edge = torch.arange(frames.widest + 1, device=at.device).expand(len(at), -1).contiguous()

        def told(row: Tensor, place: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
            order = by_class(of, frames.widest + 1)
            held = torch.stack([t.gather(1, order).to(torch.int32) for t in (row, place, of)])
            return held, torch.searchsorted(held[2].long(), edge, out_int32=True)

        own = torch.where(at >= 0, number.gather(1, at.clamp(min=0)), FAR)
        last = beyond.places(at) if beyond.window else at.clamp(min=0)
        queries, q_begin = told(torch.where(at >= 0, sight.q_row[:, 0], -1), last, own)
        keys, k_begin = told(beyond.rows(sight.keys), sight.keys.rank.long(), number)
        row, of = keys[0], keys[2].long()
        begin = k_begin.long().gather(1, of.clamp(max=frames.widest))
        place = of * (2 * frames.room) + torch.arange(row.shape[1], device=row.device) - begin
        wide = 2 * frames.room * frames.widest >= FAR
        place = torch.where(row >= 0, place, 0).to(torch.int64 if wide else torch.int32)
        return cls(queries, q_begin, keys, k_begin, row[:, None].contiguous(), place[:, None])

    def parts(
        self, sight: Sight, classes: Classes, beyond: Beyond, *, vertical: bool, horizontal: bool
    ) -> tuple[Part, ...]:
        """The lines of each head: its slashes, and what else is asked for."""
        block, room = sight.layer.block, classes.room
        columns = whole_blocks(max(room, 1), block) * block if vertical else 0
        rows = dense_size(sight, classes) if horizontal else 0
        assert classes.frames is not None
        q_row, q_pos, *more = turned_classes(
            self.queries,
            self.q_begin,
            self.keys,
            self.k_begin,
            classes.frames.stride[:, 0, 0],
            classes.line,
            classes.shift,
            classes.dense,
            room,
            self.k_pos.dtype == torch.int64,
            columns,
            rows,
        )
        spans = [span_by_range(q_row, self.k_row, q_pos, self.k_pos, 0, room, block, block)]
        if vertical:
            q_pos, k_row, k_pos, *more = more
            spans.append(span_by_range(q_row, k_row, q_pos, k_pos, 0, FAR, block, block))
        # Each of the last queries has a place and so a class: it is dense, or turned.
        all_rows = sight.layer.q_layout.length if sight.final else None
        parts = [Part(q_row, tuple(spans), all_rows=all_rows)]
        if horizontal:
            parts.append(replace(dense_part(sight, beyond, more[0], more[1]), all_rows=all_rows))
        return tuple(parts)


def query_classes(classes: Classes, at: Tensor) -> Tensor:
    """[B, h, P]: the class of each query, that of the key at its own place; -1 where a query sees no key."""
    number = classes.number
    own = number.gather(2, at.clamp(min=0).long()[:, None].expand(-1, number.shape[1], -1))
    return own.masked_fill(at[:, None] < 0, -1)


def dense_rows(sight: Sight, classes: Classes, beyond: Beyond) -> Part:
    """The queries of the horizontal line, in their order, over every key not after them but those that others cover."""
    at = sight.at
    chosen = query_classes(classes, at) == classes.dense
    size = dense_size(sight, classes)
    slot = torch.where(chosen, chosen.long().cumsum(2) - 1, size)
    lead = (*chosen.shape[:2], size + 1)
    q_row = torch.full(lead, -1, dtype=torch.int32, device=at.device)
    q_row = q_row.scatter_(2, slot, sight.q_row.expand_as(slot))[..., :-1].contiguous()
    place = torch.full(lead, -1, dtype=torch.int32, device=at.device)
    place = place.scatter_(2, slot, beyond.places(at)[:, None].expand_as(slot))[..., :-1].contiguous()
    return dense_part(sight, beyond, q_row, place)


def dense_size(sight: Sight, classes: Classes) -> int:
    """Room for as many queries of one line as there can be, in whole blocks."""
    # Queries of one place are of one class; others are of no more than keys are.
    size = sight.at.shape[1] if sight.ties else min(classes.room, sight.at.shape[1])
    return size + -size % sight.layer.block


def dense_part(sight: Sight, beyond: Beyond, q_row: Tensor, place: Tensor) -> Part:
    """Queries [B, H, n], and the places of the last keys that they may see, over every key up to there."""
    keys, block = sight.keys, sight.layer.block
    order = (q_row, beyond.rows(keys)[:, None], place, keys.rank[:, None])
    ordered = None if beyond.sink else keys.count
    return Part(q_row, (span_by_range(*order, 0, FAR, block, block, ordered=ordered, ranks=True),))
