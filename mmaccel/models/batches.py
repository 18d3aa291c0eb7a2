"""A batch under a draft: each sequence by itself, with its own inputs; and whether that is faster than plain steps.

With a draft each sequence takes its own target steps, one sequence after the other; a plain step serves the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.errors import DraftError, ModelError
from mmaccel.core.layout import IMAGE, VIDEO
from mmaccel.core.report import Meter
from mmaccel.models.family_facts import FamilyFacts
from mmaccel.models.prompt_layout import is_given

MARGIN = 1.1
"""How many times faster than plain steps of the batch a draft must be."""
STEPS = 4
"""A call with fewer steps is not measured."""
TIMED = 2
"""Plain calls of a batch's size that are timed before a draft may act there: the first step may be compiled or captured."""

STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
"""Processors of transformers that remember what they were asked, token by token, and the arguments that they are made of: a
draft asks about tokens that are refused, too, and about the same place twice."""

_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids", "position_ids")


@dataclass
class DraftTimes:
    """Times measured on one accelerated model, and the decision for a batch.

    A step takes longer on a longer prompt, so that times are kept apart by the number of binary digits of the prompt's
    length: those of prompts of 1,024 to 2,047 columns are together.

    drafted_s  for each class of lengths the seconds that a token of one sequence takes with the draft, from the last call
               that drafted, of any batch; a class next to it will do, for a prompt given alone is rarely as long as a batch
    plain_s    for each size of a batch and class of lengths the seconds of its plain steps, each of which gives every
               sequence a token, by call
    """

    drafted_s: dict[int, float] = field(default_factory=dict)
    plain_s: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    warned: bool = False

    def drafted(self, length: int, seconds: float, tokens: int) -> None:
        """A call with a draft, on prompts of `length` columns, took `seconds` for `tokens`, over all its sequences."""
        if tokens >= STEPS:
            self.drafted_s[length.bit_length()] = seconds / tokens

    def plain(self, batch: int, length: int, meter: Meter) -> None:
        """A plain call of `batch` sequences, on prompts of `length` columns, has ended."""
        steps, key = meter.new_tokens - 1, (batch, length.bit_length())
        if steps >= STEPS and meter.first is not None and meter.last is not None:
            self.plain_s[key] = [*self.plain_s.get(key, []), (meter.last - meter.first) / steps][-TIMED:]

    def why_not(self, batch: int, length: int) -> str | None:
        """Why a draft would not be faster in a batch of this size, on prompts of `length` columns; None: it is."""
        size = length.bit_length()
        timed = self.plain_s.get((batch, size), [])
        own = next(
            (self.drafted_s[near] for near in (size, size + 1, size - 1) if near in self.drafted_s), None
        )
        if own is None:
            return f"a drafted token is timed on a prompt of about {length} tokens given alone, and none was given"
        if len(timed) < TIMED:
            alike = f"{1 << size >> 1} to {(1 << size) - 1} tokens"
            return f"plain steps of {batch} sequences, of {alike} each, must first be timed in {TIMED} calls"
        turns, step = own * batch, min(timed)
        if turns * MARGIN <= step:
            return None
        return f"a token for each takes {turns * 1e3:.3g} ms with a draft in turns, {step * 1e3:.3g} ms in plain steps"


def split_batch(family: FamilyFacts, model: nn.Module, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The inputs of each sequence of a batch by itself, its padding included; what tells of neither sequences nor
    pixels stays in each."""
    if is_given(inputs.get("mm_encoder_outputs")):
        raise ModelError(
            "mm_encoder_outputs: a batch is split by its pixels; give these, or prompts one by one."
        )
    layout = family.layout(model, inputs)
    rows: list[dict[str, Any]] = []
    for b in range(layout.batch):
        row = dict(inputs)
        for name in _TOKENS:
            if is_given(inputs.get(name)):
                row[name] = inputs[name][..., b : b + 1, :]
        rows.append(row)
    for kind in (IMAGE, VIDEO):
        counts = [layout.segment[b][layout.modality[b] == kind].unique().numel() for b in range(layout.batch)]
        for name, sizes in family.shares(inputs, kind).items():
            if sum(counts) != len(sizes):
                raise ModelError(
                    f"{name} has {len(sizes)} pictures or videos and input_ids {sum(counts)}, so that it cannot be told "
                    "which sequence each is of; give prompts one by one."
                )
            item, begin = 0, 0
            for row, count in zip(rows, counts, strict=True):
                end = begin + sum(sizes[item : item + count])
                row[name] = inputs[name][begin:end]
                if not count:
                    del row[name]
                item, begin = item + count, end
    return rows


def allowed_to(allowed: Callable[[int, Tensor], Any], number: int, _: int, ids: Tensor) -> Any:
    """What may follow `ids` of sequence `number` of a batch, which transformers takes for the only one."""
    return allowed(number, ids)


def of_one(field: str, verdict: Tensor) -> Tensor:
    """What the processors or criteria given as `field` say of one sequence; `DraftError` where they tell of several."""
    if verdict.shape[0] != 1:
        raise DraftError(
            f"{field}: one tells of {verdict.shape[0]} sequences, and was asked about one, for here the sequences of a "
            "batch are decoded each by itself; give prompts one by one, or leave the draft out."
        )
    return verdict


@dataclass(frozen=True)
class Sampling:
    """What the processors make of one token's logits: (ids before [S], logits [V]) -> probabilities [V]. A class of its own,
    so that it can travel to another process."""

    processors: Any
    sample: bool

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        scores = of_one("logits_processor", self.processors(ids[None], logits[None].float()))[0]
        if self.sample:
            return torch.softmax(scores, -1)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float()
