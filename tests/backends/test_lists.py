"""The operators that make and count lists of key blocks: their contracts."""

from __future__ import annotations

import torch

from mmaccel.backends.ops.block_lists import listed_area, reach


def test_the_operators_keep_their_contracts() -> None:
    row = torch.arange(64, dtype=torch.int32).view(1, 1, 64)
    heads = row.expand(1, 3, 64).contiguous()
    torch.library.opcheck(reach.op, (row, heads, row, row, 0, 20, 16, 16))
    lists, _ = reach(row, heads, row, row, 0, 20, 16, 16)
    torch.library.opcheck(listed_area.op, (lists, torch.empty(0, dtype=torch.int32), row, heads, 16, 16))
