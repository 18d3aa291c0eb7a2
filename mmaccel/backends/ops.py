"""The operators every backend serves: schemas, shapes and the plain PyTorch kernel behind them; torch only.

`dense_attend` computes exact causal attention, the thing that all else is measured against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends import clusters as clusters
from mmaccel.backends import pieces as pieces
from mmaccel.backends import words as words
from mmaccel.backends.block_attend import ABSENT as ABSENT
from mmaccel.backends.block_attend import FULL as FULL
from mmaccel.backends.block_attend import TEST as TEST
from mmaccel.backends.block_attend import block_attend as block_attend
from mmaccel.backends.gathering import gather_now as gather_now
from mmaccel.backends.gathering import gather_units as gather_units
from mmaccel.backends.gathering import grain_of as grain_of
from mmaccel.backends.index import class_phases_now as class_phases_now
from mmaccel.backends.index import line_keys_now as line_keys_now
from mmaccel.backends.index import line_sums_now as line_sums_now
from mmaccel.backends.index import reduces as reduces
from mmaccel.backends.index import row_totals_now as row_totals_now
from mmaccel.backends.index import slash_runs_now as slash_runs_now
from mmaccel.backends.index import stride_scores_now as stride_scores_now
from mmaccel.backends.index import strongest_now as strongest_now
from mmaccel.backends.index import turned_classes_now as turned_classes_now

DENSE_ATTEND = (
    "(Tensor query, Tensor key, Tensor value, float scale, SymInt start=0, Tensor? valid=None, SymInt sinks=0, "
    "SymInt? window=None, Tensor? column=None) -> Tensor"
)
REACH = (
    "(Tensor q_row, Tensor k_row, Tensor q_place, Tensor k_place, int lo, int hi, int block_q, int block_k) "
    "-> (Tensor row, Tensor kind)"
)
LISTED_AREA = "(Tensor row, Tensor index, Tensor q_row, Tensor k_row, int block_q, int block_k) -> Tensor"
DECODE_ATTEND = (
    "(Tensor query, Tensor key, Tensor value, Tensor columns, float scale, Tensor? sees=None, "
    "Tensor? bias=None) -> Tensor"
)
PROJECT_ROWS = (
    "(Tensor x, Tensor[] weight, Tensor[] bias, Tensor? gain=None, float eps=0., Tensor? residual=None, "
    "bool gated=False, Tensor? squares=None) -> Tensor"
)
TURN_ROWS = (
    "(Tensor rows, Tensor cos, Tensor sin, Tensor places, Tensor columns, Tensor(a!) key, Tensor(b!) value) -> "
    "Tensor"
)

WINDOW = 64
"""Columns at the end of a sequence of which a row of a tree may see some and not others: the bits of a word."""


def packed(chosen: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """index int32, of each row of `chosen` [..., n] the values [n] of what is chosen; [..., n + 1] how many before each."""
    n = chosen.shape[-1]
    upto = torch.nn.functional.pad(chosen.long().cumsum(-1), (1, 0))
    slot = torch.where(chosen, upto[..., :-1], n)
    index = torch.zeros(*chosen.shape[:-1], n + 1, dtype=torch.int32, device=chosen.device)
    index.scatter_(-1, slot, value.to(torch.int32).expand_as(slot))
    return index[..., :n].flatten(), upto


def present(row: Tensor, block: int) -> Tensor:
    """[..., n / block] int32: how many of the rows [..., n] of each block are there."""
    return (row >= 0).view(*row.shape[:-1], -1, block).sum(-1, dtype=torch.int32)


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


def _reach(q_row: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from mmaccel.backends import triton

    if triton.usable(q_row.device) is None:
        from mmaccel.backends.triton.prefill.lists import reach as launch

        return launch(q_row, *rest)
    from mmaccel.backends.reference.lists import reach as plain

    return plain(q_row, *rest)


def _listed_area(row: Tensor, *rest: Any) -> Tensor:
    from mmaccel.backends import triton

    if triton.usable(row.device) is None:
        from mmaccel.backends.triton.prefill.lists import listed_area as launch

        return launch(row, *rest)
    from mmaccel.backends.reference.lists import listed_area as plain

    return plain(row, *rest)


def _has_kernel(rows: Tensor) -> bool:
    """Whether a step's kernels serve `rows`: they turn and sum in float32, which float64 is not to be rounded to."""
    from mmaccel.backends import triton

    return rows.dtype != torch.float64 and triton.usable(rows.device) is None


def _decode_attend(query: Tensor, *rest: Any) -> Tensor:
    if _has_kernel(query):
        from mmaccel.backends.triton.decode.attention import decode_attend as launch

        return launch(query, *rest)
    from mmaccel.backends.reference.decode import decode_attend as plain

    return plain(query, *rest)


def _project_rows(x: Tensor, *rest: Any) -> Tensor:
    from mmaccel.backends import triton

    if triton.reads_weights(x):
        from mmaccel.backends.triton.decode.skinny_gemm import project_rows as launch

        return launch(x, *rest)
    from mmaccel.backends.reference.decode import project_rows as plain

    return plain(x, *rest)


def _turn_rows(rows: Tensor, *rest: Any) -> Tensor:
    if _has_kernel(rows):
        from mmaccel.backends.triton.decode.rope import turn_rows as launch

        return launch(rows, *rest)
    from mmaccel.backends.reference.decode import turn_rows as plain

    return plain(rows, *rest)


