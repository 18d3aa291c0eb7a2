"""Heads made to have a pattern: the estimate finds it, drawn at random and faint under noise too.

A head is planted by its scores alone: the last 64 queries are unit vectors and each key holds what they give it, so that
every pair on a line has `ratio` times the weight of a pair of the background. Gaussian noise on every score, a sink and a
neighbourhood lie over it. How recovery falls off as lines grow fainter is in docs/mminference.md.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mmaccel.core.layout import TokenLayout
from mmaccel.policies.sparse import Grid, estimate

ROWS = 64
"""Queries that the estimate sees, and that are planned."""

LOW, HIGH = 2, 1024
"""Strides that are planted, and searched."""

KINDS = tuple(
    tuple(kind for kind, on in zip(("horizontal", "vertical", "slash"), bits, strict=True) if on)
    for bits in sorted(itertools.product((1, 0), repeat=3), key=sum)[1:]
)
"""Every combination of lines."""

BATCH = 25
"""Heads of one plan, over the same number of keys."""


@dataclass(frozen=True)
class Head:
    """Lines of one stride: the classes (place mod stride) of its columns and of its diagonals (query minus key).

    A head with horizontal lines, of the class of its first column, has that column too: grids are symmetrical, and the
    rows themselves leave no trace in a softmax. noise: deviation of the scores; sink, near: what the first key and the
    eight nearest get on top.
    """

    kinds: tuple[str, ...]
    stride: int
    columns: tuple[int, ...]
    diagonals: tuple[int, ...]
    noise: float
    sink: float
    near: float

    @classmethod
    def draw(cls, kinds: tuple[str, ...], rng: torch.Generator) -> Head:
        """One to three lines of each kind, of any stride (its logarithm is uniform) and any phase.

        Heads whose lines leave no background (some of stride 2) have nothing to be found by, and are drawn again.
        """

        def uniform(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=rng))

        def phases(stride: int) -> tuple[int, ...]:
            count = min(int(uniform(1, 4)), max(1, stride // 4))
            return tuple(torch.randperm(stride, generator=rng)[:count].tolist())

        stride = min(HIGH, int(math.exp(uniform(math.log(LOW), math.log(HIGH + 1)))))
        columns = phases(stride) if "vertical" in kinds or "horizontal" in kinds else ()
        diagonals = phases(stride) if "slash" in kinds else ()
        head = cls(kinds, stride, columns, diagonals, uniform(0, 1), uniform(0, 6), uniform(0, 3))
        period = torch.arange(stride)
        return head if not head.on_line(period[:, None], period[None]).all() else cls.draw(kinds, rng)

    def on_line(self, row: Tensor, column: Tensor) -> Tensor:
        """Whether the pairs of a query and a key at these places are on a line."""
        line = torch.zeros(torch.broadcast_shapes(row.shape, column.shape), dtype=torch.bool)
        for phase in self.columns:
            line |= column % self.stride == phase
        for phase in self.diagonals:
            line |= (row - column) % self.stride == phase
        if "horizontal" in self.kinds:
            line |= row % self.stride == self.columns[0]
        return line

    def scores(self, n: int, ratio: float, rng: torch.Generator) -> Tensor:
        """[ROWS, n]: what the last queries of `n` tokens give to each key, not yet causal."""
        row, column = torch.arange(n - ROWS, n)[:, None], torch.arange(n)[None]
        score = self.noise * torch.randn(ROWS, n, generator=rng) + math.log(ratio) * self.on_line(row, column)
        score += self.near * ((row - column >= 0) & (row - column < 8))
        score[:, 0] += self.sink
        return score


@dataclass(frozen=True)
class Found:
    """What a plan follows: its stride and the class of its column and of its diagonal, where it has such lines."""

    stride: int
    column: int | None = None
    diagonal: int | None = None

    def verdict(self, head: Head) -> str:
        """ "exact", "harmonic" (a multiple or a divisor of the stride, on the planted lines) or "missed"."""
        multiple, divisor = self.stride % head.stride == 0, head.stride % self.stride == 0
        if not (multiple or divisor):
            return "missed"
        common = min(self.stride, head.stride)
        for phase, planted in ((self.column, head.columns), (self.diagonal, head.diagonals)):
            if phase is not None and planted and phase % common not in {p % common for p in planted}:
                return "missed"
        return "exact" if self.stride == head.stride else "harmonic"


def plan_mask(heads: Sequence[Head], n: int, ratio: float, rng: torch.Generator, pattern: Grid) -> Tensor:
    """[heads, ROWS, n] bool: what the pattern lets the last queries of `n` tokens see."""
    score = torch.stack([head.scores(n, ratio, rng) for head in heads])
    query = ROWS**0.5 * torch.eye(ROWS).expand(1, len(heads), ROWS, ROWS)
    layout = TokenLayout.text(1, n)
    plan = pattern.plan(
        query, score.transpose(1, 2)[None], layout.select_tokens(slice(n - ROWS, None)), layout
    )
    assert plan is not None
    return plan.to_mask()[0]


def read(mask: Tensor, columns: bool, diagonals: bool) -> Found:
    """The grid of a head that sees `mask` [ROWS, n]; only one of stride 2 can be dense, and its phases are not read."""
    n = mask.shape[1]
    place = torch.arange(n)
    row = place[-ROWS:, None]
    some = ~(mask | (place > row)).all(1)  # a row on a horizontal line sees everything
    if not some.any():
        return Found(2)
    found: dict[str, int] = {}
    gaps = set()
    if columns:
        lines = mask[some][:, : n - ROWS].all(0).nonzero()[:, 0]
        found["column"] = int(lines[0])
        gaps |= set(lines.diff().tolist())
    if diagonals:
        leaning = mask.gather(1, (row - place[: n - ROWS]).clamp(min=0))[some]
        lines = leaning.all(0).nonzero()[:, 0]
        found["diagonal"] = int(lines[0])
        gaps |= set(lines.diff().tolist())
    stride = min(gaps)
    return Found(stride, **{kind: phase % stride for kind, phase in found.items()})


def pattern_of(kinds: Sequence[str]) -> Grid:
    """The pattern with those lines on; that of a head of horizontal lines alone shows the columns that decide them."""
    return Grid(
        stride="free",
        min_stride=LOW,
        max_stride=HIGH,
        horizontal="horizontal" in kinds and kinds != ("horizontal",),
        vertical="vertical" in kinds or kinds == ("horizontal",),
        slash="slash" in kinds,
    )


def verdicts(
    kinds: tuple[str, ...], count: int, ratio: float, seed: int, blind: bool = False
) -> list[tuple[Head, Found, str]]:
    """`count` draws of heads with those lines, and how each was recovered; `blind`: every kind of line is searched."""
    rng = torch.Generator().manual_seed(seed)
    pattern = pattern_of(KINDS[-1] if blind else kinds)
    told = []
    while len(told) < count:
        heads = [Head.draw(kinds, rng) for _ in range(min(BATCH, count - len(told)))]
        n = int(torch.randint(4 * HIGH, 8 * HIGH, (), generator=rng))
        for head, mask in zip(heads, plan_mask(heads, n, ratio, rng, pattern), strict=True):
            found = read(mask, pattern.vertical, pattern.slash)
            told.append((head, found, found.verdict(head)))
    return told


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
    for k, kinds in enumerate(KINDS):
        count = draws // len(KINDS) + (k < draws % len(KINDS))
        for head, found, verdict in verdicts(kinds, count, RATIO, seed=100 + k, blind=blind):
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
    head = Head(("horizontal", "vertical", "slash"), 10, (3, 4), (2,), 0.0, 0.0, 0.0)
    weight = head.scores(4096, RATIO, rng).exp()
    for i in range(64):
        for j in range(4000, 4032):
            place = 4032 + i
            line = place % 10 == 3 or j % 10 in (3, 4) or (place - j) % 10 == 2
            assert weight[i, j] == pytest.approx(RATIO if line else 1.0)
    drawn = [Head.draw(kinds, rng) for kinds in KINDS for _ in range(40)]
    strides = [h.stride for h in drawn]
    assert min(strides) == 2 and max(strides) > 900 and len(set(strides)) > 100
    assert {len(h.columns) for h in drawn} == {len(h.diagonals) for h in drawn} == {0, 1, 2, 3}
