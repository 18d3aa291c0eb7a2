"""Copies units (frames) from the host to the layer that needs them, on demand or as `QueryPrediction` lets it predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops import clusters
from mmaccel.core.memory.buffers import KEPT, QueueMark, grow_buffer, on_device
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.store import HostStore
from mmaccel.policies.kv.store.slabs import GatherTable, view_by_unit

COUNTED = ("needed", "cached", "covered", "missing", "guessed", "ahead", "in_time")
WINDOW, CACHE, AHEAD = "window", "cache", "ahead"
NEVER = torch.iinfo(torch.long).max
"""The number of no entry."""


@dataclass(frozen=True, eq=False)
class _Brought:
    """When the units of one `copy_units` were there: codes [n] of what was wanted, and marks (CUDA events) of when
    prefetched units arrived, when the units were asked for, and when all had arrived."""

    layer: int
    code: Tensor
    ahead: QueueMark | None
    asked: QueueMark
    ready: QueueMark


class Prefetcher:
    """Copies the units (frames) that each layer of a question retrieves into one buffer on the device; the host never waits.

    Only the device knows which units are wanted and where they are. A code says where a unit is: first come the store's
    slots in host memory, then three buffers on the device, each numbered from where a slab of the store would begin: the
    `window`; the cache, the `room` units that each layer used last; and prefetched units. A buffer is a tensor [n, 2, G, P,
    D], like the store's slots, allocated at its first write and never moved. The compute queue (CUDA stream) writes it and
    the copy queue reads it; a writer waits for readers.

    A question calls `begin`; then for each layer `location_codes` of its units, `predict_codes` for the next layer,
    `copy_units`, `prefetch`, and `cache_units`. `location_codes`, `predict_codes` and `cache_units` read tensors at fixed
    addresses while `addresses` is unchanged, so that a CUDA graph can replay them. `copy_units` also copies units that were
    not predicted, so predictions change no result. All copies run in order on the copy queue, so prefetched units are read
    before the next layer's replace them.

    counts  entries (units) needed; of these cached, covered (prefetched), missing; entries guessed; entries covered by
            prefetches that had ended before the device waited for them ("in_time"); prefetches ("ahead"); by how many
            seconds those in time came early ("slack_seconds"), and for how many seconds the device waited for prefetched
            entries ("waited_seconds") and for the rest ("waited_missing_seconds")
    """

    def __init__(self, store: HostStore, layers: int, window: int, room: int) -> None:
        self._store, self._first, self.room = store, 0, room
        self._sizes = {WINDOW: window, CACHE: layers * room, AHEAD: 0}
        self._places: dict[str, Tensor] = {}
        self._listed = dict[bool, tuple[Tensor, ...]]()
        with torch.inference_mode(False):
            # What the host knows: the code from which on there are no slots, where those of what comes ahead begin, and the
            # gap of `UnitRowMap`.
            self._known = torch.zeros(3, dtype=torch.long, device=store.device)
            # Where the entries of each layer are; the last one is none.
            self._tables = torch.zeros(layers, 0, dtype=torch.long, device=store.device)
            # Of each layer those that are cached.
            self._cached = torch.full((layers, room), NEVER, device=store.device)
            # The units of the tables' first rows, where rows were given back: see `UnitRowMap`.
            self._old = torch.zeros(0, dtype=torch.long, device=store.device)
        self._units: object = None
        self._told: list[int] = []
        self._ahead: dict[int, QueueMark] = {}
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._seconds = dict.fromkeys(("slack_seconds", "waited_seconds", "waited_missing_seconds"), 0.0)
        self._guessed: list[Tensor] = []
        self._brought: list[_Brought] = []
        self._wanted_later, self._gap, self._moves = 0, 0, False
        # Codes of what was gathered since they were counted, and how many before were of the store.
        self.crossing: list[Tensor] = []
        self._crossed: Tensor | None = None

    def uncached(self, window: int) -> Prefetcher:
        """Return a prefetcher without cache or prediction, for a question beside others; both add to the same counters."""
        self.update_counters()
        other = Prefetcher(self._store, len(self._tables), window, 0)
        other._counts, other._seconds = self._counts, self._seconds
        return other

    # A question.

    def begin(self, first: int) -> None:
        """Start a question: build the tables of where units (frames) are; those from number `first` on are in the window."""
        self._first, at = first, self._store.table.at
        begins, rows = self._begins(), self._store.table.slots_on_device()
        if (at.gap, at.moves) != (self._gap, self._moves) or (at.gap and at.old is not self._units):
            self._gap, self._units, self._moves = at.gap, at.old, at.moves
            self._old = grow_buffer(self._old, 0, max(len(at.old), KEPT), used=0, share=0.0).fill_(NEVER)
            self._old[: len(at.old)] = on_device(torch.from_numpy(at.old), self._store.device)
            self._cached.fill_(NEVER)  # of some the store may be rid
        told = [self._store.slot_count, begins[AHEAD], self._gap]
        if told != self._told:
            self._told = told
            self._known.copy_(on_device(told, self._store.device))
        near = first - self._gap
        places = (
            max(rows.shape[1], near) + self._sizes[WINDOW] + 1
        )  # a loaded store may hold none of the last units
        if self._tables.shape[1] != places:
            with torch.inference_mode(False):
                self._tables = self._known.new_zeros(len(rows), places)
        entry, table = torch.arange(places, device=rows.device), self._tables
        held = pad(rows, (0, places - rows.shape[1]), value=-1)
        torch.where(entry < near, held, entry + (begins[WINDOW] - near), out=table)
        if self.room:
            # Those of the window stay where they are: what is written to the last place is overwritten.
            row = torch.where(self._cached < first, self._rows(self._cached), places - 1)
            code = torch.arange(row.numel(), device=rows.device).view_as(row) + begins[CACHE]
            table.scatter_(1, row, code)
        table[:, -1].fill_(-1)

    def addresses(self) -> Hashable:
        """Return addresses and shapes of tensors that `location_codes` and others read; CUDA graphs hold while equal."""
        read = self._known, self._tables, self._cached, self._old
        return self._moves, tuple((one.data_ptr(), one.shape) for one in read)

    def _rows(self, entries: Tensor) -> Tensor:
        """The table rows of `entries` (see `UnitRowMap`), -1 of -1."""
        if not self._moves:
            return entries
        row = torch.maximum(entries - self._known[2], torch.searchsorted(self._old, entries))
        return torch.where(entries < 0, entries, row)

    def location_codes(self, layer: int, entries: Tensor) -> Tensor:
        """Return codes [n] long of where (host, window, cache, prefetched) each unit (frame) of `entries` [n] is."""
        return self._tables[layer][self._rows(entries)]

    def predict_codes(self, layer: int, entries: Tensor) -> Tensor:
        """Return codes [n] for `prefetch`: of predicted `entries` [n] (-1: none), those that only the host holds; -1 for
        others. Afterwards `location_codes` says of these units that they are where `prefetch` copies them to."""
        return clusters.mark_host_slots(
            self._tables[layer], self._rows(entries), self._known[:1], self._known[1:2]
        )

    def prefetch(self, layer: int, wanted: Tensor) -> None:
        """Start to copy the units (frames) at the codes `wanted` [n] of `predict_codes` from the host, for `layer`."""
        if len(wanted) > self._sizes[AHEAD]:
            self._sizes[AHEAD] = len(wanted)
            old = self._places.pop(AHEAD, None)
            if old is not None:
                self._store.lanes.wire.keep_alive(old)
        place = self._place(AHEAD)[: len(wanted)]
        _, self._ahead[layer] = self._gather(wanted, place.permute(1, 2, 0, 3, 4))
        self._guessed.append(wanted)
        self._counts["ahead"] += 1

    def copy_units(
        self, layer: int, entries: Tensor, code: Tensor | None, recalled: int, out: Tensor, window: Pair
    ) -> QueueMark | None:
        """Copy keys and values of the units `entries` [n] into `out` [2, G, n * P, D], by their codes [n] if the store
        `can_gather`. `window`: keys and values [1, G, m * P, D] of the window. The counters count the first `recalled`
        entries. Return the mark at which the copy is done, or None if it is."""
        tokens = self._store.shape.tokens
        if code is None:
            gone = [unit for unit in entries.tolist() if unit < self._first]
            near = [
                view_by_unit(side[0], tokens).index_select(1, entries[len(gone) :] - self._first)
                for side in window
            ]
            far = torch.stack(self._store.fetch(layer, gone))
            out.copy_(torch.cat([far, torch.stack(near).flatten(2, 3)], 2))
            return None
        held = self._place(WINDOW)[: window[0].shape[2] // tokens]

        def lay() -> None:
            for side, rows in enumerate(window):
                held[:, side] = view_by_unit(rows[0], tokens).transpose(0, 1)

        self._store.lanes.compute_queue.run(lay)
        asked, ready = self._gather(code, out)
        self._brought.append(_Brought(layer, code[:recalled], self._ahead.pop(layer, None), asked, ready))
        return ready

    def retrieve(
        self,
        layer: int,
        entries: Tensor,
        code: Tensor | None = None,
        table: GatherTable | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return keys and values [2, G, n * P, D] of units `entries` [n] outside the window, for a pass of the stream, in
        `out` if given; call `begin` first. `code` [n]: their location codes, if the store `can_gather`. With a `table` of
        `places` they are copied on the compute queue, where a CUDA graph can capture it. No counter or cache changes."""
        out = self._store.new_device_buffer(len(entries)) if out is None else out
        if code is None:
            self._store.fetch(layer, entries.tolist(), out)
            return out
        if table is not None:
            self.crossing.append(code)
            table.copy_units(code, out, self._store.lanes.compute_queue.run)
            return out
        _, ready = self._gather(code, out)
        self._store.lanes.compute_queue.wait(ready)
        return out

    def cache_units(self, layer: int, entries: Tensor, rows: Tensor) -> None:
        """Cache units `entries` [k], ascending, with keys and values `rows` [2, G, k * P, D], instead of the layer's former
        ones; if there are too many, the last ones."""
        count, skip = min(self.room, len(entries)), max(0, len(entries) - self.room)
        if count:
            place = self._place(CACHE)[layer * self.room :][:count]
            units = view_by_unit(rows, self._store.shape.tokens)[:, :, skip:].permute(2, 0, 1, 3, 4)
            self._store.lanes.compute_queue.run(partial(place.copy_, units))
            self._cached[layer, :count] = entries[skip:]
            self._cached[layer, count:].fill_(NEVER)

    def forget_from(self, end: int) -> None:
        """Remove the units (frames) from `end` on from the cache."""
        # As if they were of a window: never marked.
        self._cached.masked_fill_(self._cached >= end, NEVER)

    def drop_prefetched(self) -> None:
        """Discard prefetched units (frames) that were not used."""
        self._ahead.clear()

    def count_copies(self) -> None:
        """Count the copied units in a counter on the device. Call it before the store gets slots, which renumbers codes."""
        crossing, self.crossing = self.crossing, []
        if crossing:
            code = torch.cat(crossing)
            count = ((code >= 0) & (code < self._store.slot_count)).sum()
            self._crossed = count if self._crossed is None else self._crossed + count

    def update_counters(self) -> None:
        """Bring the counters of copied and prefetched units (frames) up to date; waits for the device."""
        self.count_copies()
        if self._crossed is not None:
            self._store.count_copied(int(self._crossed))
            self._crossed = None
        guessed, brought = self._guessed, self._brought
        self._guessed, self._brought = [], []
        if guessed:
            self._counts["guessed"] += int((torch.cat(guessed) >= 0).sum())
        if brought:
            codes = torch.cat([one.code for one in brought]).cpu()
            parts = torch.split(codes, [len(one.code) for one in brought])
            for one, code in zip(brought, parts, strict=True):
                self._count(one, code)

    def counts(self) -> dict[str, float]:
        """Return the counters of copied and prefetched frames as numbers; waits for the device."""
        self.update_counters()
        return {**{name: float(count) for name, count in self._counts.items()}, **self._seconds}

    def coverage(self) -> float:
        """Share of the units (frames) copied from the host, for layers after the first, that were copied ahead; 0 to 1."""
        return self._counts["covered"] / max(1, self._wanted_later)

    def nbytes(self) -> int:
        held = (self._known, self._tables, self._cached, self._old, *self._places.values())
        return sum(one.nbytes for one in held)

    def _count(self, one: _Brought, code: Tensor) -> None:
        begins = self._begins()
        missing = int((code < self._store.slot_count).sum())
        near = int(((code >= begins[WINDOW]) & (code < begins[CACHE])).sum())
        covered = int((code >= begins[AHEAD]).sum())
        cached = len(code) - near - covered - missing
        self._counts.update(needed=len(code) - near, covered=covered, missing=missing, cached=cached)
        self._wanted_later += (covered + missing) * (one.layer > 0)
        begin = one.asked
        if one.ahead is not None:
            one.ahead.wait_on_host()
            one.asked.wait_on_host()
            slack = one.ahead.seconds(one.asked)
            if slack >= 0:
                self._counts["in_time"] += covered
                self._seconds["slack_seconds"] += slack
            else:
                self._seconds["waited_seconds"] -= slack
                begin = one.ahead
        if missing:
            one.ready.wait_on_host()
            self._seconds["waited_missing_seconds"] += begin.seconds(one.ready)

    def _begins(self) -> dict[str, int]:
        """The code of the first unit of each place."""
        begin, per, found = self._store.slot_count, self._store.slabs.per, dict[str, int]()
        for name, units in self._sizes.items():
            found[name] = begin
            begin += -(-units // per) * per
        return found

    def _place(self, name: str) -> Tensor:
        if name not in self._places:
            self._places[name] = self._empty(self._sizes[name])
            for ahead in (True, False) if name == CACHE else (True,):
                self._listed.pop(ahead, None)
        return self._places[name]

    def _empty(self, units: int) -> Tensor:
        shape = self._store.shape
        with torch.inference_mode(False):
            return torch.empty(units, *shape.tensor_shape, dtype=shape.dtype, device=self._store.device)

    def _gather(self, code: Tensor, out: Tensor) -> tuple[QueueMark, QueueMark]:
        """Units by codes [n] into `out` [2, G, n * P, D], on the wire's lane; the marks before and after."""
        self.crossing.append(code)
        # A question that breaks off gives `out` back while it is being written to.
        self._store.lanes.wire.keep_alive(out)
        if not self._store.slot_count:
            return self._store.gather(code, out, [self._places[WINDOW]])
        return self._store.gather(code, out, self.places())

    def count_captured(self, code: Tensor) -> None:
        """Count what captured calls of `retrieve` copied, each by codes `code` [L, n], when they are replayed."""
        self.crossing.append(code.flatten())
        self._store.count_copied(0, gathers=len(code))

    def places(self, ahead: bool = True) -> tuple[Tensor, ...]:
        """Return the device's buffers that codes may speak of; the same object while they stay where they are. Passes of
        frames read the cache alone: nothing that comes `ahead`, and no copy of the window, which questions make."""
        if ahead not in self._listed:
            read = {name: x for name, x in self._places.items() if ahead or name == CACHE}
            blank = self._empty(1)  # stands for a place that nobody reads
            self._listed[ahead] = tuple(
                read.get(name, blank.expand(units, -1, -1, -1, -1))
                for name, units in self._sizes.items()
                if ahead or name != AHEAD
            )
        return self._listed[ahead]


class QueryPrediction:
    """Predicts the hidden states that enter the next layer from those that enter this one, by adding the mean change that
    this layer made in the last question.

    Questions share the chat template, so most of what a layer adds is alike. On both tiny models the query made of predicted
    states finds 84% of what the next layer retrieves, with a quarter more units (frames) prefetched; the query of unchanged
    states finds 68%.

    All tensors stay at fixed addresses on the device, so that a CUDA graph can replay `predict_hidden`.
    """

    def __init__(self, layers: int, hidden: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._known, self._seen = torch.zeros(2, layers, hidden, device=device)
            self._before = torch.zeros(hidden, device=device)
        self._reached = -1

    def clear(self) -> None:
        """Forget how past questions changed from layer to layer."""
        self._known.zero_()
        self._reached = -1

    def predict_hidden(self, layer: int, rows: Tensor, count: Tensor) -> Tensor:
        """Predict the hidden states [1, n, E] that will enter the next layer, from those entering this one, of which the
        first `count` [1] are the question's words. Records the change that the previous layer made."""
        seen = self._seen[layer - 1] if layer else None
        return clusters.predict_next_layer_input(rows[0], count, self._known[layer], self._before, seen)[None]

    def note_input(self, layer: int) -> None:
        """Record that the input of `layer` was given to `predict_hidden`, by a call or by a graph replay."""
        self._reached = layer if layer == self._reached + 1 else -1

    def end_question(self) -> None:
        """End the question: the changes that its layers made are those that the next question adds."""
        if self._reached > 0:
            self._known[: self._reached] = self._seen[: self._reached]
        self._reached = -1
