"""Questions to a stream that are more than one text: several messages, also with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, check_question
from mmaccel.core.layout import IMAGE
from mmaccel.core.streams.parts import Question
from mmaccel.models import deepstack
from mmaccel.models.chat import split_into_prompts

Messages = list[dict[str, Any]]


def question_messages(question: Any) -> tuple[Messages, Messages, list[Any]]:
    """Split `question`, content pieces or messages, into: messages for the chat template; the same with the last user text
    empty, to find by comparison which tokens are that text; and the images in order.

    The stream is the video at the start of the first user turn. A system message is placed after it, since the stream has
    already read the template's beginning. Raises `ModelError` for videos, several questions or roles out of turn.
    """
    (messages, images, videos), *others = split_into_prompts(question, None, None)
    if videos or others:
        raise ModelError(
            "question: it shows a video, or is several questions; ask one question about the stream."
        )
    system = [piece for one in messages if one.get("role") == "system" for piece in one["content"]]
    turns = [one for one in messages if one.get("role") != "system"]
    roles = [one.get("role") for one in turns]
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise ModelError(
            f"question: its turns are of {roles}; give messages of user and assistant in turn, the last of the user."
        )
    last = turns[-1]["content"]
    check_question("".join(piece.get("text", "") for piece in last))
    silent = [{**piece, "text": ""} if "text" in piece else piece for piece in last]
    before = [{"type": "video"}]
    if system:
        text = "\n".join(piece.get("text", "") for piece in system)
        before.append({"type": "text", "text": f"{text}\n"})

    def led(turns: Messages) -> Messages:
        return [{**turns[0], "content": [*before, *turns[0]["content"]]}, *turns[1:]]

    return led(turns), led([*turns[:-1], {**turns[-1], "content": silent}]), images


def expand_image_placeholders(adapter: Any, question: Question, images: Sequence[Any]) -> Question:
    """Return `question`, which has one placeholder for each of `images`, with all image tokens and their embeddings."""
    processor, family, model = adapter.processor, adapter.family, adapter.model
    tokenizer, where = processor.tokenizer, {"device": adapter.device, "dtype": adapter.dtype}
    # A special token stays one between two images, whatever a tokenizer makes of words.
    text = tokenizer.eos_token.join([processor.image_token] * len(images))
    made = processor(text, images=[list(images)], add_special_tokens=False, **where)
    del made["attention_mask"]
    kinds, row = made.pop("mm_token_type_ids", None), made["input_ids"][0]
    between = (row == tokenizer.eos_token_id).nonzero()[:, 0].tolist()
    runs = [row[begin + 1 : end] for begin, end in pairwise([-1, *between, len(row)])]
    parts, begin, (first, end) = list[Tensor](), 0, question.words
    places = (question.ids == processor.image_token_id).nonzero()[:, 0].tolist()
    for at, run in zip(places, runs, strict=True):
        parts += [question.ids[begin:at], run]
        more, begin = len(run) - 1, at + 1
        first, end = first + more * (at < question.words[0]), end + more * (at < question.words[1])
    ids = torch.cat([*parts, question.ids[begin:]])
    inputs = {**made, "input_ids": ids[None]}
    if kinds is not None:
        inputs["mm_token_type_ids"] = family.token_modalities(model.config, ids[None]).int()
    with adapter.hold_model():
        embeds = deepstack.join_prompt_deepstack(family.forward_inputs(model, inputs))[0]
    layout = family.layout(model, inputs)
    layout = replace(layout, position=torch.arange(len(ids), device=layout.device)[None]).to(adapter.device)
    visual = (layout.modality[0] == IMAGE).nonzero()[:, 0]
    positions = family.positions(model, inputs)
    after = positions[:, 0] - positions[:, 0, :1] if positions.ndim == 3 else None
    seen = int(visual[-1]) + 1 if len(visual) else 0
    return Question(ids, (first, end), embeds, seen, layout, after, question.suffix_length)
