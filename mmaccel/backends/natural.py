"""Rows that stand in their own order, told without a look at the device: who makes them says so."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

_made: WeakValueDictionary[tuple[torch.device, int, int], Tensor] = WeakValueDictionary()
"""Device, address and number of rows -> what `counted` made and somebody still holds."""


def counted(batch: int, n: int, width: int, device: torch.device) -> Tensor:
    """[batch, width] int32: the rows 0 .. n - 1, and -1 past the last. Nobody writes to it."""
    row = torch.arange(width, dtype=torch.int32, device=device)
    row = row.masked_fill(row >= n, -1).repeat(batch, 1)
    _made[row.device, row.data_ptr(), n] = row
    return row


def in_order(row: Tensor, n: int) -> bool:
    """Whether `row` [b, 1, width] is what `counted` made for n rows; False where that is not known."""
    made = _made.get((row.device, row.data_ptr(), n))
    return made is not None and made.numel() == row.numel() and row.is_contiguous()
