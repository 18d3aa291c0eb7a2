"""Which slot each unit has: blocks of slots belong to one owner, so that units that are fetched together lie together; and a
table of the slots, on the host and on the device.

Pure bookkeeping over numbers. A block is `block` consecutive slots. An owner's units fill its own blocks first, then a free
block, the next one after its last where that is free; a block all of whose slots are given back belongs to no one.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmaccel.policies.kv.store.streams import on_device

Numbers = NDArray[np.int64]


class Allotment:
    """Slots ``0 .. size``, taken and given back."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.size = 0
        self.free = 0
        self._vacant: list[set[int]] = []
        self._owner: list[Hashable | None] = []
        self._rooms: dict[Hashable, set[int]] = {}
        self._last: dict[Hashable, int] = {}
        self._empty: set[int] = set()
        self._queue: list[int] = []

    def grow(self, slots: int) -> None:
        """Add `slots` slots, a whole number of blocks, at the end."""
        if slots % self.block:
            raise ValueError(f"{slots} slots are not whole blocks of {self.block}")
        for start in range(self.size, self.size + slots, self.block):
            number = len(self._vacant)
            self._vacant.append(set(range(start, start + self.block)))
            self._owner.append(None)
            self._release(number)
        self.size += slots
        self.free += slots

    def take(self, owner: Hashable, count: int, crowd: bool = False) -> list[int] | None:
        """`count` slots for `owner`; None, and nothing is changed, when its blocks and the empty ones do not hold so many.

        crowd   take room in the blocks of other owners as well
        """
        found: list[int] = []
        for number in sorted(self._rooms.get(owner, ())):
            found += sorted(self._vacant[number])[: count - len(found)]
        claimed = self._claim(owner, count - len(found))
        for number in claimed:
            found += sorted(self._vacant[number])[: count - len(found)]
        if len(found) < count and crowd:
            others = sorted(n for rooms in self._rooms.values() for n in rooms)
            for number in others:
                if self._owner[number] != owner and len(found) < count:
                    found += sorted(self._vacant[number])[: count - len(found)]
        if len(found) < count:
            for number in claimed:
                self._release(number)
            return None
        for number in claimed:
            self._owner[number] = owner
            self._rooms.setdefault(owner, set()).add(number)
            self._last[owner] = number
        for slot in found:
            self._fill(slot)
        return found

    def give(self, slots: Iterable[int]) -> None:
        """Take `slots` back."""
        for slot in slots:
            number = slot // self.block
            vacant, owner = self._vacant[number], self._owner[number]
            if slot in vacant or owner is None:
                raise ValueError(f"slot {slot} is free already")
            vacant.add(slot)
            self.free += 1
            self._rooms.setdefault(owner, set()).add(number)
            if len(vacant) == self.block:
                self._leave(owner, number)
                self._owner[number] = None
                if self._last.get(owner) == number:
                    del self._last[owner]
                self._release(number)

    def _claim(self, owner: Hashable, count: int) -> list[int]:
        """Empty blocks for `count` slots, as many as there are, taken off the list of empty ones."""
        claimed: list[int] = []
        after = self._last.get(owner, -2) + 1
        while count > len(claimed) * self.block and self._empty:
            if after not in self._empty:
                while self._queue[0] not in self._empty:
                    heapq.heappop(self._queue)
                after = heapq.heappop(self._queue)
            self._empty.remove(after)
            claimed.append(after)
            after += 1
        return claimed

    def _release(self, number: int) -> None:
        self._empty.add(number)
        heapq.heappush(self._queue, number)
        # A block claimed because it comes next stays in the queue; giving and taking must not lengthen it for ever.
        if len(self._queue) > 2 * len(self._empty) + 64:
            self._queue = sorted(self._empty)

    def _fill(self, slot: int) -> None:
        number = slot // self.block
        self._vacant[number].remove(slot)
        self.free -= 1
        owner = self._owner[number]
        if not self._vacant[number] and owner is not None:
            self._leave(owner, number)

    def _leave(self, owner: Hashable, number: int) -> None:
        rooms = self._rooms[owner]
        rooms.discard(number)
        if not rooms:
            del self._rooms[owner]


