"""What stream memories with a local window have in common: encoding under it, and the way of a question.

Encoding: a query sees the head, the last ``window * P`` columns, its own included, and nothing else; so what a chunk gives
does not depend on how the stream is cut. Keys are turned at the units' own places, less a base that grows in large steps
once places would pass the model's limit (see `Bases`). Questions: [head | recalled units in order of time | local units |
question and answer], turned at compact or original places, gathered once a layer and kept for the answer.

Letters: G key/value heads, D head size, P tokens a unit, n columns of a pass. Keys are raw (before rotation) unless said.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.buffers import grow_buffer
from mmaccel.core.errors import ModelError
from mmaccel.core.kv import MARGIN, CacheSlot, KVView, Seen, Stream, StreamPass, StreamState
from mmaccel.policies.kv._evidence import Look, Rows, mean_query, weigh
from mmaccel.policies.kv._window import Asked, Bases, Pair, Ring, Rope, load_window, moved, save_window


class StreamMemory(StreamState):
    """The base of windowed memories; subclasses archive what leaves the window and say what a question recalls.

    window, local: units. Subclasses fill `_gone` (units leave the window), `_took` (units have come), `_recall` and
    `_bring` (a question), `_rewind`, `_save` and `_load`, or replace `_gather`, which makes what a question sees. Which
    units a question recalls stays on the device; how many they are the host knows.
    """

    def __init__(
        self,
        stream: Stream,
        geometry: Geometry,
        model: ModelView,
        device: torch.device,
        *,
        window: int,
        local: int,
        positions: str = "compact",
    ) -> None:
        self.stream, self.geometry, self.device = stream, geometry, device
        self.window, self.local, self.compact = window, local, positions == "compact"
        self._always = self.compact
        self.rope = Rope(model, stream.dtype)
        self.bases = Bases(stream.places, window)
        layers = geometry.layers
        self._heads: list[Pair | None] = [None] * layers
        self._turned_heads: dict[int, tuple[Tensor, Tensor]] = {}
        self._rings: list[Ring | None] = [None] * layers
        self._new, self._fresh = list[Pair | None]([None] * layers), list[Tensor | None]([None] * layers)
        self._asked: list[Asked | None] = [None] * layers
        # On a device what a question sees lies where it lay for the one before.
        self._kept, self._keeps = dict[int, Pair](), device.type == "cuda"
        self._piece: StreamPass | None = None
        self._count, self._first, self._extra, self._pending = 0, 0, 0, 0
        self._base, self._headed = 0, False
        self._looks: dict[int, Look] = {}
        self._rows = Rows()

    # What subclasses fill.

    def _took(self, piece: StreamPass) -> None:
        """Units ``piece.first .. + piece.count`` have gone through all layers; `_new` holds their keys and values."""

    def _gone(self, layer: int, first: int, count: int, key: Tensor, value: Tensor) -> None:
        """Units ``first .. first + count`` leave the window of a layer; [1, G, count * P, D]."""

    def _retrieved(self, layer: int, query: Tensor) -> list[Pair]:
        """Keys, turned, and values of units that have left the window, which the units of a pass see besides; by their raw
        queries [1, H, n, D]."""
        return []

    def _recall(self, layer: int, query: Tensor, end: int) -> Tensor | None:
        """Ascending numbers [k] on the device, below `end`, of the units to see; None: none.

        query [H, D]: the mean of the raw queries of the question's words.
        """
        return None

    def _bring(self, layer: int, numbers: Tensor, begin: int, out: Tensor) -> None:
        """Keys and values of units `numbers` [k], below `begin`, and of all from `begin` on, into `out` [2, G, n * P, D]."""
        raise ModelError("kv: units that have left the window are not kept.")

    def _rewind(self, units: int, first: int) -> None:
        """Forget units from `units` on; those from `first` on are in the window again."""

    def _save(self, folder: Path) -> None:
        """Write what the subclass keeps."""

    def _load(self, folder: Path) -> None:
        """Read it; `_count` and `_first` are set."""

    # The way of a pass.

    def begin_pass(self, piece: StreamPass) -> None:
        self._piece = piece
        self.rope.forget()
        if piece.kind == "units":
            if (base := self.bases.of(piece.first)) != self._base:
                self._base = base
                self._turn_rings()
        elif piece.kind != "answer":
            self.compact = self._closed(piece)
        if piece.kind == "question":
            self._looks = {}
            self._pending = piece.pending
            self._rows.begin(piece)

    def _closed(self, piece: StreamPass) -> bool:
        """Whether units are closed up for `piece`, as the fields say or because their own places leave it no positions."""
        places = self.stream.places
        fits = places.slots(self._count) < self.bases.reach
        return self._always or not (fits and places.admits(self._count, piece.pending, piece.rows, own=True))

    def shown(self, piece: StreamPass) -> tuple[int, bool]:
        closed = self._closed(piece)
        return (min(self._count, self._most()) if closed else self._count), not closed

    def _most(self) -> int:
        """Units that a question is shown at most."""
        return min(self.local, self._count - self._first)

    @torch.no_grad()
    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._new[layer] = (key, value)

    @torch.no_grad()
    def view(self, layer: int, query: Tensor) -> KVView:
        piece, new = self._piece, self._new[layer]
        if piece is None or new is None:
            raise ModelError(f"kv: layer {layer} is asked for before anything was appended to it.")
        if piece.kind == "head":
            angles = self.rope.at("head", self.stream.places.head)
            key, value = new
            return KVView(self.rope.apply(key, angles), value, query=self.rope.apply(query, angles))
        if piece.kind == "units":
            return self._encode(layer, query, piece, *new)
        return self._answer(layer, query, piece, *new)

    def end_pass(self) -> None:
        piece = self._piece
        if piece is None:
            return
        if piece.kind == "head":
            self._heads, self._headed = list(self._new), True
        elif piece.kind == "units":
            self._took(piece)
            self._move(piece)
        elif piece.kind == "proxy":
            self._asked = [None] * len(self._asked)
        else:
            self._extra += piece.rows
            if piece.kind == "question":
                self._rows.hold()
        self._new, self._fresh = [None] * len(self._new), [None] * len(self._fresh)
        self._piece = None

    def fit(self, first: int, count: int) -> int:
        return self.bases.same(first, count)

    def _encode(self, layer: int, query: Tensor, piece: StreamPass, key: Tensor, value: Tensor) -> KVView:
        """What new units see: the head, what is retrieved for them, and the window, their own columns in it."""
        places, ring = self.stream.places, self._rings[layer]
        angles = self.rope.at("units", lambda: places.own(piece.first, piece.count, self._base))
        turned = self._fresh[layer] = self.rope.apply(key, angles)
        sinks = [self._head(layer), *self._retrieved(layer, query)]
        near = [] if ring is None else [(ring.turned, ring.value)]
        parts = [*sinks, *near, (turned, value)]
        return KVView(
            torch.cat([one for one, _ in parts], 2),
            torch.cat([one for _, one in parts], 2),
            sinks=sum(one.shape[2] for one, _ in sinks),
            window=self.window * self.stream.unit,
            query=self.rope.apply(query, angles),
        )

    @torch.no_grad()
    def write_slot(self, layer: int, query: Tensor) -> CacheSlot | None:
        piece = self._piece
        if piece is None or piece.kind not in ("question", "answer"):
            return None
        slot = self._slot(layer, query, piece)
        if piece.kind == "question":
            self._rows.at(layer, query, slot, turned=False)
        return slot

    def _slot(self, layer: int, query: Tensor, piece: StreamPass) -> CacheSlot:
        asked = self._asked[layer]
        if asked is None:
            asked = self._asked[layer] = self._gather(layer, query, piece)
        extra = 0 if piece.kind == "proxy" else self._extra
        seen = asked.seen if self.compact else self._count
        name = ("tail", seen, extra, piece.rows)
        places = self.stream.places
        angles = self.rope.at(
            name, lambda: places.after(seen, self._pending, extra, piece.rows, not self.compact)
        )
        start = asked.base + extra
        end = start + max(piece.rows, MARGIN)
        asked.key, asked.value = (grow_buffer(x, 2, end, used=start) for x in (asked.key, asked.value))
        return CacheSlot(asked.key, asked.value, start, angles)

    def _answer(self, layer: int, query: Tensor, piece: StreamPass, key: Tensor, value: Tensor) -> KVView:
        slot = self._slot(layer, query, piece)
        own = slice(slot.column, slot.column + piece.rows)
        slot.key[:, :, own], slot.value[:, :, own] = key, value
        self.rope.apply_(slot.key[:, :, own], slot.angles)
        query = query.contiguous()
        self.rope.apply_(query, slot.angles)
        if piece.kind == "question":
            self._rows.at(layer, query, slot, turned=True)
        return KVView(slot.key[:, :, : own.stop], slot.value[:, :, : own.stop], query=query, bias=slot.bias)

    def _gather(self, layer: int, query: Tensor, piece: StreamPass) -> Asked:
        """What the question of `piece`, with raw queries [1, H, n, D], sees at a layer before its own columns."""
        begin, numbers = self._first, None
        if piece.kind == "question":
            begin = max(self._count - self.local, self._first)
            numbers = self._recall(layer, mean_query(query, piece), begin)
            told = torch.zeros(0, dtype=torch.long) if numbers is None else numbers
            self._looks[layer] = told, begin
        count = self._count - begin + (0 if numbers is None else len(numbers))
        room = count * self.stream.unit + piece.rows + piece.room
        asked, raw = self._space(layer, count * self.stream.unit, room)
        if numbers is None or not len(numbers):
            self._near(layer, begin, raw)
        else:
            self._bring(layer, numbers, begin, raw)
        places = self.stream.places
        if self.compact or numbers is None or count == self._count:
            first = 0 if self.compact or count == self._count else begin
            name = ("units of a question", first, count)
            ranked = self.compact
            angles = self.rope.at(
                name, lambda: places.units(first, count) if ranked else places.own(first, count)
            )
        else:
            local = torch.arange(begin, self._count, device=numbers.device)
            angles = self.rope.angles(places.chosen(torch.cat([numbers, local]), self._count - 1, own=True))
        self.rope.apply_(raw[:1], angles)
        asked.seen = count
        return asked

    def _space(self, layer: int, filled: int, room: int) -> tuple[Asked, Tensor]:
        """What a question sees, its head alone written, with `room` columns after it; and the first `filled` of these
        [2, G, filled, D], to be written to."""
        key, value = self._head(layer)
        old, known = self._kept.get(layer, (None, None))
        count, like = key.shape[2], key.expand(2, -1, -1, -1)
        out = grow_buffer(old, 2, count + room + MARGIN, like=like, used=0, share=0.0)
        if out is not old or known is not key:
            # Nothing else writes over a head.
            out[0, :, :count], out[1, :, :count] = key[0], value[0]
        if self._keeps:
            self._kept[layer] = out, key
        return Asked(out[:1], out[1:], count + filled, 0), out[:, :, count : count + filled]

    def _near(self, layer: int, begin: int, out: Tensor) -> None:
        """Keys and values of the units of the window from `begin` on into `out` [2, G, n * P, D]."""
        ring, skip = self._rings[layer], (begin - self._first) * self.stream.unit
        if ring is not None and out.shape[2]:
            out[:1], out[1:] = ring.key[:, :, skip:], ring.value[:, :, skip:]

    def _head(self, layer: int) -> Pair:
        """Keys, turned, and values of the head."""
        raw = self._heads[layer]
        if raw is None:
            raise ModelError("kv: the stream has no head yet; run it first.")
        known = self._turned_heads.get(layer)
        if known is None or known[0] is not raw[0]:
            angles = self.rope.at("head", self.stream.places.head)
            known = self._turned_heads[layer] = raw[0], self.rope.apply(raw[0], angles)
        return known[1], raw[1]

    def _move(self, piece: StreamPass) -> None:
        """New units into the window; what is beyond it leaves."""
        total = piece.first + piece.count
        first = max(self._first, total - self.window)
        leaving = first - self._first
        for layer, new in enumerate(self._new):
            turned = self._fresh[layer]
            if new is None or turned is None:
                raise ModelError(f"kv: layer {layer} was left out of a pass.")
            fresh = Ring(new[0], turned, new[1])
            self._rings[layer], gone = moved(self._rings[layer], fresh, leaving * self.stream.unit)
            if leaving:
                self._gone(layer, self._first, leaving, *gone)
        self._count, self._first = total, first

    def _turn_rings(self) -> None:
        if self._count == self._first:
            return
        places = self.stream.places
        # Units before the base are those that no query of a new unit sees; they are turned at the base's own place.
        numbers = (torch.arange(self._first, self._count) - self._base).clamp(min=0)
        angles = self.rope.at(
            "rings",
            lambda: (
                places.chosen(numbers, int(numbers[-1]))
                if places.even
                else places.own(self._first, len(numbers), self._base)
            ),
        )
        for layer, ring in enumerate(self._rings):
            if ring is not None:
                self._rings[layer] = ring._replace(turned=self.rope.apply(ring.key, angles))

    # The stream as a whole.

    def units(self) -> int:
        return self._count

    def length(self) -> int:
        return (self.stream.head if self._headed else 0) + self._count * self.stream.unit + self._extra

    def held(self) -> int:
        asked = max((one.base for one in self._asked if one is not None), default=0)
        return self.stream.head * self._headed + (self._count - self._first) * self.stream.unit + asked

    def truncate(self, length: int) -> None:
        extra = length - (self.length() - self._extra)
        if not 0 <= extra <= self._extra:
            raise ModelError(f"kv: the stream has {self.length()} columns; it cannot be cut to {length}.")
        self._extra = extra

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._piece, self._extra, self._pending = None, 0, 0
            self._asked = [None] * len(self._asked)
            self._rows.clear()
            self._new, self._fresh = [None] * len(self._new), [None] * len(self._fresh)

    def checkpoint(self) -> Any:
        return self._count, self._first, self._base, self._headed, list(self._heads), list(self._rings)

    def restore(self, mark: Any) -> None:
        self._count, self._first, self._base, self._headed, heads, rings = mark
        self._heads, self._rings, self._turned_heads = list(heads), list(rings), {}
        self._piece, self._asked = None, [None] * len(self._asked)
        self._new, self._fresh = [None] * len(self._new), [None] * len(self._fresh)
        self._rewind(self._count, self._first)

    def reset(self) -> None:
        empty = [None] * self.geometry.layers
        self.restore((0, 0, 0, False, empty, empty))

    def evidence(self) -> dict[int, Seen]:
        return weigh(self._looks, self._count, self._reached())

    def _reached(self) -> Tensor | None:
        """See `Rows.reached`."""
        return self._rows.reached(self.rope, self.stream.head, self._units_of)

    def _units_of(self, layer: int, shares: Tensor) -> Tensor:
        """[n, U]: what units get of what columns between the head and the question get, [n, N]."""
        recalled, begin = self._looks[layer]
        local = torch.arange(begin, self._count, device=shares.device)
        own = shares.view(len(shares), -1, self.stream.unit).sum(2)
        out = shares.new_zeros(len(shares), self._count)
        return out.index_add_(1, torch.cat([recalled.to(local), local]), own)

    def nbytes(self) -> int:
        tensors = [t for pair in (*self._heads, *self._rings) if pair is not None for t in pair]
        tensors += [t for one in self._asked if one and not self._kept for t in (one.key, one.value)]
        tensors += [*(x for x, _ in self._kept.values()), *(x for _, x in self._turned_heads.values())]
        return sum(tensor.nbytes for tensor in tensors)

    def counters(self) -> dict[str, float]:
        return {
            **super().counters(),
            "units": float(self._count),
            "window": float(self._count - self._first),
            "resident": float(self._count - self._first),
        }

    def save(self, path: str | Path) -> None:
        save_window(Path(path), self._heads, self._rings, self._count, self._first)
        self._save(Path(path))

    def load(self, path: str | Path) -> None:
        stream, groups = self.stream, (self.geometry.kv_heads, self.geometry.head_dim)
        found = load_window(Path(path), stream, len(self._heads), groups, self.window, self.device)
        self._heads, self._rings, self._count, self._first = found
        self._headed = True
        self._base = self.bases.of(max(self._count - 1, 0))
        self.rope.forget()
        self._turn_rings()
        self._load(Path(path))
