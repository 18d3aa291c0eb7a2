"""The order (class, position) of a grid head: its lines are runs of keys in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.core.plan import FAR, KeySpan, Part, span_by_range
from mmaccel.policies.sparse.intra import Sight
from mmaccel.policies.sparse.orders import places
from mmaccel.policies.sparse.stride import Classes


@dataclass(frozen=True, eq=False)
class Residue:
    """Keys by (class, position), queries by (class of the keys they pair with, position).

    code [B, h, N] class * base + place of each key, ascending, and k_row [B, h, N] its row; for each query, [B, h, P] or
    [B, H, P], its row, place, own class, and `pair`, the class of the keys its slashes lead to. base exceeds any place.
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
    def of(cls, sight: Sight, classes: Classes, *, slash: bool) -> Residue:
        """The order of the queries and keys of `sight`; without slashes the queries stay in the order they are in."""
        keys, at = sight.keys, sight.at
        base = len(keys) + 1
        code, order = (classes.number * base + places(keys)[:, None]).sort(-1)
        k_row = keys.row[:, None].expand_as(order).gather(2, order)
        own = query_classes(classes, at)
        pair = (own - classes.shift) % classes.stride if slash else own
        q_row, q_at = sight.q_row.expand_as(pair), at[:, None].expand_as(pair)
        own = own.expand_as(pair)
        if slash:
            order = torch.where(q_row >= 0, pair * base + q_at, FAR * base).argsort(-1)
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
        q_place, k_place = self.pair * (2 * room) + end - start - 1, number * (2 * room) + rank
        k_row = torch.where(number == self.classes.line, -1, self.k_row) if owned else self.k_row
        return self._span(q_row, k_row, q_place, k_place, room)

    def vertical(self, q_row: Tensor) -> KeySpan:
        """Each query and the keys of the vertical line."""
        begin = self.classes.line * self.base
        start, end = self._find(begin), self._find(begin + self.q_at, right=True)
        k_row = torch.where(self.code // self.base == self.classes.line, self.k_row, -1)
        k_place = torch.arange(self.code.shape[2], device=self.code.device) - start
        return self._span(q_row, k_row, end - start - 1, k_place, FAR)

    def _find(self, code: Tensor, right: bool = False) -> Tensor:
        """Where `code` [B, x, n] falls among the codes of the keys; x is h, or any number when h is 1."""
        B, h, _ = self.code.shape
        flat = code.reshape(B, h, -1) if h == 1 else code.contiguous()
        return torch.searchsorted(self.code, flat, right=right).view_as(code)

    def _span(self, q_row: Tensor, k_row: Tensor, q_place: Tensor, k_place: Tensor, hi: int) -> KeySpan:
        wide = 2 * self.classes.room * self.classes.most >= FAR
        q_place = torch.where(q_row >= 0, q_place, -1).to(torch.int64 if wide else torch.int32)
        k_place = torch.where(k_row >= 0, k_place, 0).to(q_place.dtype)
        return span_by_range(q_row, k_row, q_place, k_place, 0, hi, self.block, self.block)


def query_classes(classes: Classes, at: Tensor) -> Tensor:
    """[B, h, P]: the class of each query, that of the key at its own place; -1 where a query sees no key."""
    number = classes.number
    own = number.gather(2, at.clamp(min=0).long()[:, None].expand(-1, number.shape[1], -1))
    return own.masked_fill(at[:, None] < 0, -1)


def dense_rows(sight: Sight, classes: Classes) -> Part:
    """The queries of the horizontal line, in their order, over every key not after them; room for as many as can be."""
    keys, at, block = sight.keys, sight.at, sight.layer.block
    chosen = query_classes(classes, at) == classes.dense
    slot = chosen.long().cumsum(2)
    # Queries of one place are of one class; others are of no more than keys are.
    size = at.shape[1] if sight.ties else min(classes.room, at.shape[1])
    size += -size % block
    slot = torch.where(chosen, slot - 1, size)
    lead = (*chosen.shape[:2], size + 1)
    q_row = torch.full(lead, -1, dtype=torch.int32, device=at.device)
    q_row = q_row.scatter_(2, slot, sight.q_row.expand_as(slot))[..., :-1].contiguous()
    place = torch.full(lead, -1, dtype=torch.int32, device=at.device)
    place = place.scatter_(2, slot, at[:, None].expand_as(slot))[..., :-1].contiguous()
    order = (q_row, keys.row[:, None], place, places(keys)[:, None])
    return Part(q_row, (span_by_range(*order, 0, FAR, block, block),))
