"""The `full` memory, which keeps all keys and values; base classes of `window` and `offload`."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import ModelError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.kv import (
    KVState,
    KVView,
    Stream,
    StreamPolicy,
    StreamState,
    UnitEvidence,
    grow_buffer,
)
from mmaccel.core.memory.relay import make_delegate
from mmaccel.core.registry import register
from mmaccel.policies.kv._window import Pair, PassState

FILE = 4096
"""Columns of a layer in one file of a saved stream."""


@register("kv", "full")
@dataclass(frozen=True, kw_only=True)
class Full(StreamPolicy):
    """Keep all keys and values of all layers on the device, in growing buffers; a view is a slice of them.

    Exact, and any column can be rolled back: truncation changes a count. The buffers take the dtype, device and batch of
    what is appended first. In a stream every query sees all that came before it, at its original position.
    """

    exact: ClassVar[bool] = True
    sequences: ClassVar[bool] = True
    allows_sparse: ClassVar[bool] = True
    shares_columns: ClassVar[bool] = True
    ingests: ClassVar[bool] = True
    allows_branches: ClassVar[bool] = True

    def open(self, geometry: Geometry, model: ModelView | None, device: torch.device) -> KVState:
        return FullState(geometry.layers)

    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        return FullStream(stream, geometry, model, device)


class PerLayerKVState(KVState):
    """Base of KV caches in which each layer counts its own columns, so that the cache is valid within a forward pass too.

    A forward pass appends to layers 0 .. L-1 in order; the length is that of layer 0. Rolling back cuts the layers that are
    longer, and leaves those that an aborted pass did not reach. Subclasses store (`_put`), cut and choose columns.
    """

    def __init__(self, layers: int) -> None:
        self._counts = [0] * layers
        self._last = 0
        self._batch: int | None = None

    @torch.no_grad()
    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        batch, _, n, _ = key.shape
        if self._batch is None:
            self._batch = batch
        if batch != self._batch:
            raise ModelError(
                f"kv: the memory is of {self._batch} sequences and {batch} were run; reset or reorder it."
            )
        self._put(layer, key, value)
        self._counts[layer] += n
        if layer == 0:
            self._last = n

    @torch.no_grad()
    def accept(self, keep: int | Tensor) -> None:
        length, last = self.length(), self._last
        count = keep if isinstance(keep, int) else keep.numel()
        if not 0 <= count <= last:
            raise ModelError(f"kv: {count} of the last columns cannot be kept; {last} were appended.")
        start = length - last
        if isinstance(keep, int):
            self.truncate(start + count)
        else:
            for layer, have in enumerate(self._counts):
                if have == length:
                    self._choose(layer, start, keep)
                    self._counts[layer] = start + count
        self._last = count

    def truncate(self, length: int) -> None:
        gone = self.length() - length
        if length < 0 or gone < 0:
            raise ModelError(f"kv: the memory has {self.length()} columns; it cannot be cut to {length}.")
        longer = [layer for layer, count in enumerate(self._counts) if count > length]
        for layer in longer:
            self._check_cut(layer, length)
        for layer in longer:
            self._cut(layer, length)
            self._counts[layer] = length
        self._last = max(0, self._last - gone)

    def length(self) -> int:
        return self._counts[0]

    @abstractmethod
    def _put(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store new columns; the count of the layer is still the old one."""

    @abstractmethod
    def _choose(self, layer: int, start: int, path: Tensor) -> None:
        """Of the columns from `start` on keep those at `path` [k], counted from there."""

    def _check_cut(self, layer: int, length: int) -> None:
        """Raise `ModelError` when the layer cannot be cut to `length`; nothing has been changed yet."""

    def _cut(self, layer: int, length: int) -> None:
        """Drop the columns from `length` on."""


