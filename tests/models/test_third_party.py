"""Policies that others write: what they declare decides what they may stand beside, and their names are their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import mmaccel
from mmaccel.contract.draft import check_draft
from mmaccel.core.errors import RecipeError
from mmaccel.core.recipe import Recipe, check_pairs, stream_policy
from mmaccel.core.registry import registry
from mmaccel.policies.draft import PromptLookup, Sequential, SparseToDense, TextOnly
from mmaccel.policies.draft.prompt_lookup import _Finder
from mmaccel.policies.kv.full import Full
from mmaccel.policies.kv.window import Window
from mmaccel.policies.sparse.dense import Dense
from tests.models.tiny_random import BUILD, PROMPTS, prompt


class _Named(_Finder):
    """Its counters have names that a shipped draft uses for something else."""

    def counters(self) -> dict[str, float]:
        return {"pauses": 3.0, "alone": 2.0, "window": 4.0}

    def notes(self) -> list[str]:
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
    assert lines[-1] == "draft: it looked 3 times" and len(lines) <= 2


def test_a_memory_is_known_by_what_it_declares() -> None:
    check_pairs(Recipe(kv=Counting(), draft=SparseToDense()))
    model = BUILD["llava"]()
    model.generation_config.eos_token_id = None
    inputs = prompt("llava", PROMPTS["video"])
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    with mmaccel.accelerate(model, kv=Counting(), draft=SparseToDense(window=3)) as fast:
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), plain)
        assert fast.report().draft["proposed"] > 0
    with pytest.raises(RecipeError, match="kv to 'full'"):
        check_pairs(Recipe.load(kv="window", draft=SparseToDense()))


def test_a_dense_pattern_is_known_by_what_it_declares() -> None:
    """Dense attention under another name may stand beside every memory, and nothing is measured for it."""
    for recipe in (Recipe(sparse=Plain(), kv=Window()), Recipe.load("mosaic", sparse=Plain())):
        check_pairs(recipe)
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
    with pytest.raises(RecipeError, match="reads its video before there is a question"):
        stream_policy(Recipe.load(kv="full", draft=SparseToDense()))
