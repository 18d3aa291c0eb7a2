"""One question to one accelerated model: content to inputs, inputs to text and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.attach import Accelerated, accelerate
from mmaccel.core.generate import MAX_NEW_TOKENS, FinishReason
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Report


@dataclass(frozen=True)
class Answer:
    """What a model said, and what it took.

    `text` is without special tokens; `raw`, up to the end of the turn, has those that stand inside it; `report` is the
    run's; `finish_reason` is "stop", "length" or "positions", as `core.generate.Answer` has it.
    """

    text: str
    raw: str = field(repr=False)
    report: Report = field(repr=False)
    finish_reason: FinishReason = "stop"


def prompt(processor: Any, content: Sequence[Mapping[str, Any]], model: nn.Module) -> dict[str, Tensor]:
    """Inputs of one turn (pieces of type "video", "image" and "text", in order) on the model's device, in its dtype."""
    first = next(model.parameters())
    inputs = processor.chat(content, device=first.device, dtype=first.dtype)
    return {name: x.to(first.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def generate(
    model: nn.Module | Accelerated, inputs: Mapping[str, Tensor], recipe: Recipe | None = None, **options: Any
) -> tuple[Tensor, Report]:
    """New ids [B, n], greedy unless `options` say otherwise, and the report; a plain model gets `recipe` meanwhile."""
    if not isinstance(model, Accelerated):
        with accelerate(model, recipe) as fast:
            return generate(fast, inputs, **options)
    with torch.no_grad():
        ids = model.generate(**inputs, **{"do_sample": False, **options})
    return ids[:, inputs["input_ids"].shape[1] :], model.report()


def ask(
    model: nn.Module | Accelerated,
    processor: Any,
    inputs: Mapping[str, Tensor],
    recipe: Recipe | None = None,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    streamer: Any = None,
) -> Answer:
    """The greedy answer to the first prompt of `inputs`; a plain model gets `recipe` for the length of the call."""
    return ask_each(model, processor, inputs, recipe, max_new_tokens=max_new_tokens, streamer=streamer)[0]


def ask_each(
    model: nn.Module | Accelerated,
    processor: Any,
    inputs: Mapping[str, Tensor],
    recipe: Recipe | None = None,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    streamer: Any = None,
) -> list[Answer]:
    """The greedy answer to each prompt of a batch; all have its report, whose shares and prompt tokens are means over it."""
    ids, report = generate(model, inputs, recipe, max_new_tokens=max_new_tokens, streamer=streamer)
    plain = model.model if isinstance(model, Accelerated) else model
    answers, ends = [], ends_of(plain, processor.tokenizer)
    if len(ids) > 1:
        report = replace(report, prompt_tokens=report.prompt_tokens // len(ids))
    for said in ids.tolist():
        reason = finish_reason(said, ends, max_new_tokens)
        # A shorter answer of a batch is padded.
        said = list(takewhile(lambda token: token not in ends, said))
        text = processor.decode(said).strip()
        answers.append(Answer(text, _raw(processor.tokenizer, said, text), report, reason))
    return answers


def finish_reason(said: Sequence[int], ends: set[int], most: int) -> FinishReason:
    """Why `generate` ended a sequence of new ids `said`, of which it was to make at most `most`."""
    if ends & set(said):
        return "stop"
    return "length" if len(said) >= most else "positions"


def ends_of(model: nn.Module, tokenizer: Any) -> set[int]:
    """The tokens at which the model stops; the tokenizer's end of a turn where it names none."""
    told: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if told is None:
        told = tokenizer.eos_token_id
    return set(told) if isinstance(told, list | tuple) else {told}


def _raw(tokenizer: Any, said: list[int], text: str) -> str:
    """The text of an answer without its end, special tokens and all."""
    special = {place for place, token in tokenizer.added_tokens_decoder.items() if token.special}
    return str(tokenizer.decode(said, skip_special_tokens=False)).strip() if special & set(said) else text
