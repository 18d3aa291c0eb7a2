"""The operator that puts many pieces of tensors together: what a plan of unlike heads is made of, in two launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.backends.ops.operator import operator, runs_triton

FIELDS = (
    *("tiles", "to", "kind", "to_b", "to_h", "heads", "batch", "size"),
    *("source", "from_kind", "from_b", "from_h", "more", "of_row", "shift"),
)
"""What the table says of a piece. tiles: those of the pieces before it, of its phase; to, kind: its first element in the
result of a kind; to_b, to_h, from_b, from_h: elements from a sequence, or a head, to the next; `batch` sequences of `heads`
heads of `size` elements that follow each other. source: number of the tensor it comes from, -1 for none. more: what is added
to each element; with of_row instead to the first of each five, and `shift` to the last."""

KINDS = (torch.int32, torch.int64, torch.int8)
"""The types of a result, or of a source, by number."""

TILE = 4096
"""Elements that a program moves."""

ROW = 5
"""Numbers of a list, in `BlockLists`."""


def _shapes(sources: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    return [sources[0].new_empty(n, dtype=kind) for n, kind in zip(sizes, KINDS, strict=True)]


@operator("prefill.pieces.assembled", serves=lambda sources, *_: runs_triton(sources[0]), fake=_shapes)
def assembled(
    sources: Sequence[Tensor], table: Sequence[int], fills: int, sizes: Sequence[int]
) -> list[Tensor]:
    """One tensor of each of `KINDS`, of `sizes` elements, put together of pieces of `sources`.

    table: FIELDS of each piece, one after another. The first `fills` pieces are written before the rest; those of a phase do
    not overlap. What none covers is anything. The last dimensions of a source, from the third on, are dense.
    """
    device = sources[0].device
    out = [torch.empty(n, dtype=kind, device=device) for n, kind in zip(sizes, KINDS, strict=True)]
    for first in range(0, len(table), len(FIELDS)):
        p = dict(zip(FIELDS, table[first : first + len(FIELDS)], strict=True))
        shape = p["batch"], p["heads"], p["size"]
        to = out[p["kind"]].as_strided(shape, (p["to_b"], p["to_h"], 1), p["to"])
        if p["source"] < 0:
            to.fill_(p["more"])
            continue
        source = sources[p["source"]]
        to.copy_(source.as_strided(shape, (p["from_b"], p["from_h"], 1), source.storage_offset()))
        if p["of_row"]:
            rows = to.as_strided((*shape[:2], p["size"] // ROW, ROW), (*to.stride()[:2], ROW, 1))
            rows[..., 0] += p["more"]
            rows[..., -1] += p["shift"]
        else:
            to += p["more"]
    return out
