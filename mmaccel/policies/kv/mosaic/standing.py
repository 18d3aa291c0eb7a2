"""Where entries and pseudo tokens stand when a question sees them; all on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmaccel.core.places import Places


class Standing:
    """The places of `parts` entries a unit, of p = P / parts tokens each."""

    def __init__(self, places: Places, unit: int, parts: int) -> None:
        self._places, self._unit, self._parts = places, unit, parts

    def tokens(self, entries: Tensor, numbers: Tensor, most: int) -> Tensor:
        """[k * p] or [3, k * p]: the tokens of `entries` [k], whose units stand at `numbers` [k], none above `most`."""
        if self._parts == 1:
            return self._places.chosen(numbers, most)
        p = self._unit // self._parts
        start = numbers * self._unit + entries % self._parts * p
        columns = start[:, None] + torch.arange(p, device=start.device)
        return self._places.cells(columns.flatten(), most)

    def seen(self, entries: Tensor, count: int, compact: bool) -> tuple[Callable[[], Tensor], int]:
        """The tokens of ascending `entries` [k] of a stream of `count` units, and how many units they seem to be of."""
        if len(entries) == count * self._parts:
            return lambda: self._places.units(0, count), count
        units = entries // self._parts
        if not compact:
            return lambda: self.tokens(entries, units, count - 1), count
        rank = ranks(units)
        # Of parts of units the host cannot know it without asking.
        units_seen = len(entries) if self._parts == 1 else int(rank[-1]) + 1
        return lambda: self.tokens(entries, rank, count - 1), units_seen

    def middles(self, time: Tensor, entries: Tensor, count: int, compact: bool) -> Tensor:
        """[k] or [3, k]: the middle of the unit at the mean entry numbers `time` [k], where `entries` are seen."""
        if compact and len(entries) < count * self._parts:
            units = entries // self._parts
            at = torch.searchsorted(units.to(time), time / self._parts).clamp(max=len(units) - 1)
            numbers = ranks(units)[at]
        else:
            numbers = (time / self._parts).round().long()
        return self._places.chosen(numbers, count - 1)[..., self._unit // 2 :: self._unit]


def ranks(units: Tensor) -> Tensor:
    """[n] the rank of each of `units` [n], ascending, among the different ones."""
    return torch.cat([units.new_zeros(1), (units[1:] != units[:-1]).long()]).cumsum(0)