class FullState(PerLayerKVState):
    """A KV cache with a pair of buffers [B, G, capacity, D] per layer; each layer's count says how many columns are used."""

    in_place = True

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self._buffers: list[Pair | None] = [None] * layers
        # Layers whose buffers another state writes to, behind the columns of this one.
        self._lent = set[int]()

    def fork_copy_on_write(self) -> FullState:
        """Return a second state that shares these columns and may append its own to the same buffers until `end_fork`.
        A layer that this state itself writes to meanwhile is copied first."""
        other = copy.copy(self)
        other._counts, other._buffers, other._lent = list(self._counts), list(self._buffers), set()
        self._lent = set(range(len(self._buffers)))
        return other

    def end_fork(self, other: FullState) -> None:
        """End the fork `other` (of `fork_copy_on_write`): take the shared buffers back, which `other` may have enlarged."""
        for layer in self._lent:
            self._buffers[layer] = other._buffers[layer]
        self._lent.clear()

    def view(self, layer: int, query: Tensor) -> KVView:
        buffers = self._buffers[layer]
        if buffers is None:
            raise ModelError(f"kv: layer {layer} is asked for before anything was appended to it.")
        key, value = (buffer[:, :, : self._counts[layer]] for buffer in buffers)
        return KVView(key, value)

    def layer_buffers(self, room: int) -> list[Pair]:
        found = []
        for layer, held in enumerate(self._buffers):
            if held is None or self._counts[layer] != self._counts[0]:
                raise ModelError("kv: buffers need a prompt that has run through all layers; run one first.")
            count = self._counts[layer]
            key, value = (grow_buffer(buffer, 2, count + room, used=count) for buffer in held)
            self._buffers[layer] = key, value
            found.append((key, value))
        return found

    def record_written(self, count: int) -> None:
        self._counts = [held + count for held in self._counts]
        self._last = count

    def held_columns(self) -> int:
        return max(self._counts)

    def reset(self) -> None:
        self.__init__(len(self._buffers))  # type: ignore[misc]

    def select_sequences(self, rows: Tensor) -> None:
        self._batch = rows.numel()
        # See `grow_buffer`: the mode off gives tensors that can be written to anywhere, and would switch gradients on.
        with torch.inference_mode(False), torch.no_grad():
            for layer, buffers in enumerate(self._buffers):
                if buffers is not None:
                    key, value = (buffer.index_select(0, rows.to(buffer.device)) for buffer in buffers)
                    self._buffers[layer] = key, value

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffers in self._buffers if buffers is not None for buffer in buffers)

    def _put(self, layer: int, key: Tensor, value: Tensor) -> None:
        start, buffers = self._counts[layer], self._buffers[layer]
        end = start + key.shape[2]
        if layer in self._lent and buffers is not None:
            self._lent.discard(layer)
            buffers = buffers[0].clone(), buffers[1].clone()
        old_key, old_value = (None, None) if buffers is None else buffers
        new_key = grow_buffer(old_key, 2, end, like=key, used=start)
        new_value = grow_buffer(old_value, 2, end, like=value, used=start)
        new_key[:, :, start:end] = key
        new_value[:, :, start:end] = value
        self._buffers[layer] = new_key, new_value

    def _choose(self, layer: int, start: int, path: Tensor) -> None:
        for buffer in self._buffers[layer] or ():
            chosen = buffer.index_select(2, path.to(buffer.device) + start)
            buffer[:, :, start : start + path.numel()] = chosen


