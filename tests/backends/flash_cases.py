"""What flash-attn 4 does with block tensors and a mask, written out over all pairs, for devices on which it cannot run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.backends.flash import attend
from mmaccel.backends.flash.tiles import TileSizes
from mmaccel.core.prefill.plan import AttentionPlan

from . import oracle
from .oracle import log_sum_exp, masked


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    tiles: TileSizes,
    tests: list[Tensor],
    by_key: bool,
    scale: float,
    bounds: tuple[int, ...] | None,
) -> tuple[Tensor, Tensor]:
    """As `mmaccel.backends.flash.attend.call_flash_attn`. A tile that is listed twice is a fault."""
    demand(query, key, value, tensors, tests)
    assert bounds is None or (by_key and not tests)
    mask = seen(query.shape[:3], key.shape[1], tensors, tiles, tests, by_key, bounds)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out = masked(q.float(), k.float(), v.float(), mask, scale).to(query.dtype)
    return out.transpose(1, 2), log_sum_exp(q.float(), k.float(), mask, scale)


@contextmanager
def recorded(*sizes: int) -> Iterator[tuple[list[tuple[Any, ...]], pytest.MonkeyPatch]]:
    """While inside the kernel is written out and heads of `sizes` are let through: its calls, and the patch."""
    found: list[tuple[Any, ...]] = []

    def told(*args: Any) -> tuple[Tensor, Tensor]:
        found.append(args)
        return written_out(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "call_flash_attn", told)
        patch.setattr(attend, "SIZES", sizes)
        yield found, patch


def demand(query: Tensor, key: Tensor, value: Tensor, tensors: Sequence[Tensor], tests: list[Tensor]) -> None:
    """What flash-attn 4 asks of tensors (`to_cute_tensor`, `get_aux_tensor_metadata` of 4.0.0b36): the last dimension is
    dense, also where its size is 1, and of a test no other; all sequences and heads, in block tensors all or one."""
    B, _, H, _ = query.shape
    for t in (query, key, value, *tensors, *tests):
        assert t.stride(-1) == 1, (t.shape, t.stride())
    for t in tensors:
        assert t.dtype == torch.int32 and t.shape[0] in (1, B) and t.shape[1] in (1, H)
    for t in tests:
        assert t.shape[:2] == (B, H) and t.dtype in (torch.int32, torch.int64)
        assert [size for size, stride in zip(t.shape, t.stride(), strict=True) if stride == 1 < size] == [
            t.shape[-1]
        ]


def seen(
    shape: Sequence[int],
    n_key: int,
    tensors: Sequence[Tensor],
    tiles: TileSizes,
    tests: list[Tensor],
    by_key: bool,
    bounds: tuple[int, ...] | None,
) -> Tensor:
    """[B, H, n, N] bool: the pairs that are computed, for `shape` (B, n, H)."""
    B, n, H = shape
    rows, columns = -(-n // tiles.queries), -(-n_key // tiles.keys)
    k = torch.arange(n_key)
    place = k if by_key else tests[0][:, :, None, :n_key]
    inside = torch.zeros(B, H, n, n_key, dtype=torch.bool)
    for span in tests if by_key else tests[1:]:
        first, length, *listed = (t[..., :n, None].long() for t in span.unbind(2))
        mine = (first <= place) & (place - first < length)
        if not by_key:
            mine &= (listed[0] <= k) & (k - listed[0] < listed[1])
        inside |= mine
    q = torch.arange(n)[:, None]
    for below, past, keys in zip(*[iter(bounds or ())] * 3, strict=True):
        assert max(abs(below), abs(past), keys) <= 2**31 - 1 - n, "in 32 bits"
        inside |= (k >= q + below) & (k < (q + past).clamp(max=keys))
    told = []
    for count, index in (tensors[:2], tensors[2:]):
        assert count.dtype == index.dtype == torch.int32
        assert count.shape[2:] == (rows,) and index.shape[2:] == (rows, columns)
        entry = torch.arange(columns) < count[..., None]
        table = torch.zeros(*index.shape[:3], columns + 1, dtype=torch.int32)
        table.scatter_add_(-1, torch.where(entry, index.long(), columns), torch.ones_like(index))
        told.append(table[..., :-1].expand(B, H, -1, -1))
    tested, full = (t.repeat_interleave(tiles.queries, 2).repeat_interleave(tiles.keys, 3) for t in told)
    assert int((tested + full).max()) <= 1
    wide = slice(0, n), slice(0, n_key)
    return (full.bool()[:, :, *wide]) | (tested.bool()[:, :, *wide] & inside)


def check(plan: AttentionPlan, tensors: Sequence[Tensor], scale: float = 0.2) -> None:
    oracle.check(plan, tensors, scale, attend.block_attend)
