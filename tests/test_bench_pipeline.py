"""Rows of a draft on the next device follow from the verdicts of their seeds."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import drawing  # noqa: E402
import replayed  # noqa: E402

ROWS = drawing.rows("pipeline_h200x2_202611")
FIRST, SECOND, THIRD = "e779742", "b315a86", "17096be"


def row(tree: str, case: str, **wanted: Any) -> dict[str, Any]:
    """The one row of a tree that is so."""
    (found,) = (
        one
        for one in ROWS
        if (one["tree"], one.get("case")) == (tree, case) and wanted.items() <= one.items()
    )
    return found


def rounds(seed: int, window: int, keep: float, tokens: int) -> tuple[int, int, int, int]:
    """Algorithm 1 over the verdicts of a seed: rounds, those of each mode that are followed by another, tokens kept."""
    dice = torch.Generator().manual_seed(seed)
    said, ahead, count, modes, kept = 1, window - 1, 0, [0, 0], 0
    while True:
        judged = max(min(ahead, tokens - said - 1), 0) + 1
        ranks = replayed.verdicts(judged, keep, dice).tolist()
        good = next((place for place, rank in enumerate(ranks) if rank), judged)
        said, kept, count = said + min(good + 1, judged), kept + good, count + 1
        if said >= tokens:
            return count, modes[0], modes[1], kept
        modes[judged > 1] += 1
        ahead = window - 1 if good == judged else 0


@pytest.mark.parametrize(
    ("tree", "case", "window", "seed"),
    [
        (FIRST, "parallel", 4, 3),
        (FIRST, "parallel", 5, 3),
        (FIRST, "self", 2, 3),
        (SECOND, "parallel", 4, 9),
    ],
)
def test_rounds_on_two_devices_are_those_of_the_seed_s_verdicts(
    tree: str, case: str, window: int, seed: int
) -> None:
    """Each row's steps and counters are those of its last draw, whose window was not changed on the way."""
    told = row(tree, case, asked=window)
    counters = told["counters"]
    count, before, behind, _ = rounds(seed, window, told["keep"], told["tokens"])
    assert len(told["each_per_s"]) == seed
    assert (told["steps"], counters["pre_verify"], counters["post_verify"]) == (count, before, behind)


@pytest.mark.parametrize(("case", "window"), [("parallel", 4), ("self", 2)])
def test_rounds_of_all_draws_are_those_of_their_seeds(case: str, window: int) -> None:
    """Rows of today have the steps of all draws, and the mean of their counters."""
    told = row(THIRD, case, asked=window)
    draws = told["draws"]
    each = [rounds(seed, window, told["keep"], told["tokens"] // draws) for seed in range(1, draws + 1)]
    count, before, behind, _ = (sum(column) for column in zip(*each, strict=True))
    assert told["steps"] == count and len(told["each_per_s"]) == draws
    means = told["counters"]["pre_verify"], told["counters"]["post_verify"]
    assert means == pytest.approx((before / draws, behind / draws))


def test_a_draw_keeps_the_chance_that_is_stated() -> None:
    """Of each committed token but the first it is known whether it was kept."""
    shares = torch.tensor([rounds(seed, 4, 0.81, 512)[3] / 511 for seed in range(1, 301)])
    assert shares.mean() == pytest.approx(0.81, abs=0.003)
    assert shares.std() == pytest.approx(math.sqrt(0.81 * 0.19 / 511), rel=0.12)