class FullAttentionStream(PassState):
    """Base of stream memories in which every query sees every earlier column, as in the plain model, in passes of any size.

    Subclasses store keys after RoPE, and values: `_show` stores those of a pass and returns all, `_cut` drops the last ones,
    and `_keep_path` keeps only the accepted path of a tree of drafted tokens.
    """

    recalls_alike = parts = True

    @abstractmethod
    def _show(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """Keep keys, with RoPE, and values [1, G, n, D] of the pass; all of the layer, these last."""

    @torch.no_grad()
    def view(self, layer: int, query: Tensor) -> KVView:
        _, key, value = self._appended(layer)
        angles = self.rope.cached("pass", self._positions)
        key, value = self._show(layer, self.rope.apply(key, angles), value)
        del self._new[layer]
        query = self.rope.apply(query, angles)
        return KVView(key, value, query=query, layout=self._layout(key.shape[2]))

    def _positions(self) -> Tensor:
        stream_pass, positions = self._stream_pass, self.stream.positions
        assert stream_pass is not None
        if stream_pass.kind == "head":
            return positions.positions_before_video()
        if stream_pass.kind == "units":
            return positions.positions_by_time(stream_pass.first, stream_pass.count)
        return self._after(self._count, self._extra, stream_pass, own=True)

    def end_pass(self) -> None:
        proxy = self._stream_pass is not None and self._stream_pass.kind == "proxy"
        super().end_pass()
        if proxy:
            self._cut(self.length())

    def checkpoint(self) -> Any:
        return self._count, self._headed

    def restore(self, mark: Any) -> None:
        self._count, self._headed = mark
        self._forget_question()

    def reset(self) -> None:
        self.restore((0, 0))

    def seen_tokens(self, layer: int) -> Tensor | None:
        return torch.arange(self._count * self.stream.tokens_per_unit, device=self.device)

    def evidence(self) -> dict[int, UnitEvidence]:
        """Return all units (frames) as evidence, since every layer sees all of them."""
        return {number: UnitEvidence(1.0, 0.0, None) for number in range(self._count)}

    def counters(self) -> dict[str, float]:
        return {**super().counters(), "units": float(self._count), "resident": float(self._count)}

    def save(self, path: str | Path) -> None:
        folder = Path(path)
        checkpoint_io.write_json(folder / "state.json", {"units": self._count, "head": self.stream.head})
        self._save(folder)

    def load(self, path: str | Path) -> None:
        folder = Path(path)
        told = checkpoint_io.read_json(folder / "state.json", {"units": int, "head": int})
        if told["units"] < 0 or told["head"] != self.stream.head:
            raise ModelError(
                "state.json: it is of a stream with another head, or damaged; save the session again."
            )
        self._count, self._headed = told["units"], self.stream.head
        self._load(folder)

    @abstractmethod
    def _save(self, folder: Path) -> None:
        """Write all columns."""

    @abstractmethod
    def _load(self, folder: Path) -> None:
        """Read them; the number of units is set."""


class FullStream(FullAttentionStream):
    """The stream memory of `full`: all keys (after RoPE) and values, in the buffers of a `FullState`; nothing is dropped."""

    def __init__(self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device) -> None:
        super().__init__(stream, geometry, model, device)
        self._state = FullState(geometry.layers)

    def snapshot(self, stream: Stream, pause: Callable[[], None]) -> StreamState | None:
        taken: Any = super().snapshot(stream, pause)
        taken._state = self._state.fork_copy_on_write()
        return taken  # type: ignore[no-any-return]

    def _answered(self, taken: Any) -> None:
        self._state.end_fork(taken._state)

    def _show(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        self._state.append(layer, key, value)
        view = self._state.view(layer, key)
        return view.key, view.value

    def _cut(self, columns: int) -> None:
        self._state.truncate(min(columns, self._state.length()))

    def _keep_path(self, start: int, path: Tensor) -> None:
        self._state.accept(path)

    held_columns = nbytes = make_delegate(lambda self, name: getattr(self._state, name)())

    def _save(self, folder: Path) -> None:
        for layer in range(self.geometry.layers):
            view = self._state.view(layer, torch.empty(0))
            for begin in range(0, view.key.shape[2], FILE):
                rows = slice(begin, begin + FILE)
                tensors = {"key": view.key[:, :, rows], "value": view.value[:, :, rows]}
                checkpoint_io.write_tensors(folder / _file(layer, begin), tensors)

    def _load(self, folder: Path) -> None:
        columns = self.length()
        for begin in range(0, columns, FILE):
            shape = (1, self.geometry.kv_heads, min(FILE, columns - begin), self.geometry.head_dim)
            wanted = dict.fromkeys(("key", "value"), (shape, self.stream.dtype))
            for layer in range(self.geometry.layers):
                found = checkpoint_io.read_tensors(folder / _file(layer, begin), wanted, self.device)
                self._state.append(layer, found["key"], found["value"])


def _file(layer: int, begin: int) -> str:
    return f"layer-{layer:03d}-{begin:09d}.safetensors"
