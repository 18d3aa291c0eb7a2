"""From the host to the layer that needs it: units that are cached, fetched ahead, or still missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops import words
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.store import HostStore, Sources
from mmaccel.policies.kv.store.gather_sources import WINDOW
from mmaccel.policies.kv.store.streams import Mark, on_device
from mmaccel.policies.kv.store.transfer import in_units

COUNTED = ("needed", "cached", "covered", "missing", "guessed", "ahead", "in_time")
AHEAD = "ahead"
NEVER = torch.iinfo(torch.long).max
"""The number of no entry."""


@dataclass(frozen=True, eq=False)
class Window:
    """The units from `first` on of a stream, of which a layer holds keys and values [1, G, n * P, D]."""

    first: int
    pair: Pair


@dataclass(frozen=True, eq=False)
class _Brought:
    """Of one `bring`: codes [n] of what was wanted, and the marks when what came ahead was there, when it was asked for,
    and when all was there."""

    layer: int
    code: Tensor
    ahead: Mark | None
    asked: Mark
    ready: Mark


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
        """Keep `entries` [k], ascending, of `rows` [2, G, k * P, D], instead of what was kept; of too many the last."""
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


class Prefetcher:
    """Brings entries of a layer from the store, for one question after the other; the host knows none of them.

    A question goes: `begin`; for each layer, `codes` of what it wants and `foretell` for the next one, `bring`,
    `prefetch`, `arrive`, and `keep` of its cache. `codes`, `foretell` and `keep` are functions of tensors that stay where
    they are as long as `mark` does, so that they can be replayed.

    What `prefetch` guessed wrongly is never seen, and what it left out is fetched before `bring` returns: the result does
    not depend on the guess. All reads go one after the other on the wire's lane, so that what came ahead has been read
    before the next layer's takes its place.

    counts  entries needed; of these cached, covered (fetched ahead), missing; entries guessed; entries covered by
            transfers ahead that had ended before the device came to wait for them ("in_time"); transfers ahead ("ahead");
            by how many seconds those that were in time came before ("slack_s"), and for how many seconds the device waited
            for what was fetched ahead ("waited_s") and for the rest ("waited_missing_s")
    """

    def __init__(self, store: HostStore, layers: int, window: int, room: int) -> None:
        self._store, self.sources = store, Sources(store, window)
        self.cache = Cache(self.sources, layers, room)
        self.sources.add(AHEAD, 0)
        self._window = window
        with torch.inference_mode(False):
            # What the host knows: the codes from which on there are no slots, where those of what comes ahead begin, and
            # those of each layer's cache.
            self._known = torch.zeros(2 + layers, dtype=torch.long, device=store.device)
            # Where the entries of each layer are; the last one is none.
            self._tables = torch.zeros(layers, 0, dtype=torch.long, device=store.device)
        self._told: list[int] = []
        self._ahead: dict[int, Mark] = {}
        self._coming: dict[int, Mark] = {}
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._seconds = dict.fromkeys(("slack_s", "waited_s", "waited_missing_s"), 0.0)
        self._guessed: list[Tensor] = []
        self._brought: list[_Brought] = []
        self._wanted_later = 0

    @property
    def indexed(self) -> bool:
        """Whether entries are brought by codes."""
        return self._store.indexed

    def begin(self, first: int) -> None:
        """Entries of layers will be asked for, of which those from `first` on are in the window."""
        begins, rows = self.sources.begins(), self._store.rows()
        told = [self._store.slot_count, begins[AHEAD]]
        told += [begins["cache", layer] for layer in range(len(rows))]
        if told != self._told:
            self._told = told
            self._known.copy_(on_device(told, self._store.device))
        places = rows.shape[1] + self._window + 1
        if self._tables.shape[1] != places:
            with torch.inference_mode(False):
                self._tables = self._known.new_zeros(len(rows), places)
        entry, table = torch.arange(places, device=rows.device), self._tables
        held = pad(rows, (0, places - rows.shape[1]), value=-1)
        torch.where(entry < first, held, entry + (begins[WINDOW] - first), out=table)
        self.cache.mark(table, first, self._known[2:, None])
        table[:, -1].fill_(-1)

    def mark(self) -> Hashable:
        """Where all lies that `codes`, `foretell` and `keep` read and write."""
        kept = self._known, self._tables, self.cache.entries
        return tuple((one.data_ptr(), one.shape) for one in kept)

    def codes(self, layer: int, entries: Tensor) -> Tensor:
        """[n] where `entries` [n] of a layer are."""
        return self._tables[layer][entries]

    def foretell(self, layer: int, entries: Tensor) -> Tensor:
        """[n] codes of those of `entries` [n] (-1: none) that are on the host alone, to `prefetch`, -1 for the others. The
        layer's `codes` will be those of where they come to lie."""
        return words.foretold(self._tables[layer], entries, self._known[:1], self._known[1:2])

    def prefetch(self, layer: int, wanted: Tensor) -> None:
        """Start to bring what `foretell` said of a layer."""
        self.sources.add(AHEAD, len(wanted))
        place = self.sources.place(AHEAD, len(wanted))
        _, self._ahead[layer] = self.sources.gather(wanted, place.permute(1, 2, 0, 3, 4))
        self._guessed.append(wanted)
        self._counts["ahead"] += 1

    def bring(
        self,
        layer: int,
        entries: Tensor,
        code: Tensor | None,
        recalled: int,
        out: Tensor,
        window: Window,
    ) -> None:
        """Keys and values of `entries` [n], by their codes where the store is `indexed`, into `out` [2, G, n * P, D],
        where they are after `arrive`. Those after the first `recalled` ones are not counted."""
        if code is None:
            out.copy_(self.sources.listed(layer, entries.tolist(), window.first, window.pair))
            return
        self.sources.window(*window.pair)
        asked, ready = self.sources.gather(code, out)
        ahead = self._ahead.pop(layer, None)
        self._brought.append(_Brought(layer, code[:recalled], ahead, asked, ready))
        self._coming[layer] = ready

    def recall(self, layer: int, entries: Tensor) -> Tensor:
        """[2, G, n * P, D] of `entries` [n] that have left the window, for a pass of the stream; after `begin`. Of `counts`
        these are no part, and the cache stays that of the last question."""
        out = self._store.buffer(len(entries))
        if not self.indexed:
            self._store.fetch(layer, entries.tolist(), out)
            return out
        _, ready = self.sources.gather(self.codes(layer, entries), out)
        self._store.lanes.compute.wait(ready)
        return out

    def arrive(self, layer: int) -> None:
        """What computes from now on sees what `bring` was asked for."""
        ready = self._coming.pop(layer, None)
        if ready is not None:
            self._store.lanes.compute.wait(ready)

    def drop(self, layer: int | None = None) -> None:
        """Give up what was fetched ahead, for one layer or all, and never asked for."""
        for one in list(self._ahead) if layer is None else [layer]:
            self._ahead.pop(one, None)
        self._coming.clear()

    def settle(self) -> None:
        """Count what was brought; waits for the device."""
        self.sources.settle()
        guessed, brought = self._guessed, self._brought
        self._guessed, self._brought = [], []
        if guessed:
            self._counts["guessed"] += int((torch.cat(guessed) >= 0).sum())
        if not brought:
            return
        codes, start = torch.cat([one.code for one in brought]).cpu(), 0
        for one in brought:
            self._count(one, codes[start : start + len(one.code)])
            start += len(one.code)

    def counts(self) -> dict[str, float]:
        """See above; waits for the device."""
        self.settle()
        return {**{name: float(count) for name, count in self._counts.items()}, **self._seconds}

    def coverage(self) -> float:
        """Of the entries that had to cross the wire for layers after the first, the share that was fetched ahead."""
        return self._counts["covered"] / max(1, self._wanted_later)

    def nbytes(self) -> int:
        return self.sources.nbytes() + sum(
            one.nbytes for one in (self._known, self._tables, self.cache.entries)
        )

    def _count(self, one: _Brought, code: Tensor) -> None:
        covered = self.sources.among(AHEAD, code)
        near = self.sources.among(WINDOW, code)
        missing = int((code < self._store.slot_count).sum())
        self._counts.update(
            needed=len(code) - near, covered=covered, missing=missing,
            cached=len(code) - near - covered - missing,
        )  # fmt: skip
        self._wanted_later += (covered + missing) * (one.layer > 0)
        begin = one.asked
        if one.ahead is not None:
            one.ahead.sync()
            one.asked.sync()
            slack = one.ahead.seconds(one.asked)
            if slack >= 0:
                self._counts["in_time"] += covered
                self._seconds["slack_s"] += slack
            else:
                self._seconds["waited_s"] -= slack
                begin = one.ahead
        if missing:
            one.ready.sync()
            self._seconds["waited_missing_s"] += begin.seconds(one.ready)
