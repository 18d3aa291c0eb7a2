"""The memory that keeps everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError
from mmaccel.core.kv import KVPolicy, KVState, KVView
from mmaccel.core.registry import register
from mmaccel.policies.kv._layered import LayeredState

if TYPE_CHECKING:
    from mmaccel.core.adapter import Geometry, ModelView

# Columns of room beyond what is needed: an eighth, within these bounds. Doubling would waste half the device at 1M tokens.
ROOM_MIN, ROOM_MAX = 256, 8192


@register("kv", "full")
@dataclass(frozen=True, kw_only=True)
class Full(KVPolicy):
    """Keep all keys and values of all layers on the device, in buffers that grow ahead of need; a view is a slice of them.

    Exact, and any column can be rolled back: truncation moves a count. The buffers take the dtype, device and batch of what
    is appended first.
    """

    exact: ClassVar[bool] = True

    def open(self, geometry: Geometry, model: ModelView | None, device: torch.device) -> KVState:
        return FullState(geometry.layers)


class FullState(LayeredState):
    """Buffers [B, G, capacity, D] for each layer, of which the counted columns are in use."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def view(self, layer: int, query: Tensor) -> KVView:
        buffers = self._buffers[layer]
        if buffers is None:
            raise ModelError(f"kv: layer {layer} is asked for before anything was appended to it.")
        key, value = (buffer[:, :, : self._counts[layer]] for buffer in buffers)
        return KVView(key, value)

    def held(self) -> int:
        return max(self._counts)

    def reset(self) -> None:
        self.__init__(len(self._buffers))  # type: ignore[misc]

    def reorder(self, rows: Tensor) -> None:
        self._batch = rows.numel()
        # See `_with_room`: the mode off gives tensors that can be written to anywhere, and would switch gradients on.
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
        new_key, new_value = _with_room(old_key, key, start, end), _with_room(old_value, value, start, end)
        new_key[:, :, start:end] = key
        new_value[:, :, start:end] = value
        self._buffers[layer] = new_key, new_value

    def _choose(self, layer: int, start: int, path: Tensor) -> None:
        for buffer in self._buffers[layer] or ():
            chosen = buffer.index_select(2, path.to(buffer.device) + start)
            buffer[:, :, start : start + path.numel()] = chosen


def _with_room(buffer: Tensor | None, new: Tensor, used: int, needed: int) -> Tensor:
    """`buffer`, or a larger one with its first `used` columns, so that `needed` columns fit."""
    if buffer is not None and buffer.shape[2] >= needed:
        return buffer
    like = new if buffer is None else buffer
    shape = list(like.shape)
    shape[2] = needed + min(max(needed // 8, ROOM_MIN), ROOM_MAX)
    # A buffer born in inference mode could not be written outside of it, and a stream may outlive the mode.
    with torch.inference_mode(False):
        grown = torch.empty(shape, dtype=like.dtype, device=like.device)
    if buffer is not None:
        grown[:, :, :used] = buffer[:, :, :used]
    return grown
