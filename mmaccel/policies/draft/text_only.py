"""A draft that never sees the video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView, Runner
from mmaccel.core.draft import DraftState
from mmaccel.core.errors import RecipeError
from mmaccel.core.registry import register
from mmaccel.policies.draft._draft_model import Reader, TextReader, open_peer
from mmaccel.policies.draft.sequential import Drafter, Sequential


@register("draft", "text_only")
@dataclass(frozen=True, kw_only=True)
class TextOnly(Sequential):
    """As `sequential`, with a prompt out of which every image and video token is taken, and with them what marks them.

    A draft step then costs what it costs on a short context, whatever the video's length. After Gagrani et al. 2024 (arXiv
    2404.08856), whose draft is a small language model without vision. Here too `model` may be one, whatever transformers
    loads as a causal language model with the target's tokenizer; of a model of the target's family it is the language
    model. Placeholders of images and videos are never proposed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prune is not None:
            raise RecipeError("text_only: prune: there is no video token left to prune; leave it out.")

    def peer(self, target: ModelView) -> ModelView:
        return open_peer(self.name, target, self.model, text=True)

    def open(self, target: ModelView) -> DraftState:
        peer = self.peer(target)
        never = target.adapter.placeholders(target.model)
        return TextDrafter(
            peer.runner(), peer.device, self.window, target.geometry.vocab, TextReader(target), never
        )


class TextDrafter(Drafter):
    """A drafter that proposes none of the tokens `never`."""

    def __init__(
        self,
        runner: Runner,
        device: torch.device,
        window: int,
        vocab: int,
        reader: Reader,
        never: Sequence[int],
    ) -> None:
        super().__init__(runner, device, window, vocab, reader)
        self._never = list(never)

    def _step(self, ids: Tensor) -> Tensor:
        logits = super()._step(ids)
        logits[self._never] = float("-inf")
        return logits
