"""The operator that puts many pieces of tensors together: what a plan of unlike heads is made of, in two launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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


def _assembled(
    sources: Sequence[Tensor], table: Sequence[int], fills: int, sizes: Sequence[int]
) -> list[Tensor]:
    from mmaccel.backends import triton

    if triton.usable(sources[0].device) is None:
        from mmaccel.backends.triton.prefill.pieces import assembled as launch

        return launch(sources, table, fills, sizes)
    from mmaccel.backends.reference.pieces import assembled as plain

    return plain(sources, table, fills, sizes)


assembled = torch.library.custom_op(
    "mmaccel::assembled",
    _assembled,
    mutates_args=(),
    schema="(Tensor[] sources, int[] table, int fills, int[] sizes) -> Tensor[]",
)
"""One tensor of each of `KINDS`, of `sizes` elements, put together of pieces of `sources`.

table: FIELDS of each piece, one after another. The first `fills` pieces are written before the rest; those of a phase do not
overlap. What none covers is anything. The last dimensions of a source, from the third on, are dense.
"""


@assembled.register_fake
def _assembled_shape(
    sources: Sequence[Tensor], table: Sequence[int], fills: int, sizes: Sequence[int]
) -> list[Tensor]:
    return [sources[0].new_empty(n, dtype=kind) for n, kind in zip(sizes, KINDS, strict=True)]
