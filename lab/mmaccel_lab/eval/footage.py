"""A world for several memories to watch: rendered once, and looked at by the vision tower once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.attach import adapter_for
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.streams.session import VideoSession
from mmaccel_lab.world import World, render

PIECE = 64
"""Frames rendered and watched at a time."""

SIDES = (168, 280)
"""Height and width of the frames."""


class Footage:
    """All frames [T, 3, H, W] of a world, of which `still` stand still, on the model's device, with the features of their
    units.

    About 140 kB a frame, and the features.
    """

    def __init__(self, model: nn.Module, processor: Any, world: World, still: float) -> None:
        self._stream_adapter = adapter_for(model).stream_adapter(model, processor)
        device, frames_per_unit = self._stream_adapter.device, self._stream_adapter.frames_per_unit
        self.frames = torch.empty(world.frames, 3, *SIDES, dtype=torch.uint8, device=device)
        rows, known = world.table(still), list[Tensor]()
        for begin in range(0, world.frames, PIECE):
            piece = self.frames[begin : begin + PIECE]
            some = {name: column[begin : begin + PIECE].to(device) for name, column in rows.items()}
            piece.copy_(render(some, *SIDES))
            if len(piece) >= frames_per_unit:
                units, self._marks = self._stream_adapter.features(
                    piece[: len(piece) // frames_per_unit * frames_per_unit], SIDES
                )
                known.append(units)
        self._known = torch.cat(known) if known else torch.empty(0)

    def features(self, frames: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """As the model's own stream adapter; what is cut out of the frames is known."""
        own = frames.untyped_storage().data_ptr() == self.frames.untyped_storage().data_ptr()
        if not (own and len(self._known) and frames.is_contiguous()):
            return self._stream_adapter.features(frames, size)
        frames_per_unit = self._stream_adapter.frames_per_unit
        first = frames.storage_offset() // frames[0].numel() // frames_per_unit
        return self._known[first : first + len(frames) // frames_per_unit], self._marks


class Viewing(VideoSession):
    """A session that watches footage from the start to the end, and is then asked."""

    _mark: Any = None
    _before = 0

    def __enter__(self) -> Viewing:
        return self

    def show(
        self,
        footage: Footage,
        fps: float,
        progress: Callable[[int], None] | None = None,
        call: int | None = None,
        ingest: bool = False,
    ) -> float:
        """Watch all of `footage`, `call` frames at a time (None: `PIECE`), or `ingest` it as one; the seconds that took.
        `progress` is told of each frame."""
        own, cuda = self._stream_adapter, self._stream_adapter.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(own.device)
            self._before = torch.cuda.memory_allocated(own.device)
        vars(own)["features"] = footage.features
        began = time.perf_counter()
        try:
            for part in footage.frames.split(len(footage.frames) if ingest else call or PIECE):
                (self.ingest if ingest else self.watch)(part, fps=fps)
                if progress is not None:
                    progress(len(part))
        finally:
            del vars(own)["features"]  # the stream itself keeps no hold of the footage
        if cuda:
            torch.cuda.synchronize(own.device)
        seconds = time.perf_counter() - began
        assert self._live is not None
        self._mark = self._live.checkpoint()
        return seconds

    def under(self, kv: StreamPolicy) -> None:
        """Be as when all was watched, whatever was asked since, and answer as a memory of `kv` does, which differs from the
        session's in fields that matter at a question alone."""
        assert self._live is not None
        self._live.restore(self._mark)
        self._live.state.set_query_fields(kv)

    @property
    def device_bytes(self) -> int | None:
        """What the stream and its questions took of the device at most, beside models and footage; None on a CPU."""
        device = self._stream_adapter.device
        return torch.cuda.max_memory_allocated(device) - self._before if device.type == "cuda" else None

    @property
    def host_bytes(self) -> float:
        """What stores of the stream and of a draft's have reserved on the host."""
        streams = self._live, getattr(getattr(self._live, "draft_stream", None), "stream", None)
        live = [getattr(one, "_live", one) for one in streams]
        return sum(one.counters().get("host_bytes", 0.0) for one in live if one is not None)

    @property
    def frames_per_unit(self) -> int:
        """Frames of a unit."""
        return self._stream_adapter.frames_per_unit
