"""A draft that never sees the video."""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.core.adapter import ModelView
from mmaccel.core.draft import DraftState
from mmaccel.core.errors import RecipeError
from mmaccel.core.registry import register
from mmaccel.policies.draft._read import TextReader
from mmaccel.policies.draft.sequential import Drafter, Sequential


@register("draft", "text_only")
@dataclass(frozen=True, kw_only=True)
class TextOnly(Sequential):
    """As `sequential`, with a prompt out of which every image and video token is taken, and with them what marks them.

    A draft step then costs what it costs on a short context, whatever the video's length. After Gagrani et al. 2024 (arXiv
    2404.08856), who train a small language model for it; here it is the language model of `model`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prune is not None:
            raise RecipeError("text_only: prune: there is no video token left to prune; leave it out.")

    def open(self, target: ModelView) -> DraftState:
        peer = self.peer(target)
        return Drafter(peer.runner(), peer.device, self.window, target.geometry.vocab, TextReader(target))
