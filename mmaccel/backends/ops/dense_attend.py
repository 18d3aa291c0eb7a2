"""Exact causal attention by the fastest installed kernel, flash-attn's or PyTorch's SDPA, without a full score matrix.

flash-attn 4 is preferred (fastest on Hopper, made for Blackwell), then 3 or 2.

Masking rules: query row i is at column ``start + i``; key n is at column n, or at ``column[n]``. A query sees a valid key
iff the key's column is not after its own and, with a window, is less than `window` columns back or one of the first `sinks`
columns. Padded query rows, and rows that see no key, give zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmaccel.backends import flash
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.operator import operator

ROWS = 256  # query rows of a block where a mask has to be written out
FEW = 16  # fewer rows than this are taken together for the heads of a group on a CPU
PRODUCTS = 128  # rows of a key head up to which float32 goes by two products on CUDA
SUMS = 64  # parts of the second product
WEIGHTS = 1 << 24  # attention weights in float32 that are in memory at a time
LONG = 1 << 13  # rows from which `attend_by_heads` is worth its calls
SLICE = 128  # rows that `attend_in_slices` attends to at a time
MASK = 1 << 26  # most entries of such a mask, the heads of a group counted

FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels for square causal attention on CUDA, in the order in which they are tried."""

# Query rows from which flash-attn 4 is taken where it is installed: once a shape it compiles for some seconds.
FLASH_FROM = 1 << 14
# Query rows from which flash-attn is taken: 3 and 2 do not split the keys of a few rows over the device.
OLDER_FROM = 128
FLASH_SIZES = (64, 96, 128)  # head sizes that flash-attn 4 serves
OLDER_LARGEST = 256  # the largest head size that 3 and 2 serve, in steps of 8


class FlashAttnRelease(NamedTuple):
    """A flash-attn release and its function. `square`: whether it beats PyTorch with as many queries as keys."""

    release: int
    call: Callable[..., Any]
    square: bool


