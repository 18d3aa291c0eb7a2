"""The sliding window under which a stream is encoded: its fields, RoPE, search queries of a question, and evidence.

Letters: G key/value heads, D head size, P tokens a unit (frame). Keys are raw (before RoPE) unless said.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops.dense_attend import mean_attention_weights
from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.memory.kv import CacheSlot, Stream, StreamPass, StreamPolicy, StreamState, UnitEvidence
from mmaccel.core.registry import at_least, limited

Pair = tuple[Tensor, Tensor]
"""Keys and values [1, G, n, D]."""
Angles = tuple[Tensor, Tensor]  # cosines and sines of positions
Look = tuple[Tensor, int]
"""What a layer looked at: the units [k] that it recalled, and the first local one."""

OWN = 1 / 6
"""What is left of a row by itself behind all layers (`QuestionRows.shares`); measured, see lab/LOG.md."""


@dataclass(frozen=True, kw_only=True)
class WindowedPolicy(StreamPolicy):
    """The fields of a memory with a local window; budgets are in frames.

    window     frames, the current one included, that a query sees while the stream is encoded
    local      number of the last of these that every question sees; others are seen only if retrieved, like older ones
    ingest_frames  frames, those of the pass included, that a query sees while a stored video is ingested; older ones only if
               its layer retrieves them. None: as many as half the free memory of the device holds. At most as many
               as the model has positions for
    positions  positions of the units that a question sees: "compact", consecutive, or "original", as in the stream, but
               compact once these pass the model's limit
    """

    ingests: ClassVar[bool] = True
    allows_branches: ClassVar[bool] = True

    window: int = limited(76, at_least(1, " frame"))
    local: int = 8
    ingest_frames: int | None = limited(None, at_least(1, " frame"))
    positions: Literal["compact", "original"] = "compact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.local <= self.window:
            raise RecipeError(f"{self.name}: local is {self.local}; give 0 to `window` ({self.window}).")

    def footprint(self, tokens: int, frames_per_unit: int) -> Footprint:
        return Footprint(window=self.window, ingest=self.ingest_frames, shown=self.local)

    def sizes(self, stream: Stream) -> dict[str, Any]:
        """Return the policy's fields counted in units (steps of time: frames, or temporal patches of them)."""
        ingest = None if self.ingest_frames is None else stream.units(self.ingest_frames)
        units = {"window": stream.units(self.window), "local": stream.units(self.local), "ingest": ingest}
        return {**units, "positions": self.positions}


class Ring(NamedTuple):
    """One layer's window of m units (frames), each [1, G, m * P, D]: raw `key`, `turned` (keys after RoPE), and `value`."""

    key: Tensor
    turned: Tensor
    value: Tensor


UnitsOf = Callable[[int, Tensor], Tensor]  # of a layer's shares [n, N] of columns: [n, U], those of units


@dataclass(eq=False)
class QuestionView:
    """What a question sees at one layer: keys (after RoPE) and values, with spare room. The first `base` columns come before
    the question: among them `summaries` summary tokens, then `seen` units (frames). `bias` is that of `KVView`."""

    key: Tensor
    value: Tensor
    base: int
    seen: int
    bias: Tensor | None = None
    summaries: int = 0


class Rope:
    """Applies RoPE to keys and queries [1, heads, n, D], and caches its angles. `angles` returns cosines and sines of
    positions [n] or [3, n]; `apply` rotates by them. Named angles are `kept` until `forget`."""

    def __init__(self, model: ModelView, dtype: torch.dtype) -> None:
        self.angles, self.apply, self.model = partial(model.rope_angles, dtype=dtype), model.apply_rope, model
        self.kept: dict[Hashable, Angles] = {}
        self.forget = self.kept.clear
        self._size = 0

    def apply_(self, x: Tensor, angles: Angles) -> None:
        """Apply RoPE with `angles` to `x` in place."""
        self.model.apply_rope_(x, angles)

    def rotated_dims(self, positions: Tensor) -> int:
        """Return how many of the D dimensions of a head RoPE rotates."""
        self._size = self._size or self.angles(positions[..., :1])[0].shape[-1]
        return self._size

    def cached(self, name: Hashable, positions: Callable[[], Tensor]) -> Angles:
        """Return the cosines and sines of `positions()` [n] or [3, n], cached under `name`."""
        if name not in self.kept:
            self.kept[name] = self.angles(positions())
        return self.kept[name]


