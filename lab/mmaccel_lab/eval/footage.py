"""A world for several memories to watch: rendered once, and looked at by the vision tower once."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.attach import StreamAdapter, adapter_for
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.streams.session import VideoSession
from mmaccel_lab.world import World, render

PIECE = 64
"""Frames rendered and watched at a time."""

SIDES = (168, 280)
"""Height and width of the frames."""


class Footage:
    """All frames of a world, of which `still` stand still, on the model's device, with the features of their units.

    About 140 kB a frame, and the features. `stream_adapter` is the model's, but knows the features of these frames.
    """

    def __init__(self, model: nn.Module, processor: Any, world: World, still: float) -> None:
        self._stream_adapter = adapter_for(model).stream_adapter(model, processor)
        self.stream_adapter: StreamAdapter = copy.copy(self._stream_adapter)
        self.stream_adapter.__dict__["features"] = self._features
        self.pieces: list[Tensor] = []
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        table = world.table(still)
        for begin in range(0, world.frames, PIECE):
            rows = {
                name: column[begin : begin + PIECE].to(self._stream_adapter.device)
                for name, column in table.items()
            }
            piece = render(rows, *SIDES).contiguous()
            self.pieces.append(piece)
            whole = len(piece) // self._stream_adapter.pace * self._stream_adapter.pace
            if whole:
                self._known[piece.untyped_storage().data_ptr()] = self._stream_adapter.features(
                    piece[:whole], SIDES
                )

    def _features(self, frames: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """As the model's own stream adapter; what is cut out of a piece is known."""
        known = self._known.get(frames.untyped_storage().data_ptr())
        if known is None or not frames.is_contiguous():
            return self._stream_adapter.features(frames, size)
        rows, marks = known
        first = frames.storage_offset() // frames[0].numel() // self._stream_adapter.pace
        return rows[first : first + len(frames) // self._stream_adapter.pace], marks


class Viewing(VideoSession):
    """A session that watches footage from the start to the end, and is then asked."""

    def __init__(self, model: nn.Module, processor: Any, kv: StreamPolicy, chunk: int | None = None) -> None:
        super().__init__(model, processor, None, kv=kv, chunk=chunk)
        self._mark: Any = None

    def __enter__(self) -> Viewing:
        return self

    def show(
        self,
        footage: Footage,
        fps: float,
        progress: Callable[[int], None] | None = None,
        call: int | None = None,
    ) -> float:
        """Watch all of `footage`, `call` frames at a time (None: `PIECE`); the seconds that took. `progress` is told of each
        frame."""
        own, self._stream_adapter = self._stream_adapter, footage.stream_adapter
        began = time.perf_counter()
        try:
            for piece in footage.pieces:
                for part in piece.split(call or PIECE):
                    self.watch(part, fps=fps)
                    if progress is not None:
                        progress(len(part))
        finally:
            self._stream_adapter = own
        if own.device.type == "cuda":
            torch.cuda.synchronize(own.device)
        seconds = time.perf_counter() - began
        assert self._live is not None
        # The stream itself keeps no hold of the footage.
        self._live.adapter = own
        self._mark = self._live.mark()
        return seconds

    def under(self, kv: StreamPolicy) -> None:
        """Be as when all was watched, whatever was asked since, and answer as a memory of `kv` does, which differs from the
        session's in fields that matter at a question alone."""
        assert self._live is not None
        self._live.back(self._mark)
        self._live.state.set_query_fields(kv)

    @property
    def pace(self) -> int:
        """Frames of a unit."""
        return self._stream_adapter.pace