@operator(None, fake=lambda query, value: query.new_empty(*query.shape[:-1], value.shape[-1]))
def dense_attend(
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
    """Causal attention of query [B, H, Sq, D] over key and value [B, G, Sk, D], H a multiple of G: [B, H, Sq, D].

    start   column of the first query row, and of its own key if that is present
    valid   bool [B, Sk], False on padding; a query row is padding iff the key at its column is
    window  a query sees the last `window` columns, its own included, and the first `sinks` columns of its sequence
    column  [Sk] or [B, Sk] integer columns of the keys, in any order, for caches that keep selected keys; `sinks` then
            counts columns from 0, otherwise from the first valid one

    `valid` costs one host synchronization; nothing else does. Padding in one run at either end needs no mask; padding in the
    middle, and `column`, need a mask of `ROWS` rows at a time.
    """
    if column is not None:
        return _by_columns(query, key, value, scale, start, valid, sinks, window, column)
    if valid is None:
        return _unpadded(query, key, value, scale, start, sinks, window)
    spans = _extent(valid)
    if spans is None:
        columns, rank = torch.arange(key.shape[2], device=key.device), valid.long().cumsum(1) - 1
        return _by_columns(query, key, value, scale, start, valid, sinks, window, columns, rank)
    if all(span == (0, valid.shape[1]) for span in spans):
        return _unpadded(query, key, value, scale, start, sinks, window)
    n = query.shape[2]
    out = value.new_zeros(*query.shape[:3], value.shape[-1])
    alike: dict[tuple[int, int], list[int]] = {}
    for b, span in enumerate(spans):
        alike.setdefault(span, []).append(b)
    for (first, end), members in alike.items():
        lo, hi = max(first - start, 0), min(end - start, n)
        if lo < hi:
            some = members if len(members) < len(spans) else slice(None)
            part = (query[some, :, lo:hi], key[some, :, first:end], value[some, :, first:end])
            out[some, :, lo:hi] = _unpadded(*part, scale, start + lo - first, sinks, window)
    return out


def _extent(valid: Tensor) -> list[tuple[int, int]] | None:
    """(first, end) of the valid columns of each sequence; None when those of some sequence are not one run."""
    n = valid.shape[1]
    count = valid.sum(1)
    first = valid.to(torch.uint8).argmax(1)
    end = n - valid.flip(1).to(torch.uint8).argmax(1)
    rows = torch.stack([torch.where(count > 0, first, 0), torch.where(count > 0, end, 0), count], 1).tolist()
    if any(e - f != c for f, e, c in rows):
        return None
    return [(f, e) for f, e, _ in rows]


def _unpadded(
    query: Tensor, key: Tensor, value: Tensor, scale: float, start: int, sinks: int, window: int | None
) -> Tensor:
    n = query.shape[2]
    end = min(start + n, key.shape[2])
    key, value = key[:, :, :end], value[:, :, :end]
    if end == 0:
        return value.new_zeros(*query.shape[:3], value.shape[-1])
    aligned = end == start + n
    if window is not None and window >= start + n:
        window = None
    if aligned and n >= OLDER_FROM and not (sinks and window is not None):
        kernel = find_flash_attn(query, key, value, window, four=n >= FLASH_FROM)
        if kernel is not None:
            # A query sees `window` columns, its own the last of them.
            sides = (-1, -1) if window is None else (window - 1, 0)
            how = {} if kernel.release == 4 else {"window_size": sides}
            rows_first = (t.transpose(1, 2) for t in (query, key, value))
            with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
                result = kernel.call(*rows_first, softmax_scale=scale, causal=True, **how)
            out: Tensor = result[0] if isinstance(result, tuple) else result
            return out.transpose(1, 2)
    if window is not None:
        return _sliding(query, key, value, scale, start, sinks, window)
    if n == 1:
        # A single row has no mask, so the heads of a group can be rows: keys are then read once for all of them.
        rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        return _sdpa(rows, key, value, scale).reshape(*query.shape[:3], -1)
    if start == 0 and end == n:
        return _square(query, key, value, scale)
    flash = _flash(query, key, value)
    rows_of_key = n * query.shape[1] // key.shape[1]
    few = rows_of_key <= PRODUCTS if query.dtype == torch.float32 else n <= FEW
    if aligned and (flash or (query.is_cuda and not few)):
        from torch.nn.attention.bias import causal_lower_right  # it imports torch._dynamo

        mask = causal_lower_right(n, end)
        if flash:
            return _sdpa(query, key, value, scale, mask=mask)
        return _by_heads(query, key, value, scale, mask=mask)
    return _sliding(query, key, value, scale, start, 0, start + n)


def _sliding(
    query: Tensor, key: Tensor, value: Tensor, scale: float, start: int, sinks: int, window: int
) -> Tensor:
    n, end = query.shape[2], key.shape[2]
    columns = torch.arange(end, device=query.device)
    out, step = [], _rows(query, key, min(end, window + sinks + ROWS))
    for r in range(0, n, step):
        first = start + r
        at = torch.arange(first, min(first + step, start + n), device=query.device)
        near = min(max(0, first - window + 1), end)
        stop, sunk = min(first + len(at), end), min(sinks, near)
        if sunk:
            k = torch.cat([key[:, :, :sunk], key[:, :, near:stop]], 2)
            v = torch.cat([value[:, :, :sunk], value[:, :, near:stop]], 2)
            c = torch.cat([columns[:sunk], columns[near:stop]])
        else:
            k, v, c = key[:, :, near:stop], value[:, :, near:stop], columns[near:stop]
        gap = at[:, None] - c
        mask = (gap >= 0) & ((gap < window) | (c < sinks))
        out.append(_masked(query[:, :, r : r + step], k, v, scale, mask[None]))
    return torch.cat(out, 2)


def _by_columns(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    start: int,
    valid: Tensor | None,
    sinks: int,
    window: int | None,
    column: Tensor,
    rank: Tensor | None = None,
) -> Tensor:
    """Any columns, any padding. `rank` [B, Sk] of a key among the valid ones of its sequence: windows count in it."""
    n, n_key = query.shape[2], key.shape[2]
    own = column.expand(1 if column.dim() == 1 and valid is None else query.shape[0], n_key)[:, None]
    place = own if rank is None else rank[:, None]
    out, step = [], _rows(query, key, n_key)
    for r in range(0, n, step):
        at = torch.arange(start + r, start + min(r + step, n), device=query.device)
        mask = own <= at[:, None]
        if window is not None:
            back = at if rank is None else rank[:, at.clamp(max=n_key - 1)]
            mask = mask & ((back[..., None] - place < window) | (place < sinks))
        if valid is not None:
            padding = ((own == at[:, None]) & ~valid[:, None]).any(-1, keepdim=True)
            mask = mask & valid[:, None] & ~padding
        out.append(_masked(query[:, :, r : r + step], key, value, scale, mask))
    return torch.cat(out, 2)


def _rows(query: Tensor, key: Tensor, width: int) -> int:
    """Rows of a block so that its mask, written out for a group of heads, stays under `MASK` entries."""
    return max(16, min(ROWS, MASK // (width * (query.shape[1] // key.shape[1]))))


def _masked(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor) -> Tensor:
    """SDPA under a bool mask [B or 1, rows, keys]; rows that see nothing, of which kernels disagree, give zeros."""
    if key.shape[2] == 0:
        return value.new_zeros(*query.shape[:3], value.shape[-1])
    blind = ~mask.any(-1, keepdim=True)
    mask = (mask | blind)[:, None]
    B, H, n, D = query.shape
    group = H // key.shape[1]
    if group > 1 and (query.is_cuda or n < FEW):
        # The heads of a group become rows: on CUDA because masked kernels know no groups and keys would be repeated, for
        # few rows because keys are then read once for all of them.
        rows = query.reshape(B, -1, group * n, D)
        out = _sdpa(rows, key, value, scale, mask=mask.repeat(1, 1, group, 1)).reshape(B, H, n, -1)
    else:
        out = _sdpa(query, key, value, scale, mask=mask)
    return out.masked_fill(blind[:, None], 0.0)


def _square(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    if not query.is_cuda:
        return _sdpa(query, key, value, scale, causal=True)
    if _flash(query, key, value) or key.shape[1] == query.shape[1]:
        with sdpa_kernel(FASTEST, set_priority=True):
            return _sdpa(query, key, value, scale, causal=True)
    return _by_heads(query, key, value, scale, causal=True)


def _by_heads(query: Tensor, key: Tensor, value: Tensor, scale: float, **mask: Any) -> Tensor:
    """Each head of a group by itself: PyTorch's kernels for CUDA, but flash, would repeat the keys or hold every score."""
    B, H, n, D = query.shape
    heads = query.reshape(B, key.shape[1], -1, n, D).unbind(2)
    return torch.stack([_sdpa(q, key, value, scale, **mask) for q in heads], 2).reshape(B, H, n, -1)


def _flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's flash kernel for CUDA takes these, groups and all."""
    grouped = query.shape[1] != key.shape[1]
    return query.is_cuda and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, grouped))


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    few = query.dtype == torch.float32 and query.shape[2] <= PRODUCTS and not grouped
    if query.is_cuda and few and not causal and (mask is None or mask.dtype == torch.bool):
        return _by_products(query, key, value, scale, mask)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _by_products(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """A few rows of float32: PyTorch's kernel gives all keys of a few rows to one multiprocessor, products take the device.

    The keys are summed in `SUMS` parts: one long sum rounds as often as it has keys.
    """
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights, size = scores.softmax(-1), key.shape[2] // SUMS
    even = size * SUMS
    some = weights[..., :even].view(*weights.shape[:3], SUMS, size).transpose(2, 3)
    parts = some @ value[:, :, :even].reshape(*value.shape[:2], SUMS, size, value.shape[3])
    out: Tensor = parts.sum(2) + weights[..., even:] @ value[:, :, even:]
    return out


def find_flash_attn(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, four: bool = True
) -> FlashAttnRelease | None:
    """The flash-attn release that supports the device, dtype, head sizes and `window` of query [B, H, n, D] and key [B, G,
    N, D]; None if there is none, or PyTorch's kernel was measured to be faster. With `four`, release 4 is considered too."""
    n, size = query.shape[2:]
    if query.dtype not in (torch.float16, torch.bfloat16) or value.shape[-1] != size:
        return None
    if four and window is None and size in FLASH_SIZES and uses_flash_attn_4(query.device):
        from flash_attn.cute import flash_attn_func

        return FlashAttnRelease(4, flash_attn_func, square=True)
    if size > OLDER_LARGEST or size % 8 or not key.dtype == value.dtype == query.dtype:
        return None
    found = find_older_flash_attn(query.device)
    return found if found and (found.square or window is not None or n != key.shape[2]) else None


def uses_flash_attn_4(device: torch.device) -> bool:
    """Whether flash-attn 4 runs dense attention on `device`."""
    return operators.why_kernels_unusable("flash_4", device) is None and flash.is_installed()


def find_older_flash_attn(device: torch.device) -> FlashAttnRelease | None:
    """flash-attn 3 or 2 if installed for `device`; None if neither is, or if flash-attn 4 runs there."""
    if uses_flash_attn_4(device):
        return None
    for release in (3, 2):
        call = (
            import_older_flash_attn(release)
            if operators.why_kernels_unusable(f"flash_{release}", device) is None
            else None
        )
        if call is not None:
            return FlashAttnRelease(
                release, call, square=release == 3 or not operators.architecture_of(device).cudnn
            )
    return None


@cache
def import_older_flash_attn(release: int) -> Callable[..., Any] | None:
    """The function `flash_attn_func` of flash-attn 3 or 2, or None if it cannot be imported."""
    module = {3: "flash_attn_interface", 2: "flash_attn"}[release]
    try:
        # One that was built for another PyTorch cannot be imported; flash-attn 4 alone has the name of 2, and no function.
        return getattr(import_module(module), "flash_attn_func", None)
    except (ImportError, OSError):
        return None


def mean_attention_weights(
    query: Tensor, key: Tensor, at: Tensor, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Causal attention weights, averaged over heads, of queries [H, n, D] at columns `at` [n] to keys [G, N, D]: [n, N]
    float32. `bias` [b] is added to the scores of the first b keys. A part of the rows and key/value heads is computed at a
    time: its scores, and its keys as float32, have `WEIGHTS` elements each at most, if one row of one head has no more."""
    (heads, rows, size), (groups, columns, _) = query.shape, key.shape
    most = max(1, WEIGHTS * groups // max(1, heads * columns))
    if rows > most:
        some = zip(torch.split(query, most, 1), torch.split(at, most), strict=True)
        return torch.cat([mean_attention_weights(own, key, begin, scale, bias) for own, begin in some])
    later = torch.arange(columns, device=key.device)[None] > at[:, None]
    total = torch.zeros(rows, columns, device=key.device)
    step = max(1, WEIGHTS // max(1, columns * max(rows * heads // groups, size)))
    grouped = torch.unflatten(query, 0, (groups, heads // groups))
    for queries, keys in zip(torch.split(grouped, step), torch.split(key, step), strict=True):
        scores = queries.float().flatten(1, 2) @ keys.float().transpose(1, 2) * scale
        scores = torch.unflatten(scores, 1, (heads // groups, rows))
        if bias is not None:
            scores[..., : len(bias)] += bias
        total += scores.masked_fill_(later, float("-inf")).softmax(-1).sum((0, 1))
    return total / heads


def attend_in_slices(
    check: Callable[[], None], query: Tensor, key: Tensor, value: Tensor, scale: float, start: int, fine: bool
) -> Tensor:
    """Compute causal attention [B, H, n, D] as `dense_attend`, of query rows at columns from `start` on, `ROWS` rows at a
    time, `fine`: `SLICE`. Between slices it calls `check`, which may run a new frame of a stream first, or end the call: on
    a CPU, attention of a long question takes longer than a frame."""
    parts, step = [], SLICE if fine else ROWS
    for begin in range(0, query.shape[2], step):
        if begin:
            check()
        some = query[:, :, begin : begin + step]
        seen = slice(0, start + begin + some.shape[2])
        parts.append(dense_attend(some, key[:, :, seen], value[:, :, seen], scale, start + begin))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def attend_by_heads(
    check: Callable[[], None], query: Tensor, key: Tensor, value: Tensor, scale: float, *shown: Any
) -> Tensor:
    """Compute attention [B, H, n, D] as `dense_attend`, one query head at a time. Before each it calls `check`, which may
    end the call by an error: on a CPU a head of a long prompt takes seconds."""
    parts, group = [], query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        check()
        one, own = slice(head, head + 1), slice(head // group, head // group + 1)
        parts.append(dense_attend(query[:, one], key[:, own], value[:, own], scale, *shown))
    return torch.cat(parts, 1)
