"""The `offload` memory: keeps everything on the host, and copies it back layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.memory.kv import Stream, StreamPass, StreamState, grow_buffer
from mmaccel.core.registry import one_of, register
from mmaccel.policies.kv._archived import HostPolicy
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.full import FullAttentionStream
from mmaccel.policies.kv.store import HostStore


@register("kv", "offload")
@dataclass(frozen=True, kw_only=True)
class Offload(HostPolicy):
    """Keep all frames on the host; every pass copies the whole past of each layer to the device, and frees it again.

    Exact: every query sees all that came before it, at its original position. The device holds one layer of the stream at a
    time; the whole stream is copied for every chunk, question and token of an answer.

    store  limits on host memory (`mmaccel describe host`); as it keeps everything, spill is "refuse" or "disk"
    """

    exact: ClassVar[bool] = True
    ingests: ClassVar[bool] = True
    allows_branches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        spills = one_of("refuse", "disk", why=", for it keeps everything")
        spills.check("offload: store", "spill", self.store.spill)

    def footprint(self, tokens: int, frames_per_unit: int) -> Footprint:
        return Footprint(host=None, copied=True)

    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        return OffloadStream(self, stream, geometry, model, device)


class OffloadStream(FullAttentionStream):
    """The stream memory of `offload`: frames are on the host; the prompt before the video and the question on the device."""

    def __init__(
        self, policy: Offload, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> None:
        super().__init__(stream, geometry, model, device)
        self.store: HostStore = policy.store.open(stream, geometry, device)
        self._heads: list[Pair | None] = [None] * geometry.layers
        self._turns: list[Pair | None] = [None] * geometry.layers

    def _show(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        stream_pass, head = self._stream_pass, self._heads[layer]
        if head is None:
            self._heads[layer] = key, value
            return key, value
        past = self.store.fetch(layer, range(self._count))
        if stream_pass is not None and stream_pass.kind == "units":
            self.store.put_layer(
                layer, range(stream_pass.first, stream_pass.first + stream_pass.count), key, value
            )
        else:
            end, old = self._extra + key.shape[2], self._turns[layer] or (None, None)
            held_key = grow_buffer(old[0], 2, end, like=key, used=self._extra)
            held_value = grow_buffer(old[1], 2, end, like=value, used=self._extra)
            held_key[:, :, self._extra : end], held_value[:, :, self._extra : end] = key, value
            self._turns[layer] = held_key, held_value
            key, value = held_key[:, :, :end], held_value[:, :, :end]
        return torch.cat([head[0], past[0][None], key], 2), torch.cat([head[1], past[1][None], value], 2)

    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        if stream_pass.kind == "units":
            self.store.make_room_for(stream_pass.count)

    def _cut(self, columns: int) -> None:
        if columns < self.stream.head:
            self._heads = [None] * len(self._heads)
        if columns <= self.length() - self._extra:
            self._turns = [None] * len(self._turns)
        if self._main is None:
            self.store.forget_from(max(0, columns - self.stream.head) // self.stream.tokens_per_unit)

    def _keep_path(self, start: int, path: Tensor) -> None:
        for pair in self._turns:
            for side in pair or ():
                side[:, :, start : start + len(path)] = side.index_select(2, path + start)

    def _save(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for layer, head in enumerate(self._heads):
            if head is not None:
                tensors |= {f"head.{layer}.key": head[0], f"head.{layer}.value": head[1]}
        checkpoint_io.write_tensors(folder / "head.safetensors", tensors)
        self.store.save(folder / "store")

    def _load(self, folder: Path) -> None:
        shape = (1, self.geometry.kv_heads, self.stream.head, self.geometry.head_dim)
        layers = range(self.geometry.layers)
        wanted = {f"head.{n}.{side}": (shape, self.stream.dtype) for n in layers for side in ("key", "value")}
        found = checkpoint_io.read_tensors(folder / "head.safetensors", wanted, self.device)
        self._heads = [(found[f"head.{n}.key"], found[f"head.{n}.value"]) for n in layers]
        self.store.load(folder / "store", self._count)

    def held_columns(self) -> int:
        turn = max((pair[0].shape[2] for pair in self._turns if pair is not None), default=0)
        return self._headed + turn

    def nbytes(self) -> int:
        pairs = [*self._heads, *self._turns]
        return sum(t.nbytes for pair in pairs if pair is not None for t in pair) + self.store.nbytes()

    def usage(self) -> dict[str, float]:
        return {**super().usage(), **self.store.usage()}

    def counters(self) -> dict[str, float]:
        host = {"host_" + name.removeprefix("host_"): n for name, n in self.store.counters().items()}
        return {**super().counters(), **host, "resident": 0.0}

    def close(self) -> None:
        self.store.close()
