"""Rows of a draft on the next device: what the pages tell follows from them, and they from the verdicts of their seeds."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import pipeline_table  # noqa: E402
import replayed  # noqa: E402

ROWS = pipeline_table.read(ROOT / "bench" / "results" / "pipeline_h200x2_202611.jsonl")
SPEED = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
PAPER = (ROOT / "docs" / "parallelvlm.md").read_text(encoding="utf-8")
FIRST, SECOND, THIRD = "e779742", "b315a86", "17096be"


def row(tree: str, case: str, **wanted: Any) -> dict[str, Any]:
    """The one row of a tree that is so."""
    (found,) = (
        one
        for one in ROWS
        if (one["tree"], one.get("case")) == (tree, case) and wanted.items() <= one.items()
    )
    return found


def test_tables_of_pages_are_those_of_the_rows() -> None:
    for mark, table in zip(("decoding", "whole"), pipeline_table.tables(ROWS), strict=True):
        assert f"<!-- bench/pipeline_table.py, {mark} -->\n\n{table}\n\n" in SPEED
        assert len(table.splitlines()) > 5


def test_figures_in_sentences_are_those_of_the_rows() -> None:
    speed, paper = (" ".join(page.split()) for page in (SPEED, PAPER))
    few, many = (row(tree, "parallel", asked=4) for tree in (FIRST, SECOND))
    alone, end = row(SECOND, "end", way="alone"), row(SECOND, "end", way="parallel")
    told = [
        f"kept {few['kept_share']:.3f} in the median (window 4), which read {few['speedup']:.2f} x and"
        f" {few['of_simulated']:.2f} of the simulator's value",
        f"for the share that was kept it is {few['speedup'] / few['simulated_at_kept']:.2f}",
        f"the median is {many['speedup']:.2f} x and {many['of_simulated']:.3f} of the simulator's value,"
        f" {many['kept_share']:.3f} kept",
        *(
            f"| {count} | {1e3 * step['median_s']:.1f} ms | {step['of_floor']:.2f} |"
            for count in (1, 4, 5, 6)
            for step in [row(FIRST, "step", rows=count)]
        ),
        f"the draft's {1e3 * many['draft_step_s']:.2f} ms: T_p / T_q is {many['c']:.1f}",
        f"{row(FIRST, 'alone')['of_floor']:.2f} of its floor in the first,"
        f" {row(SECOND, 'alone')['of_floor']:.2f} in the second",
    ]
    assert [one for one in told if one not in speed] == []
    whole = f"{alone['seconds']:.1f} s to {end['seconds']:.2f} s, {end['end_to_end']:.2f} x"
    own, in_turns = row(THIRD, "self", asked=2), row(SECOND, "sequential")
    now = row(THIRD, "parallel", asked=4)
    rivals = [
        f"| {pipeline_table.plus_minus(*pipeline_table.gain(now), 2)} x, window 4 or measured; of the simulator's value"
        f" {now['of_simulated']:.2f} |",
        f"| {row(SECOND, 'specvlm')['speedup']:.2f} x |",
        f"| {in_turns['speedup']:.2f} x, window 4 |",
        f"| {pipeline_table.plus_minus(*pipeline_table.gain(own), 2)} x after 256k, p = 0.9, of the simulator's value"
        f" {own['of_simulated']:.2f};",
        f"{own['c']:.2f}, for which the simulator has {own['simulated']:.2f} x",
        f"steps of {1e3 * in_turns['draft_step_s']:.2f} ms here where the pruned one has"
        f" {1e3 * many['draft_step_s']:.2f}",
        whole,
    ]
    assert [one for one in rivals if one not in paper] == []


def test_figures_of_the_step_of_today_are_those_of_the_rows() -> None:
    loop, ahead = row(THIRD, "alone"), row(THIRD, "parallel", asked=4)
    own, measured = row(THIRD, "self", asked=2), row(THIRD, "self", asked=None)
    speed = " ".join(SPEED.split())
    for told in (
        f"the loop alone is quicker, {loop['tokens_per_s']:.1f} tokens a second, {loop['of_floor']:.2f} of its floor",
        f"`parallel` on it {ahead['speedup']:.2f} x, {ahead['of_simulated']:.2f} of the simulator's value",
        f"is at {own['of_simulated']:.2f} and {measured['of_simulated']:.2f}, by nine draws",
    ):
        assert told in speed, told


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


def test_a_draw_keeps_what_the_page_says() -> None:
    """Of each committed token but the first it is known whether it was kept."""
    shares = torch.tensor([rounds(seed, 4, 0.81, 512)[3] / 511 for seed in range(1, 301)])
    assert shares.mean() == pytest.approx(0.81, abs=0.003)
    assert shares.std() == pytest.approx(math.sqrt(0.81 * 0.19 / 511), rel=0.12)
    assert "a draw keeps 0.810 ± 0.017 of its 511 tokens" in SPEED
