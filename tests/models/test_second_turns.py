"""Later turns of a conversation, on the cache of the turn before, under every draft: the text of one whole prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.errors import MmaccelWarning
from mmaccel.models.runner import HFRunner
from mmaccel.policies.draft import Parallel, PromptLookup, Sequential, SparseToDense, TextOnly, Tree
from mmaccel.policies.prune import FastV
from tests.models.tiny_random import BUILD, IMG, VE, VID, VS, prompt
from tests.products import product

pytestmark = pytest.mark.in_turn("family", 1)

TOKENS = 10
DRAFTS: dict[str, Callable[..., Any]] = {
    "off": lambda model: "off",
    "prompt_lookup": lambda model: PromptLookup(),
    "sequential": lambda model, **own: Sequential(model=model, window=3, **own),
    "text_only": lambda model: TextOnly(model=model, window=3),
    "tree": lambda model, **own: Tree(model=model, **own),
    "parallel": lambda model, **own: Parallel(model=model, window=3, process=False, **own),
    "sparse_to_dense": lambda model: SparseToDense(window=3, retention=0.5),
}
TURNS = {
    "text": [[("text", 6), ("video", 4), ("text", 9)], [("text", 8)], [("text", 5)]],
    "video": [
        [("text", 6), ("image",), ("text", 9)],
        [("text", 3), ("video", 6), ("text", 8)],
        [("text", 5)],
    ],
}


def sharp(name: str) -> Any:
    """A random model whose texts vary, and hold no placeholder: its weights are louder than drawn."""
    model = BUILD[name](layers=3)
    for weight in model.model.language_model.layers.parameters():
        weight.data *= 6 if weight.ndim == 2 else 1
    model.get_output_embeddings().weight.data[[IMG, VID, VS, VE]] = 0
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    model = sharp(request.param)
    return request.param, model, copy.deepcopy(model)


def said(name: str, inputs: dict[str, Tensor], answer: Tensor, turn: dict[str, Tensor]) -> tuple[Any, Any]:
    """The next turn, after `answer` [1, S] on the cache, and as one whole prompt."""
    ids = torch.cat([answer, turn["input_ids"]], 1)
    new = {**turn, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    whole = {**inputs, **{k: v for k, v in new.items() if "pixel" not in k and "grid" not in k}}
    for name in turn:
        if name not in ("input_ids", "attention_mask", "mm_token_type_ids"):
            whole[name] = torch.cat([inputs[name], turn[name]]) if name in inputs else turn[name]
    if "mm_token_type_ids" in turn:
        gap = answer.shape[1] - inputs["mm_token_type_ids"].shape[1]
        kinds = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, gap))
        new["mm_token_type_ids"] = whole["mm_token_type_ids"] = torch.cat(
            [kinds, turn["mm_token_type_ids"]], 1
        )
    return new, whole


def talk(
    fast: Any, name: str, turns: Any, wanted: list[Tensor] | None = None, **more: Any
) -> tuple[list[Tensor], list[Any]]:
    """The answers of a conversation on one cache, and the report of each turn."""
    whole: dict[str, Any] = {}
    answers, reports, cache = [], [], None
    for number, pieces in enumerate(turns):
        turn = prompt(name, pieces, seed=number)
        given, whole = (turn, turn) if cache is None else said(name, whole, answers[-1], turn)
        out = fast.generate(
            **given,
            past_key_values=cache,
            max_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            **more,
        )
        cache = out.past_key_values
        answers.append(out.sequences)
        reports.append(fast.report())
    return answers, reports


def plainly(model: Any, name: str, turns: Any) -> list[Tensor]:
    """The same, each turn one whole prompt to the plain model."""
    whole: dict[str, Any] = {}
    answers: list[Tensor] = []
    for number, pieces in enumerate(turns):
        turn = prompt(name, pieces, seed=number)
        whole = turn if not answers else said(name, whole, answers[-1], turn)[1]
        answers.append(model.generate(**whole, max_new_tokens=TOKENS, do_sample=False))
    assert all(len(set(one[0, -TOKENS:].tolist())) > 2 for one in answers), "the texts must vary"
    return answers


@pytest.mark.parametrize(
    ("draft", "turns", "family"), product(DRAFTS, TURNS, sorted(BUILD)), indirect=["family"]
)
def test_turns_on_one_cache_are_one_whole_prompt(family, draft: str, turns: str, monkeypatch) -> None:
    name, model, peer = family
    want = plainly(model, name, TURNS[turns])
    read: list[tuple[bool, int, bool]] = []
    prefill = HFRunner.prefill

    def noted(self: HFRunner, inputs: Any, *rest: Any, **more: Any) -> Tensor:
        pixels = any(inputs.get(one) is not None for one in ("pixel_values", "pixel_values_videos"))
        read.append((self.model is peer, inputs["input_ids"].shape[1], pixels))
        return prefill(self, inputs, *rest, **more)

    monkeypatch.setattr(HFRunner, "prefill", noted)
    with mmaccel.accelerate(model, draft=DRAFTS[draft](peer)) as fast:
        got, reports = talk(fast, name, TURNS[turns])
    assert [one.tolist() for one in got] == [one.tolist() for one in want]
    for report in reports:
        assert not report.notes
        if draft == "off":
            continue
        assert report.draft["failed"] is None
        assert report.draft["rounds"] > 0 or draft == "prompt_lookup"
        if draft in ("sequential", "parallel"):
            assert report.draft["accepted"] == report.draft["proposed"] > 0, (
                "a twin that sees the same is right"
            )
    if draft in ("sequential", "parallel", "tree", "text_only"):
        mine = [one for one in read if one[0]]
        assert len(mine) == 3
        assert all(
            columns <= TOKENS + len(one) for (_, columns, _), one in zip(mine, [got[0][0]], strict=False)
        )
        words = prompt(name, TURNS[turns][2], seed=2)["input_ids"].shape[1]
        assert words < mine[2][1] <= words + TOKENS, "what was read before is not read again"
    if draft == "sparse_to_dense":
        assert reports[1].draft["accepted"] > 0


@pytest.mark.parametrize("draft", ["off", "prompt_lookup"])
def test_columns_of_later_turns_are_known_for_what_they_are(family, draft: str) -> None:
    """transformers runs the tower before the model's forward, which then sees no pixels."""
    name, model, _ = family
    first, turn = (prompt(name, pieces, seed=n) for n, pieces in enumerate(TURNS["video"][:2]))
    how: Any = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}
    with mmaccel.accelerate(model, draft=draft) as fast:
        out = fast.generate(**first, **how)
        given, whole = said(name, first, out.sequences, turn)
        again = fast.generate(**given, past_key_values=out.past_key_values, **how)
        known = again.past_key_values.sequence
        want = fast.adapter.layout(model, whole)
        assert bool((want.modality[0, first["input_ids"].shape[1] + TOKENS :] != 0).any())
        for field in ("modality", "frame", "row", "column"):
            own = getattr(known.layout, field)
            assert torch.equal(own[:, : want.length], getattr(want, field)), field
        ends = fast.adapter.positions(model, whole).flatten(0, -2)[-1, -1]
        assert int(known.delta) == int(ends) + 1 - want.length


@pytest.mark.filterwarnings("ignore::mmaccel.core.errors.MmaccelWarning")
def test_a_pruner_of_the_target_says_that_it_leaves_a_later_video(family) -> None:
    name, model, peer = family
    told: list[Any] = []
    prune = FastV(layer=1, retention=0.3)
    for draft in ("off", Sequential(model=peer, window=3)):
        with mmaccel.accelerate(model, prune=prune, draft=draft) as fast:
            answers, reports = talk(fast, name, TURNS["video"])
        told.append([one.tolist() for one in answers])
        assert [any("of this turn whole" in note for note in one.notes) for one in reports] == [
            False,
            True,
            False,
        ]
        assert reports[0].kv["visual from layer 1"] == int(0.3 * reports[0].kv["visual"]) > 0
    assert told[0] == told[1]
    with mmaccel.accelerate(model, prune=prune) as fast, pytest.warns(MmaccelWarning, match="of this turn"):
        talk(fast, name, TURNS["video"][:2])
