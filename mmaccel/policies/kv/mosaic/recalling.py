"""What the passes of a stream retrieve while it is watched, so that units are stored as they are after what came before."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.core.kv import Stream
from mmaccel.policies.kv._angles import Turner
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.mosaic.choosing import Chooser
from mmaccel.policies.kv.mosaic.fetching import Fetcher
from mmaccel.policies.kv.mosaic.index import Index
from mmaccel.policies.kv.mosaic.standing import ranks


class Recalling:
    """Letters as in `MosaicMemory`. Each layer of a pass retrieves `budget` entries that have left the window, by the mean
    query of the pass, from the clusters of all that came before the pass.

    Nothing is read back: what was retrieved goes to the host with the pass's own keys, and makes the splits that it owes
    when these are clustered. So these follow from the passes of the stream alone (a call of `watch` ends with a pass),
    not from questions, from what the cache holds, or from the way by which entries come. Nothing is fetched ahead either:
    what a layer needs of 8 frames crosses the wire in less than a hundredth of the time that it takes for a pass.
    """

    def __init__(
        self,
        budget: int,
        index: Index,
        chooser: Chooser,
        fetcher: Fetcher,
        turner: Turner,
        stream: Stream,
        parts: int,
    ) -> None:
        self.budget = budget
        self._index, self._chooser, self._fetcher, self._turner = index, chooser, fetcher, turner
        self._stream, self._parts = stream, parts
        self._found: list[Tensor] = []
        self._some = False

    def begin(self, first: int) -> None:
        """A pass begins; units from `first` on are in the window."""
        self._found, end = [], first * self._parts
        self._some = bool(self.budget and first)
        if self._some:
            self._index.refresh()
            self._some = len(self._index.prepare(end).entries) > 0
        if self._some:
            self._fetcher.begin(end)

    def view(self, layer: int, query: Tensor, base: int, first: int) -> list[Pair]:
        """Keys, turned for `base`, and values of what the queries [1, H, n, D] of a pass retrieve, if anything can be."""
        if not self._some:
            return []
        # One launch for the thousands of rows of a pass, which a question's kernel would go through one after the other.
        mean = query[0].mean(1, keepdim=True, dtype=torch.float32)
        found = self._index.search(layer, self._chooser.folded(mean), self.budget, first * self._parts)
        entries = found.entries
        self._found.append(entries)
        rows = self._fetcher.recall(layer, entries)
        units = entries // self._parts
        places = self._stream.places
        # In slots, where the base is taken from these; units that do not come evenly are then all closed up.
        numbers = _closed(units, base, places.slots(first), places.even) if base else units
        where = self._chooser.standing.tokens(entries, numbers, places.slots(first), not base)
        self._turner.turn_(rows[:1], self._turner.angles(where))
        return [(rows[:1], rows[1:])]

    def retrieved(self) -> Tensor | None:
        """[L, n] the entries that the pass retrieved, still on the device; None where there were none."""
        found, self._found = self._found, []
        if not found:
            return None
        self._fetcher.sources.tally()
        return torch.stack(found)


def _closed(units: Tensor, base: int, first: int, even: bool) -> Tensor:
    """[n] where ascending `units` [n], all below `first`, stand where `base` is taken from them: what lies before the base
    is closed up behind it, so that its order is still seen. All stand before the window; where there are more than places
    there, as parts of many units may be, the oldest share the first place."""
    rank = ranks(units)
    room = first - base - 1 - rank[-1]
    there = torch.maximum(units - base, rank) if even else rank + room
    return torch.minimum(there, rank + room).clamp_min(0)
