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

ROWS = stock.read(ROOT / "bench" / "results" / "stock_cpu_202611.jsonl")


def test_the_page_has_the_table_of_its_rows() -> None:
    page = (ROOT / "docs" / "stock.md").read_text(encoding="utf-8")
    assert stock.BEGIN + stock.table(ROWS) + "\n" + stock.END in page


def test_every_failure_has_a_reason() -> None:
    assert {row["recipe"] for row in ROWS} == set(stock.RECIPES) == set(stock_plugin.RECIPES)
    assert set(stock.REASONS) == set(stock_plugin.REASONS)
    for row in ROWS:
        assert row["other"] == [] and sum(row["failed"].values()) == row["tests"] - row["passed"]
    dense = next(row for row in ROWS if row["recipe"] == "dense")
    assert dense["tests"] - dense["passed"] <= stock.MOST and set(dense["failed"]) <= set(stock.REASONS)


@pytest.mark.parametrize(
    ("test", "error", "why"),
    [
        (
            "a",
            "mmaccel.core.errors.ModelError: backward: it has no gradient; detach the recipe to train.",
            "no gradient",
        ),
        ("test_can_set_attention_dynamically", "AssertionError: False is not true", "private config copy"),
        ("a", "mmaccel.core.errors.DraftError: num_beams: one beam; set it to 1.", "refused: num_beams"),
        ("a", "mmaccel.core.errors.ModelError: something is wrong.", "other"),
        ("a", "AssertionError: 0 != 2", "other"),
    ],
)
def test_a_failure_is_sorted(test: str, error: str, why: str) -> None:
    assert stock_plugin.reason(test, error) == why
