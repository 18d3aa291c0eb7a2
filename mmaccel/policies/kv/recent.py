"""The `recent` memory: only the last few frames, a baseline for other memories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.memory.kv import Stream, StreamState
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.kv._window import WindowedPolicy
from mmaccel.policies.kv._windowed import StreamMemory


@register("kv", "recent")
@dataclass(frozen=True, kw_only=True)
class Recent(WindowedPolicy):
    """Encodes under a sliding window; a question sees the last frames and the prompt before the video, nothing else.

    SimpleStream (arXiv 2604.02317) asks every memory to beat an answer from the last four frames. This is not SimpleStream,
    which runs the plain model anew on those frames: here keys and values were encoded under the window, with context from
    earlier frames. Only the window is kept.

    local  frames a question sees
    """

    query_time_fields: ClassVar[frozenset[str]] = frozenset({"local"})

    local: int = limited(4, at_least(1, " frame"))

    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        return StreamMemory(stream, geometry, model, device, **self.sizes(stream))
