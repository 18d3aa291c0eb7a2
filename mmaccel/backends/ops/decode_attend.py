"""Attention of a few new rows over a cache of fixed size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmaccel.backends.ops.operator import operator, runs_triton_in_float32

WINDOW = 64
"""Columns at the end of a sequence of which a row of a tree may see some and not others: the bits of a word."""


def _shape(query: Tensor) -> Tensor:
    B, H, n, D = query.shape
    return query.new_empty(B, n, H, D).transpose(1, 2)


@operator("decode.attention.decode_attend", serves=runs_triton_in_float32, fake=_shape)
def decode_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor,
    scale: float,
    sees: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Exact attention of a few new rows over a cache of fixed size, whose new columns are written already.

    query [B, H, n, D], key and value [B, G, capacity, D], H a multiple of G. columns [B, n] long, on the device: the
    column of each new row, ascending; row i sees the columns 0 .. columns[b, i]. With sees [n] long (a tree) row i
    sees, of the last `WINDOW` columns up to columns[b, n - 1], those whose bits are set, the oldest first, and all
    before them. bias [m] float32 is added to the scores of the columns 0 .. m - 1. Gives [B, H, n, D]; in memory a row
    of all heads lies together.
    """
    column = torch.arange(key.shape[2], device=key.device)
    if sees is None:
        mask = column <= columns[..., None]
    else:
        late = column - (columns[:, -1:] + 1 - WINDOW)
        told = (sees[None, :, None] >> late.clamp(0, WINDOW - 1)[:, None]) & 1
        mask = (late < 0)[:, None] | ((told != 0) & (late < WINDOW)[:, None])
    held = (column <= columns[:, -1:])[:, None, :, None]
    key, value = (torch.where(held, x, 0) for x in (key, value))  # what lies behind may be anything
    grouped = query.shape[1] != key.shape[1]
    if bias is not None:
        added = functional.pad(bias, (0, key.shape[2] - len(bias)))
        mask = added.masked_fill(~mask, -torch.inf).to(query.dtype)
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask[:, None], scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous().transpose(1, 2)
