"""From the host to the layer that needs it: what is cached, what was fetched ahead, and what is still missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from mmaccel.policies.kv.mosaic.cache import Cache
from mmaccel.policies.kv.store import HostStore, Ticket
from mmaccel.policies.kv.store.wire import in_units, on_device

COUNTED = ("needed", "cached", "covered", "missing", "guessed", "ahead", "in_time")

PENDING = 256
"""Timed transfers that may await being read."""


class Fetcher:
    """Brings entries of a layer from the store, for one question after the other.

    What `prefetch` guessed wrongly is never seen, and what it left out is fetched before `bring` returns: the result does
    not depend on the guess. Three buffers: of the layer at hand what came ahead and what is missing, and the next layer's.

    counts  entries needed; of these cached, covered (fetched ahead), missing; entries guessed; entries covered by
            transfers ahead that had ended before the device came to wait for them ("in_time"); transfers ahead ("ahead");
            by how many seconds those that were in time came before ("slack_s"), and for how many seconds the device waited
            for what was fetched ahead ("waited_s") and for what was missing ("waited_missing_s")
    """

    def __init__(self, store: HostStore, cache: Cache, room: int) -> None:
        self._store, self.cache, self._room = store, cache, room
        self._slots = store.slots(3)
        self._ahead: dict[int, tuple[list[int], Ticket]] = {}
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._seconds = dict.fromkeys(("slack_s", "waited_s", "waited_missing_s"), 0.0)
        self._timed: list[tuple[Ticket, int, bool]] = []
        self._wanted_later = 0

    def prefetch(self, layer: int, entries: Sequence[int]) -> None:
        """Start to bring those of `entries` that are not cached."""
        wanted = [entries[place] for place in self.cache.split(layer, entries, use=False)[1]]
        if wanted:
            self._ahead[layer] = wanted, self._slots.fetch_async(layer, wanted)
            self._counts["guessed"] += len(wanted)

    def bring(self, layer: int, entries: Sequence[int], then: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Keys and values [1, G, k * p, D] of `entries`; `then` is called when all that is missing is under way."""
        here, gone = self.cache.split(layer, entries)
        early, ticket = self._ahead.pop(layer, ([], None))
        at = {entry: row for row, entry in enumerate(early)}
        hit = [place for place in gone if entries[place] in at]
        miss = [place for place in gone if entries[place] not in at]
        late: Ticket | None = None
        try:
            if miss:
                late = self._slots.fetch_async(layer, [entries[place] for place in miss])
            then()
            out = self._store.buffer(len(entries))
            view = in_units(out, self._store.shape.tokens)
            if here:
                view.index_copy_(2, _at(here, out), self.cache.get(layer, [entries[place] for place in here]))
            if ticket is not None:
                _place(ticket, view, hit, [at[entries[place]] for place in hit])
            if late is not None:
                _place(late, view, miss, list(range(len(miss))))
        finally:
            # Whatever breaks off, the buffers are there for the next question.
            for one in (ticket, late):
                if one is not None:
                    one.release()
        if gone and self._room:
            rows = view if len(gone) == len(entries) else view.index_select(2, _at(gone, out))
            self.cache.put(layer, [entries[place] for place in gone], rows, self._room)
        self._count(layer, entries, here, hit, miss, ticket, late)
        return out[0][None], out[1][None]

    def drop(self, layer: int | None = None) -> None:
        """Give up what was fetched ahead, for one layer or all, and never asked for."""
        for one in list(self._ahead) if layer is None else [layer]:
            if one in self._ahead:
                self._ahead.pop(one)[1].release()

    def counts(self) -> dict[str, float]:
        """See above; waits for transfers under way."""
        self._settle_times(0)
        return {**{name: float(count) for name, count in self._counts.items()}, **self._seconds}

    def coverage(self) -> float:
        """Of the entries that had to cross the wire for layers after the first, the share that was fetched ahead."""
        return self._counts["covered"] / max(1, self._wanted_later)

    def nbytes(self) -> int:
        return self._slots.nbytes() + self.cache.nbytes()

    def _count(
        self,
        layer: int,
        entries: Sequence[int],
        here: list[int],
        hit: list[int],
        miss: list[int],
        ticket: Ticket | None,
        late: Ticket | None,
    ) -> None:
        self._counts.update(needed=len(entries), cached=len(here), covered=len(hit), missing=len(miss))
        self._wanted_later += (len(hit) + len(miss)) * (layer > 0)
        if ticket is not None:
            self._counts.update(ahead=1)
            self._timed.append((ticket, len(hit), True))
        if late is not None:
            self._timed.append((late, len(miss), False))
        self._settle_times(PENDING)

    def _settle_times(self, keep: int) -> None:
        """Read all but the last `keep` timed transfers."""
        cut = max(0, len(self._timed) - keep)
        for ticket, entries, ahead in self._timed[:cut]:
            slack = ticket.slack()
            if slack is None:
                continue
            if ahead and slack >= 0:
                self._counts["in_time"] += entries
                self._seconds["slack_s"] += slack
            elif slack < 0:
                self._seconds["waited_s" if ahead else "waited_missing_s"] -= slack
        del self._timed[:cut]


def _place(ticket: Ticket, view: Tensor, places: list[int], rows: list[int]) -> None:
    """Rows of a transfer to their places in `view` [2, G, k, p, D]."""
    for side, came in enumerate(ticket.wait()):
        units = in_units(came, view.shape[3])
        if rows != list(range(units.shape[1])):
            units = units.index_select(1, _at(rows, view))
        view[side].index_copy_(1, _at(places, view), units)


def _at(places: list[int], like: Tensor) -> Tensor:
    return on_device(places, like.device)
