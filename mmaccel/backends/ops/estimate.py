"""What the last queries attend to, reduced as it is made, on a CUDA device alone.

The plain forms are the methods of `mmaccel.policies.sparse.estimate.LastQueries`, and of `stride_scores` that of
`mmaccel.policies.sparse.stride`, which serve every other device. Common to the first three: query [B, H, L, D], the
last queries; key [B, G, N, D], H a multiple of G; row [B, n] long, the rows of `key` in which the keys lie, None for
its first `width`; at [B, L] long, the place of each query among the n = `width` keys, of which it sees those not after
it, ascending, -1 for none; total [B, H, L] float32, the log-sum-exp of all that a query sees, where the keys are not
all of it; pooled: the heads of one key head share the mean of their weights, and the results have h = G heads,
otherwise h = H. Scores are scaled by D ** -0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from mmaccel.backends.ops import operator as operators

P = ParamSpec("P")
R = TypeVar("R")

MOST_QUERIES = 128
"""Queries that a program holds."""


@operators.constant
def reduces(device: torch.device, dtype: torch.dtype, queries: int, size: int) -> bool:
    """Whether `row_totals`, `line_sums` and `class_phases` are served, for so many queries of heads of this size."""
    known = dtype in (torch.float16, torch.bfloat16, torch.float32)
    return known and 0 < queries <= MOST_QUERIES and size <= 256 and operators.usable(device) is None


def _kernel(fake: Callable[P, R]) -> operators.Operator[P, R]:
    """An operator that its kernel alone serves, made of its fake."""
    return operators.Operator(fake, "prefill.estimate", lambda *_: True, fake, ())


def _heads(query: Tensor, key: Tensor, pooled: bool) -> tuple[int, int]:
    return query.shape[0], key.shape[1] if pooled else query.shape[1]


@_kernel
def row_totals(query: Tensor, key: Tensor, row: Tensor | None, at: Tensor, width: int) -> Tensor:
    """[B, H, L] float32: the log-sum-exp of the scores of each query; -inf of one that sees nothing."""
    return query.new_empty(query.shape[:3], dtype=torch.float32)


@_kernel
def line_sums(
    query: Tensor, key: Tensor, row: Tensor | None, at: Tensor, total: Tensor | None, width: int, pooled: bool
) -> tuple[Tensor, Tensor]:
    """[B, h, n] float32, twice: the weight of each column, and of each diagonal (query place minus key place)."""
    columns = query.new_empty(*_heads(query, key, pooled), width, dtype=torch.float32)
    return columns, torch.empty_like(columns)


@_kernel
def class_phases(
    query: Tensor,
    key: Tensor,
    row: Tensor | None,
    at: Tensor,
    total: Tensor | None,
    width: int,
    pooled: bool,
    pairing: Sequence[Tensor],
    score: str,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """line and shift [B, h, 1] long: the class of the heaviest columns and the phase of the heaviest slashes, under `score`.

    pairing: order [B, n] int32, the places by class, ascending in each; start [B, C + 1] int32, where each class begins in
    it, and the last ends; own [B, L] int32, the class of the key at each query's place; members [B, C or more] float32, how
    many pairs of a query and a key before it have a phase; stride [B] long, how many classes and phases there are.
    spread [B, h, L] float32, with `rows`: the entropy of the weights of each query; empty otherwise.
    """
    shape = _heads(query, key, pooled)
    line = query.new_empty(*shape, 1, dtype=torch.int64)
    spread = (*shape, query.shape[2]) if rows else (0,)
    return line, torch.empty_like(line), query.new_empty(spread, dtype=torch.float32)


@_kernel
def stride_scores(value: Tensor, at: Tensor, low: int, high: int, score: str) -> Tensor:
    """[B, H, high - low + 1] float32: what the heaviest class of lines of each stride weighs under `score`, over the kinds.

    value [kinds, B, H, n] float32, the standing of lines by how far they are from the first; at [B] the last of them.
    """
    return value.new_empty(*value.shape[1:3], high - low + 1)
