"""What several draws of verdicts come to in one row."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import pair


def draw(pace: float, kept: float = 0.8, failed: str | None = None, **counters: float) -> dict[str, Any]:
    """A generation of 101 tokens, 50 steps and that many tokens a second."""
    counters = {"keep_rate": kept, "window": 4.0, "draft_step_s": 0.002, **counters}
    told = {"tokens": 101, "steps": 50, "seconds": 100 / pace, "tokens_per_s": pace, "a_step": 2.0}
    return {**told, "failed": [failed] if failed else [], "counters": counters}


def test_a_slow_draw_counts_by_the_time_it_takes() -> None:
    told = pair.pooled([draw(50.0), draw(100.0), draw(100.0)], 40.0)
    assert told["seconds"] == 4.0 and told["tokens_per_s"] == pytest.approx(300 / 4)
    assert (told["draws"], told["tokens"], told["steps"], told["a_step"]) == (3, 303, 150, 2.0)
    # Seconds a token 0.02, 0.01, 0.01: their mean has the standard error 1 / 300, a quarter of it.
    assert told["error_per_s"] == pytest.approx(75 / 4)
    assert told["speedup"] == pytest.approx(75 / 40)
    assert told["speedup_error"] == pytest.approx(75 / 160)


def test_one_draw_has_no_error() -> None:
    told = pair.pooled([draw(50.0)], 40.0)
    assert told["tokens_per_s"] == 50.0 and told["error_per_s"] is told["speedup_error"] is None


def test_the_error_is_how_means_of_draws_lie() -> None:
    dice = torch.Generator().manual_seed(0)
    seconds = 1 + 0.05 * torch.randn(400, 9, generator=dice)
    means, errors = zip(*(pair.spread((1 / each).tolist()) for each in seconds), strict=True)
    assert torch.tensor(means).std() == pytest.approx(sum(errors) / len(errors), rel=0.1)


def test_what_failed_in_any_draw_is_told_and_counters_are_means() -> None:
    rows = [draw(50.0, 0.7, "it died"), draw(60.0, 0.9, expected_gain=2.0)]
    told = pair.against(rows, 40.0, 0.81)
    assert told["failed"] == ["it died"]
    assert told["kept_share"] == told["counters"]["keep_rate"] == pytest.approx(0.8)
    assert told["counters"]["expected_gain"] == 2.0
    assert told["of_simulated"] == pytest.approx(told["speedup"] / told["simulated"])
