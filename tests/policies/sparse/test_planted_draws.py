"""Grid heads drawn at random, faint lines under noise: their stride and phases have to be found.

How recovery falls off as lines grow fainter is in docs/mminference.md.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mmaccel.core.layout import TokenLayout
from mmaccel.policies.sparse import Grid

from . import planted

RATIO = 4.0
"""The weight of a pair on a line over that of a background pair."""


def recovered(draws: int, blind: bool) -> tuple[Counter[str], list[object]]:
    """How many of the heads were found, of every combination of lines alike; and those that were missed."""
    tally: Counter[str] = Counter()
    missed = []
    for k, kinds in enumerate(planted.KINDS):
        count = draws // len(planted.KINDS) + (k < draws % len(planted.KINDS))
        for head, found, verdict in planted.verdicts(kinds, count, RATIO, seed=100 + k, blind=blind):
            tally[verdict] += 1
            if verdict == "missed":
                missed.append((head, found))
    assert tally.total() == draws
    return tally, missed


@pytest.mark.parametrize("blind", [False, True], ids=["its lines", "all lines"])
def test_a_few_draws(blind: bool) -> None:
    tally, missed = recovered(14, blind)
    assert not missed
    # Multiples of a stride leave lines out, and divisors add some: harmonics are to be rare.
    assert tally["exact"] >= 13


@pytest.mark.slow
@pytest.mark.parametrize("blind", [False, True], ids=["its lines", "all lines"])
def test_a_thousand_draws(blind: bool) -> None:
    tally, missed = recovered(1000, blind)
    assert tally["exact"] + tally["harmonic"] >= 990, missed
    assert tally["exact"] >= 950


def test_the_draws_are_what_they_say() -> None:
    """A line pair weighs RATIO background pairs; strides, phases and numbers of lines vary."""
    rng = torch.Generator().manual_seed(0)
    head = planted.Head(("horizontal", "vertical", "slash"), 10, (3, 4), (2,), 0.0, 0.0, 0.0)
    weight = head.scores(4096, RATIO, rng).exp()
    for i in range(64):
        for j in range(4000, 4032):
            place = 4032 + i
            line = place % 10 == 3 or j % 10 in (3, 4) or (place - j) % 10 == 2
            assert weight[i, j] == pytest.approx(RATIO if line else 1.0)
    drawn = [planted.Head.draw(kinds, rng) for kinds in planted.KINDS for _ in range(40)]
    strides = [h.stride for h in drawn]
    assert min(strides) == 2 and max(strides) > 900 and len(set(strides)) > 100
    assert {len(h.columns) for h in drawn} == {len(h.diagonals) for h in drawn} == {0, 1, 2, 3}


@pytest.mark.parametrize(("stride", "phase"), [(7, 3), (64, 63), (150, 0)])
def test_horizontal_lines_alone_follow_the_columns(stride: int, phase: int) -> None:
    """Which rows are dense the last queries cannot show: their phase is that of the columns."""
    n = 1536
    head = planted.Head(("horizontal",), stride, (phase,), (), 0.5, 3.0, 1.0)
    score = head.scores(n, RATIO, torch.Generator().manual_seed(1))
    query = torch.zeros(1, 1, n, 64)
    query[0, 0, -64:] = 8.0 * torch.eye(64)
    layout = TokenLayout.text(1, n)
    pattern = Grid(stride="free", min_stride=2, max_stride=400, vertical=False, slash=False)
    plan = pattern.plan(query, score.T[None, None].contiguous(), layout, layout)
    assert plan is not None
    dense = torch.arange(n) % stride == phase
    assert torch.equal(plan.to_mask()[0, 0], dense[:, None] & torch.ones(n, n, dtype=torch.bool).tril())
