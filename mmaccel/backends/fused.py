"""Operators that do more than one thing between two layers' attention, for a step whose kernels take as long to begin as to
read: see `mmaccel.backends.ops` for what they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops import reads_weights

PHASES = 8
"""Numbers that count what is done of the parts of `chain_rows`."""

PASS_ROWS = (
    "(Tensor x, Tensor weight, Tensor[] bias, Tensor residual, Tensor gain) -> "
    "(Tensor out, Tensor gained, Tensor squares)"
)
ENTER_ROWS = (
    "(Tensor x, Tensor[] weight, Tensor[] bias, Tensor? gain, Tensor? squares, float eps, Tensor turn, Tensor columns, "
    "Tensor(a!) key, Tensor(b!) value) -> Tensor"
)
DECODE_PIECES = (
    "(Tensor query, Tensor key, Tensor value, Tensor columns, float scale, Tensor? sees=None) -> "
    "(Tensor part, Tensor lse)"
)
CHAIN_ROWS = (
    "(Tensor attended, Tensor x, Tensor[] weight, Tensor gain, float eps, Tensor gain_next, float eps_next, "
    "Tensor(a!) counts, Tensor[] entered, Tensor[] bias, Tensor? turn, Tensor? columns, Tensor(b!)? key, "
    "Tensor(c!)? value, Tensor? lse=None) -> (Tensor out, Tensor gained, Tensor squares, Tensor query)"
)


def _pass_rows(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    if reads_weights(x):
        from mmaccel.backends.triton.rows import pass_rows as launch

        return launch(x, *rest)
    from mmaccel.backends.reference.decode import pass_rows as plain

    return plain(x, *rest)


def _enter_rows(x: Tensor, *rest: Any) -> Tensor:
    if reads_weights(x):
        from mmaccel.backends.triton.enter import enter_rows as launch

        return launch(x, *rest)
    from mmaccel.backends.reference.decode import enter_rows as plain

    return plain(x, *rest)


def _decode_pieces(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if reads_weights(query.transpose(1, 2).flatten(0, 1)):
        from mmaccel.backends.triton.decode import decode_pieces as launch

        return launch(query, *rest)
    from mmaccel.backends.reference.decode import decode_pieces as plain

    return plain(query, *rest)


def _chain_rows(attended: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if reads_weights(x):
        from mmaccel.backends.triton.chain import chain_rows as launch

        return launch(attended, x, *rest)
    from mmaccel.backends.reference.decode import chain_rows as plain

    return plain(attended, x, *rest)


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

decode_pieces = torch.library.custom_op(
    "mmaccel::decode_pieces", _decode_pieces, mutates_args=(), schema=DECODE_PIECES
)
"""`ops.decode_attend` whose pieces are not merged: part [B, H, n, S, D] and lse [B, H, n, S], as `chain_rows` takes them."""

chain_rows = torch.library.custom_op(
    "mmaccel::chain_rows", _chain_rows, mutates_args=("counts", "key", "value"), schema=CHAIN_ROWS
)
"""What lies between two layers' attention: `pass_rows` of the output's weight, `ops.project_rows` of the gate's and the
other's, `pass_rows` of the last, and, where there is a layer after it, `enter_rows`.

attended [R, H * D], or with lse what `decode_pieces` gave; x [R, E], what entered the layer; weight: [E, H * D], two of
[I, E], [E, I]; gain, eps: of the norm between; gain_next, eps_next: of the norm after. entered, bias, turn, columns, key,
value: what `enter_rows` is given; empty and None where no layer follows, but for the columns of pieces. counts [PHASES]
int32 on the device, zeros before and after: no two calls that may be at work at a time share them. Gives what the last
`pass_rows` does, and the queries, or none.
"""


@pass_rows.register_fake
def _pass_rows_shape(
    x: Tensor, weight: Tensor, bias: Sequence[Tensor], residual: Tensor, gain: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # How many parts the squares have is the kernel's own affair.
    parts = torch.library.get_ctx().new_dynamic_size()
    squares = x.new_empty(x.shape[0], parts, dtype=torch.float32)
    return x.new_empty(residual.shape), x.new_empty(residual.shape), squares


@decode_pieces.register_fake
def _decode_pieces_shape(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    # How many pieces there are is the kernel's own affair.
    *row, D = query.shape
    splits = torch.library.get_ctx().new_dynamic_size()
    part = query.new_empty(*row, splits, D, dtype=torch.promote_types(query.dtype, torch.float32))
    return part, part.new_empty(*row, splits)


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


@chain_rows.register_fake
def _chain_rows_shape(
    attended: Tensor,
    x: Tensor,
    weight: Sequence[Tensor],
    gain: Tensor,
    eps: float,
    gain_next: Tensor,
    eps_next: float,
    counts: Tensor,
    entered: Sequence[Tensor],
    bias: Sequence[Tensor],
    turn: Tensor | None,
    columns: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query = x.new_empty(0)
    if columns is not None and key is not None:
        (B, n), D = columns.shape, key.shape[-1]
        query = x.new_empty(B, n, entered[0].shape[0] // D, D).transpose(1, 2)
    return (*_pass_rows_shape(x, weight[0], [], x, gain), query)
