"""Lists made, and pieces put together, by the Triton kernels against the plain ones; `test_triton.py` runs them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel.backends.ops import block_lists
from mmaccel.backends.ops.block_lists import FIELDS, copy_pieces
from mmaccel.backends.triton.prefill import lists
from mmaccel.backends.triton.prefill.lists import copy_pieces as launched
from mmaccel.core.prefill.merge_heads import Slice, TensorPacker

from .interpreted import DEVICE, INTERPRETED, first

FAR = 2**31 - 1


def order(
    n: int, lead: tuple[int, int], wide: bool, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, some runs of them and some single ones absent, and ascending places with ties and gaps."""
    row = torch.arange(n, dtype=torch.int32).repeat(*lead, 1)
    row[torch.rand(*lead, n, generator=rng) < 0.1] = -1
    begin, end = sorted(torch.randint(0, n, (2,), generator=rng).tolist())
    row[:, :, begin:end] = -1
    place = torch.randint(0, 3, (*lead, n), generator=rng).cumsum(-1)
    return row, place + (1 << 33) if wide else place.to(torch.int32)


# The first have every leading dimension, pair of blocks, width of places and range.
@pytest.mark.parametrize("seed", first(4, 1, 2, 3, 4, 0, *range(5, 12)))
def test_reach(seed: int) -> None:
    """Leading dimensions shared or not, ranges open or not, keys absent, places of either width, blocks of two sizes."""
    rng = torch.Generator().manual_seed(seed)
    wide, (block_q, block_k) = seed % 4 == 3, [(16, 16), (16, 32), (64, 64)][seed % 3]
    B, H = 1 + seed % 2, 3
    leads = [(1, 1), (B, 1), (1, H), (B, H)]
    q_lead, k_lead = leads[seed % 4], leads[(seed // 4 + seed) % 4]
    q_row, q_pos = order(block_q * 3, q_lead, wide, rng)
    k_row, k_pos = order(block_k * 13, k_lead, wide, rng)
    q_pos[torch.rand(q_pos.shape, generator=rng) < 0.05] = -1
    if seed % 2:
        q_row, k_row = q_row[:1, :1], k_row[:1, :1]
    q_pos = q_pos[..., torch.randperm(q_pos.shape[-1], generator=rng)]
    ranges = [(0, FAR), (0, 70), (-9, 40), (100, FAR)]
    for lo, hi in ranges[seed // 4 % 2 :: 2] if INTERPRETED else ranges:
        arguments = (q_row, k_row, q_pos, k_pos)
        wanted = block_lists.reach.plain(*arguments, lo, hi, block_q, block_k)
        found = lists.reach(*(t.to(DEVICE) for t in arguments), lo, hi, block_q, block_k)
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == want.dtype and torch.equal(got.cpu(), want)


def test_reach_over_more_blocks_than_are_looked_at_together() -> None:
    """Runs of empty blocks longer than a step, at the beginning, in the middle and at the end."""
    n = 16 * 2600
    k_row = torch.arange(n, dtype=torch.int32).view(1, 1, n).clone()
    k_row[..., : 16 * 30] = -1
    k_row[..., 16 * 500 : 16 * 2000] = -1
    k_row[..., -16 * 40 :] = -1
    place = torch.arange(n, dtype=torch.int32).view(1, 1, n)
    q_row, q_pos = (t[..., 16 * 480 : 16 * 2100 : 16 * 9].repeat_interleave(16, -1) for t in (place, place))
    wanted = block_lists.reach.plain(q_row, k_row, q_pos, place, 0, 16 * 100, 16, 16)
    found = lists.reach(*(t.to(DEVICE) for t in (q_row, k_row, q_pos, place)), 0, 16 * 100, 16, 16)
    assert all(torch.equal(got.cpu(), want) for got, want in zip(found, wanted, strict=True))


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_area(indexed: bool, shared: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    B, H, M, N = 2, 3, 9, 700
    row = torch.zeros(B, H, M, 5, dtype=torch.int64)
    row[..., 0] = torch.randint(0, 20, (B, H, M), generator=rng)
    row[..., 1] = torch.randint(0, 600, (B, H, M), generator=rng)
    row[..., 4] = torch.randint(-5 if indexed else 0, 20, (B, H, M), generator=rng)
    index = torch.arange(5, 660, dtype=torch.int32) if indexed else torch.empty(0, dtype=torch.int32)
    q_row = torch.randint(-1, 3, (1, 1, 16 * M) if shared else (B, H, 16 * M), generator=rng)
    k_row = torch.randint(-1, 1, (B, 1, 32 * N) if shared else (B, H, 32 * N), generator=rng)
    nq, nk = (q_row.view(*q_row.shape[:2], M, 16) >= 0).sum(-1), (k_row.view(B, -1, N, 32) >= 0).sum(-1)
    rows = q_row.to(torch.int32), k_row.to(torch.int32)
    wanted = torch.zeros(B, H, dtype=torch.int64)
    for b in range(B):
        for h in range(H):
            for m in range(M):
                begin, count, _, _, shift = row[b, h, m].tolist()
                entries = range(begin, begin + count)
                blocks = [(int(index[e]) if indexed else e) + shift for e in entries]
                wanted[b, h] += int(nq.expand(B, H, M)[b, h, m]) * int(nk.expand(B, H, N)[b, h, blocks].sum())
    assert torch.equal(block_lists.listed_area.plain(row, index, *rows, 16, 32), wanted)
    found = lists.listed_area(*(t.to(DEVICE) for t in (row, index, *rows)), 16, 32)
    assert torch.equal(found.cpu(), wanted)


def sheet_of(size: int) -> tuple[TensorPacker, list[Slice]]:
    """Tensors of each type, of pieces of one head and of several, shared and strided, longer than a tile if `size` is."""
    rng = torch.Generator().manual_seed(size)

    def some(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(-5, 100, shape, generator=rng, dtype=dtype).to(DEVICE)

    sheet = TensorPacker()
    narrow = sheet.add((2, 5, 2 * size), -1, torch.int32)
    wide = sheet.add((2, 5, size), 7, torch.int64)
    lists = sheet.add((2, 5, 40, 5), 0, torch.int64)
    kinds = sheet.add((1, 1, 33), 1, torch.int8)
    sheet.put(narrow, (0, 1, 3), some(2, 3, size), 0)
    sheet.put(narrow, (0, 1), some(1, 1, size), size, more=-4)
    sheet.put(narrow, (4,), some(2, 1, 2 * size)[..., ::2], 3)
    sheet.put(wide, (1, 2), some(2, 7, size)[:, 2:4, : size // 2], size // 4, more=1 << 40)
    sheet.put(wide, (4,), some(1, 1, size, dtype=torch.int64), 0)
    sheet.put(lists, (0, 2, 3), some(2, 3, 20, 5, dtype=torch.int64), 9, more=1000, shift=7)
    sheet.put(lists, (1,), some(1, 1, 40, 5, dtype=torch.int64), 0, more=3)
    sheet.put(kinds, (0,), some(1, 1, 21, dtype=torch.int8), 5)
    return sheet, [narrow, wide, lists, kinds]


@pytest.mark.parametrize("size", [100, 5000])
def test_pieces(size: int) -> None:
    sheet, rooms = sheet_of(size)
    fills = len(sheet._fills) // len(FIELDS)
    told = sheet._sources, [*sheet._fills, *sheet._puts], fills, sheet._ends
    for room in rooms:
        made = []
        for way in (copy_pieces.plain, launched):
            sheet._made = way(*told)
            made.append(sheet.tensor(room))
        assert made[0].shape == room.shape and torch.equal(*made)
