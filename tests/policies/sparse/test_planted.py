"""Heads made to have a pattern: the estimate finds it, drawn at random and faint under noise too.

How recovery falls off as lines grow fainter is in docs/mminference.md.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.policies.sparse import Grid, estimate

from . import planted
from .scenes import Scene, sequence

N = 640


def codes(n: int, seed: int) -> Tensor:
    """[n, 64] unit vectors of which no two are near."""
    return torch.nn.functional.normalize(
        torch.randn(n, 64, generator=torch.Generator().manual_seed(seed)), dim=1
    )


def grid_head(
    number: Tensor, stride: int, shift: int, line: int, strength: float = 14.0
) -> tuple[Tensor, Tensor]:
    """query, key [1, 1, n, 65] that attend along slashes of phase `shift` and along the columns of class `line`."""
    code = codes(stride, 5)
    key = torch.cat([code[number], (number == line).float()[:, None]], 1)
    query = torch.cat([code[(number - shift) % stride], torch.ones(len(number), 1)], 1)
    return strength * key.shape[1] ** 0.5 * query[None, None], key[None, None]


def grid_mask(number: Tensor, stride: int, shift: int, line: int) -> Tensor:
    n = len(number)
    seen = (number[:, None] - number) % stride == shift
    seen |= (number == line)[:, None] | (number == line)
    return seen & torch.ones(n, n, dtype=torch.bool).tril()


def test_heads_and_sequences_have_strides_of_their_own() -> None:
    grids = [[(16, 0, 3), (21, 5, 0)], [(33, 32, 32), (8, 2, 7)]]
    heads = [[grid_head(torch.arange(N) % s, s, *lines) for s, *lines in row] for row in grids]
    query, key = (torch.cat([torch.cat([h[i] for h in row], 1) for row in heads]) for i in (0, 1))
    layout = TokenLayout.text(2, N)
    plan = Grid(stride="free", max_stride=80, block=16).plan(query, key, layout, layout)
    assert plan is not None
    mask = plan.to_mask()
    for b, row in enumerate(grids):
        for h, (s, *lines) in enumerate(row):
            assert torch.equal(mask[b, h], grid_mask(torch.arange(N) % s, s, *lines))


@pytest.mark.parametrize(("shift", "line"), [(0, 5), (11, 0)])
def test_grid_of_frames_is_not_shifted_by_timestamps(shift: int, line: int) -> None:
    """Frames of 20 tokens with a timestamp of one to three tokens before each."""
    segments = []
    for frame in range(26):
        segments += [(TEXT, [1 + frame % 3]), (VIDEO, [20])]
    scene = Scene((sequence(segments),))
    number, since = [], -1
    for token in scene.sequences[0]:
        since = 0 if token.cell == 0 else since + 1
        number.append(since % 20)
    number = torch.tensor(number)
    plan = Grid(block=16).plan(*grid_head(number, 20, shift, line), scene.layout(), scene.layout())
    assert plan is not None
    assert torch.equal(plan.to_mask()[0, 0], grid_mask(number, 20, shift, line))


def test_a_sink_is_no_grid() -> None:
    """One column that draws nearly everything does not decide the stride of the faint lines behind it."""
    number = torch.arange(N) % 24
    query, key = grid_head(number, 24, 0, 6, strength=10.0)
    key[..., 0, -1] = 1.6
    layout = TokenLayout.text(1, N)
    plan = Grid(stride="free", max_stride=80, block=16).plan(query, key, layout, layout)
    assert plan is not None
    assert torch.equal(plan.to_mask()[0, 0], grid_mask(number, 24, 0, 6))


@pytest.mark.parametrize(("L", "n"), [(1, 1), (1, 9), (4, 4), (4, 5), (16, 70)])
def test_rows_that_line_up_have_the_diagonals_that_gathering_finds(L: int, n: int) -> None:
    rng = torch.Generator().manual_seed(L + n)
    weight = torch.rand(2, 3, L, n, generator=rng)
    want = torch.zeros(2, 3, n)
    for r in range(L):
        for j in range(n - L + r + 1):
            want[:, :, n - L + r - j] += weight[:, :, r, j]
        weight[:, :, r, n - L + r + 1 :] = 0
    torch.testing.assert_close(estimate._skewed(weight), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(estimate._skewed(weight[:, 1:]), want[:, 1:], rtol=0, atol=1e-5)


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


# Multiples of a stride leave lines out, and divisors add some: harmonics are to be rare.
@pytest.mark.parametrize("blind", [False, True], ids=["its lines", "all lines"])
@pytest.mark.parametrize(
    ("draws", "found", "exact"), [(14, 14, 13), pytest.param(1000, 990, 950, marks=pytest.mark.slow)]
)
def test_draws(draws: int, found: int, exact: int, blind: bool) -> None:
    tally, missed = recovered(draws, blind)
    assert tally["exact"] + tally["harmonic"] >= found, missed
    assert tally["exact"] >= exact


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
