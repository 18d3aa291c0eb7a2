"""What a caller's processors and criteria say of a token, asked in our loop: by one sequence, and of guesses too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.draft import Warp
from mmaccel.core.errors import DraftError

STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
"""Processors of transformers that remember what they were asked, token by token, and the arguments that they are made of: a
draft asks about tokens that are refused, too, and about the same place twice."""


def check_processors(processors: Any, draft: str) -> None:
    """Raise `DraftError` for `STATEFUL` ones under the draft of that name."""
    for processor in processors or ():
        if (field := STATEFUL.get(type(processor).__name__)) is not None:
            raise DraftError(
                f"{field}: it goes by the tokens asked about before, and draft {draft!r} asks about some that are taken "
                "back; leave one of both out."
            )


def allowed_to(allowed: Callable[[int, Tensor], Any], number: int, _: int, ids: Tensor) -> Any:
    """What may follow `ids` of sequence `number` of a batch, which transformers takes for the only one."""
    return allowed(number, ids)


def of_one(field: str, told: Tensor) -> Tensor:
    """What the processors or criteria given as `field` say of one sequence; `DraftError` where they tell of several."""
    if told.shape[0] != 1:
        raise DraftError(
            f"{field}: one tells of {told.shape[0]} sequences, and was asked about one, for here the sequences of a batch "
            "are decoded each by itself; give prompts one by one, or leave the draft out."
        )
    return told


def warp(processors: Any, sample: bool) -> Warp | None:
    """(ids before [S], logits [V]) -> probabilities [V]; None when greedy decoding takes the raw maximum."""
    if not sample and not processors:
        return None

    return Sampling(processors, sample)


@dataclass(frozen=True)
class Sampling:
    """What the processors make of one token's logits; a class of its own, so that it can travel to another process."""

    processors: Any
    sample: bool

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        scores = of_one("logits_processor", self.processors(ids[None], logits[None].float()))[0]
        if self.sample:
            return torch.softmax(scores, -1)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float()
