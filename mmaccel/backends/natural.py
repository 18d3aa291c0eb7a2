"""Rows and places that stand in their own order, told without a look at the device: who makes them says so.

What is written to afterwards is no longer known: tensors count their writes. Those of inference mode do not, so what is made
here is made out of it; of what others make there, `tell_together` takes their word. While a graph is traced, tensors have
no address, and nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

Known = TypeVar("Known")
Name = tuple[torch.device, tuple[int, ...]]
"""Device and addresses."""

_made: dict[Name, tuple[ref[Tensor], int, int | None]] = {}
"""What was made there, as long as somebody holds it, how many rows are in it, and its `_writes`."""

_together: dict[Name, tuple[tuple[tuple[ref[Tensor], int | None], ...], int]] = {}
"""What holds all rows among it, as long as somebody holds all of it, each with its `_writes`, and how many these are."""

_ranks: dict[Name, tuple[ref[UntypedStorage], int, int | None]] = {}
"""The memory in which numbers from 0 on lie there, as long as there is any, how many, `_writes`."""

_places: dict[Name, tuple[ref[UntypedStorage], tuple[int, int], int, int | None]] = {}
"""The same of places one after another: the first and how many they are, the elements, `_writes`."""

_reach: dict[Name, tuple[ref[UntypedStorage], Band, torch.Size, int | None]] = {}
"""The same of lists: the pairs for which they hold every block, their shape, `_writes`."""


class Band(NamedTuple):
    """Pairs of `rows` queries and `keys` keys, in their order: row i and key j where lo <= first + i - j < hi; in blocks
    of so many of either."""

    rows: int
    keys: int
    first: int
    lo: int
    hi: int
    blocks: tuple[int, int]


@torch.inference_mode(False)
def counted(batch: int, n: int, width: int, device: torch.device) -> Tensor:
    """[batch, width] int32: the rows 0 .. n - 1, and -1 past the last. Nobody writes to it."""
    row = torch.arange(width, dtype=torch.int32, device=device)
    return _told(row.masked_fill(row >= n, -1).repeat(batch, 1), n)


@torch.inference_mode(False)
def first_rows(row: Tensor, n: int) -> Tensor:
    """`row` without what is no row below n: -1 stands there."""
    kept = torch.where(row < n, row, -1)
    known = rows_in_order(row)
    return kept if known is None else _told(kept, min(n, known))


def rows_in_order(row: Tensor) -> int | None:
    """How many rows `row` [b, width] or [b, 1, width] holds in their order, with -1 behind them; None if that is not known
    to be all that it holds."""
    made, n, writes = _found(_made, row) or (None, 0, None)
    known = made() if made is not None else None
    if known is None or _writes(known) != writes:
        return None
    return n if known.numel() == row.numel() and row.is_contiguous() else None


@torch.inference_mode(False)
def first_of(row: Tensor, n: int, width: int) -> Tensor:
    """The first n of `row` [..., N] in a room of `width`, -1 behind them."""
    kept = row[..., :width].masked_fill(torch.arange(width, device=row.device) >= n, -1)
    known = rows_in_order(row)
    return kept if known is None else _told(kept, min(n, known))


@torch.inference_mode(False)
def ranks(batch: int, width: int, device: torch.device) -> Tensor:
    """[batch, width] int32: 0 .. width - 1, all sequences' the same memory. Nobody writes to it."""
    rank = torch.arange(width, dtype=torch.int32, device=device)
    if name := _name(rank):
        storage = ref(rank.untyped_storage(), lambda _: _ranks.pop(name, None))
        _ranks[name] = storage, width, _writes(rank)
    return rank.expand(batch, width)


def are_ranks(place: Tensor) -> bool:
    """Whether `place` [..., width] is known to hold 0 .. width - 1 in each row."""
    made, n, writes = _found(_ranks, place) or (None, 0, None)
    alike = all(size == 1 or not step for size, step in zip(place.shape[:-1], place.stride(), strict=False))
    dense = place.dtype == torch.int32 and place.stride(-1) == 1 and place.shape[-1] <= n
    return made is not None and made() is not None and _writes(place) == writes and alike and dense


