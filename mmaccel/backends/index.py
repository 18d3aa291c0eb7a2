"""The operators that make the indices of adaptive patterns.

`row_totals`, `line_sums` and `class_phases` reduce what the last queries attend to as they make it, on a CUDA device; their
plain forms are the methods of `mmaccel.policies.sparse.estimate.LastQueries`, and of `stride_scores` that of
`mmaccel.policies.sparse.stride`, which serve every other device. Common to the first three: query [B, H, L, D], the last
queries; key [B, G, N, D], H a multiple of G; row [B, n] long, the rows of `key` in which the keys lie, None for its first
`width`; at [B, L] long, the place of each query among the n = `width` keys, of which it sees those not after it, ascending,
-1 for none; total [B, H, L] float32, the log-sum-exp of all that a query sees, where the keys are not all of it; pooled: the
heads of one key head share the mean of their weights, and h = G heads are told, otherwise h = H. Scores are scaled by
D ** -0.5. The other operators are served on every device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_ASKED = "Tensor query, Tensor key, Tensor? row, Tensor at"
ROW_TOTALS = f"({_ASKED}, int width) -> Tensor"
LINE_SUMS = f"({_ASKED}, Tensor? total, int width, bool pooled) -> (Tensor columns, Tensor diagonals)"
CLASS_PHASES = (
    f"({_ASKED}, Tensor? total, int width, bool pooled, Tensor order, Tensor start, Tensor own, Tensor members, "
    "Tensor stride, str score, bool rows) -> (Tensor line, Tensor shift, Tensor spread)"
)
STRIDE_SCORES = "(Tensor value, Tensor at, int low, int high, str score) -> Tensor"
STRONGEST = "(Tensor columns, Tensor diagonals, Tensor last, int vertical, int slash) -> (Tensor columns, Tensor diagonals)"
LINE_KEYS = (
    "(Tensor row, Tensor columns, Tensor diagonals, int width, int block) -> "
    "(Tensor left, Tensor kind, Tensor kept, Tensor k_row, Tensor k_place)"
)
SLASH_RUNS = (
    "(Tensor kept, Tensor shape, Tensor member, Tensor home, Tensor reach, Tensor broken, Tensor runs, Tensor sure, "
    "int block) -> (Tensor row, Tensor index)"
)
TURNED_CLASSES = (
    "(Tensor queries, Tensor q_begin, Tensor keys, Tensor k_begin, Tensor stride, Tensor line, Tensor shift, Tensor dense, "
    "int room, bool wide, int columns, int rows) -> Tensor[]"
)


@cache
def reduces(device: torch.device, dtype: torch.dtype, queries: int, size: int) -> bool:
    """Whether `row_totals`, `line_sums` and `class_phases` are served, for so many queries of heads of this size."""
    from mmaccel.backends import triton

    if triton.usable(device) is not None:
        return False
    from mmaccel.backends.triton.prefill.estimate import suits

    return suits(dtype, queries, size)


def _row_totals(*args: Any) -> Tensor:
    from mmaccel.backends.triton.prefill.estimate import row_totals

    return row_totals(*args)


def _line_sums(*args: Any) -> tuple[Tensor, Tensor]:
    from mmaccel.backends.triton.prefill.estimate import line_sums

    return line_sums(*args)


def _class_phases(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from mmaccel.backends.triton.prefill.estimate_grid import class_phases

    return class_phases(*args)


def _stride_scores(*args: Any) -> Tensor:
    from mmaccel.backends.triton.prefill.strides import stride_scores

    return stride_scores(*args)


def _at_home(name: str, device: torch.device) -> Any:
    """The function of an operator that is served everywhere: in Triton where it runs, plain elsewhere."""
    from mmaccel.backends import triton

    if triton.usable(device) is None:
        from mmaccel.backends.triton.prefill import slashes

        return getattr(slashes, name)
    from mmaccel.backends.reference import index

    return getattr(index, name)


def _strongest(columns: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from mmaccel.backends import triton

    if triton.usable(columns.device) is None:
        from mmaccel.backends.triton.prefill.strongest import strongest as launch

        return launch(columns, *rest)
    from mmaccel.backends.reference.index import strongest as plain

    return plain(columns, *rest)


def _line_keys(row: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    left, kind, kept, k_row, k_place = _at_home("line_keys", row.device)(row, *rest)
    return left, kind, kept, k_row, k_place


def _slash_runs(kept: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    row, entries = _at_home("slash_runs", kept.device)(kept, *rest)
    return row, entries


def _turned_classes(queries: Tensor, *rest: Any) -> list[Tensor]:
    from mmaccel.backends import triton

    if triton.usable(queries.device) is None:
        from mmaccel.backends.triton.prefill.classes import turned_classes as launch

        return launch(queries, *rest)
    from mmaccel.backends.reference.classes import turned_classes as plain

    return plain(queries, *rest)


row_totals = torch.library.custom_op("mmaccel::row_totals", _row_totals, mutates_args=(), schema=ROW_TOTALS)
"""[B, H, L] float32: the log-sum-exp of the scores of each query; -inf of one that sees nothing."""

line_sums = torch.library.custom_op("mmaccel::line_sums", _line_sums, mutates_args=(), schema=LINE_SUMS)
"""[B, h, n] float32, twice: the weight of each column, and of each diagonal (query place minus key place)."""

class_phases = torch.library.custom_op(
    "mmaccel::class_phases", _class_phases, mutates_args=(), schema=CLASS_PHASES
)
"""line and shift [B, h, 1] long: the class of the heaviest columns and the phase of the heaviest slashes, under `score`.

