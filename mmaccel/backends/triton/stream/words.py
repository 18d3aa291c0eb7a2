"""The kernels of `mmaccel.backends.words`."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64
"""Columns of a program."""

ROWS = 16
"""Rows that are read together."""

ENTRIES = 256
"""Entries of a program."""


@triton.jit
def _total(X, row_n, d, D, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[COLUMNS] the sum of the first `count` rows."""
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        n = first + tl.arange(0, ROWS)
        inside = (n < count)[:, None] & (d < D)[None, :]
        x = tl.load(X + n.to(tl.int64)[:, None] * row_n + d[None, :], mask=inside, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    return total


@triton.jit(do_not_specialize=["n"])
def folded_kernel(
    X,
    COUNT,
    OUT,
    n,
    row_h,
    row_n,
    D,
    HEADS: tl.constexpr,
    TOLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of a group of HEADS heads."""
    group = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count = n
    if TOLD:
        count = tl.load(COUNT).to(tl.int32)
    found = tl.zeros([COLUMNS], tl.float32)
    for head in range(HEADS):
        found += _total(X + (group * HEADS + head) * row_h, row_n, d, D, count, ROWS, COLUMNS) / count
    tl.store(OUT + group * D + d, found, mask=d < D)


@triton.jit(do_not_specialize=["n"])
def moved_kernel(
    X,
    COUNT,
    KNOWN,
    BEFORE,
    SEEN,
    OUT,
    n,
    row_n,
    E,
    SHOWN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of all rows."""
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    count = tl.load(COUNT).to(tl.int32)
    mean = _total(X, row_n, e, E, count, ROWS, COLUMNS) / count
    if SHOWN:
        tl.store(SEEN + e, mean - tl.load(BEFORE + e, mask=e < E, other=0.0), mask=e < E)
    tl.store(BEFORE + e, mean, mask=e < E)
    kind = OUT.dtype.element_ty
    known = tl.load(KNOWN + e, mask=e < E, other=0.0).to(kind).to(tl.float32)
    for first in range(0, n, ROWS):
        line = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (line < n)[:, None] & (e < E)[None, :]
        x = tl.load(X + line[:, None] * row_n + e[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + line[:, None] * E + e[None, :], (x + known[None, :]).to(kind), mask=inside)


@triton.jit(do_not_specialize=["n", "last"])
def foretold_kernel(TABLE, ENTRY, SLOTS, BEGIN, OUT, n, last, BLOCK: tl.constexpr):
    """Some entries. No two programs look at one place: only at the last one, which is not written."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(ENTRY + at, mask=at < n, other=-1)
    place = tl.where(entry < 0, last, entry)
    found = tl.load(TABLE + place, mask=at < n, other=-1)
    host = (found >= 0) & (found < tl.load(SLOTS)) & (entry >= 0)
    tl.store(TABLE + place, tl.load(BEGIN) + at, mask=host)
    tl.store(OUT + at, tl.where(host, found, -1), mask=at < n)


def folded(rows: Tensor, count: Tensor | None, groups: int) -> Tensor:
    """See `mmaccel.backends.words.folded`."""
    H, n, D = rows.shape
    out = torch.empty(groups * D, device=rows.device)
    with torch.cuda.device_of(rows):
        folded_kernel[(groups, triton.cdiv(D, COLUMNS))](
            rows, out if count is None else count, out, n, rows.stride(0), rows.stride(1), D,
            HEADS=H // groups, TOLD=count is not None, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


def moved(words: Tensor, count: Tensor, known: Tensor, before: Tensor, seen: Tensor | None) -> Tensor:
    """See `mmaccel.backends.words.moved`."""
    n, E = words.shape
    out = torch.empty(n, E, dtype=words.dtype, device=words.device)
    with torch.cuda.device_of(words):
        moved_kernel[(triton.cdiv(E, COLUMNS),)](
            words, count, known, before, before if seen is None else seen, out, n, words.stride(0), E,
            SHOWN=seen is not None, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


def foretold(table: Tensor, entries: Tensor, slots: Tensor, begin: Tensor) -> Tensor:
    """See `mmaccel.backends.words.foretold`."""
    out = torch.empty_like(entries)
    if len(entries):
        with torch.cuda.device_of(table):
            foretold_kernel[(triton.cdiv(len(entries), ENTRIES),)](
                table, entries, slots, begin, out, len(entries), len(table) - 1, BLOCK=ENTRIES, num_warps=4
            )
    return out
