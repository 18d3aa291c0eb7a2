"""What a query sees of a tested tile, in the language of flash-attn 4's kernels."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


@cute.jit
def within(batch, head, row, column, seqlen_info, tensors):
    """Whether a span lists the key for the query, and its place is in the range: see `mmaccel.backends.flash.limits`."""
    b, h, q, k = batch[0], head[0], row[0], column[0]
    least, most = tensors[0][b, h, k], tensors[1][b, h, k]
    seen = cutlass.Boolean(False)
    for span in tensors[2:]:
        place, begin, end = span[b, h, 0, q], span[b, h, 1, q], span[b, h, 2, q]
        listed = (begin <= k) & (k < end)
        seen = seen | (listed & (least <= place) & (place < most))
    return utils.scalar_to_ssa(seen, cutlass.Boolean)
