"""The table of docs/stock.md is that of its rows, and each failure in it has a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "tests" / "stock"))

import stock  # noqa: E402
import stock_plugin  # noqa: E402

import mmaccel  # noqa: E402
from tests.models.tiny_random import BUILD  # noqa: E402

ROWS = stock.read(ROOT / "bench" / "results" / "stock_cpu_202611.jsonl")


def test_the_page_has_the_table_of_its_rows() -> None:
    page = (ROOT / "docs" / "stock.md").read_text(encoding="utf-8")
    assert stock.BEGIN + stock.table(ROWS) + "\n" + stock.END in page


def test_every_failure_has_a_reason() -> None:
    assert {row["recipe"] for row in ROWS} == set(stock.RECIPES) == set(stock_plugin.RECIPES)
    assert set(stock.REASONS) == set(stock_plugin.REASONS)
    for row in ROWS:
        refused = {name.removeprefix("refused: ") for name in row["failed"]} - set(stock.REASONS)
        assert refused <= stock_plugin.IMPOSSIBLE[row["recipe"]]
        assert row["other"] == [] and sum(row["failed"].values()) == row["tests"] - row["passed"]
    dense = next(row for row in ROWS if row["recipe"] == "dense")
    assert dense["tests"] - dense["passed"] <= stock.MOST and set(dense["failed"]) <= set(stock.REASONS)


@pytest.mark.parametrize(
    ("recipe", "test", "error", "why"),
    [
        (
            "dense",
            "a",
            "mmaccel.core.errors.ModelError: backward: it has no gradient; detach the recipe to train.",
            "no gradient",
        ),
        (
            "dense",
            "a",
            f"AssertionError: False is not true; {stock_plugin.OWN_CONFIG}",
            "private config copy",
        ),
        ("dense", "test_can_set_attention_dynamically", "AssertionError: False is not true", "other"),
        ("sequential", "a", "mmaccel.core.errors.DraftError: num_beams: one; set it.", "refused: num_beams"),
        ("dense", "a", "mmaccel.core.errors.ModelError: num_beams: one; set it.", "other"),
        ("window", "a", "mmaccel.core.errors.ModelError: use_cache: leave it out.", "other"),
        ("dense", "test_mismatching_tokens", "AssertionError: none raised", "class of the exception"),
        ("dense", "a", "RuntimeError: mismatching shapes", "other"),
        ("dense", "a", "mmaccel.core.errors.ModelError: something is wrong.", "other"),
        ("dense", "a", "AssertionError: 0 != 2", "other"),
    ],
)
def test_a_failure_is_sorted(recipe: str, test: str, error: str, why: str) -> None:
    assert stock_plugin.reason(recipe, test, error) == why


def test_a_test_that_is_lost_is_a_failure_without_a_reason() -> None:
    row = stock.row("dense", "a", {"one": ("passed", ""), "two": ("passed", "")}, {"one": ("passed", "")})
    assert row["other"] == ["two"] and row["passed"] == 1


@pytest.mark.parametrize("kind", ["qwen", "llava"])
def test_a_failure_beside_a_config_of_ours_is_known_by_it(kind: str) -> None:
    model = BUILD[kind]()
    with mmaccel.accelerate(model):
        ours, theirs = model.model.language_model, model.config
        for value, seen in ((ours, True), (ours.config, True), (theirs, False), (model, False), (5, False)):
            with pytest.raises(AssertionError) as caught:
                _fail_beside(value)
            assert stock_plugin._looks_at_own_config(caught.traceback, ROOT) is seen
            assert not stock_plugin._looks_at_own_config(caught.traceback, ROOT / "bench")


def _fail_beside(value: object) -> None:
    raise AssertionError("False is not true")
