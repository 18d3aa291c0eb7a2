"""What a question brought to the device stays there for the next one, up to a number of entries a layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmaccel.policies.kv.store import Sources
from mmaccel.policies.kv.store.wire import in_units


class Cache:
    """Keys and values of the entries that a layer last brought, of at most `room` of them, in a place of `sources` a layer.

    Which entries they are is known to the device alone, where `entries` [L, room] lies.
    """

    def __init__(self, sources: Sources, layers: int, room: int) -> None:
        self._sources, self.room = sources, room
        with torch.inference_mode(False):
            self.entries = torch.full((layers, room), NEVER, device=sources.store.device)
        for layer in range(layers):
            sources.add(("cache", layer), room)

    def mark(self, tables: Tensor, first: int, begin: Tensor) -> None:
        """Note in `tables` [L, n] where the cached entries of all layers are, those that are below `first`: codes from
        `begin` [L, 1] on. The last place of a table is that of no entry, and holds anything after this."""
        if self.room:
            # Those of the window stay where they are.
            at = torch.where(self.entries < first, self.entries, tables.shape[1] - 1)
            tables.scatter_(1, at, begin + torch.arange(self.room, device=tables.device))

    def keep(self, layer: int, entries: Tensor, rows: Tensor) -> None:
        """Keep `entries` [k], ascending, of `rows` [2, G, k * p, D], instead of what was kept; of too many the last."""
        count = min(self.room, len(entries))
        if count:
            place = self._sources.place(("cache", layer), count)
            units = in_units(rows, self._sources.store.shape.tokens)[:, :, len(entries) - count :]
            self._sources.store.lanes.compute.run(partial(_copy, place, units.permute(2, 0, 1, 3, 4)))
            self.entries[layer, :count] = entries[len(entries) - count :]
            self.entries[layer, count:].fill_(NEVER)

    def cut(self, end: int) -> None:
        """Forget entries from `end` on."""
        # As if they were of a window: never marked.
        self.entries.masked_fill_(self.entries >= end, NEVER)

    def flush(self) -> None:
        """Forget everything."""
        self.entries.fill_(NEVER)


def _copy(place: Tensor, units: Tensor) -> None:
    place.copy_(units)


NEVER = torch.iinfo(torch.long).max
"""The number of no entry."""
