"""Pieces put together by the Triton kernel against the plain way, interpreted or compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmaccel.backends.ops.block_lists import FIELDS, copy_pieces
from mmaccel.backends.triton.prefill.lists import copy_pieces as launched
from mmaccel.core.prefill.merge_heads import Slice, TensorPacker

from .triton_cases import DEVICE


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