@torch.inference_mode(False)
def places_from(first: int, batch: int, n: int, width: int, device: torch.device) -> Tensor:
    """[batch, width] int32: the places first .. first + n - 1, and -1 past the last. Nobody writes to it."""
    rank = torch.arange(width, dtype=torch.int32, device=device)
    place = torch.where(rank < n, rank + first, -1).repeat(batch, 1)
    if name := _name(place):
        storage = ref(place.untyped_storage(), lambda _: _places.pop(name, None))
        _places[name] = storage, (first, n), place.numel(), _writes(place)
    return place


def first_place(place: Tensor) -> tuple[int, int] | None:
    """The first of the places `place` [b, width] or [b, 1, width], and how many follow each other from it on in each row;
    None if that is not known."""
    made, found, size, writes = _found(_places, place) or (None, (0, 0), 0, None)
    if made is None or made() is None or _writes(place) != writes or place.dtype != torch.int32:
        return None
    return found if place.numel() == size and place.is_contiguous() else None


def band(
    q_row: Tensor,
    k_row: Tensor,
    q_place: Tensor,
    k_place: Tensor,
    lo: int,
    hi: int,
    blocks: tuple[int, int],
) -> Band | None:
    """The pairs of a span (`ops.block_attend`) where its queries and keys are known to stand in their order, and its queries
    to have places that follow each other."""
    rows, keys, places = rows_in_order(q_row), rows_in_order(k_row), first_place(q_place)
    if rows is None or keys is None or places is None or rows > places[1] or not are_ranks(k_place):
        return None
    return Band(rows, keys, places[0], lo, hi, blocks)


def tell_reach(row: Tensor, pairs: Band | None) -> None:
    """Say that lists `row` [b, h, M, 5] hold every block in which there are any of `pairs`, if these are known."""
    if pairs is not None and (name := _name(row)):
        storage = ref(row.untyped_storage(), lambda _: _reach.pop(name, None))
        _reach[name] = storage, pairs, row.shape, _writes(row)


def reaches(row: Tensor, pairs: Band) -> bool:
    """Whether lists `row` are known to hold every block in which there are any of `pairs`."""
    made, known, shape, writes = _found(_reach, row) or (None, None, None, None)
    if made is None or made() is None or known is None or _writes(row) != writes or row.shape != shape:
        return False
    fewer = pairs.rows <= known.rows and pairs.keys <= known.keys
    return fewer and row.is_contiguous() and known[2:] == pairs[2:]


def tell_together(rows: Sequence[Tensor], n: int) -> None:
    """Say that `rows`, each [b, h, width], hold every row of 0 .. n - 1 once among them for each head, and else only -1."""
    if name := _name(*rows):
        _together[name] = (
            tuple((ref(row, lambda _: _together.pop(name, None)), _writes(row)) for row in rows),
            n,
        )


def rows_together(rows: Sequence[Tensor]) -> int | None:
    """How many rows `rows` are known to hold among them, every one once for each head and with nothing else but -1."""
    if len(rows) == 1 and (n := rows_in_order(rows[0])) is not None:
        return n
    made, n = _found(_together, *rows) or ((), None)
    for row, (one, writes) in zip(rows, made, strict=False):
        known = one()
        if known is None or _writes(known) != writes:
            return None
        if known.shape != row.shape or known.stride() != row.stride():
            return None
    return n


def _writes(made: Tensor) -> int | None:
    """How often `made`, or a view of what it is a view of, was written to; None of inference mode, which does not count."""
    return None if made.is_inference() else made._version


def _told(row: Tensor, n: int) -> Tensor:
    if name := _name(row):
        _made[name] = ref(row, lambda _: _made.pop(name, None)), n, _writes(row)
    return row


def _name(*rows: Tensor) -> Name | None:
    """None where a tensor has no address: without memory, all would have one; nor while a graph is traced."""
    if torch.compiler.is_compiling():
        return None
    lie = tuple(row.data_ptr() for row in rows)
    return (rows[0].device, lie) if all(lie) else None


def _found(known: dict[Name, Known], *rows: Tensor) -> Known | None:
    name = _name(*rows)
    return None if name is None else known.get(name)
