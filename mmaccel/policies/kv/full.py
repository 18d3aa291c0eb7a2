"""The memory that keeps everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from mmaccel.core import checkpoint_io
from mmaccel.core.buffers import grow_buffer
from mmaccel.core.errors import ModelError
from mmaccel.core.kv import KVState, KVView, Stream, StreamPolicy, StreamState
from mmaccel.core.registry import register
from mmaccel.policies.kv._layered import LayeredState
from mmaccel.policies.kv._whole import WholeStream

if TYPE_CHECKING:
    from mmaccel.core.adapter import Geometry, ModelView


@register("kv", "full")
@dataclass(frozen=True, kw_only=True)
class Full(StreamPolicy):
    """Keep all keys and values of all layers on the device, in buffers that grow ahead of need; a view is a slice of them.

    Exact, and any column can be rolled back: truncation moves a count. The buffers take the dtype, device and batch of what
    is appended first. In a stream every query sees all that came before it, at its true place.
    """

    exact: ClassVar[bool] = True
    sequences: ClassVar[bool] = True

    @property
    def admits_sparse(self) -> bool:
        return True

    def open(self, geometry: Geometry, model: ModelView | None, device: torch.device) -> KVState:
        return FullState(geometry.layers)

    def stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        return FullStream(stream, geometry, model, device)


class FullState(LayeredState):
    """Buffers [B, G, capacity, D] for each layer, of which the counted columns are in use."""

    in_place = True

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def view(self, layer: int, query: Tensor) -> KVView:
        buffers = self._buffers[layer]
        if buffers is None:
            raise ModelError(f"kv: layer {layer} is asked for before anything was appended to it.")
        key, value = (buffer[:, :, : self._counts[layer]] for buffer in buffers)
        return KVView(key, value)

    def buffers(self, room: int) -> list[tuple[Tensor, Tensor]]:
        found = []
        for layer, held in enumerate(self._buffers):
            if held is None or self._counts[layer] != self._counts[0]:
                raise ModelError("kv: a prompt must have gone through all layers before a step is laid out.")
            count = self._counts[layer]
            key, value = (grow_buffer(buffer, 2, count + room, used=count) for buffer in held)
            self._buffers[layer] = key, value
            found.append((key, value))
        return found

    def wrote(self, count: int) -> None:
        self._counts = [held + count for held in self._counts]
        self._last = count

    def held(self) -> int:
        return max(self._counts)

    def reset(self) -> None:
        self.__init__(len(self._buffers))  # type: ignore[misc]

    def reorder(self, rows: Tensor) -> None:
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


class FullStream(WholeStream):
    """A stream in the buffers of a `FullState`, turned."""

    def __init__(self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device) -> None:
        super().__init__(stream, geometry, model, device)
        self._state = FullState(geometry.layers)

    def _show(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._state.append(layer, key, value)
        view = self._state.view(layer, key)
        return view.key, view.value

    def _cut(self, columns: int) -> None:
        self._state.truncate(min(columns, self._state.length()))

    def held(self) -> int:
        return self._state.held()

    def nbytes(self) -> int:
        return self._state.nbytes()

    def _save(self, folder: Path) -> None:
        for layer in range(self.geometry.layers):
            view = self._state.view(layer, torch.empty(0))
            for begin in range(0, view.key.shape[2], FILE):
                rows = slice(begin, begin + FILE)
                tensors = {"key": view.key[:, :, rows], "value": view.value[:, :, rows]}
                checkpoint_io.write_tensors(folder / _file(layer, begin), tensors)

    def _load(self, folder: Path) -> None:
        columns = self._base()
        for begin in range(0, columns, FILE):
            shape = (1, self.geometry.kv_heads, min(FILE, columns - begin), self.geometry.head_dim)
            wanted = dict.fromkeys(("key", "value"), (shape, self.stream.dtype))
            for layer in range(self.geometry.layers):
                found = checkpoint_io.read_tensors(folder / _file(layer, begin), wanted, self.device)
                self._state.append(layer, found["key"], found["value"])


FILE = 4096
"""Columns of a layer in one file of a saved stream."""


def _file(layer: int, begin: int) -> str:
    return f"layer-{layer:03d}-{begin:09d}.safetensors"
