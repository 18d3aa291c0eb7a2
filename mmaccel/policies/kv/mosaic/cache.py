"""What a question brought to the device stays there for the next one, up to a number of entries a layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.policies.kv.store import Sources
from mmaccel.policies.kv.store.wire import in_units


class Cache:
    """Keys and values of the entries that a layer last brought, of at most `room` of them, in a place of `sources` a layer.

    Which entries they are is on the device; the host is told when it asks (`held`).
    """

    def __init__(self, sources: Sources, layers: int, room: int) -> None:
        self._sources, self._layers, self.room = sources, layers, room
        self._entries: dict[int, Tensor] = {}
        self._told: list[Tensor] | None = None
        for layer in range(layers):
            sources.add(("cache", layer), room)

    def mark(self, layer: int, table: Tensor, first: int) -> None:
        """Note in the `table` of a layer where its cached entries are, those that are below `first`."""
        entries = self._entries.get(layer)
        if entries is not None:
            codes = self._sources.codes(("cache", layer), len(entries))[:-1]
            # Those of the window stay where they are: their notes go to the last place, that of no entry.
            table[torch.where(entries < first, entries, -1)] = codes

    def keep(self, layer: int, entries: Tensor, rows: Tensor) -> None:
        """Keep `entries` [k], ascending, of `rows` [2, G, k * p, D], instead of what was kept; of too many the last."""
        if self.room and len(entries):
            count = min(self.room, len(entries))
            place = self._sources.place(("cache", layer), count)
            units = in_units(rows, self._sources.store.shape.tokens)[:, :, len(entries) - count :]
            self._sources.store.lanes.compute.run(partial(_copy, place, units.permute(2, 0, 1, 3, 4)))
            # What was told may be written over by the next question.
            self._entries[layer], self._told = entries[len(entries) - count :].clone(), None

    def holds(self) -> bool:
        """Whether anything is here."""
        return bool(self._entries)

    def held(self, entries: int) -> Tensor:
        """[L, n] on the host, whether each of the first `entries` entries is here."""
        if self._told is None:
            self._told = [one.cpu() for one in self._entries.values()]
        found = torch.zeros(self._layers, entries, dtype=torch.bool)
        for layer, one in zip(self._entries, self._told, strict=True):
            found[layer, one[one < entries]] = True
        return found

    def cut(self, end: int) -> None:
        """Forget entries from `end` on."""
        for layer, entries in self._entries.items():
            # As if they were of a window: never marked, and never told.
            self._entries[layer] = torch.where(entries < end, entries, NEVER)
        self._told = None

    def flush(self) -> None:
        """Forget everything."""
        self._entries, self._told = {}, None


def _copy(place: Tensor, units: Tensor) -> None:
    place.copy_(units)


NEVER = torch.iinfo(torch.long).max
