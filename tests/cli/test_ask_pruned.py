"""Pruned answers from the command line: the report says how many video tokens there were, and how many were left where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    "fields, told",
    [
        ("prune: {name: fastv, retention: 0.25, layer: 1}", "256 from layer 1"),
        ("prune: {name: visionzip, retention: 0.5}\nsparse: a_shape", "512 from layer 0"),
        ("prune: {name: dycoke, drop: 0.5, forget: 0.5, layer: 2}", "640 from layer 0"),
    ],
)
def test_ask_names_what_was_pruned(
    call: Call, clip: str, ov: str, tmp_path: Path, fields: str, told: str
) -> None:
    recipe = tmp_path / "pruned.yaml"
    recipe.write_text(fields)
    status, out, _ = call(
        "ask", clip, "What colour was the star?", "--model", ov, "--recipe", recipe, "--max-new-tokens", 2
    )
    assert status == 0 and "1024 tokens" in out and told in " ".join(out.split())


def test_a_draft_s_pruner_is_no_recipe(call: Call, clip: str, ov: str) -> None:
    status, _, err = call("ask", clip, "Which?", "--model", ov, "--recipe", "uv")
    assert status == 2 and "give it to the draft" in err
