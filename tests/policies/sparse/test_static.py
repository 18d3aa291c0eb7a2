"""The static patterns and the content baseline against the masks of their papers.

Heads made to have a pattern: the estimate finds it, drawn at random and faint under noise too. A head is planted by its
scores alone: the last 64 queries are unit vectors and each key holds what they give it, so that every pair on a line has
`ratio` times the weight of a pair of the background. Gaussian noise on every score, a sink and a neighbourhood lie over
it. How recovery falls off as lines grow fainter is in docs/mminference.md.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.registry import registry
from mmaccel.policies.sparse import BlockTopK, Grid, SFFixed, SFStrided, TriShape, block_topk, estimate
from tests.spies import Largest, product

from . import masks
from .scenes import Scene, Token, scenes, sequence

STRIDES: list[dict[str, Any]] = [
    dict(stride="frame", low=2, high=12),
    dict(stride="frame", low=3, high=5),
    dict(stride="frame", low=1, high=1024),
    dict(stride=1, low=1, high=1),
    dict(stride=7, low=7, high=7),
    dict(stride=16, low=16, high=16),
    dict(stride=500, low=500, high=500),
]


def check(pattern, scene: Scene, mask_of) -> None:
    got = scene.mask(pattern)
    for b, tokens in enumerate(scene.sequences):
        assert (got[b] == scene.place(b, mask_of(tokens))).all()


def fields_of(strides: dict[str, Any]) -> dict[str, Any]:
    names = dict(stride="stride", low="min_stride", high="max_stride")
    return {names[k]: v for k, v in strides.items() if strides["stride"] == "frame" or k == "stride"}


@given(
    scenes(), st.sampled_from([(0, 1), (3, 5), (16, 16), (1, 200)]), st.sampled_from([0, 1, 7, 16, 40, 300])
)
def test_tri_shape(scene: Scene, extent: tuple[int, int], bottom: int) -> None:
    fields = dict(sink=extent[0], window=extent[1], bottom=bottom)
    check(TriShape(block=16, **fields), scene, lambda tokens: masks.tri_shape(tokens, **fields))


@given(scenes(), st.sampled_from(STRIDES), st.sampled_from([0, 1, 3, 50]), st.sampled_from(["last", "first"]))
def test_sf_fixed(scene: Scene, strides: dict[str, Any], summary: int, side: str) -> None:
    def mask_of(tokens):
        cut, _ = masks.segments(tokens, **strides)
        return masks.sf_fixed(cut, summary=summary, side=side)

    check(SFFixed(block=16, summary=summary, side=side, **fields_of(strides)), scene, mask_of)


@given(scenes(), st.sampled_from(STRIDES))
def test_sf_strided(scene: Scene, strides: dict[str, Any]) -> None:
    pattern = SFStrided(block=16, **fields_of(strides))
    check(pattern, scene, lambda tokens: masks.sf_strided(*masks.segments(tokens, **strides)))


VIDEO_ALONE = Scene((sequence([(VIDEO, [12] * 9)]),), heads=1, groups=1)


def marked_frames() -> tuple[Token, ...]:
    """Five frames of 3 rows of 4 cells and a mark each, with timestamps of one and two tokens between; then a question."""
    tokens: list[Token] = [Token(TEXT)] * 3
    for frame in range(5):
        tokens += [Token(TEXT)] * (1 + frame % 2)
        for cell in range(12):
            tokens.append(Token(VIDEO, frame, cell))
            if cell % 4 == 3:
                tokens.append(Token(VIDEO))
    return (*tokens, *[Token(TEXT)] * 40)


def test_marks_belong_to_their_frame_and_timestamps_to_none() -> None:
    scene = Scene((marked_frames(), sequence([(TEXT, [9]), (VIDEO, [6, 6, 7]), (IMAGE, [5])])))
    strides = dict(stride="frame", low=2, high=64)
    cut, step = masks.segments(scene.sequences[0], **strides)
    assert step == 15 and [len(s) for s in cut] == [4, 15, 2, 15, 1, 15, 2, 15, 1, 15, 15, 15, 10]
    for pattern, mask in (
        (SFFixed(block=16, **fields_of(strides)), lambda cut, _: masks.sf_fixed(cut, summary=1, side="last")),
        (SFStrided(block=16, **fields_of(strides)), masks.sf_strided),
    ):
        check(pattern, scene, lambda tokens, mask=mask: mask(*masks.segments(tokens, **strides)))


def test_text_alone_has_segments_of_128() -> None:
    scene = Scene((sequence([(TEXT, [300])]),), heads=1, groups=1)
    for cls in (SFFixed, SFStrided):
        assert (scene.mask(cls()) == scene.mask(cls(stride=128))).all()


def test_parts_of_the_bottom_have_few_rows() -> None:
    """The long lists of the dense rows stand in a part of two blocks, not in that of all rows."""
    query, key = torch.zeros(1, 2, 4096, 8), torch.zeros(1, 1, 4096, 8)
    layout = Scene((sequence([(TEXT, [4096])]),)).layout()
    plan = TriShape(window=512).plan(query, key, layout, layout)
    assert plan is not None and [part.q_row.shape[-1] for part in plan.parts] == [4096, 128]
    longest = [max(s.lists.list_lengths.max() for s in part.spans) for part in plan.parts]
    assert longest[0] <= 9 and longest[1] == 64


@pytest.mark.parametrize(
    ("name", "boundary"),
    product(["tri_shape", "sf_fixed", "sf_strided"], ["q_boundary", "k_boundary", "boundary_2d"]),
)
def test_of_a_single_modality_a_boundary_changes_nothing(name: str, boundary: str) -> None:
    inner = {"name": name, "block": 16}
    fields = dict(default=inner) if boundary == "boundary_2d" else dict(text=inner, video=inner, image=inner)
    made = (boundary, dict(block=16, **fields)), (name, dict(block=16))
    bound, plain = (registry("sparse").build(*one) for one in made)
    assert (VIDEO_ALONE.mask(bound) == VIDEO_ALONE.mask(plain)).all()


CHOICES: list[dict[str, Any]] = [
    dict(sink=0, budget=0.3),
    dict(sink=5, budget=0.6),
    dict(sink=20, budget=0.0),
    dict(sink=16, budget=0.95, top=3),
    dict(sink=0, budget=1.0, top=1),
    dict(sink=40, budget=1.0, top=4),
    dict(sink=0, budget=1.0),
]


@pytest.mark.parametrize("stride", [None, 16, 4, 1], ids=["mean", "16", "4", "1"])
@given(scene=scenes(), choice=st.sampled_from(CHOICES))
def test_the_heaviest_blocks_are_kept(stride: int | None, scene: Scene, choice: dict[str, Any]) -> None:
    how = dict(score="mean") if stride is None else dict(score="antidiagonal", stride=stride)
    pattern = BlockTopK(block=16, **how, **choice)
    plan = scene.plan(pattern)
    listed = plan.parts[0].spans[0].lists.list_lengths.sum(-1).max()
    assert int(listed) <= pattern.max_blocks_total(plan.n_query, plan.n_key)
    query, key, _ = scene.tensors()
    got = plan.to_mask().numpy()
    for b, tokens in enumerate(scene.sequences):
        pad, n = scene.pad(b), len(tokens)
        first = max(0, scene.start - pad)
        for h in range(scene.heads):
            q = query[b, h, max(0, pad - scene.start) :].numpy()
            k = key[b, h // (scene.heads // scene.groups), pad:].numpy()
            share = masks.block_shares(q, k, first, 16, stride)
            assert np.allclose(share.sum(1), 1)
            mask = masks.block_topk(share, n, first, block=16, **{"top": None, **choice})
            assert (got[b, h, max(0, pad - scene.start) :, pad:] == mask[first:]).all()
            assert not got[b, h, :, :pad].any() and not got[b, h, : max(0, pad - scene.start)].any()


def test_a_run_of_queries_at_a_time_is_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene((sequence([(VIDEO, [10] * 20)]), sequence([(TEXT, [150])])), start=21)
    whole = scene.plan(BlockTopK(block=16, budget=0.5, sink=0)).to_mask()
    monkeypatch.setattr(block_topk, "ENTRIES", 1)
    assert torch.equal(scene.plan(BlockTopK(block=16, budget=0.5, sink=0)).to_mask(), whole)


def test_a_limit_makes_the_bound_linear() -> None:
    assert BlockTopK(top=32, sink=128).max_blocks_total(131072, 131072) <= 2048 * 32
    assert BlockTopK().max_blocks_total(128, 131072) == 2047 + 2048


@pytest.mark.parametrize("score", ["antidiagonal", "mean"])
def test_no_tensor_holds_every_pair(score: str) -> None:
    S = 4096
    query, key = torch.randn(1, 2, S, 16), torch.randn(1, 1, S, 16)
    layout = TokenLayout.text(1, S)
    with Largest() as seen:
        BlockTopK(score=score, budget=0.5).plan(query, key, layout, layout)
    assert seen.entries < S * S / 8


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
    def draw(cls, kinds: tuple[str, ...], rng: torch.Generator) -> "Head":
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
    rows = layout.select_tokens(slice(n - ROWS, None))
    plan = pattern.plan(query, score.transpose(1, 2)[None], rows, layout)
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