def runs(slots: list[int], per: int) -> list[tuple[int, int]]:
    """Slots as runs ``(start, end)`` of positions in the list: consecutive, and within one slab of `per` slots."""
    found: list[tuple[int, int]] = []
    begin = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1 or slots[i] % per == 0:
            found.append((begin, i))
            begin = i
    return found


class Table:
    """[L, units] slots and groups, -1 for none; it widens with the unit numbers."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._device = device
        self.slot: Numbers = np.full((layers, 0), -1, dtype=np.int64)
        self.group: Numbers = self.slot.copy()
        self._copy: Tensor | None = None
        self._stale = True

    def set(
        self, layer: int, units: Sequence[int], slots: Sequence[int], groups: Sequence[int | None]
    ) -> None:
        """Units of a layer lie in `slots` from now on, each in a group."""
        self._widen(max(units, default=-1) + 1)
        self.slot[layer, units] = slots
        self.group[layer, units] = [-1 if group is None else group for group in groups]
        self._stale = True

    def unset(self, layer: int, units: Sequence[int]) -> list[int]:
        """Forget units of a layer; the slots they lay in. Those not held are passed over."""
        wanted = np.unique([unit for unit in units if 0 <= unit < self.slot.shape[1]]).astype(np.int64)
        slots = self.slot[layer, wanted]
        self.slot[layer, wanted] = self.group[layer, wanted] = -1
        self._stale = True
        return [int(slot) for slot in slots if slot >= 0]

    def look(self, layer: int, units: Sequence[int]) -> list[int]:
        """Slots of units, -1 where there is none."""
        wanted = np.asarray(units, dtype=np.int64)
        known = (wanted >= 0) & (wanted < self.slot.shape[1])
        slots = np.full(wanted.shape, -1, dtype=np.int64)
        slots[known] = self.slot[layer, wanted[known]]
        return [int(slot) for slot in slots]

    def units(self, layer: int, first: int = 0) -> list[int]:
        """The units from number `first` on that a layer holds, ascending."""
        return [first + int(unit) for unit in np.flatnonzero(self.slot[layer, first:] >= 0)]

    def count(self) -> int:
        """Units held, summed over the layers."""
        return int(np.count_nonzero(self.slot >= 0))

    def oldest(self, keep: Sequence[int]) -> int | None:
        """The least number of a unit that any layer holds and that is not among `keep`."""
        held = np.flatnonzero((self.slot >= 0).any(0))
        held = held[~np.isin(held, np.asarray(keep, dtype=np.int64))]
        return int(held[0]) if held.size else None

    def held(self) -> int:
        """Units that some layer holds."""
        return int((self.slot >= 0).any(0).sum())

    def group_of(self, layer: int, unit: int) -> int | None:
        known = 0 <= unit < self.group.shape[1] and self.group[layer, unit] >= 0
        return int(self.group[layer, unit]) if known else None

    def rows(self) -> Tensor:
        """[L, units] slots on the device: uploaded whole, and only when asked for after a change, for streams change
        in one phase and are asked in another. It stays where it is until the table widens."""
        if self._copy is None or self._copy.shape != self.slot.shape:
            with torch.inference_mode(False):
                self._copy = torch.empty(self.slot.shape, dtype=torch.long, device=self._device)
            self._stale = True
        if self._stale:
            self._copy.copy_(on_device(torch.from_numpy(self.slot).clone(), self._device))
            self._stale = False
        return self._copy

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return 0 if self._copy is None else self._copy.nbytes

    def _widen(self, units: int) -> None:
        have = self.slot.shape[1]
        if units > have:
            more = np.full((self.slot.shape[0], max(units, 2 * have) - have), -1, dtype=np.int64)
            self.slot = np.concatenate([self.slot, more], 1)
            self.group = np.concatenate([self.group, more], 1)
