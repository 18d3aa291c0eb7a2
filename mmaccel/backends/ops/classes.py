"""Queries and keys in the order (class, position), turned by each head's phase."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops.operator import operator


def _shapes(queries: Tensor, line: Tensor, wide: bool, columns: int, rows: int) -> list[Tensor]:
    B, H = line.shape[:2]
    kind = torch.int64 if wide else torch.int32
    P, N = (B, H, queries.shape[2]), (B, H, columns)
    out = [queries.new_empty(P), queries.new_empty(P, dtype=kind)]
    if columns:
        out += [queries.new_empty(n, dtype=d) for n, d in ((P, kind), (N, torch.int32), (N, kind))]
    return out + [queries.new_empty(B, H, rows) for _ in range(2 if rows else 0)]


@operator("prefill.classes.turned_classes", fake=_shapes)
def turned_classes(
    queries: Tensor,
    q_begin: Tensor,
    keys: Tensor,
    k_begin: Tensor,
    stride: Tensor,
    line: Tensor,
    shift: Tensor,
    dense: Tensor,
    room: int,
    wide: bool,
    columns: int,
    rows: int,
) -> list[Tensor]:
    """The order (class, position) of the queries and keys of each head of a grid, from the one that all heads share.

    queries [3, B, P] int32: row, place and class of each query by (class, place), those without a place last; keys [3,
    B, N] int32: row, place and class by (class, place). q_begin, k_begin [B, C + 1] int32: where each class begins, and
    the last ends. stride [B] long: the classes there are; line, shift, dense [B, H, 1] long: the class of the vertical
    lines, the phase of the slashes and the class of the horizontal lines. room: no class has more keys; wide: places
    are told in 64 bits.

    Gives, each [B, H, P], [B, H, columns] or [B, H, rows]: the rows of the queries by the class they pair with, -1 for
    those of the `dense` class, and their places for the slashes: class * (2 * room) + rank, of the last key of the
    paired class that is not after the query, and a rank of -1 where there is none. With `columns`, no fewer than any
    class has keys, the places of the queries, and the rows and places of the keys, for the vertical lines: slashes then
    lead to none of these keys, and the rank of queries that pair with their class is -1. With `rows` the rows and
    places of the queries of the dense class.
    """
    (B, P), N, H = queries.shape[1:], keys.shape[2], line.shape[1]
    kind = torch.int64 if wide else torch.int32
    base, s = N + 1, stride[:, None, None]
    code = (keys[2].long() * base + keys[1]).contiguous()
    starts = k_begin.long()[:, None].expand(B, H, -1)

    def ranks(number: Tensor, at: Tensor) -> Tensor:
        """How many keys of class `number` are not after `at`, minus one."""
        wanted = (number * base + at).flatten(1)
        end = torch.searchsorted(code, wanted, right=True).view(at.shape)
        return end - starts.gather(2, number.expand_as(at)) - 1

    i = torch.arange(P, device=keys.device)
    served = q_begin.long().gather(1, stride[:, None])[..., None]
    turn = q_begin.long()[:, None].expand(B, H, -1).gather(2, shift)
    source = torch.where(i < served, (i + turn) % served.clamp(min=1), i)
    row, at, own = (t[:, None].expand(B, H, P).gather(2, source) for t in queries)
    row = row.masked_fill(i >= served, -1)
    pair = (own.long() - shift) % s
    if rows:
        row = row.masked_fill(own == dense, -1)
    there, rank = row >= 0, ranks(pair, at)
    if columns:
        rank = rank.masked_fill(pair == line, -1)
    out = [row, torch.where(there, pair * (2 * room) + rank, -1).to(kind)]
    if columns:
        begin, end = (starts.gather(2, line + more) for more in (0, 1))
        place = torch.arange(columns, device=keys.device).expand(B, H, columns)
        mine = begin + place < end
        line_row = keys[0][:, None].expand(B, H, N).gather(2, (begin + place).clamp(max=N - 1))
        out += [torch.where(there, ranks(line, at), -1).to(kind), torch.where(mine, line_row, -1)]
        out.append(torch.where(mine, place, 0).to(kind))
    if rows:
        begin, end = (q_begin.long()[:, None].expand(B, H, -1).gather(2, dense + more) for more in (0, 1))
        source = begin + torch.arange(rows, device=keys.device)
        there, source = source < end, source.clamp(max=P - 1)
        out += [
            torch.where(there, t[:, None].expand(B, H, P).gather(2, source), -1).contiguous()
            for t in queries[:2]
        ]
    return out