order [B, n] int32: the places by class, ascending in each; start [B, C + 1] int32: where each class begins in it, and the
last ends. own [B, L] int32: the class of the key at each query's place. members [B, C or more] float32: how many pairs of a
query and a key before it have a phase. stride [B] long: how many classes and phases there are. spread [B, h, L] float32,
with `rows`: the entropy of the weights of each query; empty otherwise.
"""

stride_scores = torch.library.custom_op(
    "mmaccel::stride_scores", _stride_scores, mutates_args=(), schema=STRIDE_SCORES
)
"""[B, H, high - low + 1] float32: what the heaviest class of lines of each stride weighs under `score`, over the kinds.

value [kinds, B, H, n] float32, the standing of lines by how far they are from the first; at [B] the last of them.
"""

strongest = torch.library.custom_op("mmaccel::strongest", _strongest, mutates_args=(), schema=STRONGEST)
"""[B, H, K] long, ascending: of columns and of diagonals those of the K greatest scores [B, H, n], none of them negative.

K is the lesser of n and `vertical` or `slash`. last [B]: the last line there is, -1 for none; past the last that is chosen
comes n. Diagonal 0 is chosen whatever its score. Of equal scores any may be.
"""

line_keys = torch.library.custom_op("mmaccel::line_keys", _line_keys, mutates_args=(), schema=LINE_KEYS)
"""Columns [B, H, K] and diagonals [B, H, S] long among the keys `row` [B, N], which are those of the first `width` places.

left [B, H, N] int32: the rows of the keys that are no column, -1 for the columns; kind [B, H, N / block] int8: FULL where
all keys of a block are there, ABSENT elsewhere. kept [B, H, N] bool: the diagonals. k_row, k_place [B, H, whole blocks, at
least one] int32: the rows and places of the columns, -1 and 0 for none.
"""

slash_runs = torch.library.custom_op("mmaccel::slash_runs", _slash_runs, mutates_args=(), schema=SLASH_RUNS)
"""row [B, H, M, 5] long and index int32 of `BlockLists`: the key blocks that diagonals touch.

kept [B, H, N] bool: the diagonals; the rest as in `mmaccel.policies.sparse.slashes.Shapes`.
"""

turned_classes = torch.library.custom_op(
    "mmaccel::turned_classes", _turned_classes, mutates_args=(), schema=TURNED_CLASSES
)
"""The order (class, position) of the queries and keys of each head of a grid, from the one that all heads share.

queries [3, B, P] int32: row, place and class of each query by (class, place), those without a place last; keys [3, B, N]
int32: row, place and class by (class, place). q_begin, k_begin [B, C + 1] int32: where each class begins, and the last ends.
stride [B] long: the classes there are; line, shift, dense [B, H, 1] long: the class of the vertical lines, the phase of the
slashes and the class of the horizontal lines. room: no class has more keys; wide: places are told in 64 bits.

