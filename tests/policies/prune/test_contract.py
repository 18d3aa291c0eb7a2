"""What every registered pruner must do, and refuse."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmaccel import Recipe, check_policy
from mmaccel.contract.prefill import DEPTH, check_pruner_stages, random_pruner_inputs
from mmaccel.core.errors import RecipeError
from mmaccel.core.prefill import prune as pruning
from mmaccel.core.recipe import policy
from mmaccel.core.registry import registry
from tests.policies.prune.by_hand import frames_of, layout_of, layouts, visual

NAMES = sorted(registry("prune"))
EVERYTHING: dict[str, dict[str, Any]] = {"dycoke": {"drop": 0.0}, "sparsevlm": {"retention": (1.0, 1.0, 1.0)}}
NOTHING: dict[str, dict[str, Any]] = {
    "dycoke": {"drop": 1.0},
    "sparsevlm": {"retention": (0.0, 0.0, 0.0), "recycle": 0.0},
}


def build(name: str, **fields: Any) -> pruning.TokenPruner:
    pruner: pruning.TokenPruner = registry("prune").build(name, fields)
    return pruner


@pytest.mark.parametrize("name", NAMES)
@given(layout=layouts(), seed=st.integers(0, 99))
def test_text_and_marks_stay(name: str, layout, seed: int) -> None:
    check_pruner_stages(build(name), layout, seed)
    check_policy(build(name), rounds=1, seed=seed)


@pytest.mark.parametrize("name", NAMES)
@given(layout=layouts())
def test_everything_and_nothing(name: str, layout) -> None:
    for fields, want in ((EVERYTHING, layout.length), (NOTHING, layout.length - len(visual(layout)))):
        pruner = build(name, **fields.get(name, {"retention": 1.0 if fields is EVERYTHING else 0.0}))
        stage = pruner.pruning_stages(DEPTH)[-1]
        signals = random_pruner_inputs(layout, stage)
        kept = pruner.prune(signals, layout, stage)
        if name == "dycoke" and fields is NOTHING:
            # The first of every four frames stays, and frames of unlike grids.
            assert set(frames_of(layout)[0] if frames_of(layout) else []) <= set(kept.columns.tolist())
            continue
        assert len(kept.columns) == want
        if fields is EVERYTHING and kept.states is not None:
            torch.testing.assert_close(kept.states, signals["hidden"][-1])


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("sparsevlm", "dycoke", "visionzip", "pyramid_drop")]
)
@pytest.mark.parametrize("retention, count", [(0.1, 10), (0.29, 29), (0.295, 29), (0.005, 0), (0.999, 99)])
def test_counts_are_exact(name: str, retention: float, count: int) -> None:
    """Of 100 tokens; 0.29 of them is 28.999... in binary."""
    layout = layout_of([("text", 3), ("video", [(2, 5)] * 10, 1), ("text", 4)])
    pruner = build(name, retention=retention)
    (stage,) = pruner.pruning_stages(DEPTH)
    kept = pruner.keep(random_pruner_inputs(layout, stage), layout, stage)
    assert len(kept) == count + 3 + 1 + 4


@pytest.mark.parametrize("name", ["fastv", "dycoke"])
def test_one_layer_is_too_few_in_a_sentence(name: str) -> None:
    with pytest.raises(RecipeError, match="of a model of 1; it needs two layers of attention or more"):
        build(name).pruning_stages(1)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_declares(name: str) -> None:
    pruner = build(name)
    for stage in pruning.check_pruning_stages(pruner, DEPTH):
        assert bool(stage.hidden) == ("hidden" in pruner.needs)
        assert bool(stage.attention) == ("attention" in pruner.needs)
    told = Recipe.load({"prune": name}).to_dict()["prune"] if pruner.stage != "draft" else None
    if told is not None:
        assert policy("prune", told) == pruner


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-0.1, 1.1, "much", None, True])
def test_a_share_out_of_range_is_refused(name: str, value: Any) -> None:
    field = "drop" if name == "dycoke" else "retention"
    given_value = (value, value, value) if name == "sparsevlm" else value
    with pytest.raises(RecipeError, match=rf"{field}"):
        build(name, **{field: given_value})


@pytest.mark.parametrize(
    "name, fields, word",
    [
        ("uv", {"layer": 0}, "layer"),
        ("uv", {"layer": 3, "base": 3}, "base"),
        ("attention", {"mass": 1.5}, "mass"),
        ("fastv", {"layer": 0}, "layer"),
        ("pyramid_drop", {"stages_at": (0.5, 0.25)}, "stages_at"),
        ("pyramid_drop", {"stages_at": ()}, "stages_at"),
        ("sparsevlm", {"retention": (0.2, 0.4, 0.1)}, "rise"),
        ("sparsevlm", {"retention": (0.5, 0.4)}, "layers"),
        ("sparsevlm", {"retention": (0.5,), "layers": (-1,)}, "layers"),
        ("sparsevlm", {"recycle": 2.0}, "recycle"),
        ("sparsevlm", {"neighbours": 0}, "neighbours"),
        ("dycoke", {"forget": -1.0}, "forget"),
        ("dycoke", {"layer": 0}, "layer"),
        ("dycoke", {"refresh": 2.0}, "refresh"),
        ("visionzip", {"contextual": 2.0}, "contextual"),
    ],
)
def test_other_fields_are_checked_at_birth(name: str, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        build(name, **fields)


@pytest.mark.parametrize(
    "name, fields", [("uv", {"layer": 5}), ("fastv", {"layer": 4}), ("pyramid_drop", {"stages_at": (0.1, 0.9)}),
                     ("sparsevlm", {"retention": (0.5,), "layers": (3,)}), ("dycoke", {"layer": 4})],
)  # fmt: skip
def test_a_model_too_shallow_is_refused(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=name):
        build(name, **fields).pruning_stages(4)


@pytest.mark.parametrize("name", NAMES)
def test_recipes_take_what_acts_on_the_target(name: str) -> None:
    if build(name).stage == "draft":
        with pytest.raises(RecipeError, match="give it to the draft"):
            Recipe(prune=name)  # type: ignore[arg-type]
        return
    assert Recipe(prune=name).prune == build(name)  # type: ignore[arg-type]
    assert Recipe(prune=name, kv="window").prune == build(name)  # type: ignore[arg-type]
    if build(name).stage == "layer":
        with pytest.raises(RecipeError, match="kv 'rekv'"):
            Recipe(prune=build(name, compact=True), kv="rekv")  # type: ignore[arg-type]
    if build(name).stage == "layer":
        with pytest.raises(RecipeError, match="chunk"):
            Recipe(prune=name, chunk=128)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="set compact to False"):
        Recipe(prune=build(name, compact=True), draft="sparse_to_dense")  # type: ignore[arg-type]
    if build(name).scoring_layer is not None:
        with pytest.raises(RecipeError, match="forget"):
            Recipe.load({"prune": name, "draft": {"name": "sequential", "model": "tiny-ov"}})


@given(count=st.integers(0, 40), more=st.integers(0, 200))
def test_spread_is_distinct_and_even(count: int, more: int) -> None:
    places = pruning.evenly_spaced(count, count + more).tolist()
    assert len(set(places)) == count and places == sorted(places)
    assert all(0 <= p < count + more for p in places)
    steps = {b - a for a, b in pairwise(places)}
    assert not steps or max(steps) - min(steps) <= 1


def test_ties_go_to_the_first() -> None:
    assert pruning.top_indices(torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0]), 2).tolist() == [1, 2]
    assert pruning.top_indices(torch.zeros(50), 3).tolist() == [0, 1, 2]


@given(numerator=st.integers(0, 100), count=st.integers(0, 5000))
def test_quota_rounds_down_decimals(numerator: int, count: int) -> None:
    assert pruning.share_token_count(numerator / 100, count) == numerator * count // 100
