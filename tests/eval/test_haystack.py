"""Needles by length and depth: what is asked, how rivals are levelled, what is made of the answers."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import load_model, load_processor
from mmaccel.cli.answer import ask, prompt_inputs
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Meter
from mmaccel_lab.cli.haystack import methods_of
from mmaccel_lab.eval.cases import Film
from mmaccel_lab.eval.encoded import Encoded
from mmaccel_lab.eval.haystack import Gap, Haystack, Shot, haystack_cases, interval, spread_by, whole_films
from mmaccel_lab.eval.methods import listed
from mmaccel_lab.eval.picture import haystack_maps
from mmaccel_lab.eval.rivals import PRUNERS, RIVALS, Fields, Rival, ablated, computed, left, level


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


@pytest.mark.parametrize("tail", [0, 16, 64])
def test_rivals_have_the_dense_rows_of_the_yardstick(tmp_path: Path, tail: int) -> None:
    assert PRUNERS == ("visionzip", "fastv")
    yardstick = tmp_path / "yardstick.yaml"
    yardstick.write_text(f"sparse: {{name: a_shape, window: 64}}\ndense_tail: {tail}\n")
    methods = methods_of("tiny-ov", "cpu", ["dense", str(yardstick)], ["all"], "yardstick")
    assert len(methods.rivals) == len(RIVALS)
    assert {methods.recipe(one.make(1.0)).dense_tail for one in methods.rivals.values()} == {tail}


def test_minference_keeps_what_its_released_code_keeps() -> None:
    """minference/modules/minference_forward.py: 30 columns and 100 diagonals always, 30 and 50 at least."""
    least = RIVALS["minference"].make(1 / 256)["sparse"]
    assert (least["vertical"], least["slash"], least["sink"], least["nearest"]) == (30, 50, 30, 100)


def test_ours_less_something() -> None:
    own = {0: {0: {"name": "k_boundary", "text": {"name": "a_shape", "sink": 10, "window": 40}}}}
    shape = {"name": "a_shape", "block": 64, "sink": 10, "window": 40}
    bare = {0: {0: shape, 1: {"name": "grid", "vertical": True}}}
    made = ablated(own, bare, 64, 32)
    budgets = {name: rival.budget for name, rival in made.items()}
    assert budgets == {"without_boundaries": True, "without_tail": False, "without_both": True}
    grown = made["without_boundaries"].make(2.0)
    assert grown["dense_tail"] == 32 and made["without_both"].make(2.0) == {**grown, "dense_tail": 0}
    assert grown["sparse"]["table"][0] == {
        0: {"name": "a_shape", "block": 64, "sink": 20, "window": 80},
        1: {"name": "grid", "vertical": True},
    }
    assert made["without_tail"].make(2.0)["sparse"]["table"] == own
    assert Recipe.load(grown).sparse.name == "per_head"


def test_the_interval_of_a_share() -> None:
    # Newcombe (1998), Table I: 81 of 263 by Wilson's score method.
    assert interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert interval(0, 0) == (0.0, 1.0) and interval(50, 50)[1] == pytest.approx(1.0)


def test_questions_of_one_video_go_together() -> None:
    films = [film for film in range(20) for _ in range(5)]
    alike = [float(film % 2) for film in films]
    # All of a video right or all wrong: twenty videos tell what a hundred questions do where each is for itself.
    assert spread_by(films, alike) == pytest.approx(5 * 99 / 95)
    assert interval(50, 100, 5.0) == interval(10, 20)
    # The same in each video: nothing grows, and what is narrower than chance is not believed.
    assert spread_by(films, [1.0, 0.0, 0.0, 1.0, 1.0] * 20) == 1.0
    assert spread_by(films, [1.0] * 100) == 1.0 == spread_by([0] * 5, [1.0, 0.0] * 2 + [1.0])
    pairs = [(True, film % 2 == 0) for film in films]
    wide, narrow = Gap.of(pairs, 5.0), Gap.of(pairs)
    assert (wide.mean, wide.asked) == (narrow.mean, narrow.asked) == (0.5, 100)
    assert wide.low == Gap.of(pairs[::5]).low < narrow.low


@pytest.mark.parametrize("documents", [0, 4])
def test_a_whole_film_has_a_card_at_every_depth(documents: int) -> None:
    films = list(whole_films(128, 5, 4, 7, documents=documents))
    assert len({cases[0].world.seed for cases in films}) == 4
    for cases in films:
        cards = {card.shape: card for card in cases[0].world.cards}
        own = [next(card for shape, card in cards.items() if shape in case.question) for case in cases]
        assert [card.frame * 5 // 128 for card in own] == [0, 1, 2, 3, 4]
        assert [case.answer for case in cases] == [card.colour for card in own]
        assert len({(case.world, case.pieces) for case in cases}) == 1


def test_too_few_whole_films_are_told() -> None:
    """Of four frames none shows a card in each of five stretches."""
    with pytest.warns(MmaccelWarning, match="only 0 of 2 videos of 4 frames have a card in each of 5 depths"):
        assert list(whole_films(4, 5, 2, 0)) == []


def test_dropped_tokens_are_attention_not_computed() -> None:
    report = Meter().report({}, "reference", {}, torch.device("cpu"))
    told = replace(report, kept=0.5, patterns=(("dense",),) * 4, prompt_tokens=100)
    assert computed(report) is None and computed(told) == 0.5
    # From layer 2 on 20 of 80 video tokens are left: 40 of 100 tokens, 0.16 of the pairs, in half the layers.
    dropped = replace(told, kv={"visual": 80.0, "visual from layer 2": 20.0})
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
    gap = found.against("a", "b")
    # Six differences of -1 and six of 0; Agresti and Min: 0.5 and 6.5 of 14 differ.
    half = 1.96 * math.sqrt((7 / 14 - (6 / 14) ** 2) / 14)
    assert (gap.mean, gap.asked) == (-0.5, 12)
    assert (gap.low, gap.high) == pytest.approx((-6 / 14 - half, -6 / 14 + half))
    assert found.against("a", "nobody") == Gap(0.0, -1.0, 1.0, 0)
    # Two that never differ are not known to be equal.
    same = found.against("a", "a")
    assert same.mean == 0 and same.high == -same.low == pytest.approx(1.96 / 14)
    assert found.share("a") == (6, 12)
    row = found.rows()[0]
    assert (row["recipe"], row["frames"], row["right"], row["asked"]) == ("a", 64, [1, 1, 1], [2, 2, 2])


def test_the_maps_show_every_recipe() -> None:
    drawn = haystack_maps(Haystack(3, [s for name in "abcde" for s in _shots(name, [True, False] * 6)]))
    assert [axes.get_title().split("\n") for axes in drawn.axes] == [
        [name, "50.0% right, 10% computed"] for name in "abcde"
    ]


@pytest.fixture(scope="module")
def asked(random_folder: Callable[[str], Path]) -> tuple[Any, Any, Any]:
    """A model, its processor, and a prompt."""
    folder = str(random_folder("tiny-ov-draft"))
    model, processor = load_model(folder, dtype=torch.float32), load_processor(folder)
    (_, case), *_ = haystack_cases(16, 1, 1, 3)
    with Film() as film:
        return model, processor, prompt_inputs(processor, case.content(film.watch(case.world)), model)


@pytest.mark.parametrize("name", PRUNERS)
@pytest.mark.parametrize("m", [0.3, 1.0, 1.7])
def test_what_a_pruner_leaves_is_counted(asked: tuple[Any, Any, Any], name: str, m: float) -> None:
    model, processor, inputs = asked
    recipe = Recipe.load(RIVALS[name].make(m))
    measured = computed(ask(model, processor, inputs, recipe, max_new_tokens=1).report)
    family = adapter_for(model)
    counted = left(recipe.prune, family.layout(model, inputs), len(family.layers(model)))
    assert counted == pytest.approx(measured) and 0 < counted < 1


@pytest.mark.parametrize("name", ["a_shape", "tri_shape", "sf_fixed", "sf_strided"])
def test_what_a_layout_alone_decides_is_counted(asked: tuple[Any, Any, Any], name: str) -> None:
    model, processor, inputs = asked
    layout, found = adapter_for(model).layout(model, inputs), []
    for tail in (0, 64):
        recipe = Recipe.load({**RIVALS[name].make(0.01), "dense_tail": tail})
        found.append(computed(ask(model, processor, inputs, recipe, max_new_tokens=1).report))
        assert listed(recipe, layout) == pytest.approx(found[-1]) and found[-1] != 1
    assert found[1] != found[0]
    assert listed(Recipe.load(RIVALS["minference"].make(0.01)), layout) is None


def test_the_vision_tower_is_asked_once(asked: tuple[Any, Any, Any]) -> None:
    """A prompt to several recipes is encoded once, also for a pruner that reads the tower; answers are as they were."""
    model, processor, inputs = asked
    looks: list[None] = []
    tower = adapter_for(model).multimodal(model).vision_tower
    handle = tower.register_forward_hook(lambda *_: looks.append(None))
    recipes = [Recipe(), Recipe.load("a_shape-short"), Recipe.load({"prune": "visionzip"}), Recipe()]
    apart = [ask(model, processor, inputs, recipe, max_new_tokens=4).raw for recipe in recipes]
    assert len(looks) == 4
    seen = Encoded()
    for recipe, said in zip(recipes, apart, strict=True):
        with seen.shared(model, recipe):
            assert ask(model, processor, inputs, recipe, max_new_tokens=4).raw == said
    assert len(looks) == 5
    # Another prompt is encoded anew.
    other = {name: x.clone() for name, x in inputs.items()}
    with seen.shared(model, Recipe()):
        ask(model, processor, other, Recipe(), max_new_tokens=1)
    assert len(looks) == 6
    handle.remove()


def test_few_tries_bring_a_rival_to_its_share() -> None:
    """A try is a prefill."""
    for wanted in (0.01, 0.07, 0.4, 0.8):
        tries: list[Fields] = []

        def measure(fields: Fields, tries: list[Fields] = tries) -> float:
            tries.append(fields)
            return 1 - math.exp(-fields["sparse"]["window"] / 20_000)

        assert abs(level(RIVALS["tri_shape"], wanted, measure)[1] / wanted - 1) <= 0.02 and len(tries) <= 7