class PassState(StreamState):
    """Base of all stream memories of keys and values: the current forward pass, and the numbers of columns.

    A stream has `_headed` columns of the prompt before the video and `_count` units (frames). In a question follow
    `_pending` rows of incomplete units, and `_extra` columns of the question and its answer; the last pass appended `_last`
    of these.
    """

    def __init__(self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device) -> None:
        self.stream, self.geometry, self.device = stream, geometry, device
        self.rope = Rope(model, stream.dtype)
        self._stream_pass: StreamPass | None = None
        self._new: dict[int, Pair] = {}
        self._ingests, self._columns = False, dict[tuple[int, int], TokenLayout]()
        self._headed = self._count = self._extra = self._pending = self._last = 0

    _main: Any = None  # of a snapshot, the memory that it is of
    _pause: Callable[[], None] = staticmethod(lambda: None)

    def snapshot(self, stream: Stream, pause: Callable[[], None]) -> StreamState | None:
        taken = copy.copy(self)
        vars(taken).update((name, x.copy()) for name, x in vars(self).items() if type(x) in (dict, list))
        taken._main, taken._pause, taken.stream = self, pause, stream
        taken.rope = Rope(self.rope.model, stream.dtype)
        return taken

    def _answered(self, taken: Any) -> None:
        """The question of the snapshot `taken` is over: take from it what is to last."""

    def _cut(self, columns: int) -> None:
        """Keep the first `columns` columns of each layer, as far as it has them."""

    def _keep_path(self, start: int, path: Tensor) -> None:
        """At each layer, of the columns of a question and its answer from `start` on, keep those at `path` [k] ascending,
        on the device, counted from there."""
        raise ModelError("kv: this memory cannot verify token trees; use a draft that proposes chains.")

    def _after(self, units: int, extra: int, stream_pass: StreamPass, own: bool) -> Tensor:
        """[n] or [3, n]: where the rows of a question or an answer stand, behind `units` units and `extra` of its columns.
        Those of a tree stand at their depth. `own`: units are at their own times."""
        positions, branches, rows = self.stream.positions, stream_pass.branches, stream_pass.rows
        if branches is None:
            return positions.positions_after(units, self._pending, extra, rows, own)
        start = extra - (branches.sees.shape[1] - rows)
        line = positions.positions_after(units, self._pending, start, int(branches.depth.max()) + 1, own)
        return line[..., branches.depth.to(line.device)]

    def begin_pass(self, stream_pass: StreamPass) -> None:
        self._stream_pass = stream_pass
        self.rope.forget()
        self._columns.clear()
        if stream_pass.kind == "question":
            self._pending = stream_pass.pending

    @torch.no_grad()
    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._new[layer] = key, value

    def _appended(self, layer: int) -> tuple[StreamPass, Tensor, Tensor]:
        """The pass, and the raw keys and values that a layer appended."""
        if self._stream_pass is None or layer not in self._new:
            raise ModelError(f"kv: layer {layer} is asked for before anything was appended to it.")
        return self._stream_pass, *self._new[layer]

    def end_pass(self) -> None:
        stream_pass = self._stream_pass
        if stream_pass is None:
            return
        if stream_pass.kind == "head":
            self._headed = self.stream.head
        elif stream_pass.kind == "units":
            self._move(stream_pass)
        elif stream_pass.kind != "proxy":
            self._extra += stream_pass.rows
            self._last = stream_pass.rows
        self._break_off()

    def _move(self, stream_pass: StreamPass) -> None:
        """The units of a pass belong to the stream."""
        self._count += stream_pass.count

    def _break_off(self) -> None:
        self._stream_pass = None
        self._new.clear()

    def begin_ingest(self) -> None:
        self._ingests = True

    def end_ingest(self) -> None:
        self._ingests = False

    def _layout(self, columns: int, few: int = 0) -> TokenLayout | None:
        """What the `columns` columns of a view are where a pattern may choose among them: the head, `few` summary tokens,
        units by rank, a question's pending ones among them, and its other rows."""
        stream_pass = self._stream_pass
        tail = None if stream_pass is None else stream_pass.layout
        if tail is None and not (self._ingests and stream_pass is not None and stream_pass.kind == "units"):
            return None
        if (columns, few) not in self._columns:
            rows = columns - (0 if tail is None else tail.length)
            place = torch.arange(rows, device=self.device)[None] - self.stream.head
            frame = ((place - few) // self.stream.tokens_per_unit).clamp_min(-1)
            layout = TokenLayout.build(torch.where(place < 0, TEXT, VIDEO), frame=frame)
            self._columns[columns, few] = layout if tail is None else layout.append(tail)
        return self._columns[columns, few]

    def _forget_question(self) -> None:
        self._break_off()
        self._ingests = False
        self._extra = self._pending = self._last = 0
        self._cut(self.length())

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._forget_question()
            if self._main is not None:
                self._main._answered(self)

    def units(self) -> int:
        return self._count

    def length(self) -> int:
        return self._headed + self._count * self.stream.tokens_per_unit + self._extra

    def truncate(self, length: int) -> None:
        if not 0 <= self.length() - length <= self._extra:
            raise ModelError(f"kv: the stream has {self.length()} columns; it cannot be cut to {length}.")
        gone = self.length() - length
        self._extra, self._last = self._extra - gone, max(0, self._last - gone)
        self._cut(length)

    @torch.no_grad()
    def accept(self, keep: int | Tensor) -> None:
        count, last = keep if isinstance(keep, int) else keep.numel(), self._last
        if not 0 <= count <= last:
            raise ModelError(f"kv: {count} of the last columns cannot be kept; {last} were appended.")
        if isinstance(keep, Tensor):
            self._keep_path(self._extra - last, keep.to(self.device))
        self.truncate(self.length() - last + count)


def words_of(stream_pass: StreamPass) -> tuple[int, int]:
    """Return the range (begin, end) of a question's rows whose queries search the memory."""
    return (
        stream_pass.words
        if stream_pass.words[1] > stream_pass.words[0]
        else (stream_pass.pending, stream_pass.rows)
    )


def mean_query(query: Tensor, stream_pass: StreamPass) -> Tensor:
    """Return [H, D] float32: the mean raw query of the question's words (or all rows), from queries [1, H, n, D]."""
    begin, end = words_of(stream_pass)
    return query[0, :, begin:end].float().mean(1)


def attention(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return causal attention weights [n, N] float32, averaged over heads: query [H, n, D] belongs to the last n columns of
    key [G, N, D]. Both are after RoPE; `bias` [b] is added to the scores of the first columns."""
    at = torch.arange(key.shape[1] - query.shape[1], key.shape[1], device=key.device)
    return mean_attention_weights(query, key, at, key.shape[2] ** -0.5, bias)


class _Row(NamedTuple):
    query: Tensor
    slot: CacheSlot
    turned: bool


class QuestionRows:
    """Keeps the queries of a question's rows at each layer, from its first word on, to compute evidence after the question.

    Until `shares` is called it only copies queries, because the next question overwrites their buffers.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._first = self._count = self._listed = 0
        self._kept = True

    def begin(self, stream_pass: StreamPass) -> None:
        """Start to record a question's rows."""
        self._rows, self._first, self._count = {}, words_of(stream_pass)[0], stream_pass.rows
        self._listed, self._kept = 0, stream_pass.weigh

    def record_queries(self, layer: int, query: Tensor, slot: CacheSlot, turned: bool) -> None:
        """Record queries [1, H, n, D] of all rows of the pass at a layer, and their cache slot. Those without RoPE (not
        `turned`) are copied later, by `copy_queries`. Does nothing if no evidence will be asked for."""
        if not self._kept:
            return
        own = query[0, :, self._first :]
        # The rows before may be many, those of a unit not yet complete: they would stay with it, layer by layer.
        self._rows[layer] = _Row(own.clone() if turned else own, slot, turned)

    def note_shown_columns(self, layer: int, columns: Tensor) -> None:
        """Record that `layer` showed the question only the `columns` [k] of those before it; the others get no weight."""
        if (row := self._rows.get(layer)) is not None:
            bias = row.slot.key.new_full((row.slot.column,), -torch.inf, dtype=torch.float32)
            bias[columns] = 0.0
            if row.slot.bias is not None:
                bias[: len(row.slot.bias)] += row.slot.bias
            self._rows[layer] = row._replace(slot=replace(row.slot, bias=bias))

    def note_listed_rows(self, rows: int) -> None:
        """Record that the first `rows` rows used sparse attention, so their weights are unknown; `shares` skips them."""
        self._listed = max(self._listed, rows)

    def copy_queries(self) -> None:
        """Copy queries that are still in the layers' buffers; called when the question has passed all layers."""
        raw = {layer: row for layer, row in self._rows.items() if not row.turned}
        if raw:
            # Of few rows, which a layer leaves where the next question's go: one launch for all.
            held = torch.stack([row.query for row in raw.values()])
            pairs = zip(raw.items(), held, strict=True)
            self._rows |= {layer: row._replace(query=one) for (layer, row), one in pairs}

    def clear(self) -> None:
        """Forget the question's rows, when its answer has ended."""
        self._rows = {}

    @torch.no_grad()
    def shares(self, rope: Rope, head: int, units_of: UnitsOf, pause: Callable[[], None]) -> Tensor | None:
        """Return [U]: each unit's (frame's) share, sum 1, in the question's last row, which predicts the first token.

        Attention rollout (Abnar and Zuidema, 2020): after each layer a row consists of its own former part, of what it gets
        from units, and of what it gets from earlier rows. Its own part is such that `OWN` of it remains after all layers.
        `units_of(layer, shares [n, N])` returns [n, U], columns' shares summed by unit. Rows with sparse attention are left
        out; if all are, the result is None.
        """
        first = max(self._first, self._listed)
        if not self._rows or first >= self._count:
            return None
        own = OWN ** (1 / len(self._rows))
        # From the last layer down, for the last row alone: every row of a long question has a part of every unit.
        weight: Tensor | None = None
        made: Tensor | float = 0.0
        for layer, (query, slot, turned) in reversed(self._rows.items()):
            if not turned:
                angles = slot.angles[0][:, :, self._first :], slot.angles[1][:, :, self._first :]
                query = rope.apply(query[None], angles)[0]
            query = query[:, first - self._first :]
            got = attention(query, slot.key[0, :, : slot.column + self._count], slot.bias)
            pause()
            if weight is None:
                weight = got.new_zeros(1, len(got))
                weight[:, -1] = 1
            come = weight @ got
            made = made + (1 - own) * units_of(layer, come[:, head : slot.column])[0]
            weight = own * weight + (1 - own) * come[:, slot.column + first :]
        assert isinstance(made, Tensor)
        return made / made.sum().clamp_min(torch.finfo(torch.float32).tiny)


def to_evidence(looks: dict[int, Look], count: int, reached: Tensor | None) -> dict[int, UnitEvidence]:
    """Return the evidence of an answer, unit (frame) -> `UnitEvidence`. `looks`: layer -> (numbers of the units it
    retrieved, first local unit); `count`: units in all; `reached` [count]: each unit's share in the answer, or None.

    Includes units that no layer attended to if, through summary tokens, their share is more than an even one.
    """
    layers = len(looks)
    recalled = Counter(number for chosen, _ in looks.values() for number in chosen.tolist())
    local = Counter(number for _, begin in looks.values() for number in range(begin, count))
    parts = [None] * count if reached is None else reached.tolist()
    far = [number for number, part in enumerate(parts) if part is not None and part * count > 1]
    return {
        one: UnitEvidence((recalled[one] + local[one]) / layers, recalled[one] / layers, parts[one])
        for one in sorted({*recalled, *local, *far})
    }