dense_attend = torch.library.custom_op(
    "mmaccel::dense_attend", _dense_attend, mutates_args=(), schema=DENSE_ATTEND
)
"""Exact causal attention; see `mmaccel.backends.dense.dense_attend` for its arguments."""

attend_now, decode_now, turn_now = _dense_attend, _decode_attend, _turn_rows
reach_now, area_now = _reach, _listed_area
"""What is behind these, for code that nobody compiles: a call through torch.library takes the host some 40 us more."""


@dense_attend.register_fake
def _dense_attend_shape(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


decode_attend = torch.library.custom_op(
    "mmaccel::decode_attend", _decode_attend, mutates_args=(), schema=DECODE_ATTEND
)
"""Exact attention of a few new rows over a cache of fixed size, whose new columns are written already.

query [B, H, n, D], key and value [B, G, capacity, D], H a multiple of G. columns [B, n] long, on the device: the column of
each new row, ascending; row i sees the columns 0 .. columns[b, i]. With sees [n] long (a tree) row i sees, of the last
`WINDOW` columns up to columns[b, n - 1], those whose bits are set, the oldest first, and all before them. bias [m] float32
is added to the scores of the columns 0 .. m - 1. Gives [B, H, n, D]; in memory a row of all heads lies together.
"""

project_rows = torch.library.custom_op(
    "mmaccel::project_rows", _project_rows, mutates_args=(), schema=PROJECT_ROWS
)
"""Rows through the linear layers of a transformer, with what stands before and after them.

x [R, K]; weight: one to three of [O, K], their outputs one after another; bias: none, or [O] for each. With `gain` [K] the
rows are normed first (RMS, `eps`). `gated`: of two weights, silu of the first's outputs times the second's. `residual`
[R, O'] is added. Gives [R, O'] in the type of `x`; bfloat16 rows round after the norm and at the end. With `squares` [R, P]
`x` and these are what `fused.pass_rows` gave, and the outputs are those of the rows normed by `eps`.
"""

turn_rows = torch.library.custom_op(
    "mmaccel::turn_rows", _turn_rows, mutates_args=("key", "value"), schema=TURN_ROWS
)
"""Turn new queries and keys, and write keys and values to their columns of the cache; gives queries [B, H, n, D].

rows [B, n, (H + 2 G) * D]: the heads of the queries, of the keys, of the values. cos and sin [B, S, D]: the angles of each
place. places, columns [B, n] long: where each row stands, and where it is written. key and value [B, G, capacity, D], the
last dimension dense.
"""


@decode_attend.register_fake
def _decode_attend_shape(query: Tensor, *rest: Any) -> Tensor:
    B, H, n, D = query.shape
    return query.new_empty(B, n, H, D).transpose(1, 2)


@project_rows.register_fake
def _project_rows_shape(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor],
    gain: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    squares: Tensor | None = None,
) -> Tensor:
    width = weight[0].shape[0] if gated else sum(w.shape[0] for w in weight)
    return x.new_empty(x.shape[0], width)


@turn_rows.register_fake
def _turn_rows_shape(
    rows: Tensor, cos: Tensor, sin: Tensor, places: Tensor, columns: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    B, n, width = rows.shape
    G, D = key.shape[1], key.shape[-1]
    return rows.new_empty(B, n, width // D - 2 * G, D).transpose(1, 2)


reach = torch.library.custom_op("mmaccel::reach", _reach, mutates_args=(), schema=REACH)
"""The run of key blocks that a range of places reaches from each block of queries; few launches where Triton runs.

q_row [b, h, P], k_row [b, h, N], q_place [b, h, P], k_place [b, h, N], b and h each 1 or all there are; the places of keys
that are there (k_row >= 0) ascend. Gives row [b, h, P / block_q, 5] and kind [b, h, N / block_k] of `BlockLists`,
without an index: from the first block in which a pair may pass ``lo <= q_place - k_place < hi`` to the last.
"""


@reach.register_fake
def _reach_shape(
    q_row: Tensor,
    k_row: Tensor,
    q_place: Tensor,
    k_place: Tensor,
    lo: int,
    hi: int,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, Tensor]:
    key_b, key_h = (max(x, y) for x, y in zip(k_row.shape[:2], k_place.shape[:2], strict=True))
    b, h = (max(*of) for of in zip(q_row.shape[:2], q_place.shape[:2], (key_b, key_h), strict=True))
    row = q_row.new_empty(b, h, q_row.shape[-1] // block_q, 5, dtype=torch.int64)
    return row, k_row.new_empty(key_b, key_h, k_row.shape[-1] // block_k, dtype=torch.int8)


listed_area = torch.library.custom_op(
    "mmaccel::listed_area", _listed_area, mutates_args=(), schema=LISTED_AREA
)
"""[b, h] int64: over lists of `BlockLists`, row [b, h, M, 5] and index, the sum of how many rows of q_row [b, h, P]
there are in each block of queries, times how many of k_row [b, h, N] there are in the key blocks that it lists."""


@listed_area.register_fake
def _listed_area_shape(
    row: Tensor, index: Tensor, q_row: Tensor, k_row: Tensor, block_q: int, block_k: int
) -> Tensor:
    b, h = (max(*of) for of in zip(row.shape[:2], q_row.shape[:2], k_row.shape[:2], strict=True))
    return row.new_empty(b, h)
