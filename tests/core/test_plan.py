"""The parts of the currency: lists, kinds, masks, counts, and the way to an operator and back."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.backends import reference
from mmaccel.backends.ops.block_attend import ABSENT, FULL, TEST, BlockLists, HeadRange, KeySpan, Part
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill import plan as plans
from mmaccel.core.prefill.sparse import attend_plan, parts_to_launch
from mmaccel.core.recipe import Recipe
from tests.backends.oracle import draw, random_plan

BLOCK = 4


def rows(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).view(1, 1, -1)


def pairs(part: Part, span: KeySpan, table: Tensor, b: int, h: int) -> set[tuple[int, int]]:
    """The pairs (place in the part, place in the span) that a listed block holds and the range test lets through."""
    q_row, q_pos = (t[b % t.shape[0], h % t.shape[1]].tolist() for t in (part.q_row, span.q_pos))
    k_row, k_pos = (t[b % t.shape[0], h % t.shape[1]].tolist() for t in (span.k_row, span.k_pos))
    return {
        (i, j)
        for i in range(len(q_row))
        for j in range(len(k_row))
        if table[b % table.shape[0], h % table.shape[1], i // BLOCK, j // BLOCK]
        and q_row[i] >= 0
        and k_row[j] >= 0
        and span.lo <= q_pos[i] - k_pos[j] < span.hi
    }


@st.composite
def orders(draw: st.DrawFn) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, int, int], torch.Generator]:
    """q_row, k_row, q_pos, k_pos, lo, hi of a span, and a generator for what lists it."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    lead = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 3)]))
    m, n = draw(st.integers(1, 5)), draw(st.integers(1, 6))

    def row(count: int) -> Tensor:
        row = torch.rand(*lead, count, generator=rng).argsort(-1)
        return row.masked_fill(torch.rand(*lead, count, generator=rng) < draw(st.sampled_from([0, 0.3])), -1)

    def place(count: int) -> Tensor:
        if draw(st.booleans()):
            return (torch.arange(count) + draw(st.integers(0, 5))).expand(*lead, count)
        return torch.randint(0, 30, (*lead, count), generator=rng).sort(-1).values

    places = place(BLOCK * m), place(BLOCK * n)
    lo = draw(st.sampled_from([0, -plans.FAR, 5]))
    hi = lo + draw(st.integers(3, 12)) if lo >= 0 and draw(st.booleans()) else plans.FAR
    return (row(BLOCK * m), row(BLOCK * n), *places, lo, hi), rng


