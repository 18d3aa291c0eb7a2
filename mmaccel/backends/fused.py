"""Operators that do more than one thing between two layers' attention, for a step whose kernels take as long to begin as to
read: see `mmaccel.backends.ops` for what they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops import turn_now

PASS_ROWS = (
    "(Tensor x, Tensor weight, Tensor[] bias, Tensor residual, Tensor gain) -> "
    "(Tensor out, Tensor gained, Tensor squares)"
)
ENTER_ROWS = (
    "(Tensor x, Tensor[] weight, Tensor[] bias, Tensor? gain, Tensor? squares, float eps, Tensor turn, Tensor columns, "
    "Tensor(a!) key, Tensor(b!) value) -> Tensor"
)


def _pass_rows(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    from mmaccel.backends import triton

    if triton.reads_weights(x):
        from mmaccel.backends.triton.decode.skinny_gemm import pass_rows as launch

        return launch(x, *rest)
    from mmaccel.backends.reference.decode import pass_rows as plain

    return plain(x, *rest)


def _enter_rows(x: Tensor, *rest: Any) -> Tensor:
    from mmaccel.backends import triton

    if triton.reads_weights(x):
        from mmaccel.backends.triton.decode.qkv_rope_cache import enter_rows as launch

        return launch(x, *rest)
    from mmaccel.backends.reference.decode import enter_rows as plain

    # Where the products are PyTorch's, what turns is a kernel still: one for a dozen.
    return plain(x, *rest, turn_now)  # type: ignore[call-arg]


pass_rows = torch.library.custom_op("mmaccel::pass_rows", _pass_rows, mutates_args=(), schema=PASS_ROWS)
"""Rows [R, K] through a weight [E, K] and past it, and what the norm after them needs, so that it is no kernel of its own.

bias: none, or one of [E]; residual [R, E]; gain [E]: that of the norm. Gives out [R, E], the sum; gained [R, E], out times
gain, in the type of `x`; and squares [R, P] in float32, whose sum over P is that of out squared: what is linear in the
normed rows is the same of `gained`, over the root of mean and eps.
"""

enter_rows = torch.library.custom_op(
    "mmaccel::enter_rows", _enter_rows, mutates_args=("key", "value"), schema=ENTER_ROWS
)
"""`ops.project_rows` of the weights of queries, keys and values, then `ops.turn_rows`; gives queries [B, H, n, D].

x [B * n, K], weight [H * D, K] and two of [G * D, K]; bias: none, or one for each. `gain` and `squares` are those of
`ops.project_rows`, one of them or none. turn [2, B, n, D]: cosines and sines of each row. columns, key, value as there.
"""


@pass_rows.register_fake
def _pass_rows_shape(
    x: Tensor, weight: Tensor, bias: Sequence[Tensor], residual: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # How many parts the squares have is the kernel's own affair.
    parts = torch.library.get_ctx().new_dynamic_size()
    squares = x.new_empty(x.shape[0], parts, dtype=torch.float32)
    return x.new_empty(residual.shape), x.new_empty(residual.shape), squares


@enter_rows.register_fake
def _enter_rows_shape(
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
) -> Tensor:
    B, n = columns.shape
    D = key.shape[-1]
    return x.new_empty(B, n, weight[0].shape[0] // D, D).transpose(1, 2)
