"""What a question is searched by, and what its answer rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.core.kv import CacheSlot, Seen, StreamPass
from mmaccel.policies.kv._window import Rope

Look = tuple[Tensor, int]
"""What a layer looked at: the units [k] that it recalled, and the first local one."""

OWN = 1 / 6
"""What is left of a row by itself behind all layers (`Rows.reached`); measured, see docs/mosaic.md."""

MOST = 1 << 24
"""Attention weights in float32 that are there at a time."""


def words_of(piece: StreamPass) -> tuple[int, int]:
    """The rows of a question by which memories are searched."""
    return piece.words if piece.words[1] > piece.words[0] else (piece.pending, piece.rows)


def mean_query(query: Tensor, piece: StreamPass) -> Tensor:
    """[H, D] float32: the mean of the raw queries [1, H, n, D] of the question's words, or of all its rows."""
    begin, end = words_of(piece)
    return query[0, :, begin:end].float().mean(1)


def attention(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """[n, N] float32, mean over heads: what each row of query [H, n, D], the last n of the columns of key [G, N, D], gets of
    each column. Both turned; causal; `bias` [b] is added to the scores of the first columns. Some rows at a time."""
    groups, count, size = key.shape
    rows = query.shape[1]
    grouped = query.reshape(groups, -1, rows, size)
    step = max(1, MOST // (grouped.shape[1] * count))
    line = torch.arange(count, device=key.device)
    out = torch.zeros(rows, count, device=key.device)
    for group in range(groups):
        there = key[group].float().T * size**-0.5
        for first in range(0, rows, step):
            some = grouped[group, :, first : first + step].float() @ there
            if bias is not None:
                some[..., : len(bias)] += bias
            end = torch.arange(first, first + some.shape[1], device=key.device) + count - rows
            some.masked_fill_(line > end[:, None], -torch.inf)
            out[first : first + step] += some.softmax(-1).mean(0)
    return out / groups


class _Row(NamedTuple):
    query: Tensor
    slot: CacheSlot
    turned: bool


class Rows:
    """The rows of a question from its first word on, as they looked at each layer; kept until it is over.

    Nothing is computed before `reached` is asked for but copies, for where queries lie others may come to lie.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._first = self._count = 0
        self._kept = True

    def begin(self, piece: StreamPass) -> None:
        """A question comes."""
        self._rows, self._first, self._count = {}, words_of(piece)[0], piece.rows
        self._kept = piece.weigh

    def at(self, layer: int, query: Tensor, slot: CacheSlot, turned: bool) -> None:
        """Queries [1, H, n, D] of all its rows at a layer, and where they sit; not `turned` ones stay as they are until
        `hold`. They are kept if the question is to be weighed."""
        if not self._kept:
            return
        own = query[0, :, self._first :]
        # The rows before may be many, those of a unit not yet complete: they would stay with it, layer by layer.
        self._rows[layer] = _Row(own.clone() if turned else own, slot, turned)

    def hold(self) -> None:
        """The question is through all layers."""
        raw = {layer: row for layer, row in self._rows.items() if not row.turned}
        if raw:
            # Of few rows, which a layer leaves where the next question's go: one launch for all.
            held = torch.stack([row.query for row in raw.values()])
            self._rows |= {
                layer: row._replace(query=one) for (layer, row), one in zip(raw.items(), held, strict=True)
            }

    def clear(self) -> None:
        """The question is over."""
        self._rows = {}

    @torch.no_grad()
    def reached(self, rope: Rope, head: int, units_of: Callable[[int, Tensor], Tensor]) -> Tensor | None:
        """[U]: of all that reaches the last row, which says the first token, from units, the share of each; None: unknown.

        Attention rollout (Abnar and Zuidema, 2020): behind each layer a row is made of what it was, what it gets of units,
        and what it gets of rows before it as these were. Its own part is such that `OWN` of it is left behind all layers.
        `units_of` (layer, shares [n, N]) gives [n, U], what units get of what columns behind the head get.
        """
        if not self._rows:
            return None
        own = OWN ** (1 / len(self._rows))
        # From the last layer down, for the last row alone: every row of a long question has a part of every unit.
        weight: Tensor | None = None
        made: Tensor | float = 0.0
        for layer, (query, slot, turned) in reversed(self._rows.items()):
            if not turned:
                angles = slot.angles[0][:, :, self._first :], slot.angles[1][:, :, self._first :]
                query = rope.apply(query[None], angles)[0]
            got = attention(query, slot.key[0, :, : slot.column + self._count], slot.bias)
            if weight is None:
                weight = got.new_zeros(1, len(got))
                weight[:, -1] = 1
            come = weight @ got
            made = made + (1 - own) * units_of(layer, come[:, head : slot.column])[0]
            weight = own * weight + (1 - own) * come[:, slot.column + self._first :]
        assert isinstance(made, Tensor)
        return made / made.sum().clamp_min(torch.finfo(torch.float32).tiny)


def weigh(looks: dict[int, Look], count: int, reached: Tensor | None) -> dict[int, Seen]:
    """Evidence from what each layer looked at, and what reached the answer [count].

    Of units that no layer looked at themselves, those of which more than an even part came by what stands for them.
    """
    layers = len(looks)
    recalled: dict[int, int] = {}
    local: dict[int, int] = {}
    for chosen, begin in looks.values():
        for number in chosen.tolist():
            recalled[number] = recalled.get(number, 0) + 1
        for number in range(begin, count):
            local[number] = local.get(number, 0) + 1
    parts = None if reached is None else reached.tolist()
    far = [number for number, part in enumerate(parts or ()) if part * count > 1]
    found = {}
    for number in sorted({*recalled, *local, *far}):
        told, near = recalled.get(number, 0), local.get(number, 0)
        found[number] = Seen((told + near) / layers, told / layers, None if parts is None else parts[number])
    return found
