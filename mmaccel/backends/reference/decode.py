"""The operators of a decode step as plain PyTorch says them; see `mmaccel.backends.ops` for their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mmaccel.backends.ops import WINDOW


def decode_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor,
    scale: float,
    sees: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention under a mask over the whole cache."""
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


def project_rows(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] = (),
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    squares: Tensor | None = None,
) -> Tensor:
    """Norm, products, gate and residual, one after the other, each in the type of `x`."""
    if squares is not None:
        x = (x * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)).to(x.dtype)
    if gain is not None:
        wide = x.float()
        x = gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    parts = [functional.linear(x, w, bias[i] if bias else None) for i, w in enumerate(weight)]
    out = functional.silu(parts[0]) * parts[1] if gated else torch.cat(parts, -1)
    return out if residual is None else residual + out


def pass_rows(
    x: Tensor, weight: Tensor, bias: Sequence[Tensor], residual: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A product, the sum, and what a norm of it needs."""
    out = project_rows(x, [weight], bias, residual=residual)
    return out, out * gain, out.float().pow(2).sum(-1, keepdim=True)


def turn_rows(
    rows: Tensor, cos: Tensor, sin: Tensor, places: Tensor, columns: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Rotation of queries and keys, and what is written where."""
    B, n, width = rows.shape
    G, D = key.shape[1], key.shape[-1]
    batch = torch.arange(B, device=rows.device)[:, None]
    heads = rows.view(B, n, width // D, D)
    angles = [table[batch, places][:, :, None] for table in (cos, sin)]
    turned = heads[:, :, : width // D - G]
    half = D // 2
    turned = turned * angles[0] + torch.cat([-turned[..., half:], turned[..., :half]], -1) * angles[1]
    query, new = turned[:, :, : width // D - 2 * G], turned[:, :, width // D - 2 * G :]
    key.transpose(1, 2)[batch, columns] = new
    value.transpose(1, 2)[batch, columns] = heads[:, :, width // D - G :]
    return query.contiguous().transpose(1, 2)


def enter_rows(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor],
    gain: Tensor | None,
    squares: Tensor | None,
    eps: float,
    turn: Tensor,
    columns: Tensor,
    key: Tensor,
    value: Tensor,
    rotate: Callable[..., Tensor] = turn_rows,
) -> Tensor:
    """Three products, one after the other, then `rotate`."""
    rows = project_rows(x, weight, bias, gain, eps, squares=squares).view(*columns.shape, -1)
    places = torch.arange(columns.shape[1], device=x.device).expand_as(columns)
    return rotate(rows, turn[0], turn[1], places, columns, key, value)
