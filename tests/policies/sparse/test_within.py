"""A plan narrowed by a window and sinks: the plan's pairs that a window shows, by every backend, for every pattern."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.backends import select
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO
from mmaccel.core.prefill.plan import AttentionPlan, KeySpan, Part
from mmaccel.core.prefill.sparse import attend_plan
from tests.backends.oracle import budget
from tests.backends.plans import random_plan, with_extras
from tests.products import product

from .scenes import Scene, scenes, sequence
from .test_contract import CASES, listed_by_hand, small
from .test_no_reads import NoReads

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

LONG = Scene(
    (
        sequence(
            [(TEXT, [9]), (VIDEO, [8] * 20), (IMAGE, [9, 9]), (TEXT, [1]), (VIDEO, [6] * 30), (TEXT, [30])]
        ),
        sequence([(TEXT, [3]), (VIDEO, [6] * 60), (TEXT, [9])]),
    ),
    start=100,
    seed=5,
)
"""Some hundred tokens: windows of a few blocks leave blocks out before and after."""


def window_mask(plan: AttentionPlan, sinks: int, window: int) -> Tensor:
    """[n_query, n_key] bool, written out: what a window of `window` columns and `sinks` show, causality aside."""
    first = plan.n_key - plan.n_query
    rows = [[k < sinks or first + i - k < window for k in range(plan.n_key)] for i in range(plan.n_query)]
    return torch.tensor(rows)


def check(plan: AttentionPlan, sinks: int, window: int) -> AttentionPlan:
    narrow = plan.within(sinks, window)
    assert torch.equal(narrow.to_mask(), plan.to_mask() & window_mask(plan, sinks, window))
    assert plan.overlap or int(narrow.count_mask().max()) <= 1
    listed = narrow.count_listed_pairs()
    assert (listed >= narrow.to_mask().sum((2, 3))).all() and (listed <= plan.count_listed_pairs()).all()
    if narrow.dense is None:
        assert torch.equal(listed, listed_by_hand(narrow))
    return narrow


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10)
@given(scene=scenes(), sinks=st.sampled_from([0, 1, 4, 16, 19, 70]), window=st.integers(1, 150))
def test_a_narrowed_plan_has_the_pairs_of_both(name: str, scene: Scene, sinks: int, window: int) -> None:
    plan = scene.plan(small(name))
    if plan is not None:
        check(plan, sinks, window)


def ends_show_something(plan: AttentionPlan, part: Part, span: KeySpan, mask: Tensor) -> None:
    """The first and the last block of each list hold a key that the window shows to a row of the block of queries."""
    offset, block, _ = span.lists.flat()
    b, h, M = offset.shape[0], offset.shape[1], offset.shape[2] - 1
    q_row, k_row = (row.expand(b, h, -1) for row in (part.q_row, span.k_row))
    for x, y, m in itertools.product(range(b), range(h), range(M)):
        begin, end = offset[x, y, m : m + 2].tolist()
        rows = q_row[x, y, m * plan.block_q : (m + 1) * plan.block_q]
        for entry in {begin, end - 1} if begin < end else ():
            first = int(block[entry]) * plan.block_k
            keys = k_row[x, y, first : first + plan.block_k]
            assert mask[rows[rows >= 0].long()][:, keys[keys >= 0].long()].any()


SPARSE = [case for case in CASES if case != "dense"]


@pytest.mark.parametrize(
    ("name", "shown"), product(SPARSE, [(0, 1), (4, 30), (16, 64), (40, 65), (0, 200)]), ids=str
)
def test_blocks_that_a_window_leaves_out_are_not_listed(name: str, shown: tuple[int, int]) -> None:
    sinks, window = shown
    plan = LONG.plan(small(name))
    with NoReads():
        plan.within(sinks, window)
    narrow = check(plan, sinks, window)
    for part in narrow.parts:
        for span in part.spans:
            ends_show_something(narrow, part, span, window_mask(plan, sinks, window))
    if window < 16:
        assert (narrow.count_listed_pairs() < plan.count_listed_pairs()).all()
    assert narrow is plan.within(sinks, window)
    assert torch.equal(
        narrow.first(37).to_mask(), narrow.to_mask() * (torch.arange(plan.n_query) < 37)[:, None]
    )
    moved = narrow.to("meta")
    assert [(p.sinks, p.edge) for p in moved.parts] == [(p.sinks, p.edge) for p in narrow.parts]


@given(
    seed=st.integers(0, 2**16),
    lead=st.sampled_from(["", "b", "h", "bh"]),
    sizes=st.sampled_from([(50, 90), (1, 200), (130, 133)]),
    sinks=st.sampled_from([0, 3, 16, 40]),
    window=st.integers(1, 180),
)
def test_random_plans(seed: int, lead: str, sizes: tuple[int, int], sinks: int, window: int) -> None:
    """Lists in any order, positions in any order, ranges that know no causality."""
    check(random_plan(seed, lead=lead, n_query=sizes[0], n_key=sizes[1]), sinks, window)


@pytest.mark.parametrize(
    ("name", "backend", "shown"), product(SPARSE, ["reference", "flex"], [(0, 30), (20, 70)]), ids=str
)
def test_backends_compute_the_narrowed_pairs(name: str, backend: str, shown: tuple[int, int]) -> None:
    sinks, window = shown
    plan = LONG.plan(small(name))
    query, key, value = LONG.tensors(torch.float32)
    exact, allowed = budget(query, key, value, plan.to_mask() & window_mask(plan, sinks, window), 0.25)
    out, _ = attend_plan(
        plan.within(sinks, window), query, key, value, 0.25, select.get(backend, query.device)
    )
    assert float((out.double() - exact).abs().max()) <= allowed


def test_a_window_that_shows_all_is_none_and_what_cannot_be_narrowed_is_refused() -> None:
    plan = random_plan(3, lead="h", n_query=50, n_key=90)
    assert plan.within(4, 90) is plan and plan.within(0, 1000) is plan
    with pytest.raises(ValueError, match="has a window already"):
        plan.within(4, 20).within(0, 10)
    extra = with_extras(plan, 2, 16, 3)
    with pytest.raises(RecipeError, match="stand for many and have no column"):
        extra.within(4, 20)
    biased = replace(
        extra,
        parts=tuple(
            replace(part, spans=tuple(s for s in part.spans if s.key is None)) for part in extra.parts
        ),
    )
    assert any(span.bias is not None for part in biased.parts for span in part.spans)
    mask = window_mask(biased, 4, 20)
    assert torch.equal(biased.within(4, 20).to_bias(), biased.to_bias() * mask)
