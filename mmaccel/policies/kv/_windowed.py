"""Base of stream memories with a local window: encoding under the window, and how a question runs.

Letters: G key/value heads, D head size, P tokens a unit (frame), n columns of a pass. Keys are before RoPE unless said.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import ModelError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.kv import MARGIN, CacheSlot, KVView, Stream, StreamPass, UnitEvidence, grow_buffer
from mmaccel.policies.kv._ingest import IngestState, first_columns, layer_ranges
from mmaccel.policies.kv._window import Look, Pair, QuestionRows, QuestionView, Ring, mean_query, to_evidence


class StreamMemory(IngestState):
    """The base of memories with a local window; subclasses archive units that leave it and choose what a question retrieves.

    New units (frames) see only the prompt before the video (head) and the last ``window * P`` columns, theirs included,
    however the stream is cut. Keys have the units' own positions, minus a base (see `Bases`). A question sees [head |
    retrieved units in order of time | local units | question and answer], at compact or original positions, gathered once
    per layer and kept for the answer. A stored video is encoded as in `IngestState`.

    window, local, ingest: units. Subclasses override `_gone` (called when units leave the window), `_recall` (which units a
    question retrieves), `_most`, `_bring` (copies these), `_rewind`, `_save` and `_load`; or replace `_gather`, which
    builds what a question sees. Only the device knows which units are retrieved; the host knows how many.
    """

    recalls_alike = True

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
        ingest: int | None = None,
    ) -> None:
        super().__init__(stream, geometry, model, device, window, ingest)
        self.local, self.compact = local, positions == "compact"
        self._always = self.compact
        self._asked: dict[int, QuestionView] = {}
        # On a device what a question sees lies where it lay for one before, if no other is asked meanwhile.
        self._kept, self._keeps = dict[int, Pair](), device.type == "cuda"
        self._looks: dict[int, Look] = {}
        self._rows = QuestionRows()

    # What subclasses fill.

    def _recall(self, layer: int, query: Tensor, end: int) -> Tensor | None:
        """Ascending numbers [k] on the device, below `end`, of the units to see, or None; query [H, D] is the mean of the
        raw queries of the question's words. Who recalls so is not `recalls_alike`."""
        return None

    def _bring(self, layer: int, numbers: Tensor, begin: int, out: Tensor) -> None:
        """Keys and values of units `numbers` [k], below `begin`, and of all from `begin` on, into `out` [2, G, n * P, D]."""
        raise ModelError("kv: units that have left the window are not kept.")

    def _rewind(self, units: int, first: int) -> None:
        """Forget units from `units` on; those from `first` on are in the window again."""

    def _save(self, folder: Path) -> bool:
        """Write what the subclass keeps; return whether the window is in it."""
        if type(self)._save is StreamMemory._save and type(self)._gone is not StreamMemory._gone:
            raise ModelError(f"kv: {type(self).__name__} has no _save for its units; write it, and _load.")
        return False

    def _load(self, folder: Path) -> Sequence[Pair] | None:
        """Read it, `_count` and `_first` are set; return the window of each layer, on the host, if it is in it."""
        return None

    # The way of a pass.

    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        if stream_pass.kind == "units" and self._ingested is not None:
            self._make_way(self._ingested, stream_pass)
        elif stream_pass.kind == "units":
            if (base := self.bases.base_of_unit(stream_pass.first)) != self._base:
                self._base = base
                self._turn_rings()
        elif stream_pass.kind != "answer":
            self.compact = self._closed(stream_pass)
        if stream_pass.kind == "question":
            self._looks, self._rows = {}, QuestionRows()
            self._rows.begin(stream_pass)

    def set_query_fields(self, policy: Any) -> None:
        if "local" in policy.query_time_fields:
            self.local = self.stream.units(policy.local)

    @property
    def parts(self) -> bool:  # type: ignore[override]
        return type(self) is StreamMemory  # a subclass says itself whether what it keeps bears that

    several = property(lambda self: self.parts)

    def _answered(self, taken: Any) -> None:
        self._kept = taken._kept

    def _closed(self, stream_pass: StreamPass) -> bool:
        """Whether units are closed up for this pass, as the fields say or because their own positions leave it none."""
        positions = self.stream.positions
        fits = positions.count_intervals(self._count) < self.bases.reach
        return self._always or not (
            fits and positions.fits_limit(self._count, stream_pass.pending, stream_pass.rows, own=True)
        )

    def shown_units(self, stream_pass: StreamPass) -> tuple[int, bool]:
        closed = self._closed(stream_pass)
        return (min(self._count, self._most()) if closed else self._count), not closed

    def _most(self) -> int:
        """Units that a question is shown at most."""
        return min(self.local, self._count - self._first)

    @torch.no_grad()
    def view(self, layer: int, query: Tensor) -> KVView:
        stream_pass, key, value = self._appended(layer)
        if stream_pass.kind == "head":
            angles = self._head_angles()
            return KVView(self.rope.apply(key, angles), value, query=self.rope.apply(query, angles))
        show = self._encode if stream_pass.kind == "units" else self._answer
        return show(layer, query, stream_pass, key, value)

    def end_pass(self) -> None:
        kind = None if self._stream_pass is None else self._stream_pass.kind
        if kind == "head":
            for layer, (key, value) in self._new.items():
                self._heads[layer] = Ring(key, self.rope.apply(key, self._head_angles()), value)
        elif kind == "proxy":
            self._asked.clear()
        elif kind == "question":
            self._rows.copy_queries()
        super().end_pass()

    def _forget_question(self) -> None:
        super()._forget_question()
        self._asked.clear()
        self._rows.clear()

    def _keep_path(self, start: int, path: Tensor) -> None:
        for asked in self._asked.values():
            begin = asked.base + start
            for side in (asked.key, asked.value):
                # Copied before it is written: both lie in one buffer.
                side[:, :, begin : begin + len(path)] = side.index_select(2, path + begin)

    def _encode(
        self, layer: int, query: Tensor, stream_pass: StreamPass, key: Tensor, value: Tensor
    ) -> KVView:
        """What new units see: the head, what is retrieved for them, and the window, their own columns in it."""
        if self._ingested is not None:
            return self._show(layer, query, key, value)
        ring, angles = self._rings[layer], self._unit_angles(stream_pass)
        turned = self.rope.apply(key, angles)
        sinks = [self._head(layer), *self._retrieved(layer, query)]
        parts = [*sinks, *([(ring.turned, ring.value)] if ring else []), (turned, value)]
        key, value = (torch.cat(side, 2) for side in zip(*parts, strict=True))
        count, window = sum(one.shape[2] for one, _ in sinks), self.window * self.stream.tokens_per_unit
        return KVView(key, value, sinks=count, window=window, query=self.rope.apply(query, angles))

    @torch.no_grad()
    def new_kv_slot(self, layer: int, query: Tensor) -> CacheSlot | None:
        stream_pass = self._stream_pass
        if stream_pass is None or stream_pass.kind not in ("question", "answer"):
            return None
        slot = self._slot(layer, query, stream_pass)
        if stream_pass.kind == "question":
            self._rows.record_queries(layer, query, slot, turned=False)
        return slot

    @torch.no_grad()
    def new_kv_slots(self) -> list[CacheSlot] | None:
        stream_pass, layers = self._stream_pass, self.geometry.layers
        if stream_pass is None or stream_pass.kind != "answer" or len(self._asked) < layers:
            return None
        return [self._slot(layer, self._asked[layer].key, stream_pass) for layer in range(layers)]

    def _slot(self, layer: int, query: Tensor, stream_pass: StreamPass) -> CacheSlot:
        if layer not in self._asked:
            self._asked[layer] = self._gather(layer, query, stream_pass)
        asked = self._asked[layer]
        extra = 0 if stream_pass.kind == "proxy" else self._extra
        seen = asked.seen if self.compact else self._count
        angles = self.rope.cached(
            ("tail", seen, extra, stream_pass.rows),
            lambda: self._after(seen, extra, stream_pass, not self.compact),
        )
        start, end = asked.base + extra, asked.base + extra + max(stream_pass.rows, MARGIN)
        if end > asked.key.shape[2]:
            asked.key, asked.value = (grow_buffer(x, 2, end, used=start) for x in (asked.key, asked.value))
        return CacheSlot(asked.key, asked.value, start, angles, asked.bias)

    def _answer(
        self, layer: int, query: Tensor, stream_pass: StreamPass, key: Tensor, value: Tensor
    ) -> KVView:
        slot = self._slot(layer, query, stream_pass)
        own = slice(slot.column, slot.column + stream_pass.rows)
        slot.key[:, :, own], slot.value[:, :, own] = key, value
        self.rope.apply_(slot.key[:, :, own], slot.angles)
        query = query.contiguous()
        self.rope.apply_(query, slot.angles)
        if stream_pass.kind == "question":
            self._rows.record_queries(layer, query, slot, turned=True)
        layout = self._layout(own.stop, self._asked[layer].summaries)
        key, value = (side[:, :, : own.stop] for side in (slot.key, slot.value))
        return KVView(key, value, query=query, bias=slot.bias, layout=layout)

    def _gather(self, layer: int, query: Tensor, stream_pass: StreamPass) -> QuestionView:
        """What the question of `stream_pass`, with raw queries [1, H, n, D], sees at a layer before its own columns."""
        begin, numbers = self._first, None
        if stream_pass.kind == "question":
            begin = max(self._count - self.local, self._first)
            numbers = self._recall(layer, mean_query(query, stream_pass), begin)
            self._looks[layer] = torch.zeros(0, dtype=torch.long) if numbers is None else numbers, begin
        count = self._count - begin + (0 if numbers is None else len(numbers))
        columns = count * self.stream.tokens_per_unit
        asked, raw = self._space(layer, columns, columns + stream_pass.rows + stream_pass.room)
        if numbers is not None and len(numbers):
            self._bring(layer, numbers, begin, raw)
        else:
            self._near(layer, begin, raw)
        positions = self.stream.positions
        if self.compact or numbers is None or count == self._count:
            first = 0 if self.compact or count == self._count else begin
            stand = positions.position_range if self.compact else positions.positions_by_time
            angles = self.rope.cached(("units of a question", first, count), lambda: stand(first, count))
        else:
            numbers = torch.cat([numbers, torch.arange(begin, self._count, device=numbers.device)])
            angles = self.rope.angles(positions.of_units(numbers, self._count - 1, own=True))
        self.rope.apply_(raw[:1], angles)
        asked.seen = count
        return asked

    def _space(self, layer: int, filled: int, room: int) -> tuple[QuestionView, Tensor]:
        """What a question sees, its head alone written, with `room` columns after it; and the first `filled` of these
        [2, G, filled, D], to be written to."""
        key, value = self._head(layer)
        keeps = self._keeps and self._stream_pass is not None and self._stream_pass.kind == "question"
        old, known = (self._main or self)._kept.pop(layer, (None, None)) if keeps else (None, None)
        count, like = key.shape[2], key.expand(2, -1, -1, -1)
        out = grow_buffer(old, 2, count + room + MARGIN, like=like, used=0, share=0.0)
        if out is not old or known is not key:
            # Nothing else writes over a head.
            out[0, :, :count], out[1, :, :count] = key[0], value[0]
        if keeps:
            self._kept[layer] = out, key
        return QuestionView(out[:1], out[1:], count + filled, 0), out[:, :, count : count + filled]

    def _near(self, layer: int, begin: int, out: Tensor) -> None:
        """Keys and values of the units of the window from `begin` on into `out` [2, G, n * P, D]."""
        ring, skip = self._rings[layer], (begin - self._first) * self.stream.tokens_per_unit
        if ring is not None and out.shape[2]:
            out[:1], out[1:] = ring.key[:, :, skip:], ring.value[:, :, skip:]

    def _head(self, layer: int) -> Pair:
        """Keys, with RoPE, and values of the head."""
        head = self._heads[layer]
        if head is None:
            raise ModelError("kv: the stream has no head yet; run it first.")
        return head.turned, head.value

    def _move(self, stream_pass: StreamPass) -> None:
        """New units into the window; what is beyond it leaves."""
        if self._ingested is not None:
            return self._took(self._ingested, stream_pass)
        total = stream_pass.first + stream_pass.count
        first = max(self._first, total - self.window)
        cut = (gone := first - self._first) * self.stream.tokens_per_unit
        if left_out := {*range(len(self._rings))} - {*self._new}:
            raise ModelError(f"kv: layer {min(left_out)} was left out of a pass.")
        fresh = [Ring(key, key, value) for _, (key, value) in sorted(self._new.items())]
        for layers in layer_ranges(len(self._rings), gone):
            if gone:
                some = ((self._rings[layer], fresh[layer]) for layer in layers)
                self._gone(layers, self._first, gone, [first_columns(*pair, cut) for pair in some])
            stream_pass.pause()
        keys, values = torch.cat([one.key for one in fresh]), torch.cat([one.value for one in fresh])
        turned = self.rope.apply(keys, self._unit_angles(stream_pass))
        self._shift_windows((keys, turned, values), cut, stream_pass.pause)
        self._count, self._first = total, first

    # The stream as a whole.

    def held_columns(self) -> int:
        asked = max((one.base for one in self._asked.values()), default=0)
        return self._headed + (self._count - self._first) * self.stream.tokens_per_unit + asked

    def checkpoint(self) -> Any:
        return self._count, self._first, self._base, list(self._heads), list(self._rings)

    def restore(self, mark: Any) -> None:
        self._count, self._first, self._base, heads, rings = mark
        self._heads, self._rings, self._stacked = list(heads), list(rings), ([], [])
        self._ingested = self.last_listed = None
        self._headed = self.stream.head if heads[0] else 0
        self._forget_question()
        self._rewind(self._count, self._first)

    def reset(self) -> None:
        self.restore((0, 0, 0, [None] * len(self._heads), [None] * len(self._rings)))

    def evidence(self) -> dict[int, UnitEvidence]:
        parts = self._rows.shares(self.rope, self.stream.head, self._units_of, self._pause)
        return to_evidence(self._looked(), self._count, parts)

    def count_summary_columns(self, layer: int) -> int:
        return self._asked[layer].summaries

    def seen_tokens(self, layer: int) -> Tensor | None:
        return None if layer not in self._looks else self._tokens_of(*self._looks[layer])

    def _tokens_of(self, numbers: Tensor, begin: int) -> Tensor:
        """[m] the tokens of units `numbers`, and of all from `begin` on."""
        local = torch.arange(begin, self._count, device=numbers.device)
        inside = torch.arange(tokens := self.stream.tokens_per_unit, device=numbers.device)
        return (torch.cat([numbers, local])[:, None] * tokens + inside).flatten()

    def record_shown_columns(self, layer: int, columns: Tensor) -> None:
        self._rows.note_shown_columns(layer, columns)

    def record_sparse_rows(self, layer: int, rows: int) -> None:
        self._rows.note_listed_rows(rows)

    def _looked(self) -> dict[int, Look]:
        """What each layer of the question looked at."""
        return self._looks

    def _units_of(self, layer: int, shares: Tensor) -> Tensor:
        """[n, U]: what units get of what columns between the head and the question get, [n, N]."""
        recalled, begin = self._looks[layer]
        local = torch.arange(begin, self._count, device=shares.device)
        own = shares.view(len(shares), -1, self.stream.tokens_per_unit).sum(2)
        out = shares.new_zeros(len(shares), self._count)
        return out.index_add_(1, torch.cat([recalled.to(local), local]), own)

    def nbytes(self) -> int:
        tensors = [t for ring in (*self._heads, *self._rings) if ring is not None for t in ring]
        # Also while another thread runs a pass.
        tensors += [t for one in tuple(self._asked.values()) if not self._kept for t in (one.key, one.value)]
        held = 0 if self._ingested is None else self._ingested.nbytes()
        return held + sum(tensor.nbytes for tensor in (*tensors, *(x for x, _ in tuple(self._kept.values()))))

    def counters(self) -> dict[str, float]:
        window = float(self._count - self._first)
        return {**super().counters(), "units": float(self._count), "window": window, "resident": window}

    def save(self, path: str | Path) -> None:
        folder = Path(path)
        rings = {"head": self._heads} | ({} if self._save(folder) else {"window": self._rings})
        tensors = {
            f"{name}.{layer}.{side}": getattr(ring, side)
            for name, some in rings.items()
            for layer, ring in enumerate(some)
            if ring is not None
            for side in ("key", "value")
        }
        checkpoint_io.write_tensors(folder / "window.safetensors", tensors)
        checkpoint_io.write_json(folder / "state.json", {"units": self._count, "first": self._first})

    def load(self, path: str | Path) -> None:
        folder, stream, geometry = Path(path), self.stream, self.geometry
        facts = checkpoint_io.read_json(folder / "state.json", {"units": int, "first": int})
        count, first = facts["units"], facts["first"]
        if not 0 <= first <= count or count - first > self.window:
            raise ModelError(f"{folder}: the window holds units {first} to {count}; the file is damaged.")
        self._headed, self._count, self._first = stream.head, count, first
        window = self._load(folder)
        tokens = 0 if window is not None else (count - first) * stream.tokens_per_unit
        columns = {"head": stream.head} | ({"window": tokens} if tokens else {})
        wanted = {
            f"{name}.{layer}.{side}": ((1, geometry.kv_heads, n, geometry.head_dim), stream.dtype)
            for name, n in columns.items()
            for layer in range(geometry.layers)
            for side in ("key", "value")
        }
        found = checkpoint_io.read_tensors(folder / "window.safetensors", wanted, self.device)
        self.rope.forget()
        head = self._head_angles()
        for name, rings in (("head", self._heads), ("window", self._rings)):
            for layer in range(geometry.layers if name in columns else 0):
                key, value = (found[f"{name}.{layer}.{side}"] for side in ("key", "value"))
                rings[layer] = Ring(key, self.rope.apply(key, head) if name == "head" else key, value)
        for layer, pair in enumerate(window or ()):
            key, value = (side.to(self.device) for side in pair)
            self._rings[layer] = Ring(key, key, value)
        self._base = self.bases.base_of_unit(max(count - 1, 0))
        self._turn_rings()
