"""Each pattern against the mask of its paper, written down independently: equal, or between the mask and its closure;
boundaries between modalities against masks put together pair by pair from those of the patterns within."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmaccel.backends import reference
from mmaccel.core.layout import MODALITIES, TEXT, VIDEO
from mmaccel.core.prefill.sparse import attend_plan, parts_to_launch
from mmaccel.policies.sparse import (
    AShape,
    Boundary2D,
    Dense,
    Grid,
    KBoundary,
    QBoundary,
    VerticalSlash,
    orders,
)
from mmaccel.policies.sparse.orders import IntraPattern, LayerInputs
from tests.backends.oracle import masked
from tests.spies import product

from . import masks
from .scenes import Scene, Token, scenes, sequence


def weights_of(
    scene: Scene, b: int, head: int, count: int, modality: int | None = None, pooled: bool = False
) -> tuple[masks.Rows, int]:
    """What the last queries (of a modality) of a head of sequence b attend to, and the position of its first query."""
    query, key, _ = scene.tensors()
    pad, first = scene.pad(b), max(0, scene.start - scene.pad(b))
    group = scene.heads // scene.groups
    k = key[b, head // group, pad:].numpy()
    heads = range(head // group * group, (head // group + 1) * group) if pooled else [head]
    asked = [masks.last_rows(query[b, h, max(0, pad - scene.start) :].numpy(), k, first) for h in heads]
    rows = [(at[0][0], np.mean([weights for _, weights in at], 0)) for at in zip(*asked, strict=True)]
    if modality is not None:
        rows = [(i, weights) for i, weights in rows if scene.sequences[b][i].modality == modality]
    return rows[max(0, len(rows) - count) :], first


@given(scenes(), st.sampled_from([(0, 1), (3, 5), (16, 16), (20, 33), (1, 200)]))
def test_a_shape(scene: Scene, extent: tuple[int, int]) -> None:
    sink, window = extent
    got = scene.mask(AShape(sink=sink, window=window, block=16))
    for b, tokens in enumerate(scene.sequences):
        want = scene.place(b, masks.a_shape(tokens, sink=sink, window=window))
        assert (got[b] == want).all()


def one_of(names: str, *values: tuple) -> st.SearchStrategy[dict]:
    """One of some settings of these fields."""
    return st.sampled_from([dict(zip(names.split(), value, strict=True)) for value in values])


@pytest.mark.always
@settings(max_examples=80)
@given(
    scenes(),
    one_of("vertical slash", (0, 1), (7, 5), (16, 3), (40, 2), (3, 40), (200, 200)),
    st.sampled_from(["head", "group"]),
    one_of("sink nearest", (0, 1), (5, 1), (20, 4), (0, 40)),
)
def test_vertical_slash(scene: Scene, budget: dict, estimate: str, kept: dict) -> None:
    def masks_of(b: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        n, (rows, first) = len(scene.sequences[b]), weights_of(scene, b, head, 16, pooled=estimate == "group")
        return masks.vertical_slash(n, range(first, n), range(n), rows, **budget, **kept, block=16)

    scene.check(VerticalSlash(**budget, **kept, last_q=16, block=16, estimate=estimate), masks_of)


def grid_mask(
    pattern: Grid, tokens: Sequence[Token], queries: Sequence[int], keys: Sequence[int], rows: masks.Rows
) -> np.ndarray:
    """The mask of a grid head over some tokens of a sequence, from the weights `rows` among its keys."""
    low, high, kind = pattern.min_stride, pattern.max_stride, pattern.score
    lines = dict(horizontal=pattern.horizontal, vertical=pattern.vertical, slash=pattern.slash)
    shown = [tokens[j] for j in keys]
    found = None
    if pattern.stride == "frame":
        found = masks.frame_grid(shown, rows, low=low, high=high, kind=kind)
        if not masks.frames_serve(shown, found[0], low):
            found = None
    if found is None:
        limits = dict(low=low, high=high, slack=pattern.slack, kind=kind)
        columns = pattern.horizontal or pattern.vertical
        found = masks.free_grid(rows, len(keys), lines=columns, slash=pattern.slash, **limits)
    dense = masks.evenest_class(rows, found[0], found[1]) if pattern.horizontal_phase == "queries" else None
    near = dict(window=pattern.window, sink=pattern.sink)
    return masks.grid(len(tokens), queries, keys, *found, **lines, dense=dense, **near)


@pytest.mark.always
@settings(max_examples=80)
@given(
    scenes(),
    one_of("horizontal vertical slash", *itertools.product([True, False], repeat=3)).filter(
        lambda lines: any(lines.values())
    ),
    one_of(
        "stride min_stride max_stride",
        *[("free", 2, 12), ("free", 3, 5), ("frame", 2, 12), ("frame", 2, 5), ("frame", 8, 40)],
    ),
    one_of(
        "score horizontal_phase estimate",
        *itertools.product(["contrast", "mean", "sum"], ["keys", "queries"], ["head", "group"]),
    ),
    one_of("window sink", (0, 0), (0, 5), (3, 0), (17, 1), (20, 33), (200, 0), (1, 200)),
)
def test_grid(scene: Scene, lines: dict, strides: dict, how: dict, near: dict) -> None:
    pattern = Grid(**lines, **strides, **how, **near, last_q=16, block=16)

    def masks_of(b: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = scene.sequences[b]
        rows, first = weights_of(scene, b, head, 16, pooled=pattern.estimate == "group")
        return (grid_mask(pattern, tokens, range(first, len(tokens)), range(len(tokens)), rows),) * 2

    scene.check(pattern, masks_of)


def test_a_short_prompt_and_a_frameless_one_are_served_beside_a_video() -> None:
    """Each sequence of a batch has the grid it can have: one is dense, one searched, one of frames."""
    parts = [(TEXT, [4]), (VIDEO, [9] * 30), (TEXT, [6])], [(TEXT, [240])], [(TEXT, [20])]
    scene = Scene(tuple(map(sequence, parts)))
    pattern = Grid(min_stride=8, block=16)
    got = scene.mask(pattern)
    share = got.sum((2, 3)) / [[masks.causal(s).sum()] for s in scene.sequences]
    assert (share[:2] < 0.6).all()
    assert (share[2] == 1).all()


CALLERS = {
    "the last queries are padding": (slice(None), slice(None), 25),
    "the queries are the first of the keys": (slice(0, 60), slice(None), 60),
    "some keys are gone": (slice(None), slice(20, None), None),
    "the last of the keys": (slice(30, None), slice(None), None),
}
"""Which of the tokens ask, which are keys, and how many of those that ask are there."""


@pytest.mark.parametrize("case", CALLERS)
def test_the_last_queries_of_a_caller_s_own_are_those_that_are_there(case: str) -> None:
    ask, held, there = CALLERS[case]
    scene = Scene((sequence([(TEXT, [9]), (VIDEO, [7] * 12), (TEXT, [12])]),))
    whole, (query, key, _) = scene.layout(), scene.tensors()
    queries, query, key = whole.select_tokens(ask), query[:, :, ask], key[:, :, held]
    n, count = queries.length if there is None else there, 16
    if there is not None:
        queries = replace(queries, valid=torch.arange(queries.length)[None] < there)
    last = (
        LayerInputs(query, key, queries, whole.select_tokens(held), 16).region().last_query_attention(count)
    )
    assert last.sample.queries_are_last_keys == (case == "the last of the keys")
    # Places among the keys, of which some may be gone.
    at = torch.arange(scene.length)[ask][n - count : n] - (held.start or 0)
    grouped = key.repeat_interleave(scene.heads // scene.groups, 1)
    column = torch.arange(key.shape[2])
    scores = query[:, :, n - count : n] @ grouped.mT * scene.size**-0.5
    weight = scores.masked_fill(column > at[:, None], -torch.inf).softmax(-1)
    diagonals = torch.zeros(weight.shape[:2] + column.shape, dtype=weight.dtype)
    for row, place in enumerate(at.tolist()):
        diagonals[..., : place + 1] += weight[:, :, row, : place + 1].flip(-1)
    for found, want in zip(last.line_weights(), (weight.sum(2), diagonals), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", [0, 37])
def test_the_last_of_the_keys_are_not_searched_for(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Scene((sequence([(TEXT, [9]), (VIDEO, [7] * 12)]),)).layout()
    order = orders.sequence_order(keys, block=16)
    want = orders.rank_at_or_before(
        order, orders.sequence_order(keys.select_tokens(slice(start, None)), block=16)
    )
    monkeypatch.setattr(orders, "rank_at_or_before", None)
    at = LayerInputs.from_layouts(keys.select_tokens(slice(start, None)), keys, 16).region().at
    assert at.dtype == want.dtype and torch.equal(at, want)


Masks = tuple[np.ndarray, np.ndarray]


def within(
    pattern: IntraPattern | None,
    tokens: Sequence[Token],
    queries: Sequence[int],
    keys: Sequence[int],
    rows: masks.Rows,
) -> Masks:
    """The element mask and its closure of some queries over some keys; rows: all that the last of the queries attend to."""
    n = len(tokens)
    if pattern is None:
        return (np.zeros((n, n), bool),) * 2
    if isinstance(pattern, Dense):
        return (masks.dense_among(n, queries, keys),) * 2
    if isinstance(pattern, AShape):
        return (masks.a_shape_among(n, queries, keys, sink=pattern.sink, window=pattern.window),) * 2
    told = masks.among(rows, keys)
    if isinstance(pattern, Grid):
        return (grid_mask(pattern, tokens, queries, keys, told),) * 2
    assert isinstance(pattern, VerticalSlash)
    budget = dict(vertical=pattern.vertical, slash=pattern.slash)
    return masks.vertical_slash(n, queries, keys, told, **budget, block=pattern.block)


def expected(boundary: QBoundary | KBoundary | Boundary2D, scene: Scene, b: int, head: int) -> Masks:
    """The masks of one head of sequence b, pair of groups by pair of groups."""
    tokens = scene.sequences[b]
    first = max(0, scene.start - scene.pad(b))
    everyone = [None]
    of_queries = everyone if isinstance(boundary, KBoundary) else list(MODALITIES)
    of_keys = everyone if isinstance(boundary, QBoundary) else list(MODALITIES)
    n = len(tokens)
    element, closure = np.zeros((n, n), bool), np.zeros((n, n), bool)
    for q in of_queries:
        queries = [i for i in range(first, n) if q in (None, tokens[i].modality)]
        rows, _ = weights_of(scene, b, head, 16, modality=q)
        for k in of_keys:
            keys = [j for j in range(n) if k in (None, tokens[j].modality)]
            if isinstance(boundary, Boundary2D):
                name = f"{MODALITIES[q]}>{MODALITIES[k]}"
                pattern = boundary.pairs.get(name, boundary.default)
            else:
                pattern = getattr(boundary, MODALITIES[k if q is None else q])
            less, more = within(pattern, tokens, queries, keys, rows)
            element |= less
            closure |= more
    return element, closure


def check(boundary: QBoundary | KBoundary | Boundary2D, scene: Scene) -> None:
    scene.check(boundary, lambda b, head: expected(boundary, scene, b, head))


def pattern(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, **fields}


INNER: list[Any] = [
    None,
    "dense",
    pattern("a_shape", sink=0, window=1),
    pattern("a_shape", sink=3, window=7),
    pattern("a_shape", sink=17, window=20),
    pattern("a_shape", sink=50, window=200),
    pattern("vertical_slash", vertical=5, slash=3, last_q=16),
    pattern("vertical_slash", vertical=0, slash=9, last_q=16),
    pattern("grid", min_stride=2, max_stride=12, last_q=16),
    pattern("grid", stride="free", min_stride=2, max_stride=9, last_q=16),
    pattern("grid", min_stride=2, max_stride=12, last_q=16, horizontal=False),
    pattern("grid", min_stride=2, max_stride=12, last_q=16, window=9, sink=3),
    pattern("grid", stride="free", min_stride=3, max_stride=9, last_q=16, slash=False, score="mean"),
]


@pytest.mark.parametrize("boundary", [QBoundary, KBoundary])
@settings(max_examples=40)
@given(scenes(), st.tuples(*[st.sampled_from(INNER)] * 2), st.sampled_from(INNER[1:]))
def test_q_and_k_boundary(boundary: type, scene: Scene, some: tuple[Any, Any], other: Any) -> None:
    check(boundary(text=some[0], image=some[1], video=other, block=16), scene)


PAIRS = [f"{q}>{k}" for q in MODALITIES.values() for k in MODALITIES.values()]


@pytest.mark.always
@settings(max_examples=40)
@given(
    scenes(),
    st.sampled_from(INNER[1:]),
    st.dictionaries(st.sampled_from(PAIRS), st.sampled_from(INNER), max_size=5),
)
def test_boundary_2d(scene: Scene, default: Any, pairs: dict[str, Any]) -> None:
    check(Boundary2D(default=default, pairs=pairs, block=16), scene)


@pytest.mark.parametrize(
    ("inner", "segments"), product(INNER[1:], [[(TEXT, [100])], [(VIDEO, [6] * 18)]]), ids=str
)
def test_a_single_modality_is_planned_as_without_a_boundary(inner: Any, segments: Any) -> None:
    """The very same lists, so that a boundary costs nothing where there is none."""
    scene = Scene((sequence(segments),), start=37)
    query, key, _ = scene.tensors()
    layout = scene.layout()
    where = (query, key, layout.select_tokens(slice(scene.start, None)), layout)
    alone = QBoundary(video=inner, block=16).video
    assert isinstance(alone, IntraPattern)
    sight_parts = Boundary2D(default=alone, block=16).plan(*where)
    for boundary in (
        QBoundary(text=inner, image=inner, video=inner, block=16),
        KBoundary(text=inner, image=inner, video=inner, block=16),
        Boundary2D(default=inner, block=16),
    ):
        plan, plain = boundary.plan(*where), alone.plan(*where)
        if isinstance(alone, Dense):
            plain = sight_parts
        assert plan.may_share_rows == plain.may_share_rows and len(plan.parts) == len(plain.parts)
        for mine, theirs in zip(plan.parts, plain.parts, strict=True):
            assert torch.equal(mine.q_row, theirs.q_row)
            for a, b in zip(mine.spans, theirs.spans, strict=True):
                assert (a.lo, a.hi) == (b.lo, b.hi)
                for name in ("k_row", "q_pos", "k_pos"):
                    assert torch.equal(getattr(a, name), getattr(b, name))
                assert torch.equal(a.lists.row, b.lists.row) and torch.equal(a.lists.kind, b.lists.kind)
                assert torch.equal(a.lists.index_or_empty, b.lists.index_or_empty)


def test_patterns_of_the_layout_alone_are_planned_and_joined_once() -> None:
    """All layers of a prompt have one plan, and one launch of it; what looks at the tensors is planned for each layer."""
    scene = Scene((sequence([(TEXT, [9]), (VIDEO, [8] * 6), (TEXT, [5])]),), heads=2, groups=1, size=8)
    (query, key, value), layout = scene.tensors(), scene.layout()
    near = AShape(sink=4, window=16, block=16)
    fixed = QBoundary(text=near, video=near, block=16)
    asked = QBoundary(text=near, video=Grid(block=16), block=16)
    first, again = (fixed.plan(t, key, layout, layout) for t in (query, 0 * query))
    assert first is not None and first is again and parts_to_launch(first) is parts_to_launch(again)
    assert len(parts_to_launch(first)) == 1
    assert asked.plan(query, key, layout, layout) is not asked.plan(query, key, layout, layout)
    # Another recipe, number of heads or prompt has a plan of its own, which is right.
    wider = QBoundary(text=near, video=AShape(sink=4, window=32, block=16), block=16)
    fresh = scene.layout()
    for pattern, q, one in ((wider, query, layout), (fixed, query[:, :1], layout), (fixed, query, fresh)):
        plan = pattern.plan(q, key, one, one)
        assert plan is not None and plan is not first
        out, _ = attend_plan(plan, q, key, value, 0.3, reference.op)
        torch.testing.assert_close(out, masked(q, key, value, plan.to_mask(), 0.3))
