"""The `off` draft: no speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding.draft import DraftState, DraftStrategy
from mmaccel.core.errors import DraftError
from mmaccel.core.registry import register


@register("draft", "off")
@dataclass(frozen=True, kw_only=True)
class Off(DraftStrategy):
    """Propose nothing: plain decoding, by the model's own loop if possible, else by mmaccel's, with the same tokens."""

    active: ClassVar[bool] = False

    def open(self, target: ModelView) -> DraftState:
        raise DraftError("off: it proposes nothing, so there is no draft to open; decode with draft None.")
