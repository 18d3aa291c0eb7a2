"""Base of memories that archive older units (frames) on the host: what passes of the stream retrieve of them. On CUDA a
whole pass of few units, with all that its layers retrieve, is captured as a graph at its second run, then replayed.

Letters: L layers, H query heads, G key/value heads, D head size, P tokens a unit, n rows of a pass, k units retrieved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mmaccel.backends.ops import clusters
from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.decoding.replay import CudaGraphCache, GraphBuffers
from mmaccel.core.memory.buffers import as_words, on_device
from mmaccel.core.memory.kv import KVView, Stream, StreamPass
from mmaccel.policies.kv._index import Index
from mmaccel.policies.kv._ingest import Bases
from mmaccel.policies.kv._prefetch import Prefetcher
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv._windowed import StreamMemory
from mmaccel.policies.kv.store.slabs import GatherTable

REPLAYED = 4
"""The largest pass in units that is captured. It is one launch; on a larger one the device works longer
than the host launches."""


class EncodingMemory(StreamMemory):
    """A stream memory whose units (frames) move to `store` on the host when they leave the window; `index` finds them again,
    and `prefetcher` copies them back.

    While the stream is encoded, each layer of a pass retrieves `encode_budget` units by the pass's mean query, so that units
    are encoded with earlier context (Mosaic VII-A). What is stored depends on the passes alone (a call of `watch` ends one),
    not on questions, cache or prefetching. The host does not wait, and nothing is prefetched: copying is cheap.
    """

    def __init__(
        self, policy: Any, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> None:
        super().__init__(stream, geometry, model, device, **policy.sizes(stream))
        self.encode_budget, self.policy = stream.units(policy.encode_frames), policy
        own = policy.index, stream, geometry, device, self.window, policy.reps != 0
        self.index: Index = policy.index.opens(*own)
        self.store = policy.store.open(stream, geometry, device)
        self.prefetcher = Prefetcher(self.store, geometry.layers, self.window, stream.units(policy.cache))
        self.replays, self.pass_replays = CudaGraphCache(device), CudaGraphCache(device)
        # What passes retrieve stands before the window, wherever the stream is.
        self.bases = Bases(stream.positions, self.window, self.encode_budget)
        # Whether the pass retrieves, and the units that its layers have retrieved.
        self._encodes, self._encoded = False, list[Tensor]()
        # What layers see that run for a capture; what graphs read the store by; heads of all layers, and whose they are.
        self._shown: Tensor | None = None
        self._table: GatherTable | None = None
        self._stacked_heads: tuple[list[Any], Tensor] = [], torch.empty(0)

    def units_that_fit(self, first: int, count: int) -> int:
        return super().units_that_fit(first, 1 if self.policy.encode_by == "frame" else count)

    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        self.replays_pass = False
        if stream_pass.kind != "units":
            return
        self.index.set_pause(stream_pass.pause)
        self._encoded, self._encodes = [], False
        if self.encode_budget and self._first:
            # From the clusters of all that came before, wherever calls of `watch` and questions lie. The host makes
            # them while the device runs the vision tower for this pass, which was begun already.
            self.index.cluster_units()
            self.index.refresh()
            self._encodes = len(self.index.prepare(self._first).entries) > 0
        if self._encodes:
            self.prefetcher.begin(self._first)
            slots = self.stream.positions.count_intervals(self._first)
            if self.pass_replays.works and self._ingested is None and self._searches:
                self._table = self.store.gather_tables.find(self.prefetcher.places(ahead=False), self._table)
                self.store.lanes.wait_for_copies()
            self._set_data_place(1 + slots)
            if self._base:
                self._pass_slots.copy_(on_device([self._base, slots], self.device))
            if stream_pass.look is not None and self.index.by_look:
                self.index.set_visual_query(stream_pass.look.mean(0))
        few = stream_pass.count <= min(REPLAYED, self.window) and self._ingested is None
        if self.pass_replays.works and few and self._count - self._first == self.window:
            self.replays_pass = not self._encodes or self._searches
        if self.replays_pass:
            cos, sin = self._unit_angles(stream_pass)
            room = self.pass_replays.get_buffer("angles of units", (2, *cos.shape), cos.dtype)
            torch.stack((cos, sin), out=room)
            self.rope.kept["units"] = room[0], room[1]

    @property
    def _searches(self) -> bool:
        """Whether a pass chooses among more units than it retrieves, all of them in memory."""
        return self.store.can_gather and len(self.index.prepare(self._first).entries) > self.encode_budget

    @property
    def _pass_slots(self) -> Tensor:
        """[2] on the device: the base of a pass of the stream, and the time slots before its window."""
        return self.pass_replays.get_buffer("slots", (2,), torch.long)

    def _set_data_place(self, units: int) -> None:
        """Tell the replays where all that a search reads lies; positions are those of `units` units at least."""
        fetched = self.prefetcher.addresses() if self._first else None
        table = self.stream.positions.position_table_address(units)
        place = self.index.addresses(), table, fetched, self._table and self._table.capture_key
        # Passes are not of a snapshot, which reads copies.
        for replays in (self.replays, *([self.pass_replays] if self._main is None else [])):
            replays.drop_if_moved(place)

    def _folded(self, query: Tensor, count: Tensor | None = None) -> Tensor:
        """[d]: the mean of raw queries [H, n, D] of the first `count` [1] rows, or of all, against keys of all heads: the
        heads of a group summed, for they share their keys."""
        return clusters.mean_query(query, count, self.geometry.kv_heads)

    def _retrieved(self, layer: int, query: Tensor, out: Tensor | None = None) -> list[Pair]:
        if not self._encodes:
            return []
        replays, budget, positions = self.pass_replays, self.encode_budget, self.stream.positions
        now, coded, based = self.index.prepare(self._first), self.store.can_gather, self._base > 0
        # One launch for the thousands of rows of a pass, which a question's kernel would go through one after the other.
        mean = replays.get_buffer("mean", (query.shape[1], 1, query.shape[3]), torch.float32)
        torch.mean(query[0], 1, True, dtype=torch.float32, out=mean)
        turned = self.rope.rotated_dims(positions.positions_before_video())
        size = 2, 1, 1, min(budget, len(now.entries)) * positions.tokens, turned
        room = replays.get_buffer("angles of a pass", size, self.stream.dtype)  # of all layers, in turn
        (base, slots), most = self._pass_slots, positions.count_intervals(self._first)

        def find() -> tuple[Tensor, ...]:
            units = self.index.search(layer, self._folded(mean), budget, self._first).entries
            # In slots, where the base is taken from these; units that do not come evenly are then all closed up.
            at = compact_slots(units, base, slots, positions.has_even_rate) if based else units
            torch.stack(self.rope.angles(positions.of_units(at, most, own=not based)), out=room)
            return (units, self.prefetcher.location_codes(layer, units)) if coded else (units,)

        searched = self._searches and out is None
        units, *code = replays((layer, *self._pass_name()), find) if searched else find()
        self._encoded.append(units)
        table = None if out is None else self._table
        rows = self.prefetcher.retrieve(layer, units, code[0] if code else None, table, out)
        self.rope.apply_(rows[:1], (room[0], room[1]))
        return [(rows[:1], rows[1:])]

    def _pass_name(self) -> tuple[Any, ...]:
        """The name of what a pass replays, but for the pass's size."""
        if not self._encodes:
            return ("pass",)
        largest = self.index.prepare(self._first).lists.largest
        return "pass", self.encode_budget, largest, self._base > 0, self.stream.positions.has_even_rate

    @torch.no_grad()
    def replay_forward(self, embeds: Tensor, forward: Any, shared: GraphBuffers) -> Tensor:
        layers, (count, wide) = range(self.geometry.layers), embeds.shape
        largest = min(REPLAYED, self.window) * self.stream.tokens_per_unit
        shared.wait_for_last_user()
        try:
            room = (count, wide), largest * wide, embeds.dtype
            rows, out = (shared.get_part(name, *room) for name in ("embeds", "hidden"))
            shown = self._lay_out(count, largest, shared)
            size = 2, *shown[:, 0, :, :count].shape
            made = shared.get_part("made", size, math.prod(size) // count * largest, shown.dtype)
            found = shared.get_buffer("found", (2, len(layers), self.encode_budget), torch.long)
        except torch.OutOfMemoryError:  # a pass that is launched has one layer's at a time
            self.pass_replays.works = False
            return forward(embeds)  # type: ignore[no-any-return]
        rows.copy_(embeds)
        crossed = len(self.prefetcher.crossing)

        def work() -> tuple[Tensor, ...]:
            self._encoded = []
            del self.prefetcher.crossing[crossed:]
            out.copy_(forward(rows))
            for n, side in enumerate(made):
                torch.cat([self._new[layer][n] for layer in layers], out=side)
            if self._encodes:
                for n, some in enumerate((self._encoded, self.prefetcher.crossing[crossed:])):
                    torch.stack(some, out=found[n])
            return ()

        try:
            self._shown = shown
            # All sizes: what is made by size at a run, the attention's plan above all, is there at a capture.
            name = *self._pass_name(), count, self.window, self.stream.tokens_per_unit, shown.shape
            self.pass_replays(name, work, at=(ref(shared), shown.data_ptr()), shared=shared)
        finally:
            self._shown, self._encoded = None, []
            del self.prefetcher.crossing[crossed:]
        self._new = {n: (made[0, n, None], made[1, n, None]) for n in layers}
        if self._encodes:
            told = found.clone()
            self._encoded = [*told[0]]
            self.prefetcher.count_captured(told[1])
        return out

    def _lay_out(self, rows: int, largest: int, shared: GraphBuffers) -> Tensor:
        """[L, 2, G, N, D]: keys after RoPE and values that a captured pass of `rows` new columns, of `largest`, sees: the
        head, what is retrieved, the window, the new ones. The head and the window are there; the pass writes the others."""
        heads = [self._head(layer) for layer in range(self.geometry.layers)]
        _, *window = self._stacked_windows()
        budget = self.encode_budget * self.stream.tokens_per_unit
        _, groups, before, each = heads[0][0].shape
        near, width = before + self._encodes * budget, window[0].shape[2]
        size, sides = (len(heads), 2, groups, near + width + rows, each), len(heads) * 2 * groups * each
        shown = shared.get_part("shown", size, sides * (before + budget + width + largest), self.stream.dtype)
        known = self._stacked_heads[0]
        if len(known) != len(heads) or any(a is not b for a, b in zip(known, self._heads, strict=True)):
            self._stacked_heads = [*self._heads], torch.stack([torch.cat(pair) for pair in heads])
        words, own, *near_by = as_words(shown, self._stacked_heads[1], *window)
        words[:, :, :, :before] = own
        for side, some in enumerate(near_by):
            words[:, side, :, near : near + width] = some
        return shown

    def _encode(
        self, layer: int, query: Tensor, stream_pass: StreamPass, key: Tensor, value: Tensor
    ) -> KVView:
        if self._shown is None:
            return super()._encode(layer, query, stream_pass, key, value)
        shown, angles, rows = self._shown[layer], self._unit_angles(stream_pass), query.shape[2]
        unit = self.stream.tokens_per_unit
        near = shown.shape[2] - rows - self.window * unit
        if self._encodes:
            self._retrieved(layer, query, shown[:, :, near - self.encode_budget * unit : near])
        shown[:1, :, -rows:], shown[1:, :, -rows:] = self.rope.apply(key, angles), value
        query = self.rope.apply(query, angles)
        return KVView(shown[:1], shown[1:], sinks=near, window=self.window * unit, query=query)

    def _break_off(self) -> None:
        if self.replays_pass and self._stream_pass is not None:
            # What a graph reads of the store is read where the model computes.
            self.store.lanes.wire.wait(self.store.lanes.compute_queue.record_mark())
        super()._break_off()

    def _move(self, stream_pass: StreamPass) -> None:
        encoded, self._encoded = self._encoded, []
        if encoded:
            self.prefetcher.count_copies()
        retrieved = torch.stack(encoded) if encoded else None
        self.index.add_units(stream_pass.look, [*self._new.values()], retrieved)
        # Until passes retrieve, the host clusters what came before while the device still computes this one. Of an
        # ingestion two passes may be under way, one on each device of a spread model: the host waits for neither.
        self.index.cluster_units(keep=1 if self._ingested is None else 2)
        super()._move(stream_pass)

    def _gone(self, layers: Sequence[int], first: int, count: int, pairs: Sequence[Pair]) -> None:
        lost = self.store.put_layers(layers, range(first, first + count), pairs)
        if lost:
            self.index.forget(lost)


def compact_slots(units: Tensor, base: int, first: int, even: bool) -> Tensor:
    """Return time slots [n], counted from the offset `base`, for units (frames) `units` [n], ascending, before `first`, the
    window's first. Units before `base` get slots close behind it, in order; all slots stay before the window."""
    rank = torch.arange(len(units), device=units.device)
    room = first - base - 1 - rank[-1]
    there = torch.maximum(units - base, rank) if even else rank + room
    return torch.minimum(there, rank + room).clamp_min(0)
