"""The operators every backend serves: schemas, shapes and the plain PyTorch kernel behind them; torch only.

`block_attend` computes one part of an attention plan (`mmaccel.core.plan.Part`), flat: lists of tensors, one entry a span.
`dense_attend` computes exact causal attention, the thing that all else is measured against.
A backend registers its own operator of the same schema with `define`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FULL, ABSENT, TEST = 0, 1, 2
"""Kinds of listed block: no test needed; some keys absent (a vector mask); range test for each pair."""

BLOCK_ATTEND = (
    "(Tensor query, Tensor key, Tensor value, Tensor q_row, Tensor[] k_row, Tensor[] q_place, Tensor[] k_place, "
    "int[] lo, int[] hi, Tensor[] offset, Tensor[] index, Tensor[] kind, int block_q, int block_k, float scale) "
    "-> (Tensor out, Tensor lse)"
)
DENSE_ATTEND = (
    "(Tensor query, Tensor key, Tensor value, float scale, SymInt start=0, Tensor? valid=None, SymInt sinks=0, "
    "SymInt? window=None, Tensor? column=None) -> Tensor"
)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of log-sum-exps, and of sums, for queries of `dtype`: float64 for float64, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def define(name: str, kernel: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    """A custom operator ``mmaccel::<name>`` of the schema of `block_attend`, served by `kernel` on every device."""
    op = torch.library.custom_op(f"mmaccel::{name}", kernel, mutates_args=(), schema=BLOCK_ATTEND)
    op.register_fake(_block_attend_shape)
    return op


def _block_attend_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_row: Tensor,
    k_row: Sequence[Tensor],
    q_place: Sequence[Tensor],
    k_place: Sequence[Tensor],
    lo: Sequence[int],
    hi: Sequence[int],
    offset: Sequence[Tensor],
    index: Sequence[Tensor],
    kind: Sequence[Tensor],
    block_q: int,
    block_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    B, H, _, _ = query.shape
    P = q_row.shape[-1]
    out = query.new_empty(B, H, P, value.shape[-1])
    return out, query.new_empty(B, H, P, dtype=lse_dtype(query.dtype))


def _block_attend(*args: Any) -> tuple[Tensor, Tensor]:
    from mmaccel.backends.reference import block_attend

    return block_attend(*args)


def _dense_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    start: int = 0,
    valid: Tensor | None = None,
    sinks: int = 0,
    window: int | None = None,
    column: Tensor | None = None,
) -> Tensor:
    from mmaccel.backends.dense import dense_attend

    return dense_attend(
        query, key, value, scale, start=start, valid=valid, sinks=sinks, window=window, column=column
    )


block_attend = define("block_attend", _block_attend)
"""Attention of one part of a plan, all its spans under one softmax; plain PyTorch, on any device.

query [B, H, Sq, D], key and value [B, G, Sk, D], H a multiple of G. q_row [b, h, P]; for each span k_row [b, h, N],
q_place [b, h, P], k_place [b, h, N], the range lo <= q_place - k_place < hi, and the block lists offset [b, h, M + 1],
index, kind, with b and h each 1 or B and H. Gives out [B, H, P, D] in the type of the query and lse [B, H, P] in
float32 (float64 for float64), in the part's order of rows: a row with q_row = -1, or one that sees nothing, is zero with
lse = -inf. A block of kind FULL is not tested.
"""

dense_attend = torch.library.custom_op(
    "mmaccel::dense_attend", _dense_attend, mutates_args=(), schema=DENSE_ATTEND
)
"""Exact causal attention; see `mmaccel.backends.dense.dense_attend` for its arguments."""


@dense_attend.register_fake
def _dense_attend_shape(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])
