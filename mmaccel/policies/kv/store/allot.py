"""Who lies where: slots are given out in small blocks that belong to one owner, so that what is fetched together is close.

Pure bookkeeping over numbers. A block is `block` consecutive slots. An owner's units fill its own blocks first, then a free
block, the next one after its last where that is free; a block all of whose slots are given back belongs to no one.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable


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
