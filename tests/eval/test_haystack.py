"""Needles by length and depth: what is asked, how rivals are levelled, what is made of the answers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from mmaccel.core.errors import RecipeError
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Meter
from mmaccel.eval.haystack import Haystack, Shot, haystack_cases
from mmaccel.eval.picture import haystack_maps
from mmaccel.eval.rivals import RIVALS, Fields, Rival, computed, level


@pytest.mark.parametrize("documents", [0, 4])
def test_every_depth_is_asked_equally_often(documents: int) -> None:
    asked = list(haystack_cases(64, 4, 3, 7, documents=documents))
    assert Counter(depth for depth, _ in asked) == dict.fromkeys(range(4), 3)
    for depth, case in asked:
        card = next(card for card in case.world.cards if f" {card.shape} " in case.question)
        assert card.frame * 4 // 64 == depth and card.colour == case.answer
        assert ({piece[0] for piece in case.pieces} == {"video", "text"}) == bool(documents)


def test_a_rival_comes_to_the_share_it_is_given() -> None:
    asked: list[float] = []

    def measure(fields: Fields) -> float:
        asked.append(fields["sparse"]["window"])
        return min(1.0, fields["sparse"]["window"] / 10_000)

    fields, share = level(RIVALS["a_shape"], 0.15, measure)
    assert abs(share / 0.15 - 1) <= 0.02 and share == fields["sparse"]["window"] / 10_000
    assert len(asked) <= 12 and set(fields["sparse"]) == {"name", "sink", "window"}
    # 128 and 4096 of Table 2 keep their ratio.
    assert abs(fields["sparse"]["window"] / fields["sparse"]["sink"] - 32) < 1


def test_a_rival_that_cannot_come_so_low_comes_as_near_as_it_can() -> None:
    assert level(RIVALS["a_shape"], 0.1, lambda fields: 0.4 + fields["sparse"]["window"] / 1e6)[1] < 0.401


def test_a_rival_without_a_budget_stays_as_it_is() -> None:
    assert level(Rival(lambda m: {"sparse": "sf_fixed"}, budget=False), 0.1, lambda fields: 0.6)[1] == 0.6
    with pytest.raises(RecipeError, match="share is 0"):
        level(RIVALS["a_shape"], 0.0, lambda fields: 1.0)


@pytest.mark.parametrize("name", sorted(RIVALS))
@pytest.mark.parametrize("m", [1 / 256, 1.0, 64.0])
def test_every_budget_makes_a_recipe(name: str, m: float) -> None:
    recipe = Recipe.load(RIVALS[name].make(m))
    assert name in (recipe.sparse.name, recipe.prune.name if recipe.prune is not None else "minference")


def test_dropped_tokens_are_attention_not_computed() -> None:
    report = Meter().report({}, "reference", {}, torch.device("cpu"))
    told = replace(report, kept=0.5, patterns=(("dense",),) * 4, prompt_tokens=100)
    assert computed(report) is None and computed(told) == 0.5
    # From layer 2 on 20 of 80 video tokens are left: 40 of 100 tokens, 0.16 of the pairs, in half the layers.
    dropped = replace(told, kv={"video": 80.0, "video from layer 2": 20.0})
    assert computed(dropped) == pytest.approx(0.5 * (1 + 1 + 0.16 + 0.16) / 4)


def _shots(recipe: str, rights: list[bool], kept: float = 0.1) -> list[Shot]:
    return [
        Shot(recipe, 64 * (1 + n % 2), n % 3, n, "what ?", right, 1000, kept)
        for n, right in enumerate(rights)
    ]


def test_the_figures() -> None:
    found = Haystack(3, _shots("a", [True] * 6 + [False] * 6) + _shots("b", [True] * 12, 0.5))
    assert found.cells("a")[64, 0] == (1, 2) and found.mean("a") == 0.5 and found.mean("b") == 1.0
    assert found.kept("a", 64) == pytest.approx(0.1) and found.mean("c") is None
    mean, half, count = found.against("a", "b")
    # Six differences of -1 and six of 0.
    assert (mean, count) == (-0.5, 12) and half == pytest.approx(1.96 * math.sqrt(3 / 11) / math.sqrt(12))
    assert found.against("a", "nobody") == (0.0, math.inf, 0)
    row = found.rows()[0]
    assert (row["recipe"], row["frames"], row["right"], row["asked"]) == ("a", 64, [1, 1, 1], [2, 2, 2])


def test_the_maps_show_every_recipe() -> None:
    drawn = haystack_maps(Haystack(3, [s for name in "abcde" for s in _shots(name, [True, False] * 6)]))
    assert [axes.get_title().split("\n") for axes in drawn.axes] == [
        [name, "50.0% right, 10% computed"] for name in "abcde"
    ]
