"""Mask functions in flash-attn 4's kernel language (CuTe DSL): whether a query may attend to a key of a tile.

What belongs to a query is read once for all keys of a tile; what belongs to a key stays in registers.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


def to_runtime_ints(bounds: tuple[int, ...]) -> tuple[Any, ...]:
    """Convert `bounds` to runtime kernel arguments, so that new values do not compile the kernel again."""
    return tuple(cutlass.Int32(number) for number in bounds)


@cute.jit
def key_run_mask_mod(batch, head, row, column, seqlen_info, tensors):
    """Mask function: whether the key is in the run of keys that a span lists for the query
    (`tiles.key_run_mask_tensors`)."""
    b, h, q, k = batch[0], head[0], row[0], column[0]
    seen = cutlass.Boolean(False)
    for span in tensors:
        seen = seen | _holds(span[b, h, 0, q], span[b, h, 1, q], k)
    return utils.scalar_to_ssa(seen, cutlass.Boolean)


@cute.jit
def diagonal_band_mask_mod(batch, head, row, column, seqlen_info, tensors, bounds):
    """Mask function without memory reads: whether the pair is in a span's diagonal band (`tiles.key_bounds`)."""
    q, k = row[0], column[0]
    seen = cutlass.Boolean(False)
    for span in cutlass.range_constexpr(len(bounds) // 3):
        below, past, keys = bounds[3 * span], bounds[3 * span + 1], bounds[3 * span + 2]
        first = cutlass.max(q + below, 0)
        length = cutlass.max(cutlass.min(q + past, keys) - first, 0)
        seen = seen | _holds(first, length, k)
    return utils.scalar_to_ssa(seen, cutlass.Boolean)


@cute.jit
def position_run_mask_mod(batch, head, row, column, seqlen_info, tensors):
    """Mask function: whether a span lists the key for the query, with its position in range
    (`tiles.position_run_mask_tensors`)."""
    b, h, q, k = batch[0], head[0], row[0], column[0]
    place = tensors[0][b, h, k]
    seen = cutlass.Boolean(False)
    for span in tensors[1:]:
        listed = _holds(span[b, h, 2, q], span[b, h, 3, q], k)
        seen = seen | (listed & _holds(span[b, h, 0, q], span[b, h, 1, q], place))
    return utils.scalar_to_ssa(seen, cutlass.Boolean)


def _holds(first, length, x):
    # Whether first <= x < first + length: below the first is far above all lengths where there is no sign.
    unsigned = cutlass.Uint64 if first.dtype.width == 64 else cutlass.Uint32
    return unsigned(x - first) < unsigned(length)
