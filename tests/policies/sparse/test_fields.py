"""What a pattern refuses at birth, and the sentence it says."""

from __future__ import annotations

from typing import Any

import pytest

import mmaccel.policies.sparse  # noqa: F401 - registers the patterns
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.policies.sparse import AShape, Boundary2D, Dense, Grid, QBoundary

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("dense", dict(block=48), "block is 48"),
    ("a_shape", dict(sink=-1), "sink is -1"),
    ("a_shape", dict(window=0), "window is 0; give at least 1, the token itself"),
    ("a_shape", dict(windows=5), "did you mean 'window'"),
    ("vertical_slash", dict(vertical=-1), "vertical is -1"),
    ("vertical_slash", dict(slash=0), "slash is 0"),
    ("vertical_slash", dict(sink=-1), "sink is -1"),
    ("vertical_slash", dict(last_q=0), "last_q is 0"),
    ("vertical_slash", dict(nearest=0), "nearest is 0; give at least 1, the main diagonal"),
    ("grid", dict(stride="frames"), "'frame' or 'free'"),
    ("grid", dict(min_stride=1), "min_stride 1"),
    ("grid", dict(min_stride=9, max_stride=8), "no range"),
    ("grid", dict(horizontal=False, vertical=False, slash=False), "turn one on"),
    ("grid", dict(last_q=0), "last_q is 0; give at least 1 query"),
    ("grid", dict(window=-1), "window is -1; give at least 0 tokens"),
    ("grid", dict(sink=-1), "sink is -1; give at least 0 tokens"),
    ("grid", dict(slack=1.0), "slack is 1.0"),
    ("grid", dict(score="median"), "score is 'median'; give 'contrast', 'mean' or 'sum'"),
    ("grid", dict(horizontal_phase="rows"), "give 'keys' or 'queries'"),
    ("grid", dict(estimate="heads"), "give 'head' or 'group'"),
    ("vertical_slash", dict(estimate="heads"), "give 'head' or 'group'"),
    ("q_boundary", dict(text="a_shap"), "did you mean 'a_shape'"),
    ("q_boundary", dict(vidio="grid"), "did you mean 'video'"),
    ("q_boundary", dict(video={"name": "grid", "strid": "free"}), "did you mean 'stride'"),
    ("q_boundary", dict(video={"stride": "free"}), "q_boundary: video: a mapping needs the policy's name"),
    ("q_boundary", dict(video={"name": "a_shape", "window": 0}), "window is 0"),
    ("k_boundary", dict(text=5), "k_boundary: text is 5; give one of a_shape, "),
    ("k_boundary", dict(text="boundary_2d"), "k_boundary: text is 'boundary_2d'; give one of a_shape, "),
    ("k_boundary", dict(text=None, image=None, video=None), "all null"),
    ("boundary_2d", dict(pairs={"video>txt": "grid"}), "did you mean 'video>text'"),
    ("boundary_2d", dict(pairs={"video>text": (4, 8)}), r"pairs\['video>text'\] is \(4, 8\); give one of"),
    ("boundary_2d", dict(pairs=["video>text"]), "give a mapping"),
    ("boundary_2d", dict(default=None), "every pair is left out"),
    ("tri_shape", dict(sink=-1), "sink is -1"),
    ("tri_shape", dict(window=0), "window is 0"),
    ("tri_shape", dict(bottom=-1), "bottom is -1"),
    ("sf_fixed", dict(stride=0), "stride is 0"),
    ("sf_fixed", dict(stride="frames"), "'frame' or a number"),
    ("sf_fixed", dict(summary=-1), "summary is -1"),
    ("sf_fixed", dict(side="end"), "'last' or 'first'"),
    ("sf_strided", dict(stride=True), "stride is True"),
    ("sf_strided", dict(min_stride=9, max_stride=8), "no range"),
    ("block_topk", dict(score="max"), "'antidiagonal' or 'mean'"),
    ("block_topk", dict(stride=0), "stride is 0"),
    ("block_topk", dict(stride=24), "divisor of block"),
    ("block_topk", dict(budget=1.5), "budget is 1.5"),
    ("block_topk", dict(top=0), "top is 0"),
    ("block_topk", dict(sink=-1), "sink is -1"),
]


@pytest.mark.parametrize(("name", "fields", "message"), WRONG, ids=[f"{n} {f}" for n, f, _ in WRONG])
def test_a_wrong_field_is_told(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        registry("sparse").build(name, fields)


@pytest.mark.parametrize(("kind", "field"), [(AShape, "sink"), (AShape, "window"), (Grid, "window")])
def test_a_number_may_not_be_left_out(kind: Any, field: str) -> None:
    with pytest.raises(RecipeError, match=f"{field} is None; give at least "):
        kind(**{field: None})


def test_patterns_of_a_boundary_as_a_recipe_writes_them() -> None:
    fields = dict(
        block=32, default="grid", pairs={"video>text": {"name": "a_shape", "sink": 0}, "text>video": None}
    )
    pattern = registry("sparse").build("boundary_2d", fields)
    assert isinstance(pattern, Boundary2D)
    assert pattern.groups[VIDEO][TEXT] == AShape(sink=0, block=32)
    assert pattern.groups[TEXT] == {TEXT: Grid(block=32), IMAGE: Grid(block=32), VIDEO: None}
    again = Recipe.load(sparse=pattern).to_dict()["sparse"]
    assert again["pairs"]["video>text"]["sink"] == 0 and again["default"]["name"] == "grid"
    assert Recipe.load({"sparse": again}).sparse == pattern


def test_sides_of_a_boundary_as_a_recipe_writes_them() -> None:
    fields = {
        "name": "q_boundary",
        "text": "dense",
        "video": {"name": "grid", "stride": "free"},
        "image": None,
    }
    pattern = Recipe.load({"sparse": fields}).sparse
    assert pattern == QBoundary(text=Dense(), video=Grid(stride="free"), image=None)
    assert Recipe.load(Recipe.load(sparse=pattern).to_dict()).sparse == pattern
