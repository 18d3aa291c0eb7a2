"""ReKV: recall whole frames by the mean of their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import RecipeError, shown
from mmaccel.core.kv import Stream, StreamState
from mmaccel.core.registry import register
from mmaccel.policies.kv._stored import StoredMemory, StoredPolicy
from mmaccel.policies.kv.store import Way


@register("kv", "rekv")
@dataclass(frozen=True, kw_only=True)
class ReKV(StoredPolicy):
    """Encode under a sliding window, keep all frames on the host, and let each layer recall those that suit the question.

    After Di et al., "Streaming Video Question-Answering with In-context Video KV-Cache Retrieval" (ICLR 2025): a unit is
    represented by its mean key before rotation, a question by its mean query; each layer takes the best `frames`, in order
    of time and with consecutive positions, and keeps them for the answer. As in the paper's code no local window is seen by
    a question (``local = 0``). It departs from it where the head stands while encoding (see `_window.Bases`), in one pass
    over the question instead of two, and runs no language head while encoding.

    copies  how recalled units come back: "frame", a copy for each key and value tensor of a frame, as the paper's code
            does; or "coalesced", by the store's best way
    """

    local: int = 0
    copies: Literal["frame", "coalesced"] = "coalesced"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copies not in ("frame", "coalesced"):
            raise RecipeError(f"{self.name}: copies is {shown(self.copies)}; give 'frame' or 'coalesced'.")

    def stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        way: Way = "pieces" if self.copies == "frame" else "auto"
        return StoredMemory(self, stream, geometry, model, device, way=way)
