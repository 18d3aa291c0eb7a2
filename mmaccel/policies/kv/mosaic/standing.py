"""Where entries and pseudo tokens stand when a question sees them; all on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.core.places import Places


class Standing:
    """The places of `parts` entries a unit, of p = P / parts tokens each."""

    def __init__(self, places: Places, unit: int, parts: int) -> None:
        self._places, self._unit, self._parts = places, unit, parts

    def tokens(self, entries: Tensor, numbers: Tensor, most: int, own: bool) -> Tensor:
        """[k * p] or [3, k * p]: the tokens of `entries` [k], whose units stand at `numbers` [k], none above `most`. `own`:
        these are the units' numbers, which stand at their own times."""
        if self._parts == 1:
            return self._places.chosen(numbers, most, own=own)
        p = self._unit // self._parts
        start = numbers * self._unit + entries % self._parts * p
        columns = start[:, None] + torch.arange(p, device=start.device)
        return self._places.cells(columns.flatten(), most, own)

    def where(self, entries: Tensor, count: int, compact: bool) -> Tensor:
        """[k * p] or [3, k * p]: the tokens of ascending `entries` [k] of a stream of `count` units."""
        if len(entries) == count * self._parts:
            return self._places.units(0, count) if compact else self._places.own(0, count)
        units = self._units(entries)
        return self.tokens(entries, ranks(units) if compact else units, count - 1, not compact)

    def seen(self, entries: Tensor, count: int, compact: bool) -> int:
        """How many units `entries`, as `where` has them, seem to be of."""
        if not compact or len(entries) == count * self._parts:
            return count
        # Of parts of units the host cannot know it without asking.
        return len(entries) if self._parts == 1 else int(ranks(entries // self._parts)[-1]) + 1

    def middles(self, time: Tensor, entries: Tensor, count: int, compact: bool) -> Tensor:
        """[k] or [3, k]: the middle of the unit at the mean entry numbers `time` [k], where `entries` are seen."""
        own = not compact
        if compact and len(entries) < count * self._parts:
            units = self._units(entries)
            at = torch.searchsorted(units.to(time), time / self._parts).clamp(max=len(units) - 1)
            numbers = ranks(units)[at]
        else:
            numbers = (time if self._parts == 1 else time / self._parts).round().long()
        # What is no cluster may have any time. (Not below `count`: that is another at the next question.)
        numbers = numbers.clamp(0, self._places.known(count, own) - 1)
        return self._places.chosen(numbers, count - 1, self._unit // 2, own)

    def _units(self, entries: Tensor) -> Tensor:
        return entries if self._parts == 1 else entries // self._parts


def ranks(units: Tensor) -> Tensor:
    """[n] the rank of each of `units` [n], ascending, among the different ones."""
    return torch.cat([units.new_zeros(1), (units[1:] != units[:-1]).long()]).cumsum(0)
