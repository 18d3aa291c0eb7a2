"""Indices made by the Triton kernels against the plain way, interpreted or compiled; `test_triton.py` runs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from mmaccel.backends.ops import lines, operator
from mmaccel.backends.triton.prefill import estimate
from mmaccel.backends.triton.prefill import lines as kernels
from mmaccel.backends.triton.prefill.estimate import line_weights, rowwise_logsumexp
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.registry import policy
from mmaccel.policies.sparse import Grid, stride
from mmaccel.policies.sparse.estimate import LastQueryAttention, SampledQueryLayout, Score
from mmaccel.policies.sparse.orders import LayerInputs
from mmaccel.policies.sparse.per_head import LayerHeadPatterns
from tests.policies.sparse.scenes import Scene, sequence
from tests.policies.sparse.test_contract import small

from .triton_cases import DEVICE, DTYPES, INTERPRETED, some

N, HEADS, GROUPS = (200, 4, 2) if INTERPRETED else (300, 6, 3)
PLACES = {
    "the last": torch.arange(N - 20, N).expand(2, -1),
    "early, and few": torch.stack([torch.arange(100, 120), (torch.arange(20) - 5).clamp(min=-1)]),
    "apart": torch.stack([torch.arange(20) * 9, torch.arange(20) // 7 * 90 - 1]),
    "equal, and none": torch.stack([torch.full((20,), 150), torch.full((20,), -1)]),
}
"""Places of 20 queries of two sequences among N keys."""


def sample(
    at: Tensor, dtype: torch.dtype, *, gathered: bool, pooled: bool, given: bool
) -> LastQueryAttention:
    """The queries at some places of keys that lie in a longer tensor, and in another order where they are gathered."""
    rng = torch.Generator().manual_seed(3)
    query = torch.randn(2, HEADS, at.shape[1], 24, generator=rng).to(dtype)
    key = torch.randn(2, N + 9, GROUPS, 24, generator=rng).to(dtype).transpose(1, 2)
    row = torch.stack([torch.randperm(N + 9, generator=rng)[:N] for _ in range(2)]) if gathered else None
    seen = torch.arange(N) <= at[:, -1:]
    # Of some heads of a layer: a view.
    total = torch.randn(2, HEADS + 2, at.shape[1], generator=rng)[:, 1:-1].add_(6) if given else None
    return LastQueryAttention(query, key, SampledQueryLayout(at, at, row, seen, False, 99), total, pooled)


@pytest.mark.parametrize(("places", "dtype", "gathered"), some(PLACES, DTYPES, [False, True]), ids=str)
def test_lines(places: str, dtype: torch.dtype, gathered: bool) -> None:
    """Totals, columns and diagonals, from the same numbers in float64; of gathered keys also pooled over a group."""
    pooled = gathered
    last = sample(PLACES[places], dtype, gathered=gathered, pooled=pooled, given=gathered)
    exact = replace(last, query=last.query.double(), key=last.key.double())
    moved = (
        t if t is None else t.to(DEVICE)
        for t in (last.query, last.key, last.sample.row, last.query_ranks, last.total)
    )
    query, key, row, at, total = moved
    found = rowwise_logsumexp(query, key, row, at, N)
    want = exact.logsumexp()
    assert torch.equal(found.cpu() == -torch.inf, want == -torch.inf)
    assert float((found.cpu() - want).nan_to_num(0.0).abs().max()) <= 1e-5
    for got, line in zip(
        line_weights(query, key, row, at, total, N, pooled), exact.line_weights(), strict=True
    ):
        assert got.shape == (2, GROUPS if pooled else HEADS, N)
        assert bool(((last.expand_heads(got.cpu()) - line).abs() <= 1e-6 + 1e-5 * line).all())


def same_pairs(pattern: SparsePattern, scene: Scene) -> bool:
    """Whether the plan of kernels has the pairs of one that is made without them."""
    want, _ = scene.planned(pattern, torch.float32)
    with launched():
        got, _ = scene.planned(pattern, torch.float32, DEVICE)
    return torch.equal(got.spans_per_pair().cpu(), want.spans_per_pair())


@contextmanager
def launched() -> Iterator[None]:
    """Everything that the Triton backend has a kernel for goes through it, also where Triton interprets."""
    with (
        mock.patch.object(LastQueryAttention, "has_kernel", property(lambda _: True)),
        mock.patch.object(operator, "why_triton_unusable", lambda _: None),
    ):
        yield


SCENE = Scene(
    (
        sequence([(TEXT, [5]), (VIDEO, [7, 7, 7, 3]), (TEXT, [1]), (VIDEO, [7] * 5), (TEXT, [14])]),
        sequence([(TEXT, [3]), (VIDEO, [6] * 6), (TEXT, [9])]),
    ),
    heads=4,
    groups=2,
    size=16,
    seed=11,
)


@pytest.mark.parametrize("columns", [0, 5, 16, 33])
def test_line_keys(columns: int) -> None:
    """Fewer lines than there is room for, none at all, and diagonals that all heads share."""
    row = torch.arange(48, dtype=torch.int32).repeat(2, 1)
    row[1, 30:] = -1
    chosen = torch.stack([torch.arange(columns) + 3, torch.full((columns,), 48)])[:, None].expand(-1, 3, -1)
    diagonal = torch.tensor([0, 1, 17, 48, 48]).expand(2, 3, -1)
    for width in (48, 30):
        arguments = row, chosen.contiguous(), diagonal
        want = lines.split_columns.plain(*arguments, width, 16)
        got = kernels.split_columns(*(t.to(DEVICE) for t in arguments), width, 16)
        for mine, its in zip(got, want, strict=True):
            assert mine.dtype == its.dtype and torch.equal(mine.cpu(), its)


PATTERNS: dict[str, SparsePattern] = {
    "vertical_slash": small("vertical_slash"),
    "vertical_slash, group": replace(small("vertical_slash"), estimate="group"),
    "grid": small("grid"),
    "grid, mean": replace(small("grid"), score="mean", horizontal=False),
    "grid, sum, group, queries": Grid(
        score="sum",
        estimate="group",
        horizontal_phase="queries",
        min_stride=2,
        max_stride=12,
        last_q=16,
        block=16,
    ),
    "grid without columns": replace(small("grid"), vertical=False, horizontal_phase="queries"),
    "grid of a searched stride": small("grid of a searched stride"),
    "q_boundary": small("q_boundary"),
    "boundary_2d": small("boundary_2d"),
}


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("vertical_slash", 43),
        ("grid, sum, group, queries", 0),
        ("grid of a searched stride", 43),
        ("boundary_2d", 43),
        ("grid, sum, group, queries", 43),
        ("grid", 0),
        ("grid", 43),
        ("vertical_slash, group", 43),
        ("grid, mean", 43),
        ("grid without columns", 43),
        ("q_boundary", 43),
    ],
)
def test_plans(name: str, start: int) -> None:
    """The same pairs as of an index made without kernels; one prompt twice gives one answer."""
    assert same_pairs(PATTERNS[name], replace(SCENE, start=start))


@pytest.mark.parametrize("name", ["grid, sum, group, queries", "vertical_slash"])
def test_heads_apart_in_a_batch(name: str) -> None:
    """Within a boundary the totals of each run of heads are some of those of all heads, in every sequence of a batch."""
    inner = replace(PATTERNS[name], block=16)
    own = policy("sparse", {"name": "k_boundary", "text": inner, "video": inner, "image": None, "block": 16})
    assert isinstance(own, SparsePattern)
    heads = LayerHeadPatterns(block=16, named=dict.fromkeys((0, 3, 4), own), heads=6)
    short = [sequence([(TEXT, [5]), (VIDEO, [7] * n), (TEXT, [8])]) for n in (4, 3)]
    assert same_pairs(heads, replace(SCENE, sequences=tuple(short), heads=6))


@pytest.mark.parametrize(("score", "padded"), some(["contrast", "mean", "sum"], [True, False]))
def test_classes_of_more_keys_than_a_tile(score: Score, padded: bool, monkeypatch) -> None:
    """Their tiles that every query sees are not tested; the lines and the phases are those of the plain way."""
    monkeypatch.setattr(estimate, "KEYS", 16)
    long = sequence([(TEXT, [5]), (VIDEO, [5] * 40), (TEXT, [20])])
    other = sequence([(TEXT, [3]), (VIDEO, [4] * 45), (TEXT, [9])]) if padded else long
    scene = Scene((long, other), heads=4, groups=2, size=16, seed=5)
    search = stride.StrideSearch(low=2, most=12, slack=0.1, score=score, rows=True, keys=scene.length)

    def found(device: str) -> stride.StrideResidueClasses:
        query, key, _ = (t.to(device) for t in scene.tensors(torch.float32))
        layout = scene.layout().to(device)
        region = LayerInputs(query, key, layout, layout, 16).region()
        last, frames = region.last_query_attention(24, padded), stride.FrameResidueClasses.make(region, 2, 12)
        # Each class has a whole tile before the first of these queries.
        sizes = torch.stack([(frames.number[..., :150] == c).sum(-1) for c in range(4)])
        assert int(last.query_ranks.min()) > 150 and int(sizes.min()) >= estimate.KEYS
        return stride.estimate_frame_phases(last, frames, search)

    want = found("cpu")
    with launched():
        got = found(DEVICE)
    for name in ("line", "shift", "dense"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


@pytest.mark.parametrize(("score", "strides"), some(["contrast", "mean", "sum"], [(3, 7), (62, 66)]))
def test_strides(score: Score, strides: tuple[int, int]) -> None:
    """Classes of more members than go together, and more classes; of two sequences one is short."""
    low, high = strides
    rng = torch.Generator().manual_seed(low)
    value, at = torch.randn(2, 2, 1, 400, generator=rng), torch.tensor([399, 211])
    there = (torch.arange(400) <= at[:, None])[None, :, None]
    masked = value.double().masked_fill(~there, 0.0)
    want = torch.stack([stride._heaviest(masked, there, s, score) for s in range(low, high + 1)], -1)
    got = estimate.score_strides(value.to(DEVICE), at.to(DEVICE), low, high, score).cpu()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "count", "tile"),
    [(70, 50, 16), (110, 90, 16), (77, 200, 8192), (300, 20, 64), (300, 1000, 512), (77, 5, 8192)],
)
def test_strongest(n: int, count: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TILE", tile)
    monkeypatch.setattr(kernels, "PIECES", 4)
    rng = torch.Generator().manual_seed(n)
    scores, last = torch.rand(2, 3, 2, n, generator=rng) ** 8, torch.tensor([n - 1, 9, -1])
    for vertical, slash in ((count, count // 2), (0, count)):
        want = lines.choose_lines.plain(*scores, last, vertical, slash)
        got = kernels.choose_lines(*scores.to(DEVICE), last.to(DEVICE), vertical, slash)
        assert all(torch.equal(mine.cpu(), its) for mine, its in zip(got, want, strict=True))
    # Of equal scores any may be chosen.
    scores = (scores * 4).round()
    found = kernels.choose_lines(*scores.to(DEVICE), last.to(DEVICE), count, count)
    for score, got, its in zip(
        scores, found, lines.choose_lines.plain(*scores, last, count, count), strict=True
    ):
        mine = got.cpu()
        assert torch.equal(mine < n, its < n) and bool((mine.diff(dim=2) > 0)[mine[..., 1:] < n].all())
        padded = torch.nn.functional.pad(score, (0, 1), value=-1)
        assert torch.equal(padded.gather(2, mine).sort(2).values, padded.gather(2, its).sort(2).values)
