"""Policies and families that others write: what they declare decides what they may stand beside, and they lack nothing."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

import mmaccel
from mmaccel.contract.draft import check_draft
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.recipe import Recipe, check_policies_compatible, stream_policy
from mmaccel.core.registry import registry
from mmaccel.models.llava_onevision import LlavaOnevision
from mmaccel.models.processor import Processor
from mmaccel.models.prompt_layout import ProcessorSpec
from mmaccel.policies.draft import PromptLookup, Sequential, SparseToDense, TextOnly
from mmaccel.policies.draft.prompt_lookup import _Finder
from mmaccel.policies.kv.full import Full
from mmaccel.policies.kv.window import Window
from mmaccel.policies.sparse.dense import Dense
from tests.models.streams import pair, processor_like
from tests.models.tiny_random import BUILD, PROMPTS, prompt


class _Named(_Finder):
    """Its counters have names that a shipped draft uses for something else."""

    def counters(self) -> dict[str, float]:
        return {"pauses": 3.0, "alone": 2.0, "window": 4.0}

    def report_notes(self) -> list[str]:
        return ["it looked 3 times"]


@dataclass(frozen=True, kw_only=True)
class Theirs(PromptLookup):
    """A draft of somebody else's, with a field of its own named `model`."""

    name: ClassVar[str] = "theirs"

    model: str = "a table of n-grams"

    def open(self, target: Any) -> _Named:
        return _Named(self.window, self.ngram)


@dataclass(frozen=True, kw_only=True)
class Counting(Full):
    """A memory that keeps everything, as the one it is made of, under another name."""

    name: ClassVar[str] = "counting"


@dataclass(frozen=True, kw_only=True)
class Plain(Dense):
    """Dense attention under another name."""

    name: ClassVar[str] = "plain"


@pytest.mark.parametrize("family", sorted(BUILD))
def test_a_draft_tells_the_report_what_its_figures_mean(family: str) -> None:
    check_draft(Theirs())
    model = BUILD[family]()
    with mmaccel.accelerate(model, draft=Theirs()) as fast:
        model.generate(**prompt(family, PROMPTS["text"]), max_new_tokens=12, do_sample=False)
        report = fast.report()
    assert report.draft["counters"]["pauses"] == 3.0
    lines = [line for line in str(report).splitlines() if line.startswith("draft: ")]
    assert "draft: it looked 3 times" in lines and len(lines) <= 2


def test_a_memory_is_known_by_what_it_declares() -> None:
    check_policies_compatible(Recipe(kv=Counting(), draft=SparseToDense()))
    model = BUILD["llava"]()
    inputs = prompt("llava", PROMPTS["video"])
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    with mmaccel.accelerate(model, kv=Counting(), draft=SparseToDense(window=3)) as fast:
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), plain)
        assert fast.report().draft["proposed"] > 0
    with pytest.raises(RecipeError, match="set kv to 'full' or 'window'"):
        check_policies_compatible(Recipe.load(kv="mosaic", draft=SparseToDense()))


def test_a_dense_pattern_is_known_by_what_it_declares() -> None:
    """Dense attention under another name may stand beside every memory, and nothing is measured for it."""
    for recipe in (Recipe(sparse=Plain(), kv=Window()), Recipe.load("mosaic", sparse=Plain())):
        check_policies_compatible(recipe)
    stream_policy(Recipe.load("mosaic", sparse=Plain()))
    with mmaccel.accelerate(BUILD["llava"](), sparse=Plain()) as fast:
        assert fast.attention.choice is not None and "lists no block" in fast.attention.choice.why


