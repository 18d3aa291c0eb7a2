"""The operator that puts pieces together: its contract, and what it writes."""

from __future__ import annotations

import torch

from mmaccel.backends.ops.block_lists import FIELDS, copy_pieces
from mmaccel.core.prefill.merge_heads import TensorPacker


def test_pieces_lie_where_they_are_put() -> None:
    sheet = TensorPacker()
    one, two = sheet.add((2, 3, 4), -1, torch.int32), sheet.add((1, 2, 2, 5), 0, torch.int64)
    first, second = (
        torch.arange(12, dtype=torch.int32).view(2, 2, 3),
        torch.ones(1, 1, 1, 5, dtype=torch.int64),
    )
    sheet.put(one, (0, 2), first, 1, more=10)
    sheet.put(two, (1,), second, 1, more=5, shift=2)
    sheet.flush()
    want = torch.full((2, 3, 4), -1, dtype=torch.int32)
    want[:, [0, 2], 1:] = first + 10
    assert torch.equal(sheet.tensor(one), want)
    rows = torch.zeros(1, 2, 2, 5, dtype=torch.int64)
    rows[0, 1, 1] = torch.tensor([6, 1, 1, 1, 3])
    assert torch.equal(sheet.tensor(two), rows)


def test_the_operator_keeps_its_contract() -> None:
    sheet = TensorPacker()
    sheet.put(sheet.add((1, 2, 64), -1, torch.int32), (1,), torch.arange(5).view(1, 1, 5), 2)
    fills = len(sheet._fills) // len(FIELDS)
    torch.library.opcheck(copy_pieces.op, (sheet._sources, [*sheet._fills, *sheet._puts], fills, sheet._ends))
