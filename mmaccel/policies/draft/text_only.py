"""The `text_only` draft: a draft model that does not see the video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.decoding.draft import DraftState, Prompt
from mmaccel.core.layout import TEXT, TokenLayout
from mmaccel.core.registry import register
from mmaccel.policies.draft.sequential import ChainStrategy, SequentialDraftState


@register("draft", "text_only")
@dataclass(frozen=True, kw_only=True)
class TextOnly(ChainStrategy):
    """Like `sequential`, but the draft's prompt has no image and video tokens, nor the tokens that mark them.

    A draft step then costs as much as on a short context, however long the video. After Gagrani et al. 2024 (arXiv
    2404.08856), whose draft is a small language model without vision. Here too `model` may be one: any causal language model
    that transformers loads, with the target's tokenizer. Of a model of the target's family only the language model is used.
    Placeholders of images and videos are never proposed. On a stream it reads the words before and after the video.
    """

    reads_text: ClassVar[bool] = True

    def open(self, target: ModelView) -> DraftState:
        peer = self.peer(target)
        return TextOnlyDraftState(target, peer.runner(), peer.device, self, target.geometry.vocab)


class TextOnlyDraftState(SequentialDraftState):
    """A `SequentialDraftState` whose model reads only the prompt's text; it never proposes an image or video placeholder."""

    def __init__(self, target: ModelView, *given: Any) -> None:
        super().__init__(*given)
        self._target, self._never = target, tuple(target.adapter.placeholders(target.model))

    def _shown(self, prompt: Prompt) -> tuple[Mapping[str, Any], Tensor, TokenLayout | None]:
        ids, past = prompt.inputs["input_ids"], prompt.past
        layout = self._target.adapter.layout(self._target.model, prompt.inputs)
        words = ids[:, layout.modality[0].to(ids.device) == TEXT]
        if past is None:
            return {"input_ids": words}, words[0], None
        before = (past.layout.modality[0] == TEXT).nonzero()[:, 0]
        known = prompt.ids[0, before.to(ids.device)]
        return {"input_ids": words}, torch.cat([known, words[0]]), past.layout.select_tokens(before)
