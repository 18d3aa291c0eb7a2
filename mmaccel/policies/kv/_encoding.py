"""Base of memories that archive older units (frames) on the host: what passes of the stream retrieve of them. On CUDA the
attention of a pass at a layer, with all that it retrieves, is captured as a graph at its second run, then replayed.

Letters: L layers, H query heads, G key/value heads, D head size, P tokens a unit, n rows of a pass, k units retrieved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops import clusters
from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.core.memory.buffers import on_device
from mmaccel.core.memory.kv import Stream, StreamPass
from mmaccel.policies.kv._index import Index, compact_slots
from mmaccel.policies.kv._ingest import Bases
from mmaccel.policies.kv._prefetch import Prefetcher
from mmaccel.policies.kv._window import Pair, Ring
from mmaccel.policies.kv._windowed import StreamMemory
from mmaccel.policies.kv.store.slabs import GatherTable

REPLAYED = 8
"""The largest pass in units that is captured; the device works for longer on a larger one than its launches take."""


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
        self.replays = CudaGraphCache(device)
        # What passes retrieve stands before the window, wherever the stream is.
        self.bases = Bases(stream.positions, self.window, self.encode_budget)
        # Whether the pass retrieves, and the units that its layers have retrieved.
        self._encodes, self._encoded = False, list[Tensor]()
        # Whether its attention is replayed, and what the graphs read the store by.
        self._replayed = False
        self._table: GatherTable | None = None

    def units_that_fit(self, first: int, count: int) -> int:
        return super().units_that_fit(first, 1 if self.policy.encode_by == "frame" else count)

    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        self._replayed = False
        if stream_pass.kind != "units":
            return
        self._encoded, self._encodes = [], False
        if self.encode_budget and self._first:
            # From the clusters of all that came before, wherever calls of `watch` and questions lie. The host makes
            # them while the device runs the vision tower for this pass, which was begun already.
            self.index.cluster_units()
            self.index.refresh()
            self._encodes = len(self.index.prepare(self._first).entries) > 0
        if self._encodes:
            self.prefetcher.begin(self._first)
            slots = self.stream.positions.interval_count(self._first)
            if self.replays.works and self._ingested is None and self._searches:
                self._table = self.store.gather_tables.find(self.prefetcher.places(), self._table)
                self.store.lanes.wait_for_copies()
            self._set_data_place(1 + slots)
            if self._base:
                self._pass_slots.copy_(on_device([self._base, slots], self.device))
            if stream_pass.look is not None and self.index.by_look:
                self.index.set_visual_query(stream_pass.look.mean(0))
        full = self._count - self._first == self.window and stream_pass.count <= REPLAYED
        if self.replays.works and full and self._ingested is None:
            self._replayed = not self._encodes or self._searches
        if self._replayed:
            cos, sin = self._unit_angles(stream_pass)
            room = self.replays.get_buffer("angles of units", (2, *cos.shape), cos.dtype)
            torch.stack((cos, sin), out=room)
            self.rope.kept["units"] = room[0], room[1]

    @property
    def _searches(self) -> bool:
        """Whether a pass chooses among more units than it retrieves, all of them in memory."""
        return self.store.can_gather and len(self.index.prepare(self._first).entries) > self.encode_budget

    @property
    def _pass_slots(self) -> Tensor:
        """[2] on the device: the base of a pass of the stream, and the time slots before its window."""
        return self.replays.get_buffer("slots", (2,), torch.long)

    def _set_data_place(self, units: int) -> None:
        """Tell the replays where all that a search reads lies; positions are those of `units` units at least."""
        fetched = self.prefetcher.addresses() if self._first else None
        table = self.stream.positions.position_table_address(units)
        self.replays.drop_if_moved(
            (self.index.addresses(), table, fetched, self._table and self._table.capture_key)
        )

    def _folded(self, query: Tensor, count: Tensor | None = None) -> Tensor:
        """[d]: the mean of raw queries [H, n, D] of the first `count` [1] rows, or of all, against keys of all heads: the
        heads of a group summed, for they share their keys."""
        return clusters.mean_query(query, count, self.geometry.kv_heads)

    def _retrieved(self, layer: int, query: Tensor) -> list[Pair]:
        if not self._encodes:
            return []
        replays, budget, positions = self.replays, self.encode_budget, self.stream.positions
        now, coded, based = self.index.prepare(self._first), self.store.can_gather, self._base > 0
        # One launch for the thousands of rows of a pass, which a question's kernel would go through one after the other.
        mean = replays.get_buffer("mean", (query.shape[1], 1, query.shape[3]), torch.float32)
        torch.mean(query[0], 1, True, dtype=torch.float32, out=mean)
        turned = self.rope.rotated_dims(positions.positions_before_video())
        size = 2, 1, 1, min(budget, len(now.entries)) * positions.tokens, turned
        room = replays.get_buffer("angles of a pass", size, self.stream.dtype)  # of all layers, in turn
        (base, slots), most = self._pass_slots, positions.interval_count(self._first)

        def find() -> tuple[Tensor, ...]:
            units = self.index.search(layer, self._folded(mean), budget, self._first).entries
            # In slots, where the base is taken from these; units that do not come evenly are then all closed up.
            at = compact_slots(units, base, slots, positions.has_even_rate) if based else units
            torch.stack(self.rope.angles(positions.of_units(at, most, own=not based)), out=room)
            return (units, self.prefetcher.location_codes(layer, units)) if coded else (units,)

        searched = self._searches and not self._replayed
        units, *code = replays(self._pass_name(layer), find) if searched else find()
        self._encoded.append(units)
        table = self._table if self._replayed else None
        rows = self.prefetcher.retrieve(layer, units, code[0] if code else None, table)
        self.rope.apply_(rows[:1], (room[0], room[1]))
        return [(rows[:1], rows[1:])]

    def _pass_name(self, layer: int) -> tuple[Any, ...]:
        """The name of what a layer of a pass replays, but for the pass's size."""
        if not self._encodes:
            return "pass", layer
        largest = self.index.prepare(self._first).lists.largest
        return "pass", layer, self.encode_budget, largest, self._base > 0, self.stream.positions.has_even_rate

    @torch.no_grad()
    def layer_attention(self, layer: int, query: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        ring, replays, searches = self._rings[layer], self.replays, self._encodes
        if not self._replayed or ring is None:
            return attend(query)
        key, value = self._new[layer]
        given = [*map(_rows_first, (query, key, value)), ring.turned[0], ring.value[0]]
        # Passes of all sizes share the room of the largest.
        most, rows = REPLAYED * self.stream.tokens_per_unit, query.shape[2]
        sizes = [(most, *x.shape[1:]) for x in given[:3]] + [x.shape for x in given[3:]]
        rooms = [replays.get_buffer((n, "of a pass"), size, key.dtype) for n, size in enumerate(sizes)]
        held = [room[: len(x)] for room, x in zip(rooms, given, strict=True)]
        torch._foreach_copy_(held, given)
        out = replays.get_buffer("attended", (most, query.shape[1], value.shape[3]), value.dtype)[:rows]
        found = replays.get_buffer(("found", layer), (2, self.encode_budget), torch.long)
        before, crossed = len(self._encoded), len(self.prefetcher.crossing)
        at = tuple(one.data_ptr() for one in self._head(layer))

        def work() -> tuple[Tensor, ...]:
            out.copy_(_rows_first(attend(_heads_first(held[0]))))
            if searches:
                torch.stack((self._encoded[-1], self.prefetcher.crossing[-1]), out=found)
            return ()

        self._new[layer] = _heads_first(held[1]), _heads_first(held[2])
        self._rings[layer] = Ring(ring.key, held[3][None], held[4][None])
        try:
            replays((*self._pass_name(layer), query.shape), work, at=at)
        finally:
            self._new[layer], self._rings[layer] = (key, value), ring
            del self._encoded[before:], self.prefetcher.crossing[crossed:]
        if searches:
            self._encoded.append(found[0])
            self.prefetcher.count_captured(found[1])
        return _heads_first(out)

    def _break_off(self) -> None:
        super()._break_off()
        if self._replayed:
            # What a graph reads of the store is read where the model computes.
            self.store.lanes.wire.wait(self.store.lanes.compute_queue.record_mark())
        self._replayed = False

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


def _rows_first(x: Tensor) -> Tensor:
    """[n, heads, D], as the model's projections lie, of `x` [1, heads, n, D]."""
    return x[0].transpose(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    """[1, heads, n, D] of `x` [n, heads, D]."""
    return x.transpose(0, 1)[None]
