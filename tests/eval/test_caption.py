"""Captions under teacher forcing: what is forced, what is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmaccel import load_model, load_processor
from mmaccel_lab.eval.caption import agreement, caption_cases, caption_scores, forced, predicted
from mmaccel_lab.eval.cases import Film

NAMES = ["tiny-ov-draft", "tiny-qwen-draft"]


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_stands_at_the_end(name: str, random_folder: Callable[[str], Path]) -> None:
    folder = random_folder(name)
    model, processor = load_model(folder, dtype=torch.float32), load_processor(folder)
    (case,) = caption_cases(12, 1, 5)
    with Film() as film:
        content = case.content(film.watch(case.world))
    inputs, answer = forced(processor, content, case.answer, model)
    assert torch.equal(inputs["input_ids"][0, -len(answer) :], answer)
    assert processor.decode(answer).strip() == case.answer
    assert int(answer[-1]) == processor.tokenizer.eos_token_id
    # What stands before the answer is what `generate` would be given.
    asked = processor.chat(content)["input_ids"]
    assert torch.equal(inputs["input_ids"][:, : -len(answer)], asked)
    for extra in ("attention_mask", "mm_token_type_ids"):
        assert extra not in inputs or inputs[extra].shape == inputs["input_ids"].shape


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_the_plain_model_s(name: str, random_folder: Callable[[str], Path]) -> None:
    folder = random_folder(name)
    model, processor = load_model(folder, dtype=torch.float32), load_processor(folder)
    (case,) = caption_cases(12, 1, 6, words=60)
    with Film() as film:
        inputs, answer = forced(processor, case.content(film.watch(case.world)), case.answer, model)
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    assert torch.equal(predicted(model, inputs, len(answer)), logits[-len(answer) - 1 : -1].argmax(-1))


def test_a_model_agrees_with_itself(random_folder: Callable[[str], Path]) -> None:
    folder = random_folder("tiny-ov-draft")
    model, processor = load_model(folder, dtype=torch.float32), load_processor(folder)
    other = load_model(random_folder("tiny-ov"), dtype=torch.float32)
    with Film() as film:
        told = list(caption_cases(8, 2, 0, words=60))
        same = agreement(list(caption_scores(model, processor, told, film, draft=model)))
        apart = agreement(list(caption_scores(model, processor, told, film, draft=other)))
    assert same["agreement"] == 1.0 and same["captions"] == 2
    assert apart["agreement"] is not None and apart["agreement"] < 0.5
    assert same["accuracy"] == apart["accuracy"] and same["accuracy"] is not None and same["accuracy"] < 0.5


def test_shares_are_weighted_by_tokens() -> None:
    rows = [{"tokens": 10, "right": 10, "agrees": 0}, {"tokens": 30, "right": 0, "agrees": 30}]
    assert agreement(rows) == {"captions": 2, "tokens": 40, "accuracy": 0.25, "agreement": 0.75}
    assert agreement([{"tokens": 4, "right": 1}])["agreement"] is None
    assert agreement([])["accuracy"] is None
