"""What a pattern refuses at birth, and the sentence it says."""

from __future__ import annotations

from typing import Any

import pytest

import mmaccel.policies.sparse  # noqa: F401 - registers the patterns
from mmaccel.core.errors import RecipeError
from mmaccel.core.registry import registry
from mmaccel.policies.sparse import Boundary2D

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("dense", dict(block=48), "block is 48"),
    ("a_shape", dict(sink=-1), "sink is -1"),
    ("a_shape", dict(window=0), "window is 0"),
    ("a_shape", dict(windows=5), "did you mean 'window'"),
    ("vertical_slash", dict(vertical=-1), "vertical is -1"),
    ("vertical_slash", dict(slash=0), "slash is 0"),
    ("vertical_slash", dict(last_q=0), "last_q is 0"),
    ("grid", dict(stride="frames"), "'frame' or 'free'"),
    ("grid", dict(min_stride=1), "min_stride 1"),
    ("grid", dict(min_stride=9, max_stride=8), "no range"),
    ("grid", dict(horizontal=False, vertical=False, slash=False), "turn one on"),
    ("grid", dict(last_q=0), "last_q is 0"),
    ("grid", dict(slack=1.0), "slack is 1.0"),
    ("boundary_2d", dict(window=0), "window 0"),
    ("boundary_2d", dict(pairs={"video>txt": (1, 1)}), "did you mean 'video>text'"),
    ("boundary_2d", dict(pairs={"video>text": (1,)}), r"give \(sink, window\)"),
    ("boundary_2d", dict(pairs={"text>text": (9, 0)}), "the token itself"),
]


@pytest.mark.parametrize(("name", "fields", "message"), WRONG, ids=[f"{n} {f}" for n, f, _ in WRONG])
def test_a_wrong_field_is_told(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        registry("sparse").build(name, fields)


def test_pairs_of_a_boundary_as_a_recipe_writes_them() -> None:
    pattern = registry("sparse").build("boundary_2d", dict(sink=2, window=3, pairs={"video>text": [0, 7]}))
    assert isinstance(pattern, Boundary2D)
    assert pattern.extent("video", "text") == (0, 7)
    assert pattern.extent("text", "video") == (2, 3)