def check(order: tuple, span: KeySpan, listed: Tensor) -> None:
    """The span computes exactly the pairs of the listed blocks; kinds hold."""
    q_row, k_row = order[:2]
    part = Part(q_row, (span,))
    B, H = listed.shape[:2]
    kinds = span.lists.to_dense_table()
    for b in range(B):
        for h in range(H):
            want = pairs(part, span, listed, b, h)
            assert pairs(part, span, kinds >= 0, b, h) == want
            for m, n in (kinds[b, h] >= 0).nonzero().tolist():
                assert listed[b, h, m, n]
                inside = [(i, j) for i, j in want if (i // BLOCK, j // BLOCK) == (m, n)]
                queries = q_row[b % q_row.shape[0], h % q_row.shape[1], m * BLOCK : (m + 1) * BLOCK]
                columns = k_row[b % k_row.shape[0], h % k_row.shape[1], n * BLOCK : (n + 1) * BLOCK]
                there, keys = int((queries >= 0).sum()), int((columns >= 0).sum())
                kind = int(kinds[b, h, m, n])
                assert kind in (FULL, ABSENT, TEST)
                assert (kind == TEST) or len(inside) == there * keys
                assert (kind == FULL) == (len(inside) == there * BLOCK)


@given(orders())
def test_span_by_range(drawn) -> None:
    """Of ascending places: every pair in the range, one run of blocks that begins and ends within reach, kinds that hold."""
    order, _ = drawn
    q_row, k_row, q_pos, k_pos, lo, hi = order
    span = plans.span_by_range(*order, BLOCK, BLOCK)
    B, H = (max(q_row.shape[i], k_row.shape[i]) for i in (0, 1))
    M, N = q_row.shape[-1] // BLOCK, k_row.shape[-1] // BLOCK
    everything = torch.ones(B, H, M, N, dtype=torch.bool)
    part = Part(q_row, (span,))
    kinds = span.lists.to_dense_table()
    assert torch.equal(span.lists.list_lengths, (kinds >= 0).sum(-1))
    for b in range(B):
        for h in range(H):
            want = pairs(part, span, everything, b, h)
            assert pairs(part, span, kinds >= 0, b, h) == want
            for m in range(M):
                listed = (kinds[b, h, m] >= 0).nonzero()[:, 0].tolist()
                touched = sorted({j // BLOCK for i, j in want if i // BLOCK == m})
                assert set(touched) <= set(listed)
                assert listed == list(range(listed[0], listed[-1] + 1) if listed else [])
                rows = [i for i in range(m * BLOCK, (m + 1) * BLOCK) if q_row[b, h, i] >= 0]
                for n in listed:
                    if n in (listed[0], listed[-1]):
                        gaps = [
                            int(q_pos[b, h, i]) - int(k_pos[b, h, j])
                            for i in rows
                            for j in range(n * BLOCK, (n + 1) * BLOCK)
                            if k_row[b, h, j] >= 0
                        ]
                        assert min(gaps) < hi and max(gaps) >= lo
                    keys = [j for j in range(n * BLOCK, (n + 1) * BLOCK) if k_row[b, h, j] >= 0]
                    passed = sum((i, j) in want for i in rows for j in keys) == len(rows) * len(keys)
                    kind = int(kinds[b, h, m, n])
                    assert (kind != TEST) or not passed or not keys
                    assert (kind == TEST) or passed
                    assert (kind == FULL) == (passed and kind != TEST and len(keys) == BLOCK)


@given(orders())
def test_span_from_table(drawn) -> None:
    order, rng = drawn
    shape = (*order[0].shape[:2], order[0].shape[-1] // BLOCK, order[1].shape[-1] // BLOCK)
    table = torch.rand(shape, generator=rng) < 0.6
    check(order, plans.span_from_table(*order, table, BLOCK, BLOCK), table)


def test_lists_may_be_followed_by_slack() -> None:
    """Entries past the last list belong to nobody: not in the table, not in the count, not in the result."""
    plan = random_plan(4)
    part = plan.parts[0]

    def loose(span: KeySpan) -> KeySpan:
        lists = span.lists
        index = torch.cat([lists.index_or_empty, lists.index_or_empty.new_zeros(7)])
        return replace(span, lists=BlockLists(lists.row, index, lists.kind))

    slack = replace(plan, parts=(Part(part.q_row, tuple(loose(s) for s in part.spans)),))
    assert torch.equal(slack.to_mask(), plan.to_mask())
    assert torch.equal(slack.count_listed_pairs(), plan.count_listed_pairs())
    query, key, value = draw(plan, 2, 8, 0)
    for got, want in zip(
        attend_plan(slack, query, key, value, 0.3, reference.op),
        attend_plan(plan, query, key, value, 0.3, reference.op),
        strict=True,
    ):
        assert torch.equal(got, want)


def two_parts() -> plans.AttentionPlan:
    """Eight queries over twelve keys: all over the first four in one part, every second over the rest in another."""
    everything = rows(*range(8))
    first, later, second = rows(0, 1, 2, 3), rows(*range(4, 12)), rows(6, 4, 2, 0)
    listed = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    near = (everything, first, everything, rows(0, 0, 0, 0), -plans.FAR, plans.FAR)
    near = plans.span_from_table(*near, listed[..., :1], BLOCK, BLOCK)
    far = plans.span_from_table(second, later, second, later, -3, 1, listed[..., :1, :], BLOCK, BLOCK)
    parts = (Part(everything, (near,)), Part(second, (far,), merge_group=1))
    return plans.AttentionPlan(parts, BLOCK, BLOCK, batch=1, heads=2, n_query=8, n_key=12)


def test_mask_and_counts_by_hand() -> None:
    plan = two_parts()
    want = torch.zeros(8, 12, dtype=torch.bool)
    want[:, :4] = True
    for i in (0, 2, 4, 6):
        for j in range(4, 12):
            want[i, j] = -3 <= i - j < 1
    assert torch.equal(plan.to_mask()[0], want.expand(2, -1, -1))
    assert int(plan.spans_per_pair().max()) == 1
    assert plan.count_listed_pairs().tolist() == [[8 * 4 + 4 * 8] * 2]
    twice = replace(plan, parts=(plan.parts[0], plan.parts[0]))
    assert int(twice.spans_per_pair().max()) == 2
    assert torch.equal(plan.to("cpu").to_mask(), plan.to_mask())


def test_a_part_comes_in_its_own_order_and_a_plan_in_that_of_the_query() -> None:
    plan = two_parts()
    part = plan.parts[1]
    lone = replace(plan, parts=(replace(part, merge_group=0),))
    query, key, value = draw(plan, 1, 8, 3)
    ordered, _ = reference.op(query, key, value, *part.pack(), lone.block_q, lone.block_k, 0.5)
    out, lse = attend_plan(lone, query, key, value, 0.5, reference.op)
    assert torch.equal(out[:, :, part.q_row[0, 0].long()], ordered)
    assert (out[:, :, 1::2] == 0).all() and (lse[:, :, 1::2] == -torch.inf).all()
    plan = replace(two_parts(), parts=())
    query, key = torch.ones(1, 2, 8, 8), torch.ones(1, 1, 12, 8)
    out, lse = attend_plan(plan, query, key, key, 0.5, reference.op)
    assert out.shape == query.shape and not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(("n", "want"), [(0, 4), (1, 4), (4, 4), (5, 8)])
def test_rows_fill_whole_blocks(n: int, want: int) -> None:
    padded = plans.pad_rows(torch.arange(n).view(1, 1, n), BLOCK)
    assert padded.shape == (1, 1, want) and (padded[..., n:] == -1).all()


PATTERN = Recipe.load(sparse={"name": "a_shape", "block": 16, "window": 32, "sink": 16}).sparse


def one_part(length: int = 64) -> tuple[plans.AttentionPlan, Tensor, Tensor]:
    """A window's plan in one part, and query [1, 2, n, 16] and key [1, 1, n, 16] for it."""
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, h, length, 16, generator=g) for h in (2, 1))
    layout = TokenLayout.text(1, length)
    plan = PATTERN.plan(query, key, layout, layout)
    assert plan is not None
    return plan, query, key


def test_a_launch_of_one_part_of_several_relies_on_no_fact_about_them_all() -> None:
    plan, query, key = one_part()
    part = plan.parts[0]
    assert part.all_rows == 64
    both = HeadRange((0, 1), 0, 2)
    halves = tuple(
        replace(part, q_row=torch.where(half, part.q_row, -1), ordered=None, head_range=both)
        for half in (part.q_row < 32, part.q_row >= 32)
    )
    assert [one.all_rows for one in parts_to_launch(replace(plan, parts=halves))] == [None, None]
    assert [one.all_rows for one in parts_to_launch(plan)] == [64]
    want, _ = attend_plan(plan, query, key, key, 0.25, reference.op)
    found, _ = attend_plan(replace(plan, parts=halves), query, key, key, 0.25, reference.op)
    torch.testing.assert_close(found, want)


def test_a_part_of_heads_that_are_not_there_holds_no_rows() -> None:
    plan, query, key = one_part()
    lost = replace(plan, parts=(replace(plan.parts[0], head_range=HeadRange((2,), 2, 3)),))
    with pytest.raises(RecipeError, match="hold 0 of 64 rows of head 0; put each row in a part"):
        plans.check_plan_sizes(lost, "mine", query, key, whole=True)


def test_one_layout_serves_batches_of_other_sizes() -> None:
    layout = TokenLayout.text(1, 64)
    plans = [
        PATTERN.plan(torch.randn(b, 2, 64, 16), torch.randn(b, 1, 64, 16), layout, layout) for b in (2, 1, 2)
    ]
    assert [plan.batch for plan in plans if plan is not None] == [2, 1, 2]


def test_tracing_leaves_nothing_of_its_own_in_a_plan() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    plan, query, key = one_part()

    def run(query: Tensor, key: Tensor) -> Tensor:
        return attend_plan(plan, query, key, key, 0.25, reference.op)[0]

    make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(query, key)
    assert type(run(query, key)) is Tensor


def test_two_runs_of_heads_are_two_constants_of_one_graph() -> None:
    here = torch.device("cpu")

    def both(x: Tensor) -> Tensor:
        return x[plans.head_indices((0, 1), here)] - x[plans.head_indices((2, 3), here)]

    x = torch.arange(4.0)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert compiled(x).tolist() == both(x).tolist() == [-2, -2]


def test_a_key_may_be_biased_away() -> None:
    plan, _, _ = one_part()
    part = plan.parts[0]
    bias = torch.zeros(1, 1, part.spans[0].k_row.shape[-1])
    bias[..., 5] = -torch.inf
    spans = (replace(part.spans[0], bias=bias), *part.spans[1:])
    table = replace(plan, parts=(replace(part, spans=spans),)).to_bias()
    assert not table.isnan().any() and table.isinf().any()


def test_spans_share_their_own_keys_on_another_device() -> None:
    plan, _, _ = one_part()
    part, own = plan.parts[0], torch.randn(1, 1, 16, 16)
    spans = tuple(replace(s, key=own, value=own, k_row=s.k_row.clamp(max=15)) for s in part.spans)
    moved = replace(plan, parts=(replace(part, spans=spans),)).to("meta")
    assert len(part.spans) > 1 and len(moved.own_keys) == 1
