"""Base of stream memories that keep a fixed number of tokens on the device and drop the rest.

Encoding: a query sees the prompt before the video, all kept tokens, and its own causal past. Keys are stored before RoPE,
each with its column in the stream, and rotated for every pass. Units run in clips that begin at multiples of the clip's
length, so that tokens are dropped at the same moments however the stream is cut.

Letters: G key/value heads, H query heads, D head size, P tokens a unit (frame), N tokens held by a layer.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import ModelError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.memory.kv import MARGIN, KVView, Stream, StreamPass, StreamPolicy, grow_buffer
from mmaccel.core.registry import at_least, limited
from mmaccel.policies.kv._window import Look, Pair, QuestionView, attention, mean_query
from mmaccel.policies.kv._windowed import StreamMemory


class HeldTokens(NamedTuple):
    """The kept tokens of one layer in order of time: raw keys and values [1, G, N, D], and columns [N] long."""

    key: Tensor
    value: Tensor
    column: Tensor

    def select_tokens(self, index: Tensor) -> HeldTokens:
        """Return only the kept tokens at indices `index` [k]."""
        key, value = (side.index_select(2, index) for side in (self.key, self.value))
        return HeldTokens(key, value, self.column[index])

    def followed_by(self, other: HeldTokens) -> HeldTokens:
        """Return these kept tokens followed by those of `other`."""
        key, value = (torch.cat(both, 2) for both in zip(self[:2], other[:2], strict=True))
        return HeldTokens(key, value, torch.cat([self.column, other.column]))


@dataclass(frozen=True, kw_only=True)
class TokenPolicy(StreamPolicy):
    """The fields of a memory that keeps single tokens.

    frames     tokens that each layer keeps, as a number of frames: a frame's tokens times this
    positions  of kept tokens: "original" as long as the model's limit allows, then compact; or "compact" always
    """

    ingests: ClassVar[bool] = True
    allows_branches: ClassVar[bool] = True
    no_tensor_parallel: ClassVar[str | None] = "chooses tokens by the keys of all heads"

    frames: int = limited(64, at_least(1))
    positions: Literal["original", "compact"] = "original"

    def footprint(self, tokens: int, frames_per_unit: int) -> Footprint:
        return Footprint(
            window=self.frames, ingest=self.frames + (self.clip or frames_per_unit), shown=self.frames
        )


class TokenMemory(StreamMemory):
    """The base of memories that keep single tokens. Subclasses choose which to keep (`_keep`) and which a question sees
    (`_pick`).

    budget  tokens that a layer keeps at the end of a clip: a whole number of units (frames)
    clip    units of a clip
    FACTS   name -> type of the figures in `_facts`, which are saved and restored with the stream
    """

    FACTS: ClassVar[dict[str, type]] = {}
    recalls_alike, parts = False, True

    def __init__(
        self, policy: TokenPolicy, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> None:
        super().__init__(stream, geometry, model, device, window=0, local=0, positions=policy.positions)
        self.policy: Any = policy
        self.budget = stream.units(policy.frames) * stream.tokens_per_unit
        self.clip = stream.units(policy.clip or 1)
        self._held: list[HeldTokens | None] = [None] * geometry.layers
        self._seen: dict[int, tuple[Tensor, int]] = {}
        # What the tokens of a layer got of the attention that chooses among them, until the pass is over.
        self._scores: dict[int, Tensor] = {}
        self._facts: dict[str, Any] = {name: kind() for name, kind in {"pruned": float, **self.FACTS}.items()}
        self._blank = self.checkpoint()

    # What subclasses fill.

    @abstractmethod
    def _pick(self, layer: int, query: Tensor, held: HeldTokens) -> tuple[Tensor | None, int]:
        """What a question sees of `held`: indices [k] ascending, or None for all; and the first unit that it sees without
        having searched for it. query [H, D]: the mean of the question's raw queries."""

    # The way of a pass.

    def begin_ingest(self) -> None:
        self._ingests = True  # it keeps what it keeps

    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        # Keys are turned anew for each pass, so that it can be settled pass by pass where they stand.
        self.compact = self._closed(stream_pass)
        if stream_pass.kind == "question":
            self._seen = {}

    def _break_off(self) -> None:
        super()._break_off()
        self._scores.clear()

    def _closed(self, stream_pass: StreamPass) -> bool:
        positions, every = self.stream.positions, self.bases.every
        if stream_pass.kind == "units":
            return self._always or positions.count_intervals(stream_pass.first + stream_pass.count) > every
        fits = positions.count_intervals(self._count) <= every
        return self._always or not (
            fits and positions.fits_limit(self._count, stream_pass.pending, stream_pass.rows, own=True)
        )

    def _most(self) -> int:
        return -(-(self.held_columns() - self._headed) // self.stream.tokens_per_unit)

    def units_that_fit(self, first: int, count: int) -> int:
        return min(count, self.clip - first % self.clip)

    def _encode(
        self, layer: int, query: Tensor, stream_pass: StreamPass, key: Tensor, value: Tensor
    ) -> KVView:
        P = self.stream.tokens_per_unit
        column = torch.arange(
            stream_pass.first * P, (stream_pass.first + stream_pass.count) * P, device=key.device
        )
        new, old = HeldTokens(key, value, column), self._held[layer]
        whole = new if old is None else old.followed_by(new)
        total = whole.column.shape[0]
        start = total - column.shape[0]
        # Angles of the new columns are those of the last of all.
        cos, sin = self._angles(layer, whole.column)
        turned = self.rope.apply(whole.key, (cos, sin))
        query = self.rope.apply(query, (cos[:, :, start:], sin[:, :, start:]))
        head_key, head_value = self._head(layer)
        key, value = torch.cat([head_key, turned], 2), torch.cat([head_value, whole.value], 2)
        return KVView(key, value, query=query, layout=self._layout(key.shape[2]))

    def _gather(self, layer: int, query: Tensor, stream_pass: StreamPass) -> QuestionView:
        part: Pair | None = None
        held, seen = self._held[layer], 0
        if held is not None:
            index, begin = None, self._count
            if stream_pass.kind == "question":
                index, begin = self._pick(layer, mean_query(query, stream_pass), held)
                self._seen[layer] = (held.column if index is None else held.column[index], begin)
            cos, sin = self._angles(layer, held.column)
            seen = -(-held.column.shape[0] // self.stream.tokens_per_unit)
            if index is not None:
                held, cos, sin = held.select_tokens(index), cos[:, :, index], sin[:, :, index]
            part = self.rope.apply(held.key, (cos, sin)), held.value
        parts = [self._head(layer), *([] if part is None else [part])]
        base = sum(one.shape[2] for one, _ in parts)
        length = base + stream_pass.rows + stream_pass.room + MARGIN
        key, value = (grow_buffer(None, 2, length, like=one, share=0.0) for one in parts[0])
        for whole, side in zip((key, value), zip(*parts, strict=True), strict=True):
            torch.cat(side, 2, out=whole[:, :, :base])
        return QuestionView(key, value, base, seen)

    def _move(self, stream_pass: StreamPass) -> None:
        total, P = stream_pass.first + stream_pass.count, self.stream.tokens_per_unit
        for layer in range(self.geometry.layers):
            stream_pass.pause()
            new = self._new.get(layer)
            if new is None:
                raise ModelError(f"kv: layer {layer} was left out of a pass.")
            column = torch.arange(stream_pass.first * P, total * P, device=new[0].device)
            old, fresh = self._held[layer], HeldTokens(new[0], new[1], column)
            self._held[layer] = fresh if old is None else old.followed_by(fresh)
        self._count = self._first = total

    def limit_to_units(self, first: int, end: int) -> None:
        for layer, held in enumerate(self._held):
            if held is not None:
                units = held.column // self.stream.tokens_per_unit
                self._held[layer] = held.select_tokens(((units >= first) & (units < end)).nonzero()[:, 0])

    def _keep(self, layer: int, index: Tensor) -> None:
        """Of the tokens of a layer keep those at `index` [k], in order of time."""
        held = self._held[layer]
        assert held is not None
        self._facts["pruned"] += (held.column.shape[0] - index.shape[0]) / self.geometry.layers
        self._held[layer] = held.select_tokens(index.sort().values)

    def _angles(self, layer: int, column: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for tokens [N] of the stream, in order of time.

        Compact: as if there were no others, token r of them stands in unit r // P; its place in the frame stays its own.
        """
        positions, count = self.stream.positions, column.shape[0]

        def ranks() -> Tensor:
            return positions.token_positions(torch.arange(count), count // self.stream.tokens_per_unit)

        def own() -> Tensor:
            return positions.token_positions(column, self._count + self.clip, own=True)

        if self.compact and positions.moved == positions.axes:
            return self.rope.cached(("ranks", count), ranks)
        if not self._facts["pruned"]:
            return self.rope.cached(("all", count), own)
        # Every layer has tokens of its own: theirs are not worth keeping for the others.
        return self.rope.angles(torch.cat([ranks()[:1], own()[1:]]) if self.compact else own())

    # The stream as a whole.

    def held_columns(self) -> int:
        most = max((one.column.shape[0] for one in self._held if one is not None), default=0)
        return self._headed + most

    def checkpoint(self) -> Any:
        return super().checkpoint(), list(self._held), dict(self._facts)

    def restore(self, mark: Any) -> None:
        stream, held, facts = mark
        super().restore(stream)
        self._held, self._facts = list(held), dict(facts)

    def reset(self) -> None:
        self.restore(self._blank)

    def seen_tokens(self, layer: int) -> Tensor | None:
        return self._seen[layer][0] if layer in self._seen else None

    def _looked(self) -> dict[int, Look]:
        looks = {}
        for layer, (column, begin) in self._seen.items():
            numbers = torch.unique(column // self.stream.tokens_per_unit)
            looks[layer] = numbers[numbers < begin], begin
        return looks

    def _units_of(self, layer: int, shares: Tensor) -> Tensor:
        out = shares.new_zeros(len(shares), self._count)
        if layer not in self._seen:
            # Of the first unit not all frames have come.
            return out
        column, _ = self._seen[layer]
        return out.index_add_(1, column // self.stream.tokens_per_unit, shares)

    def nbytes(self) -> int:
        return super().nbytes() + sum(t.nbytes for one in self._held if one is not None for t in one)

    def counters(self) -> dict[str, float]:
        # In units' worth of tokens: few units are still whole.
        resident = (self.held_columns() - self._headed) / self.stream.tokens_per_unit
        return {**super().counters(), "resident": resident, "pruned": self._facts["pruned"]}

    def _save(self, folder: Path) -> bool:
        tensors = {
            f"{name}.{layer}": tensor
            for layer, one in enumerate(self._held)
            if one is not None
            for name, tensor in one._asdict().items()
        }
        checkpoint_io.write_tensors(folder / "tokens.safetensors", tensors)
        checkpoint_io.write_json(folder / "tokens.json", {"clip": self.clip, **self._facts})
        return False

    def _load(self, folder: Path) -> None:
        kinds = {"clip": int, "pruned": float, **self.FACTS}
        told = checkpoint_io.read_json(folder / "tokens.json", kinds)
        if told["clip"] != self.clip:
            raise ModelError(
                f"tokens.json: its clips are of {told['clip']} units and these of {self.clip}; it is of another kind."
            )
        self._facts = {name: told[name] for name in self._facts}
        if not self._count:
            return
        side = ((1, self.geometry.kv_heads, -1, self.geometry.head_dim), self.stream.dtype)
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for layer in range(self.geometry.layers):
            wanted |= {f"key.{layer}": side, f"value.{layer}": side, f"column.{layer}": ((-1,), torch.long)}
        found = checkpoint_io.read_tensors(folder / "tokens.safetensors", wanted, self.device)
        for layer in range(self.geometry.layers):
            held = HeldTokens(*(found[f"{name}.{layer}"] for name in HeldTokens._fields))
            rows = held.column.shape[0]
            outside = rows and (
                int(held.column.min()) < 0
                or int(held.column.max()) >= self._count * self.stream.tokens_per_unit
            )
            if held.key.shape[2] != rows or held.value.shape[2] != rows or outside:
                raise ModelError(
                    f"tokens.safetensors: layer {layer} has tokens that do not fit the stream; the file is damaged."
                )
            self._held[layer] = held


def attention_shares(query: Tensor, key: Tensor) -> Tensor:
    """Return the share [N] float32 of all attention that each of the keys `key` [1, G, N, D] gets from the queries `query`
    [1, H, n, D], which belong to the last n columns.

    Both are after RoPE. Attention is causal; the share is a mean over queries and heads, so that the sum is 1.
    """
    return attention(query[0], key[0]).mean(0)
