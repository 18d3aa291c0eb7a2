"""From the host to the layer that needs it: what is cached, what was fetched ahead, and what is still missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.mosaic.cache import Cache
from mmaccel.policies.kv.store import HostStore, Sources
from mmaccel.policies.kv.store.lanes import Mark
from mmaccel.policies.kv.store.sources import WINDOW
from mmaccel.policies.kv.store.wire import in_units

COUNTED = ("needed", "cached", "covered", "missing", "guessed", "ahead", "in_time")
AHEAD = "ahead"


@dataclass(frozen=True, eq=False)
class Window:
    """The entries ``first .. count`` of a stream, of which a layer holds keys and values [1, G, n * p, D]."""

    first: int
    count: int
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


class Fetcher:
    """Brings entries of a layer from the store, for one question after the other; the host knows none of them.

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
        self._ahead: dict[int, tuple[Tensor, Mark]] = {}
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._seconds = dict.fromkeys(("slack_s", "waited_s", "waited_missing_s"), 0.0)
        self._guessed: list[Tensor] = []
        self._brought: list[_Brought] = []
        self._wanted_later = 0

    def prefetch(self, layer: int, entries: Tensor, window: Window) -> None:
        """Start to bring those of `entries` [n] (-1: none) that are on the host alone."""
        if not self._store.indexed or not window.first:
            return
        table = self._table(layer, window)
        found = table[entries]
        host = found < self._store.slot_count
        wanted = torch.where(host, found, -1)
        count, tokens = len(entries), self._store.shape.tokens
        self.sources.add(AHEAD, count)
        place = self.sources.place(AHEAD, count)
        out = self._store.buffer(count)
        lanes = self._store.lanes
        self.sources.gather(wanted, out)
        lanes.wire.uses(out)
        lanes.wire.run(partial(_lay, place, out, tokens))
        table[entries] = torch.where(host, self.sources.codes(AHEAD, count)[:-1], found)
        self._ahead[layer] = table, lanes.wire.mark(timed=True)
        self._guessed.append(wanted)
        self._counts["ahead"] += 1

    def bring(
        self, layer: int, wanted: Tensor, recalled: int, out: Tensor, window: Window, then: Callable[[], None]
    ) -> None:
        """Keys and values of entries `wanted` [n] into `out` [2, G, n * p, D]; `then` is called when all that is missing is
        under way. The first `recalled` of them are cached; those after are of the window."""
        if not self._store.indexed:
            out.copy_(self.sources.listed(layer, wanted.tolist(), window.first, window.pair))
            then()
            return
        table, ahead = self._ahead.pop(layer, (None, None))
        if table is None:
            table = self._table(layer, window)
        self.sources.window(*window.pair)
        code = table[wanted]
        asked, ready = self.sources.gather(code, out)
        then()
        self._store.lanes.compute.wait(ready)
        self._brought.append(_Brought(layer, code[:recalled], ahead, asked, ready))
        self.cache.keep(layer, wanted[:recalled], out[:, :, : recalled * self._store.shape.tokens])

    def drop(self, layer: int | None = None) -> None:
        """Give up what was fetched ahead, for one layer or all, and never asked for."""
        for one in list(self._ahead) if layer is None else [layer]:
            self._ahead.pop(one, None)

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
        return self.sources.nbytes()

    def _table(self, layer: int, window: Window) -> Tensor:
        table = self.sources.table(layer, window.first, window.count)
        self.cache.mark(layer, table, window.first)
        return table

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


def _lay(place: Tensor, out: Tensor, tokens: int) -> None:
    """`out` [2, G, n * P, D] as a place has it, one unit after the other."""
    place.copy_(in_units(out, tokens).permute(2, 0, 1, 3, 4))
