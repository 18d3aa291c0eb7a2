"""Long true captions under teacher forcing: how many tokens a model gets right, and how often a draft agrees with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.cli.answer import prompt_inputs
from mmaccel.core.attach import accelerate
from mmaccel.core.errors import ModelError
from mmaccel.core.recipe import Recipe
from mmaccel.models.shipped import CAPTION_REQUEST
from mmaccel_lab.eval.cases import Case, Film, checked_seed
from mmaccel_lab.world import World


def caption_cases(frames: int, samples: int, seed: int, words: int = 480) -> Iterator[Case]:
    """Worlds full of cards, with their captions of at most `words` words as answers."""
    checked_seed(seed)
    for number in range(seed, seed + samples):
        world = World.generate(number, frames, style="caption", max_words=words)
        yield Case(world, "caption", (("video", 0, frames),), CAPTION_REQUEST, world.caption())


def forced(
    processor: Any, content: Sequence[Mapping[str, Any]], said: str, model: nn.Module
) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of a turn whose answer is given, and the ids [n] of that answer, its end-of-turn token included.

    The answer stands at the end of ``input_ids``: logits of columns ``-n - 1`` to ``-2`` predict it.
    """
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": list(content)},
        {"role": "assistant", "content": said},
    ]
    inputs = prompt_inputs(processor, turn, model)
    ids = inputs["input_ids"][0]
    # The same turn with nothing to see has the same tokens after the question.
    bare = [dict(piece) for piece in content if piece["type"] == "text"]
    opening = processor.chat([{"role": "user", "content": bare}])["input_ids"][0]
    whole = processor.chat([{"role": "user", "content": bare}, turn[1]])["input_ids"][0]
    answer = whole[len(opening) :]
    end = (answer == processor.tokenizer.eos_token_id).nonzero()
    if not torch.equal(whole[: len(opening)], opening) or not len(end):
        raise ModelError(
            "the chat template changes a turn when its answer is known; captions need one that does not."
        )
    answer, tail = answer[: int(end[0]) + 1], len(answer) - int(end[0]) - 1
    length = len(ids) - tail
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = inputs[name][:, :length]
    return inputs, answer.to(ids.device)


@torch.no_grad()
def predicted(
    model: nn.Module, inputs: Mapping[str, Tensor], count: int, recipe: Recipe | None = None
) -> Tensor:
    """[count] the most likely token at each of the last `count` columns, every earlier one given."""
    with accelerate(model, recipe) as fast:
        logits = fast(**inputs, logits_to_keep=count + 1).logits
    return logits[0, -count - 1 : -1].argmax(-1)  # type: ignore[no-any-return]


def caption_scores(
    model: nn.Module,
    processor: Any,
    asked: Sequence[Case] | Iterator[Case],
    film: Film,
    *,
    recipe: Recipe | None = None,
    draft: nn.Module | None = None,
) -> Iterator[dict[str, int]]:
    """For each caption: its `tokens`, how many the model gets `right`, and on how many the draft `agrees` (with a draft)."""
    for case in asked:
        inputs, answer = forced(processor, case.content(film.watch(case.world)), case.answer, model)
        mine = predicted(model, inputs, len(answer), recipe)
        row = {"tokens": len(answer), "right": int((mine == answer).sum())}
        if draft is not None:
            theirs = predicted(draft, _like(draft, inputs), len(answer)).to(mine.device)
            row["agrees"] = int((mine == theirs).sum())
        yield row


def agreement(rows: Sequence[Mapping[str, int]]) -> dict[str, float | None]:
    """Shares over all captions: `accuracy` of the model, `agreement` of the draft (None without one), and `tokens`."""
    tokens = sum(row["tokens"] for row in rows)
    if not tokens:
        return {"captions": 0, "tokens": 0, "accuracy": None, "agreement": None}
    agrees = [row["agrees"] for row in rows if "agrees" in row]
    return {
        "captions": len(rows),
        "tokens": tokens,
        "accuracy": sum(row["right"] for row in rows) / tokens,
        "agreement": sum(agrees) / tokens if len(agrees) == len(rows) else None,
    }


def _like(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first = next(model.parameters())
    moved = {name: x.to(first.device) for name, x in inputs.items()}
    return {
        name: x.to(first.dtype) if x.is_floating_point() and "pixel" in name else x
        for name, x in moved.items()
    }
