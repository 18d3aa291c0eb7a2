"""Boundaries between modalities, against masks put together pair by pair from those of the patterns within."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmaccel.backends import reference
from mmaccel.core.layout import MODALITIES, TEXT, VIDEO
from mmaccel.core.prefill.sparse import attend_plan, parts_to_launch
from mmaccel.policies.sparse import AShape, Boundary2D, Dense, Grid, KBoundary, QBoundary, VerticalSlash
from mmaccel.policies.sparse.orders import IntraPattern
from tests.backends.oracle import masked
from tests.products import product

from . import masks
from .scenes import Scene, Token, scenes, sequence
from .test_exact import grid_mask, weights_of

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
                assert torch.equal(a.lists.entries, b.lists.entries)


def test_patterns_of_the_layout_alone_are_planned_and_joined_once() -> None:
    """All layers of a prompt have one plan, and one launch of it; what looks at the tensors is planned for each layer."""
    scene = Scene((sequence([(TEXT, [9]), (VIDEO, [8] * 6), (TEXT, [5])]),), heads=2, groups=1, size=8)
    (query, key, value), layout = scene.tensors(), scene.layout()
    near = AShape(sink=4, window=16, block=16)
    fixed, asked = (
        QBoundary(text=near, video=near, block=16),
        QBoundary(text=near, video=Grid(block=16), block=16),
    )
    first, again = (fixed.plan(t, key, layout, layout) for t in (query, 0 * query))
    assert first is not None and first is again and parts_to_launch(first) is parts_to_launch(again)
    assert len(parts_to_launch(first)) == 1
    assert asked.plan(query, key, layout, layout) is not asked.plan(query, key, layout, layout)
    # Another recipe, number of heads or prompt has a plan of its own, which is right.
    wider = QBoundary(text=near, video=AShape(sink=4, window=32, block=16), block=16)
    for pattern, q, one in (
        (wider, query, layout),
        (fixed, query[:, :1], layout),
        (fixed, query, scene.layout()),
    ):
        plan = pattern.plan(q, key, one, one)
        assert plan is not None and plan is not first
        out, _ = attend_plan(plan, q, key, value, 0.3, reference.op)
        torch.testing.assert_close(out, masked(q, key, value, plan.to_mask(), 0.3))
