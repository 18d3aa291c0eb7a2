"""Units of a layer that lie in several places, the host's memory and tensors on the device, brought together by one gather.

Which units are wanted is known to the device alone. So is where they are: a table a layer says it by codes, the slots of the
host first and after them the units of each place on the device, one place after the other.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from mmaccel.policies.kv.store.host import HostStore
from mmaccel.policies.kv.store.streams import Mark, on_device
from mmaccel.policies.kv.store.transfer import in_units

WINDOW = "window"


class Sources:
    """The places of a stream's units: its `store`, its window of at most `window` units, and what else `add` names.

    A place is a tensor [n, 2, G, P, D], laid out as the store's slots are; it stays where it is, so that what reads it knows
    its address. It is written on the compute lane and read on the wire's: who writes has waited for the readers.
    """

    def __init__(self, store: HostStore, window: int) -> None:
        self.store = store
        self._rooms: dict[Hashable, int] = {}
        self._places: dict[Hashable, Tensor] = {}
        self._codes: dict[tuple[Hashable, int, int], Tensor] = {}
        self._crossing: list[Tensor] = []
        self._crossed: Tensor | None = None
        self._listed: tuple[Tensor, ...] | None = None
        self.add(WINDOW, window)

    def add(self, name: Hashable, units: int) -> None:
        """A place for `units` units, made when it is first written to; the last one may be added again, larger."""
        if self._rooms.get(name, -1) < units:
            self._rooms[name], self._listed = units, None
            old = self._places.pop(name, None)
            if old is not None:
                self.store.lanes.wire.uses(old)

    def place(self, name: Hashable, units: int) -> Tensor:
        """[units, 2, G, P, D]: the first units of a place."""
        if name not in self._places:
            self._places[name], self._listed = self._empty(self._rooms[name]), None
        return self._places[name][:units]

    def codes(self, name: Hashable, units: int) -> Tensor:
        """[units + 1]: codes of the first units of a place, and -1, the code of no unit."""
        at = name, self.begins()[name], units
        if at not in self._codes:
            if len(self._codes) > 4 * len(self._rooms) + 64:
                self._codes.clear()
            codes = torch.arange(at[1], at[1] + units + 1, device=self.store.device)
            codes[-1:].fill_(-1)
            self._codes[at] = codes
        return self._codes[at]

    def among(self, name: Hashable, code: Tensor) -> int:
        """How many of the codes [n], on the host, are of a place."""
        begin = self.begins()[name]
        return int(((code >= begin) & (code < begin + self._rooms[name])).sum())

    def window(self, key: Tensor, value: Tensor) -> None:
        """Lay the units of the window, [1, G, n * P, D], where the gather reads them."""
        tokens = self.store.shape.tokens
        held = self.place(WINDOW, key.shape[2] // tokens)

        def lay() -> None:
            for side, rows in enumerate((key, value)):
                held[:, side] = in_units(rows[0], tokens).transpose(0, 1)

        self.store.lanes.compute.run(lay)

    def table(self, layer: int, first: int, count: int) -> Tensor:
        """[count + 1] where the units below `count` are, those from `first` on in the window; the last entry is of no unit.

        May be written to.
        """
        return torch.cat([self.store.rows()[layer, :first], self.codes(WINDOW, count - first)])

    def gather(self, code: Tensor, out: Tensor) -> tuple[Mark, Mark]:
        """Units by codes [n] into `out` [2, G, n * P, D], on the wire's lane; the marks before and after."""
        self._crossing.append(code)
        # A question that breaks off gives `out` back while it is being written to.
        self.store.lanes.wire.uses(out)
        if not self.store.slot_count:
            return self.store.gather(code, out, [self._places[WINDOW]])
        if self._listed is None:
            # What stands for a place that nothing was written to is not read.
            held, blank = self._places, self._empty(1)
            self._listed = tuple(
                held.get(name, blank.expand(units, -1, -1, -1, -1)) for name, units in self._rooms.items()
            )
        return self.store.gather(code, out, self._listed)

    def listed(self, layer: int, units: list[int], first: int, window: tuple[Tensor, Tensor]) -> Tensor:
        """[2, G, n * P, D] of ascending `units`, known to the host: where the store is read by other ways than a gather."""
        gone = [unit for unit in units if unit < first]
        tokens, parts = self.store.shape.tokens, []
        if gone:
            parts.append(torch.stack(self.store.fetch(layer, gone)))
        near = [unit - first for unit in units if unit >= first]
        if near:
            index = on_device(near, self.store.device)
            rows = [in_units(side[0], tokens).index_select(1, index).flatten(1, 2) for side in window]
            parts.append(torch.stack(rows))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def tally(self) -> None:
        """Count on the device what was gathered: once slots are added, codes mean other places."""
        crossing, self._crossing = self._crossing, []
        if crossing:
            code = torch.cat(crossing)
            count = ((code >= 0) & (code < self.store.slot_count)).sum()
            self._crossed = count if self._crossed is None else self._crossed + count

    def settle(self) -> None:
        """Tell the store's counters how many units crossed the wire; waits for the device."""
        self.tally()
        if self._crossed is not None:
            self.store.crossed(int(self._crossed))
            self._crossed = None

    def nbytes(self) -> int:
        """Bytes of the places."""
        return sum(held.nbytes for held in self._places.values())

    def begins(self) -> dict[Hashable, int]:
        """The code of the first unit of each place: each begins where a slab of the store would."""
        begin, per, found = self.store.slot_count, self.store.slab_slots, dict[Hashable, int]()
        for name, units in self._rooms.items():
            found[name] = begin
            begin += -(-units // per) * per
        return found

    def _empty(self, units: int) -> Tensor:
        shape = self.store.shape
        with torch.inference_mode(False):
            return torch.empty(units, *shape.unit, dtype=shape.dtype, device=self.store.device)
