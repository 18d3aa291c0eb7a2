"""New queries, keys and values of a decode step: rotated, and keys and values written to their columns of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.backends.ops.operator import operator, runs_triton_in_float32
from mmaccel.backends.ops.skinny_gemm import project_rows, reads_weights


def _turn_shape(rows: Tensor, key: Tensor) -> Tensor:
    B, n, width = rows.shape
    G, D = key.shape[1], key.shape[-1]
    return rows.new_empty(B, n, width // D - 2 * G, D).transpose(1, 2)


@operator("decode.rope.turn_rows", serves=runs_triton_in_float32, mutates=("key", "value"), fake=_turn_shape)
def turn_rows(
    rows: Tensor, cos: Tensor, sin: Tensor, places: Tensor, columns: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Turn new queries and keys, and write keys and values to their columns of the cache; gives queries [B, H, n, D].

    rows [B, n, (H + 2 G) * D]: the heads of the queries, of the keys, of the values. cos and sin [B, S, D]: the angles
    of each place. places, columns [B, n] long: where each row stands, and where it is written. key and value [B, G,
    capacity, D], the last dimension dense.
    """
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


def _enter_shape(x: Tensor, weight: Sequence[Tensor], columns: Tensor, key: Tensor) -> Tensor:
    B, n = columns.shape
    D = key.shape[-1]
    return x.new_empty(B, n, weight[0].shape[0] // D, D).transpose(1, 2)


@operator(
    "decode.qkv_rope_cache.enter_rows", serves=reads_weights, mutates=("key", "value"), fake=_enter_shape
)
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
) -> Tensor:
    """`project_rows` of the weights of queries, keys and values, then `turn_rows`; gives queries [B, H, n, D].

    x [B * n, K], weight [H * D, K] and two of [G * D, K]; bias: none, or one for each. `gain` and `squares` are those of
    `project_rows`, one of them or none. turn [2, B, n, D]: cosines and sines of each row. columns, key, value as there.
    """
    rows = project_rows.plain(x, weight, bias, gain, eps, squares=squares).view(*columns.shape, -1)
    places = torch.arange(columns.shape[1], device=x.device).expand_as(columns)
    # Where the products are PyTorch's, what turns is a kernel still: one for a dozen.
    return turn_rows.direct(rows, turn[0], turn[1], places, columns, key, value)
