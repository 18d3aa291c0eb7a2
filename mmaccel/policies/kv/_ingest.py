"""Encodes a stored video into a windowed memory: each unit (frame) sees all earlier ones, and when the video has ended, only
the last `window` units stay on the device.

Letters: H query heads, G key/value heads, D head size, P tokens a unit, n columns of a pass. Keys are raw (before RoPE)
unless said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.layout import PositionIds
from mmaccel.core.memory.buffers import as_words, free_host_bytes
from mmaccel.core.memory.kv import KVView, Stream, StreamPass, grow_buffer
from mmaccel.policies.kv._window import Pair, PassState, Ring
from mmaccel.policies.kv.store.slabs import view_by_unit

SHARE = 0.5
"""Of the memory that is free when an ingestion begins: the rest is for a pass's own values and for the index."""

RUN = 16
"""Units that leave together when an ingestion has ended, where a store may have to make room for them."""

MOST = 1 << 16
"""Units between two bases at most, where their positions pass no limit."""

TOGETHER = 64  # units of all layers that are copied at a time beside what they are copied of


class Bases:
    """Offsets subtracted from the rotary positions of an endless stream, so that they stay within the model's limit.

    Up to the last unit (frame) that fits under the limit, positions are the true ones. From there on an offset is
    subtracted, a multiple of `every`, the same however the stream is cut into chunks. It changes the distance to the prompt
    before the video, not distances within the window. `reach` is the number of units at true positions. `spare` units before
    the window get positions too.
    """

    def __init__(self, positions: PositionIds, window: int, spare: int = 0) -> None:
        low, high = 0, 1
        while high < MOST and positions.largest_position(high) < positions.limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = positions.largest_position(middle) < positions.limit
            low, high = (middle, high) if fits else (low, middle)
        self._positions, self.window, self.reach = positions, window + spare, low
        # Spare units take no position that a window of up to half the limit has without them.
        self.every = max(low - self.window, window - spare, 1)

    def base_of_unit(self, unit: int) -> int:
        """Return the offset that is subtracted from positions in the pass of unit (frame) `unit`."""
        return int(self._positions.unit_step(max(0, unit - self.window)) // self.every * self.every)

    def count_same_base(self, unit: int, count: int) -> int:
        """Return how many of the `count` units (frames) from `unit` on have the same offset as `unit`."""
        if self._positions.has_even_rate:
            return min(count, self.base_of_unit(unit) + self.every + self.window - unit)
        base = self.base_of_unit(unit)
        return next((some for some in range(1, count) if self.base_of_unit(unit + some) != base), count)


class Ingested:
    """Growing buffers, for each layer, of the keys and values of a stored video while it is encoded: the prompt before the
    video, and the last `units` units (frames).

    sides  keys and values [1, G, head + units * P, D] of each layer, to start from; they may be overwritten
    unit   P
    most   units that fit in memory
    taken  units encoded so far; `share`: the sum over them of the share of earlier units that each saw
    """

    def __init__(self, sides: Sequence[Pair], head: int, unit: int, most: int) -> None:
        self._sides, self._head, self._unit, self.most = list(sides), head, unit, most
        self.units = (sides[0][0].shape[2] - head) // unit
        self.taken, self.share = 0, 0.0

    def append(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """Append keys and values [1, G, n, D] of a pass to a layer's buffers; return all keys and values of that layer."""
        used = self._head + self.units * self._unit
        end = used + key.shape[2]
        keys, values = (grow_buffer(side, 2, end, used=used) for side in self._sides[layer])
        keys[:, :, used:end], values[:, :, used:end] = key, value
        self._sides[layer] = keys, values
        return keys[:, :, :end], values[:, :, :end]

    def kv_pair(self, layer: int, first: int, count: int) -> Pair:
        """Return views [1, G, count * P, D] of a layer's keys and values of `count` units (frames) from `first` on."""
        begin = self._head + first * self._unit
        key, value = (side[:, :, begin : begin + count * self._unit] for side in self._sides[layer])
        return key, value

    def drop_first_units(self, count: int) -> None:
        """Forget the first `count` units (frames) of all layers."""
        left = self.units - count
        for layer in range(len(self._sides) if count else 0):
            for side, kept in zip(
                self.kv_pair(layer, 0, left), self.kv_pair(layer, count, left), strict=True
            ):
                side.copy_(kept.clone())  # they may overlap
        self.units = left

    def nbytes(self) -> int:
        """Return the bytes that an ingestion holds on the device."""
        return sum(side.nbytes for pair in self._sides for side in pair)


def units_that_fit(stream: Stream, geometry: Geometry, device: torch.device) -> int:
    """Return how many units (frames) `Ingested` may hold in its share of the device's free memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken = torch.cuda.memory_allocated(device)
        cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        # What the process has reserved and does not use is free for it.
        free = min(free + torch.cuda.memory_reserved(device), cap) - taken
    else:
        free = free_host_bytes()
    column = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * stream.dtype.itemsize
    return max(1, int(free * SHARE) // (column * stream.tokens_per_unit))


def layer_ranges(layers: int, units: int) -> list[range]:
    """Split the layers into ranges that can be processed at once if each layer holds `units` units (frames)."""
    step = max(1, TOGETHER // max(1, units))
    return [range(first, min(first + step, layers)) for first in range(0, layers, step)]


def unit_means(pairs: Sequence[Pair], side: int, tokens: int) -> Tensor:
    """Return the mean key (`side` 0) or value (`side` 1) of each unit (frame) at each layer, [L, n, G * D] float32, over its
    `tokens` tokens; `pairs`: keys and values [1, G, n * P, D] of each layer."""
    made, sides = list[Tensor](), [pair[side] for pair in pairs]
    for layers in layer_ranges(len(sides), sides[0].shape[2] // tokens):
        rows = torch.cat(sides[layers.start : layers.stop]) if len(layers) > 1 else sides[layers.start]
        made.append(view_by_unit(rows, tokens).mean(3, dtype=torch.float32).transpose(1, 2).flatten(2))
    return made[0] if len(made) == 1 else torch.cat(made)


def first_columns(old: Ring | None, fresh: Ring, cut: int) -> Pair:
    """Return raw keys and values of the first `cut` columns of the window `old` and then `fresh`; views where possible."""
    first = fresh if old is None else old
    if old is not None and old.key.shape[2] < cut:
        first = Ring(*(torch.cat(side, 2) for side in zip(old, fresh, strict=True)))
    return first.key[:, :, :cut], first.value[:, :, :cut]


class IngestState(PassState):
    """State of a windowed memory while frames arrive: the prompt before the video, and the units (frames) of the window.
    While a stored video is ingested, all its earlier units replace the window.

    Units of an ingested video see that prompt, what is retrieved for them, and the units before them since `begin_ingest` or
    in the window then: at most `ingest` units (None: what memory holds), and no more than the model's limit has positions
    for.
    """

    def __init__(
        self,
        stream: Stream,
        geometry: Geometry,
        model: ModelView,
        device: torch.device,
        window: int,
        ingest: int | None,
    ) -> None:
        super().__init__(stream, geometry, model, device)
        self.window, self.ingest, self.bases = window, ingest, Bases(stream.positions, window)
        self._heads: list[Ring | None] = [None] * geometry.layers
        self._rings: list[Ring | None] = [None] * geometry.layers
        # The windows of the last pass, and what they are parts of: keys, turned keys, values [L, G, N, D] of all layers.
        self._stacked: tuple[list[Ring | None], list[Tensor]] = [], []
        self._first = self._base = 0
        self._ingested: Ingested | None = None
        self._taken, self._share = 0, 0.0

    together = RUN

    def _gone(self, layers: Sequence[int], first: int, count: int, pairs: Sequence[Pair]) -> None:
        """Units ``first .. first + count`` leave the window of some layers: of each [1, G, count * P, D], to be copied."""

    def _retrieved(self, layer: int, query: Tensor, out: Tensor | None = None) -> list[Pair]:
        """Rotated keys and values of units that have left the window, which the units of a pass see besides; by their raw
        queries [1, H, n, D]. They are written to `out` [2, G, k * P, D], if given."""
        return []

    def _stacked_windows(self) -> list[Tensor]:
        """Keys, turned keys and values [L, G, N, D] of the windows of all layers; empty before there are any."""
        rings, old = self._stacked
        if len(rings) != len(self._rings) or any(a is not b for a, b in zip(rings, self._rings, strict=True)):
            held = [ring for ring in self._rings if ring is not None]
            old = [torch.cat(side) for side in zip(*held, strict=True)]
            self._stacked = list(self._rings), old
        return old

    def _shift_windows(self, fresh: Sequence[Tensor], cut: int, pause: Callable[[], None]) -> None:
        """Append keys, turned keys and values `fresh` [L, G, n, D] to the windows; these lose their first `cut` columns."""
        old, made = self._stacked_windows(), list[Tensor]()
        for number, side in enumerate(fresh):
            pause()
            parts, skip = as_words(*old[number : number + 1], side), cut
            if parts[0].shape[2] < cut:
                skip -= parts.pop(0).shape[2]
            parts[0] = parts[0][:, :, skip:]
            whole = torch.cat(parts, 2)  # also of one part: a slice would keep the whole
            made.append(whole.view(side.dtype) if whole.is_complex() else whole)
        layers = zip(*(side.unsqueeze(1).unbind() for side in made), strict=True)
        self._rings = [Ring(*sides) for sides in layers]
        self._stacked = list(self._rings), made

    def _head_angles(self) -> Pair:
        """Cosines and sines of the prompt before the video."""
        return self.rope.cached("head", self.stream.positions.positions_before_video)

    def _unit_angles(self, stream_pass: StreamPass) -> Pair:
        """Cosines and sines of the rows of a pass of units."""
        own = self.stream.positions.positions_by_time
        return self.rope.cached("units", lambda: own(stream_pass.first, stream_pass.count, self._base))

    def begin_ingest(self) -> None:
        super().begin_ingest()
        if self._ingested is not None:
            return
        sides = list[Pair]()
        for pair in zip(self._heads, self._rings, strict=True):
            there = [one for one in pair if one is not None]
            # Also of one tensor this is a copy.
            sides.append(
                (torch.cat([one.key for one in there], 2), torch.cat([one.value for one in there], 2))
            )
        fit = units_that_fit(self.stream, self.geometry, self.device)
        most = fit if self.ingest is None else min(fit, self.ingest)
        self._ingested = Ingested(sides, self.stream.head, self.stream.tokens_per_unit, most)
        self.last_listed = {}

    def units_that_fit(self, first: int, count: int) -> int:
        if self._ingested is None:
            return self.bases.count_same_base(first, count)
        # Each unit of a pass sees at least what it would see under the window.
        before = min(self.window - 1, first - self._first)
        count = min(count, max(1, self._ingested.most - before))
        return next((some for some in range(count, 1, -1) if self._admits(first - before, first + some)), 1)

    @property
    def _spare(self) -> int:
        """Slots that what is retrieved for a pass takes before all others."""
        return self.bases.window - self.window

    def _admits(self, first: int, end: int) -> bool:
        """Whether units ``first .. end`` find positions within the model's limit, less a base if need be."""
        positions, reach = self.stream.positions, self.bases.reach
        last = positions.count_intervals(end)
        return last <= reach or last - int(positions.unit_step(first)) + self._spare <= reach

    def _make_way(self, held: Ingested, stream_pass: StreamPass) -> None:
        """Units that a pass of an ingestion cannot see any more leave."""
        end, positions = stream_pass.first + stream_pass.count, self.stream.positions
        some = range(max(self._first, end - held.most), self._count)
        first = next((unit for unit in some if self._admits(unit, end)), self._count)
        self._leave(held, first - self._first)
        held.drop_first_units(first - self._first)
        far = positions.count_intervals(end) > self.bases.reach
        self._first, self._base = (first, max(0, int(positions.unit_step(first)) - self._spare) if far else 0)

    def _leave(self, held: Ingested, count: int) -> None:
        for begin in range(0, count, self.together):
            some = min(self.together, count - begin)
            for layers in layer_ranges(self.geometry.layers, some):
                pairs = [held.kv_pair(layer, begin, some) for layer in layers]
                self._gone(layers, self._first + begin, some, pairs)

    def _show(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> KVView:
        """What units of an ingestion see at a layer, by their raw queries [1, H, n, D]; key, value [1, G, n, D]."""
        held, head, rows = self._ingested, self.stream.head, query.shape[2]
        assert held is not None
        between = self._retrieved(layer, query)
        key, value = held.append(layer, key, value)
        made, count = self.stream.positions, (key.shape[2] - head) // self.stream.tokens_per_unit
        cos, sin = self.rope.cached(
            "ingested",
            lambda: torch.cat(
                [made.positions_before_video(), made.positions_by_time(self._first, count, self._base)], -1
            ),
        )
        query = self.rope.apply(query, (cos[:, :, -rows:], sin[:, :, -rows:]))
        key = self.rope.apply(key, (cos, sin))
        if between:
            key, value = (
                torch.cat([own[:, :, :head], *more, own[:, :, head:]], 2)
                for own, *more in zip((key, value), *between, strict=True)
            )
        return KVView(key, value, query=query, layout=self._layout(key.shape[2]))

    def _took(self, held: Ingested, stream_pass: StreamPass) -> None:
        """The pass of an ingestion is over: its units stay."""
        count, total = stream_pass.count, stream_pass.first + stream_pass.count
        held.units, held.taken = held.units + count, held.taken + count
        held.share += sum((end - self._first) / end for end in range(stream_pass.first + 1, total + 1))
        self._count = total

    def end_ingest(self) -> None:
        super().end_ingest()
        held, self._ingested, self.last_listed = self._ingested, None, None
        if held is None:
            return
        gone = max(0, held.units - self.window)
        self._leave(held, gone)
        for layer in range(self.geometry.layers if held.units else 0):
            # Copied: a slice would keep the whole.
            key, value = (side.clone() for side in held.kv_pair(layer, gone, held.units - gone))
            self._rings[layer] = Ring(key, key, value)
        self._first += gone
        self._base = self.bases.base_of_unit(max(self._count - 1, 0))
        self._turn_rings()
        self._taken, self._share = self._taken + held.taken, self._share + held.share

    def _turn_rings(self) -> None:
        if self._count == self._first:
            return
        self._stacked, positions = ([], []), self.stream.positions
        # Units before the base are those that no query of a new unit sees; they are turned at the base's own position.
        numbers = (torch.arange(self._first, self._count) - self._base).clamp(min=0)
        own = (
            None
            if positions.has_even_rate
            else positions.positions_by_time(self._first, len(numbers), self._base)
        )
        angles = self.rope.angles(positions.of_units(numbers, int(numbers[-1])) if own is None else own)
        for layer, ring in enumerate(self._rings):
            if ring is not None:
                self._rings[layer] = ring._replace(turned=self.rope.apply(ring.key, angles))

    def counters(self) -> dict[str, float]:
        if not self._taken:
            return super().counters()
        share = self._share / self._taken
        return {**super().counters(), "ingested": float(self._taken), "ingest_seen": share}
