"""OnSD with a language model that never had eyes: it drafts from the text alone, and what is said stays the target's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

import mmaccel
from mmaccel.core.decoding.draft import Drafting
from mmaccel.core.errors import DraftError, MmaccelError, ModelError
from mmaccel.models import loading, step
from mmaccel.models.causal import reads
from mmaccel.models.family import Causal
from mmaccel.policies.draft import Sequential, TextOnly
from mmaccel.policies.draft.sequential import Drafter
from tests.models.tiny_random import BUILD, IMG, PROMPTS, VID, VOCAB, prompt
from tests.products import product

pytestmark = pytest.mark.in_turn("family", 1)


def words_of(target: torch.nn.Module | None = None, vocab: int = VOCAB) -> T.Qwen2ForCausalLM:
    """A Qwen2 of the tiny models' sizes, with the weights of the language model of `target` if that is given."""
    torch.manual_seed(5)
    like: Any = T.Qwen2Config() if target is None else target.config.get_text_config()
    rope = {"rope_type": "default", "rope_theta": like.rope_parameters["rope_theta"]}
    model = T.Qwen2ForCausalLM(
        T.Qwen2Config(
            vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            tie_word_embeddings=False, rms_norm_eps=like.rms_norm_eps, rope_parameters=rope,
        )
    ).eval()  # fmt: skip
    if target is not None:
        model.model.load_state_dict(target.model.language_model.state_dict())
        model.lm_head.load_state_dict(target.lm_head.state_dict())
    return model


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request):
    model = BUILD[request.param]()
    model.generation_config.eos_token_id = None
    return request.param, model


@pytest.mark.parametrize(
    ("kind", "family"), product(["text", "video", "interleaved"], sorted(BUILD)), indirect=["family"]
)
def test_greedy_tokens_are_the_plain_ones(family, kind: str, tmp_path: Path) -> None:
    name, target = family
    inputs = prompt(name, PROMPTS[kind])
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    words_of(target).save_pretrained(tmp_path)
    for draft in (TextOnly(model=words_of(target), window=3), TextOnly(model=str(tmp_path), window=3)):
        with mmaccel.accelerate(target, draft=draft) as fast:
            assert torch.equal(target.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
            told = fast.report().draft
        assert told["failed"] is None and told["rounds"] > 0 and told["proposed"] > 0
        if kind == "text":
            assert told["accepted"] == told["proposed"], (
                "it has the target's weights, and reads what the target reads"
            )


def test_its_steps_are_those_that_are_captured(family, monkeypatch: pytest.MonkeyPatch) -> None:
    name, target = family
    inputs, draft = prompt(name, PROMPTS["text"]), words_of(target)
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    assert reads(draft) and Causal().runner(draft).steps is not None
    with mmaccel.accelerate(target, draft=TextOnly(model=draft, window=3)) as fast:
        assert torch.equal(target.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
        told = fast.report().draft
    assert told["failed"] is None and 0 < told["accepted"] == told["proposed"]


def test_placeholders_are_never_proposed(family, monkeypatch: pytest.MonkeyPatch) -> None:
    name, target = family
    draft = words_of()
    draft.lm_head.weight.data[[IMG, VID]] = 20 * draft.lm_head.weight.data[[5]].abs().max()
    proposed: list[int] = []
    plain = Drafter.drafting

    def drafting(self: Drafter, most: int | None = None) -> Drafting:
        found = yield from plain(self, most)
        proposed.extend(found.ids.tolist())
        return found

    monkeypatch.setattr(Drafter, "drafting", drafting)
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 2.0}):
        with mmaccel.accelerate(target, draft=TextOnly(model=draft, window=4)) as fast:
            target.generate(**prompt(name, PROMPTS["video"]), max_new_tokens=16, **options)
            assert fast.report().draft["failed"] is None
    assert len(proposed) > 20 and not {IMG, VID} & set(proposed)


def refused(works: Callable[[], object]) -> str:
    with pytest.raises(MmaccelError) as error:
        works()
    return str(error.value)


def test_what_cannot_draft_is_told(family, tmp_path: Path) -> None:
    _, target = family
    other = words_of(vocab=400)
    told = refused(lambda: mmaccel.accelerate(target, draft=TextOnly(model=other)))
    assert "the draft has 400 token embeddings and the target 200" in told
    state = T.MambaForCausalLM(
        T.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    told = refused(lambda: mmaccel.accelerate(target, draft=TextOnly(model=state)))
    assert "cannot roll back" in told
    for strategy in (Sequential, TextOnly):
        told = refused(
            lambda strategy=strategy: mmaccel.accelerate(target, draft=strategy(model=torch.nn.Linear(1, 1)))
        )
        assert "not supported" in told
    assert "'qwen2' is not supported" in refused(
        lambda: mmaccel.accelerate(target, draft=Sequential(model=words_of()))
    )
    with pytest.raises(ModelError, match="'qwen2' is not supported"):
        mmaccel.accelerate(words_of())
    assert mmaccel.attached(target) is None


def test_it_is_told_before_anything_is_loaded(
    random_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_folder("tiny-ov-draft")
    vocab = loading.outline(folder).geometry.vocab
    for count in (vocab, vocab + 5000):
        words_of(vocab=count).save_pretrained(tmp_path / str(count))
    monkeypatch.setattr(
        T.PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("something is loaded")
    )
    recipe = {"name": "text_only", "model": str(tmp_path / str(vocab))}
    loading.check_recipe({"draft": recipe}, folder)
    with pytest.raises(DraftError, match="token embeddings"):
        loading.check_recipe({"draft": {**recipe, "model": str(tmp_path / str(vocab + 5000))}}, folder)
    with pytest.raises(DraftError, match="'qwen2' is not supported"):
        loading.check_recipe({"draft": {**recipe, "name": "sequential"}}, folder)
