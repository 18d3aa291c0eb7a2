"""What a question brought to the device stays there for the next one, up to a number of entries a layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.buffers import grown
from mmaccel.policies.kv.store.wire import on_device


class Cache:
    """Keys and values of entries of p tokens by layer; of those that are not pinned the least recently used goes first.

    Slabs [2, G, S, p, D] a layer, grown as needed and no further than `room` entries and those pinned.
    """

    def __init__(
        self, layers: int, groups: int, tokens: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._slabs = [
            torch.zeros(2, groups, 0, tokens, size, dtype=dtype, device=device) for _ in range(layers)
        ]
        self._slots: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(layers)]
        self._pinned: list[dict[int, int]] = [{} for _ in range(layers)]
        self._free: list[list[int]] = [[] for _ in range(layers)]

    def split(self, layer: int, entries: Sequence[int], use: bool = True) -> tuple[list[int], list[int]]:
        """The places in `entries` of those that are here, and of those that are not; with `use` the first are used now."""
        slots, pinned = self._slots[layer], self._pinned[layer]
        here, gone = [], []
        for place, entry in enumerate(entries):
            if entry in slots:
                if use:
                    slots.move_to_end(entry)
                here.append(place)
            elif entry in pinned:
                here.append(place)
            else:
                gone.append(place)
        return here, gone

    def get(self, layer: int, entries: Sequence[int]) -> Tensor:
        """[2, G, k, p, D] of entries that are here."""
        slots, pinned = self._slots[layer], self._pinned[layer]
        at = [slots[entry] if entry in slots else pinned[entry] for entry in entries]
        return self._slabs[layer].index_select(2, on_device(at, self._slabs[layer].device))

    def put(self, layer: int, entries: Sequence[int], units: Tensor, room: int) -> None:
        """Keep `entries`, which are not here, of `units` [2, G, k, p, D]; of more than `room` the last ones."""
        slots = self._slots[layer]
        entries, units = (
            entries[-room:] if room else [],
            units[:, :, units.shape[2] - min(room, units.shape[2]) :],
        )
        while slots and len(slots) + len(entries) > room:
            self._free[layer].append(slots.popitem(last=False)[1])
        if entries:
            slots.update(zip(entries, self._store(layer, units), strict=True))

    def pin(self, layer: int, entries: Sequence[int], units: Tensor) -> None:
        """As `put`, until `unpin`."""
        self._pinned[layer].update(zip(entries, self._store(layer, units), strict=True))

    def unpin(self, layer: int, keep: set[int]) -> None:
        """Let go of the pinned entries that are not in `keep`."""
        pinned = self._pinned[layer]
        for entry in [one for one in pinned if one not in keep]:
            self._free[layer].append(pinned.pop(entry))

    def pinned(self, layer: int) -> list[int]:
        return list(self._pinned[layer])

    def holds(self) -> bool:
        """Whether anything is here that is not pinned."""
        return any(self._slots)

    def held(self, layers: int, entries: int) -> Tensor:
        """[L, n] whether each of the first `entries` entries is here, those apart that are pinned: when they come and go
        depends on how a stream is cut."""
        found = torch.zeros(layers, entries, dtype=torch.bool)
        for layer in range(layers):
            at = [one for one in self._slots[layer] if one < entries]
            found[layer, at] = True
        return found

    def cut(self, end: int) -> None:
        """Forget entries from `end` on."""
        for layer, free in enumerate(self._free):
            for kept in (self._slots[layer], self._pinned[layer]):
                free += [kept.pop(entry) for entry in [one for one in kept if one >= end]]

    def flush(self) -> None:
        """Forget all that is not pinned."""
        for layer, slots in enumerate(self._slots):
            self._free[layer] += slots.values()
            slots.clear()

    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def _store(self, layer: int, units: Tensor) -> list[int]:
        slab, free = self._slabs[layer], self._free[layer]
        lack = units.shape[2] - len(free)
        if lack > 0:
            have = slab.shape[2]
            slab = self._slabs[layer] = grown(slab, 2, have + lack, least=0)
            free += range(slab.shape[2] - 1, have - 1, -1)
        at = [free.pop() for _ in range(units.shape[2])]
        slab[:, :, on_device(at, slab.device)] = units
        return at
