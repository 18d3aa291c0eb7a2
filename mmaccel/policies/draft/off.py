"""The `off` draft: no speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding.draft import DraftState, DraftStrategy, Prompt, Proposal
from mmaccel.core.registry import register


@register("draft", "off")
@dataclass(frozen=True, kw_only=True)
class Off(DraftStrategy):
    """Propose nothing: plain decoding, by the model's own loop if possible; in ours it changes no token."""

    active: ClassVar[bool] = False

    def open(self, target: ModelView) -> DraftState:
        return _Silent()


class _Silent(DraftState):
    def begin(self, prompt: Prompt) -> None:
        pass

    def propose(self) -> Proposal:
        return Proposal.empty()

    def observe(self, committed: Tensor, kept: int) -> None:
        pass