def test_a_policy_declares_its_files_and_the_words_taken_for_it(tmp_path: Path) -> None:
    """A file that ends as a policy says is a recipe of that policy; a word that it explains is explained."""

    @mmaccel.register("sparse", "of_a_file")
    @dataclass(frozen=True, kw_only=True)
    class OfAFile(Dense):
        file: ClassVar[tuple[str, str]] = (".heads", "table")
        words: ClassVar[dict[str, str]] = {"headwise": "is a kind of file; give the file"}

        table: str = ""

    try:
        recipe = Recipe.load(tmp_path / "some.heads")
        assert recipe.sparse == OfAFile(table=str(tmp_path / "some.heads"))
        for given, kind in (("headwise", "recipe"), ({"sparse": "headwise"}, "sparse")):
            with pytest.raises(RecipeError, match=f"^{kind} 'headwise' is a kind of file; give the file.$"):
                Recipe.load(given)
    finally:
        del registry("sparse")._classes["of_a_file"]


def test_a_draft_on_a_stream_is_known_by_what_it_declares() -> None:
    class Reads(Theirs):
        needs = frozenset({"rollback", "prompt"})

    for draft in (Theirs(), TextOnly(model="x"), Sequential(model="x")):
        stream_policy(Recipe.load("mosaic", draft=draft))
    with pytest.raises(RecipeError, match="a stream has none"):
        stream_policy(Recipe.load(kv="full", draft=Reads()))
    with pytest.raises(RecipeError, match="a VideoSession does not have; set draft to 'off'"):
        stream_policy(Recipe.load(kv="full", draft=SparseToDense()))


class TheirConfig(LlavaOnevisionConfig):
    model_type = "theirs_onevision"


class TheirModel(LlavaOnevisionForConditionalGeneration):
    config_class = TheirConfig


class TheirNorm(Qwen2RMSNorm):
    pass


class TheirLayer(Qwen2DecoderLayer):
    pass


class TheirFamily(LlavaOnevision):
    """LLaVA-OneVision under another model type, with decoder layers and norms of other classes."""

    name = "theirs"
    model_types = ("theirs_onevision",)
    processors: ClassVar[Mapping[str, ProcessorSpec]] = {
        "theirs_onevision": LlavaOnevision.processors["llava_onevision"]
    }
    decoder_layers = frozenset({"TheirLayer"})
    rms_norms = frozenset({"TheirNorm"})


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Processor]:
    """A model and a processor of their family, made of those of LLaVA-OneVision."""
    monkeypatch.setitem(registry("model")._classes, "theirs", TheirFamily)
    like, processor = pair("random-ov")
    config = TheirConfig.from_dict({**like.config.to_dict(), "model_type": "theirs_onevision"})
    model = TheirModel(config).float().eval()
    model.load_state_dict(like.state_dict())
    model.generation_config = copy.deepcopy(like.generation_config)
    for layer in model.model.language_model.layers:
        layer.__class__ = TheirLayer
        layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = TheirNorm
    return model, processor_like(processor, "theirs_onevision", config=config.to_dict())


def test_its_facts_are_those_of_its_class(theirs: tuple[Any, Processor], tmp_path: Any) -> None:
    from mmaccel.models.modules import is_norm
    from mmaccel.models.step import can_fuse_layers

    model, processor = theirs
    layers, family = list(model.model.language_model.layers), TheirFamily()
    assert can_fuse_layers(layers, "silu", family) and not can_fuse_layers(layers, "silu", LlavaOnevision())
    norm = layers[0].input_layernorm
    assert is_norm(norm, family) and not is_norm(norm, LlavaOnevision())
    processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    assert Processor.from_pretrained(tmp_path).model_type == "theirs_onevision"


def test_a_family_without_a_fact_does_without(theirs: tuple[Any, Processor], monkeypatch) -> None:
    model, processor = theirs
    monkeypatch.setattr(TheirFamily, "vision_tower_reader", None)
    with pytest.raises(RecipeError, match="cannot read the vision tower of theirs"):
        mmaccel.accelerate(model, prune="visionzip")
    monkeypatch.setattr(TheirFamily, "processors", {})
    with pytest.raises(ModelError, match="'theirs_onevision' is not one of llava_onevision, qwen2"):
        Processor("theirs_onevision", processor.tokenizer)
