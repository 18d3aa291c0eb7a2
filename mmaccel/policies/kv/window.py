"""The `window` memory: attention sinks and a local window (StreamingLLM)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import ModelError
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.memory.kv import KVState, KVView, Stream, StreamPolicy, StreamState
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.kv._windowed import StreamMemory
from mmaccel.policies.kv.full import PerLayerKVState


@register("kv", "window")
@dataclass(frozen=True, kw_only=True)
class Window(StreamPolicy):
    """Every query sees the first `sinks` columns and the last `window`, its own included. Other columns are evicted.

    Columns of a long append are evicted only after its own queries have seen them, so the result does not depend on how a
    prompt is cut into chunks. After StreamingLLM (arXiv 2309.17453); unlike the paper, keys keep their original positions.
    The padding of a left-padded sequence counts as columns, also as sinks.

    In a stream the prompt before the video replaces the sinks, and `window` is rounded up to whole frames. A question sees
    all of them, at positions that continue after that prompt without a gap.

    A sparse pattern plans over all columns that are held; of the keys it chooses, each query sees those in its window.

    sinks   first tokens that are never evicted, as models need attention sinks
    window  columns a query sees, its own included, at least 1
    margin  columns held beyond the window for rollback: the last pass can always be rolled back, and `margin` columns more
    """

    sequences: ClassVar[bool] = True
    allows_sparse: ClassVar[bool] = True
    ingests: ClassVar[bool] = True
    allows_branches: ClassVar[bool] = True
    sinks: int = limited(4, at_least(0))
    window: int = limited(1024, at_least(1))
    margin: int = limited(64, at_least(0))

    @property
    def rollback_limit(self) -> int | None:
        return self.margin

    def footprint(self, tokens: int, frames_per_unit: int) -> Footprint:
        frames = -(-self.window // tokens) * frames_per_unit
        return Footprint(window=frames, shown=frames)

    def open(self, geometry: Geometry, model: ModelView | None, device: torch.device) -> KVState:
        return WindowKVState(geometry.layers, self.sinks, self.window, self.margin)

    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        units = -(-self.window // stream.tokens_per_unit)
        return StreamMemory(stream, geometry, model, device, window=units, local=units)


@dataclass
class _Held:
    """Keys and values of columns [0, sinks) and [edge, count) of a layer; `edge` is `sinks` as long as nothing has gone."""

    key: Tensor
    value: Tensor
    edge: int


class WindowKVState(PerLayerKVState):
    """The KV cache of `window`: exactly sized tensors for each layer, which `append` makes anew, without evicted columns."""

    def __init__(self, layers: int, sinks: int, window: int, margin: int) -> None:
        super().__init__(layers)
        self._sinks, self._window, self._margin = sinks, window, margin
        self._held: list[_Held | None] = [None] * layers
        self._pinned: int | None = None
        self._columns: tuple[int, int, Tensor] | None = None

    def view(self, layer: int, query: Tensor) -> KVView:
        held, count = self._held[layer], self._counts[layer]
        if held is None:
            raise ModelError(f"kv: layer {layer} is asked for before anything was appended to it.")
        column = None if held.edge == self._sinks else self._column(held.edge, count, held.key.device)
        if count <= self._sinks + self._window:
            return KVView(held.key, held.value, column)
        return KVView(held.key, held.value, column, self._sinks, self._window)

    def held_columns(self) -> int:
        return max(0 if held is None else held.key.shape[2] for held in self._held)

    def reset(self) -> None:
        self.__init__(len(self._held), self._sinks, self._window, self._margin)  # type: ignore[misc]

    @torch.no_grad()
    def select_sequences(self, rows: Tensor) -> None:
        self._batch = rows.numel()
        for held in self._held:
            if held is not None:
                held.key = held.key.index_select(0, rows.to(held.key.device))
                held.value = held.value.index_select(0, rows.to(held.value.device))

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        """Context for the passes of a question of any length, which evict no column that its first token can see."""
        before = self._pinned
        self._pinned = self.length() if before is None else before
        try:
            with super().question_scope():
                yield
        finally:
            self._pinned = before

    def nbytes(self) -> int:
        tensors = [tensor for held in self._held if held is not None for tensor in (held.key, held.value)]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def _put(self, layer: int, key: Tensor, value: Tensor) -> None:
        held, count = self._held[layer], self._counts[layer]
        if held is None:
            # Copied: a slice would keep the whole of what it was cut from.
            self._held[layer] = _Held(key.clone(), value.clone(), self._sinks)
            return
        first = count if self._pinned is None else min(count, self._pinned)
        edge = max(held.edge, first - self._window - self._margin)
        sinks = min(self._sinks, count)
        rest = sinks + max(0, min(edge, count) - held.edge)
        held.key = torch.cat([held.key[:, :, :sinks], held.key[:, :, rest:], key], 2)
        held.value = torch.cat([held.value[:, :, :sinks], held.value[:, :, rest:], value], 2)
        held.edge = edge

    def _choose(self, layer: int, start: int, path: Tensor) -> None:
        held = self._held[layer]
        if held is not None:
            old = held.key.shape[2] - (self._counts[layer] - start)
            path = torch.cat([torch.arange(old, device=held.key.device), path.to(held.key.device) + old])
            held.key, held.value = held.key.index_select(2, path), held.value.index_select(2, path)

    def _check_cut(self, layer: int, length: int) -> None:
        held = self._held[layer]
        # The next query sees columns from here on, besides the sinks; those in [sinks, edge) have gone.
        seen = max(self._sinks, length - self._window + 1)
        if held is not None and seen < min(held.edge, length):
            raise ModelError(
                f"kv: the last {self._counts[layer] - length} columns cannot be rolled back, as keys that the next "
                f"query would see have been evicted; raise margin, which is {self._margin}."
            )

    def _cut(self, layer: int, length: int) -> None:
        held = self._held[layer]
        if held is not None:
            left = min(length, self._sinks) + max(0, length - held.edge)
            held.key, held.value = held.key[:, :, :left], held.value[:, :, :left]
            held.edge = max(self._sinks, min(held.edge, length))

    def _column(self, edge: int, count: int, device: torch.device) -> Tensor:
        """[N] the columns held; the layers of a run share one tensor."""
        if self._columns is None or self._columns[:2] != (edge, count) or self._columns[2].device != device:
            parts = [torch.arange(self._sinks, device=device), torch.arange(edge, count, device=device)]
            self._columns = edge, count, torch.cat(parts)
        return self._columns[2]
