"""Tensors that grow along one axis, ahead of need."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 64


def grown(
    x: Tensor,
    axis: int,
    length: int,
    fill: float = 0,
    least: int = LEAST,
    share: float = 1.0,
    pinned: bool = False,
) -> Tensor:
    """`x` itself when `axis` has `length` places or more, else a copy with more by `share` at least, filled with `fill`.

    pinned  the copy is in host memory that a device can read
    """
    have = x.shape[axis]
    if have >= length:
        return x
    shape = list(x.shape)
    shape[axis] = max(length, have + int(share * have), least)
    out = torch.full(shape, fill, dtype=x.dtype, device=x.device, pin_memory=pinned)
    out.narrow(axis, 0, have).copy_(x)
    return out


class Series:
    """Rows [n, ...] on the host that only grow at the end, or are cut there; `pinned`: where a device can read them."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, pinned: bool = False) -> None:
        self._data = torch.zeros(0, *shape, dtype=dtype)
        self._pinned = pinned
        self._before: Tensor | None = None
        self.length = 0

    def append(self, rows: Tensor) -> None:
        end = self.length + rows.shape[0]
        if end > len(self._data):
            # The device may still be reading what was there before.
            self._before = self._data if self._pinned else None
            self._data = grown(self._data, 0, end, pinned=self._pinned)
        self._data[self.length : end] = rows.to(self._data)
        self.length = end

    def cut(self, length: int) -> None:
        self.length = min(self.length, length)

    @property
    def rows(self) -> Tensor:
        """The rows so far; a view."""
        return self._data[: self.length]

    @property
    def all(self) -> Tensor:
        """The rows so far, and room for more."""
        return self._data

    def nbytes(self) -> int:
        return self._data.untyped_storage().nbytes()
