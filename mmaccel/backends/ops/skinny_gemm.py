"""A few rows through the linear layers of a transformer: a matter of reading the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mmaccel.backends.ops.operator import operator, runs_triton

MOST = 64
"""Rows beyond which products are a matter of computing."""


def reads_weights(x: Tensor, *rest: object) -> bool:
    """Whether the products of rows `x` [R, K] are a matter of reading weights, and there are kernels for these."""
    return x.dtype == torch.bfloat16 and x.shape[0] <= MOST and runs_triton(x)


def _project_shape(x: Tensor, weight: Sequence[Tensor], gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight[0].shape[0] if gated else sum(w.shape[0] for w in weight))


@operator("decode.skinny_gemm.project_rows", serves=reads_weights, fake=_project_shape)
def project_rows(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor],
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    squares: Tensor | None = None,
) -> Tensor:
    """Rows through the linear layers of a transformer, with what stands before and after them.

    x [R, K]; weight: one to three of [O, K], their outputs one after another; bias: none, or [O] for each. With `gain` [K]
    the rows are normed first (RMS, `eps`). `gated`: of two weights, silu of the first's outputs times the second's.
    `residual` [R, O'] is added. Gives [R, O'] in the type of `x`; bfloat16 rows round after the norm and at the end. With
    `squares` [R, P] `x` and these are what `pass_rows` gave, and the outputs are those of the rows normed by `eps`.
    """
    if squares is not None:
        x = (x * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)).to(x.dtype)
    if gain is not None:
        wide = x.float()
        x = gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    parts = [functional.linear(x, w, bias[i] if bias else None) for i, w in enumerate(weight)]
    out = functional.silu(parts[0]) * parts[1] if gated else torch.cat(parts, -1)
    return out if residual is None else residual + out


def _pass_shapes(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    # How many parts the squares have is the kernel's own affair.
    parts = torch.library.get_ctx().new_dynamic_size()
    squares = x.new_empty(x.shape[0], parts, dtype=torch.float32)
    return x.new_empty(residual.shape), x.new_empty(residual.shape), squares


@operator("decode.skinny_gemm.pass_rows", serves=reads_weights, fake=_pass_shapes)
def pass_rows(
    x: Tensor, weight: Tensor, bias: Sequence[Tensor], residual: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [R, K] through a weight [E, K] and past it, and what the norm after them needs, so that it is no kernel of
    its own.

    bias: none, or one of [E]; residual [R, E]; gain [E]: that of the norm. Gives out [R, E], the sum; gained [R, E],
    out times gain, in the type of `x`; and squares [R, P] in float32, whose sum over P is that of out squared: what is
    linear in the normed rows is the same of `gained`, over the root of mean and eps.
    """
    out = project_rows.plain(x, [weight], bias, residual=residual)
    return out, out * gain, out.float().pow(2).sum(-1, keepdim=True)