Gives, each [B, H, P], [B, H, columns] or [B, H, rows]: the rows of the queries by the class they pair with, -1 for those of
the `dense` class, and their places for the slashes: class * (2 * room) + rank, of the last key of the paired class that is
not after the query, and a rank of -1 where there is none. With `columns`, no fewer than any class has keys, the places of
the queries, and the rows and places of the keys, for the vertical lines: slashes then lead to none of these keys, and the
rank of queries that pair with their class is -1. With `rows` the rows and places of the queries of the dense class.
"""


row_totals_now, line_sums_now, class_phases_now = _row_totals, _line_sums, _class_phases
stride_scores_now, strongest_now, line_keys_now = _stride_scores, _strongest, _line_keys
slash_runs_now, turned_classes_now = _slash_runs, _turned_classes
"""What is behind the operators, for planners, which nobody compiles: a layer of mixed heads makes a hundred calls, and
through torch.library each takes the host some 40 us more."""


@row_totals.register_fake
def _row_totals_shape(query: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float32)


def _told(query: Tensor, key: Tensor, pooled: bool) -> tuple[int, int]:
    return query.shape[0], key.shape[1] if pooled else query.shape[1]


@line_sums.register_fake
def _line_sums_shape(
    query: Tensor, key: Tensor, row: Tensor | None, at: Tensor, total: Tensor | None, width: int, pooled: bool
) -> tuple[Tensor, Tensor]:
    columns = query.new_empty(*_told(query, key, pooled), width, dtype=torch.float32)
    return columns, torch.empty_like(columns)


@class_phases.register_fake
def _class_phases_shape(
    query: Tensor,
    key: Tensor,
    row: Tensor | None,
    at: Tensor,
    total: Tensor | None,
    width: int,
    pooled: bool,
    order: Tensor,
    start: Tensor,
    own: Tensor,
    members: Tensor,
    stride: Tensor,
    score: str,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    told = _told(query, key, pooled)
    line = query.new_empty(*told, 1, dtype=torch.int64)
    spread = (*told, query.shape[2]) if rows else (0,)
    return line, torch.empty_like(line), query.new_empty(spread, dtype=torch.float32)


@stride_scores.register_fake
def _stride_scores_shape(value: Tensor, at: Tensor, low: int, high: int, score: str) -> Tensor:
    return value.new_empty(*value.shape[1:3], high - low + 1)


@strongest.register_fake
def _strongest_shape(
    columns: Tensor, diagonals: Tensor, last: Tensor, vertical: int, slash: int
) -> tuple[Tensor, Tensor]:
    B, H, n = columns.shape
    first, second = (columns.new_empty(B, H, min(k, n), dtype=torch.int64) for k in (vertical, slash))
    return first, second


@line_keys.register_fake
def _line_keys_shape(
    row: Tensor, columns: Tensor, diagonals: Tensor, width: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, H, K), N = columns.shape, row.shape[1]
    left = row.new_empty(B, H, N)
    k_row = row.new_empty(B, H, max(K + -K % block, block))
    kind = left.new_empty(B, H, N // block, dtype=torch.int8)
    return left, kind, left.new_empty(B, H, N, dtype=torch.bool), k_row, torch.empty_like(k_row)


@slash_runs.register_fake
def _slash_runs_shape(
    kept: Tensor,
    shape: Tensor,
    member: Tensor,
    home: Tensor,
    reach: Tensor,
    broken: Tensor,
    runs: Tensor,
    sure: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    B, H, N = kept.shape
    row = kept.new_empty(B, H, member.shape[1], 5, dtype=torch.int64)
    room = shape.shape[1] * H * (N // block + 2) + broken.shape[1] * B * H * (N // block)
    return row, kept.new_empty(room, dtype=torch.int32)


@turned_classes.register_fake
def _turned_classes_shape(
    queries: Tensor,
    q_begin: Tensor,
    keys: Tensor,
    k_begin: Tensor,
    stride: Tensor,
    line: Tensor,
    shift: Tensor,
    dense: Tensor,
    room: int,
    wide: bool,
    columns: int,
    rows: int,
) -> list[Tensor]:
    B, H = line.shape[:2]
    kind = torch.int64 if wide else torch.int32
    P, N = (B, H, queries.shape[2]), (B, H, columns)
    out = [queries.new_empty(P), queries.new_empty(P, dtype=kind)]
    if columns:
        out += [queries.new_empty(n, dtype=d) for n, d in ((P, kind), (N, torch.int32), (N, kind))]
    return out + [queries.new_empty(B, H, rows) for _ in range(2 if rows else 0)]
