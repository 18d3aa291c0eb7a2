"""Each pattern against the mask of its paper, written down independently: equal, or between the mask and its closure."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.policies.sparse import AShape, Grid, VerticalSlash, orders
from mmaccel.policies.sparse.orders import LayerInputs

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
    scene = Scene(
        (
            sequence([(TEXT, [4]), (VIDEO, [9] * 30), (TEXT, [6])]),
            sequence([(TEXT, [240])]),
            sequence([(TEXT, [20])]),
        )
    )
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
    for found, want in zip(last.line_sums(), (weight.sum(2), diagonals), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("start", [0, 37])
def test_the_last_of_the_keys_are_not_searched_for(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Scene((sequence([(TEXT, [9]), (VIDEO, [7] * 12)]),)).layout()
    order = orders.sequence_order(keys, block=16)
    want = orders.at_or_before(order, orders.sequence_order(keys.select_tokens(slice(start, None)), block=16))
    monkeypatch.setattr(orders, "at_or_before", None)
    at = LayerInputs.from_layouts(keys.select_tokens(slice(start, None)), keys, 16).region().at
    assert at.dtype == want.dtype and torch.equal(at, want)
