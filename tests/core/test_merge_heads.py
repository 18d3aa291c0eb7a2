"""A plan mixed of several computes, for each head, what that head's own plan computes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.backends import flex, reference
from mmaccel.backends.ops.block_attend import BlockLists, KeySpan, Part
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.merge_heads import merge_plans
from mmaccel.core.prefill.plan import AttentionPlan, HeadRun, head_runs, span_by_range, span_from_table
from mmaccel.core.prefill.sparse import attend_plan, parts_to_launch
from mmaccel.policies.sparse import AShape, Grid, VerticalSlash
from tests.backends.oracle import masked
from tests.policies.sparse.scenes import Scene, Token, scenes, sequence

BLOCK = 16


def random_plan(scene: Scene, heads: int, seed: int) -> AttentionPlan:
    """A plan with parts and spans of random number, order, range and lists; parts may share rows over disjoint keys."""
    rng = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    B, n_query, n_key = scene.batch, scene.length - scene.start, scene.length
    layout = scene.layout()
    overlap = bool(number(0, 2))
    row_owner = torch.randint(0, 3, (n_query,), generator=rng)
    key_owner = torch.randint(0, 6, (n_key,), generator=rng)
    parts = []
    for p in range(number(1, 4)):
        h = heads if number(0, 2) else 1
        mine = torch.ones(n_query, dtype=torch.bool) if overlap else row_owner == p
        q_row = ordered(mine, layout.valid[:, scene.start :], h, rng)
        P = q_row.shape[-1]
        spans = []
        for s in range(number(1, 3)):
            hs = heads if number(0, 2) else 1
            # Each span of a part, and of parts that share rows, has keys of its own.
            own = key_owner == (2 * p + s if overlap else s)
            k_row = ordered(own, layout.valid, hs, rng)
            N = k_row.shape[-1]
            q_pos, k_pos = torch.arange(P).expand(1, 1, P), torch.arange(N).expand(1, 1, N)
            lo = number(-3, 9)
            hi = lo + number(1, 60) if number(0, 2) else 2**31 - 1
            lead = (B, max(h, hs), P // BLOCK, N // BLOCK)
            table = torch.rand(lead, generator=rng) < 0.7
            spans.append(span_from_table(q_row, k_row, q_pos.int(), k_pos.int(), lo, hi, table, BLOCK, BLOCK))
        parts.append(Part(q_row, tuple(spans), merge_group=p if overlap else 0))
    return AttentionPlan(tuple(parts), BLOCK, BLOCK, B, heads, n_query, n_key)


def ordered(member: Tensor, valid: Tensor, heads: int, rng: torch.Generator) -> Tensor:
    """[B, heads, whole blocks] int32: the members in a random order, -1 for what is padding, absent or past the last."""
    n = member.shape[0]
    rows = torch.full((valid.shape[0], heads, n + -n % BLOCK), -1, dtype=torch.int32)
    for b in range(valid.shape[0]):
        for h in range(heads):
            order = torch.randperm(n, generator=rng)
            rows[b, h, :n] = torch.where(member[order] & valid[b, order], order, -1)
    return rows


def shares_of(heads: int, seed: int) -> list[tuple[int, ...]]:
    """The heads dealt out at random."""
    rng = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, 3, (heads,), generator=rng).tolist()
    return [tuple(h for h in range(heads) if owner[h] == n) for n in range(3) if n in owner]


def own_masks(shares, heads: int, scene: Scene) -> Tensor:
    """[B, H, n_query, n_key]: what each head would compute by itself."""
    layout = scene.layout()
    queries = layout.select_tokens(slice(scene.start, None))
    out = torch.zeros(scene.batch, heads, scene.length - scene.start, scene.length, dtype=torch.bool)
    causal = layout.position[:, None] <= queries.position[:, :, None]
    for some, plan in shares:
        if plan is None:
            out[:, list(some)] = (causal & layout.valid[:, None] & queries.valid[:, :, None])[:, None]
        else:
            out[:, list(some)] = plan.to_mask().expand(-1, len(some), -1, -1)
    return out


@settings(max_examples=10)
@given(scene=scenes(), seed=st.integers(0, 2**16), lone=st.booleans())
def test_each_head_keeps_its_own_pairs(scene: Scene, seed: int, lone: bool) -> None:
    heads, layout = scene.heads, scene.layout()
    queries = layout.select_tokens(slice(scene.start, None))
    dealt = shares_of(heads, seed)
    plans = [random_plan(scene, 1 if lone else len(some), seed + n) for n, some in enumerate(dealt)]
    shares = list(zip(dealt, plans, strict=True))
    if seed % 3 == 0:
        shares[-1] = (dealt[-1], None)
    mixed = merge_plans(shares, heads, heads // scene.groups, queries, layout)
    expected = own_masks(shares, heads, scene)
    if all(plan is None for _, plan in shares):
        assert mixed is None
        return
    assert mixed is not None and mixed.heads == heads
    assert torch.equal(mixed.to_mask(), expected)
    assert mixed.spans_per_pair().max() <= 1
    for some, plan in shares:
        if plan is not None:
            listed = plan.count_listed_pairs().expand(-1, len(some))
            assert torch.equal(mixed.count_listed_pairs()[:, list(some)], listed)
        else:
            pairs = expected[:, list(some)].sum((2, 3)).double()
            assert torch.equal(mixed.count_listed_pairs()[:, list(some)], pairs)
    tensors = scene.tensors()
    for op in (reference.op, *[flex.op] * (seed % 4 == 0)):
        out, _ = attend_plan(mixed, *tensors, scene.size**-0.5, op)
        torch.testing.assert_close(out, masked(*tensors, expected, scene.size**-0.5), rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_biases_and_own_keys_stay_with_their_heads(seed: int) -> None:
    """Two heads of a group with a bias, a whole group with keys of its own, and one head that has neither."""
    scene = Scene((sequence([(TEXT, [9]), (VIDEO, [7] * 6)]),), heads=6, groups=2, seed=seed)
    layout, (query, key, value) = scene.layout(), scene.tensors()
    rng = torch.Generator().manual_seed(seed)
    dealt, plans = [(0, 2), (3, 4, 5), (1,)], []
    for n, some in enumerate(dealt):
        plan = random_plan(scene, len(some), seed + n)
        spans = [
            replace(span, bias=torch.randn(span.k_row.shape, generator=rng) if n == 0 else None)
            for span in plan.parts[0].spans
        ]
        if n == 1:
            own = (torch.randn(1, 1, 20, scene.size, generator=rng, dtype=key.dtype) for _ in range(2))
            at = torch.zeros_like(plan.parts[0].q_row)
            k_row = torch.arange(32).masked_fill(torch.arange(32) >= 20, -1).int()[None, None]
            order = plan.parts[0].q_row, k_row, at, 0 * k_row, 0, 1, BLOCK, BLOCK
            span = span_by_range(*order)
            spans.append(replace(span, **dict(zip(("key", "value"), own, strict=True))))
        part = replace(plan.parts[0], spans=tuple(spans))
        plans.append(replace(plan, parts=(part, *plan.parts[1:])))
    merged = merge_plans(list(zip(dealt, plans, strict=True)), 6, 3, layout, layout)
    assert merged is not None and merged.spans_per_pair().max() == 1
    for some, plan in zip(dealt, plans, strict=True):
        columns = plan.to_mask().shape[-1]
        for whole, alone in ((merged.to_mask(), plan.to_mask()), (merged.to_bias(), plan.to_bias())):
            assert torch.equal(whole[:, list(some), :, :columns], alone.expand(-1, len(some), -1, -1))
            assert not whole[:, list(some), :, columns:].any()
    out, lse = attend_plan(merged, query, key, value, 0.3, reference.op)
    for some, plan in zip(dealt, plans, strict=True):
        groups = slice(some[0] // 3, some[0] // 3 + 1)
        tensors = query[:, list(some)], key[:, groups], value[:, groups]
        alone = attend_plan(plan, *tensors, 0.3, reference.op)
        for whole, one in zip((out, lse), alone, strict=True):
            torch.testing.assert_close(whole[:, list(some)], one, rtol=0, atol=1e-12)


@given(scene=scenes(), seed=st.integers(0, 2**16))
def test_lists_are_no_longer_than_they_were(scene: Scene, seed: int) -> None:
    dealt = shares_of(scene.heads, seed)
    plans = [random_plan(scene, len(some), seed + n) for n, some in enumerate(dealt)]
    layout = scene.layout()
    shares, queries = list(zip(dealt, plans, strict=True)), layout.select_tokens(slice(scene.start, None))
    mixed = merge_plans(shares, scene.heads, scene.heads // scene.groups, queries, layout)
    assert mixed is not None

    def listed(plan: AttentionPlan, heads: int) -> int:
        total = 0
        for part in plan.parts:
            h = len(range(heads)[part.for_heads(heads)])
            for span in part.spans:
                assert span.lists.blocks == part.q_row.shape[-1] // BLOCK
                count = span.lists.list_lengths.expand(scene.batch, h, -1)
                block = span.lists.to_dense_table() >= 0
                assert torch.equal(block.sum(-1).expand_as(count), count)
                total += int(count.sum())
        return total

    assert listed(mixed, scene.heads) == sum(
        listed(plan, len(some)) for some, plan in zip(dealt, plans, strict=True)
    )


def first_blocks() -> BlockLists:
    """Four query blocks list the first key block of four, and test it."""
    row = torch.tensor([0, 1, 0, 0, 0]).expand(1, 1, 4, 5)
    return BlockLists(row, torch.zeros(1).int(), torch.zeros(1, 1, 4).char())


def ranged(heads: int, *ranges: tuple[int, int]) -> AttentionPlan:
    """A plan of 64 tokens and one part, with a span for each of these ranges."""
    places, lists = torch.arange(64, dtype=torch.int32).view(1, 1, 64), first_blocks()
    spans = tuple(KeySpan(places, places, places, lo, hi, lists) for lo, hi in ranges)
    return AttentionPlan((Part(places, spans),), BLOCK, BLOCK, 1, heads, 64, 64)


def test_keys_of_all_heads_are_not_repeated_beside_those_of_each() -> None:
    """The dense rows of a grid see all keys, its vertical line those of one class of each head."""
    scene = Scene((tuple(Token(VIDEO, n // 40) for n in range(320)),), heads=8)
    query, key, _ = scene.tensors(torch.float32)
    layout = scene.layout()
    plan = Grid(min_stride=8, block=BLOCK).plan(query, key, layout, layout)
    assert plan is not None
    (part,) = parts_to_launch(plan)
    shapes = [span.k_row.shape for part in plan.parts for span in part.spans]
    alone = sorted(shape[2] for shape in shapes if shape[1] > 1)
    assert alone and sorted(s.k_row.shape[2] for s in part.spans if s.k_row.shape[1] > 1) == alone
    assert [s.ordered for s in part.spans if s.ordered is not None] == [320]
    # Beside heads of another pattern they are repeated; that they stand in their order is still known.
    some = Grid(min_stride=8, block=BLOCK).plan(query[:, :6], key[:, :1], layout, layout)
    near = AShape(sink=16, window=32, block=BLOCK).plan(query[:, :1], key[:, :1], layout, layout)
    mixed = merge_plans([(range(6), some), ((6, 7), near)], 8, 4, layout, layout)
    assert mixed is not None
    spans = [span for part in mixed.parts for span in part.spans if span.scattered is not None]
    for span in spans:
        rows = span.k_row.unflatten(-1, (-1, BLOCK))
        begin = rows - torch.arange(BLOCK)
        least, most = (
            f(begin.where(rows >= 0, fill), -1) for f, fill in ((torch.amin, 999), (torch.amax, -999))
        )
        found = int(((least < most) | (most + BLOCK > 320)).sum()) * BLOCK
        assert found <= (span.scattered or 0)
    assert any((span.scattered or 0) < span.k_row.numel() // 2 for span in spans)


def test_one_share_of_all_heads_is_its_own_plan_and_heads_are_each_named_once() -> None:
    layout, plan = TokenLayout.text(1, 64), ranged(4, (0, 9))
    assert merge_plans([((0, 1, 2, 3), plan)], 4, 2, layout, layout) is plan
    lone = replace(plan, heads=1)
    mixed = merge_plans([((0, 1, 2, 3), lone)], 4, 2, layout, layout)
    assert mixed is not None and mixed.parts is plan.parts and mixed.heads == 4
    with pytest.raises(ValueError, match="each of 0 to 2 once"):
        merge_plans([((0, 1), None), ((1,), None)], 3, 1, layout, layout)
    assert merge_plans([((0, 2), None), ((1,), None)], 3, 1, layout, layout) is None
    layout, far = TokenLayout.text(1, 64), 2**31 - 1
    one, two = ranged(1, (0, 5), (5, far)), ranged(1, (0, far))
    mixed = merge_plans([((0,), one), ((1,), two)], 2, 2, layout, layout)
    assert mixed is not None
    assert [(s.lo, s.hi) for s in mixed.parts[0].spans] == [(0, 5), (0, far)]


def test_runs_are_views_of_whole_groups() -> None:
    assert head_runs([0, 1, 2, 3], 2) == [HeadRun((0, 1, 2, 3), slice(0, 2))]
    assert head_runs([1, 2, 7], 2) == [HeadRun((1, 2), slice(0, 2)), HeadRun((7,), slice(3, 4))]
    assert head_runs([0, 1, 3, 6], 3) == [HeadRun((0, 1), slice(0, 1)), HeadRun((3, 6), slice(1, 3))]
    query = torch.randn(1, 8, 5, 4)
    adjacent, apart = head_runs([2, 3], 4)[0], head_runs([1, 3], 4)[0]
    assert adjacent.select_queries(query).data_ptr() == query[:, 2:].data_ptr()
    assert torch.equal(apart.select_queries(query), query[:, [1, 3]])


def test_runs_of_unlike_patterns_stand_side_by_side() -> None:
    """Two budgets of slashes share a slot and lists of their own, grids and a window stand beside them. The keys of slashes
    of a grid are those of all its heads, and stay one order when these are planned apart."""
    scene = Scene((sequence([(TEXT, [9]), (VIDEO, [7] * 30), (TEXT, [12])]),), heads=8, groups=2)
    layout = scene.layout()
    query, key, value = scene.tensors()
    patterns = [
        VerticalSlash(vertical=5, slash=3, last_q=16, block=BLOCK),
        VerticalSlash(vertical=9, slash=11, last_q=16, block=BLOCK),
        *[Grid(min_stride=2, last_q=16, block=BLOCK)] * 2,
        AShape(sink=3, window=20, block=BLOCK),
    ]
    dealt = [(0, 5), (1, 6), (2,), (3,), (4, 7)]
    shares = []
    for pattern, some in zip(patterns, dealt, strict=True):
        plan = pattern.plan(query[:, list(some)], key[:, : len(some)], layout, layout)
        shares.append((some, plan))
    mixed = merge_plans(shares, 8, 4, layout, layout)
    assert mixed is not None
    slash = shares[2][1].parts[0].spans[0]
    kept = [span for part in mixed.parts for span in part.spans if span.hi == slash.hi]
    assert [span.k_row.shape for span in kept] == [slash.k_row.shape] and slash.k_row.shape[1] == 1
    mask = own_masks(shares, 8, scene)
    assert torch.equal(mixed.to_mask(), mask) and mixed.spans_per_pair().max() == 1
    assert torch.equal(mixed.count_listed_pairs()[:, [1, 6]], shares[1][1].count_listed_pairs())
    out, _ = attend_plan(mixed, query, key, value, scene.size**-0.5, reference.op)
    torch.testing.assert_close(out, masked(query, key, value, mask, scene.size**-0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [0, 100])
def test_all_rows_are_known_to_be_there(start: int) -> None:
    """Of a grid's turned and dense queries, alone and beside heads in their order; not where heads or tokens are missing."""
    one = sequence([(TEXT, [9]), (VIDEO, [7] * 30), (TEXT, [12])])
    scene, padded = Scene((one,), heads=4, groups=2), Scene((one, one[:150]), heads=4, groups=2)
    grid, near = Grid(min_stride=2, last_q=16, block=BLOCK), AShape(sink=3, window=20, block=BLOCK)

    def planned(scene: Scene, pattern: Grid | AShape, some: slice) -> AttentionPlan:
        layout = scene.layout()
        query, key, _ = scene.tensors()
        found = pattern.plan(
            query[:, some, start:], key[:, :1], layout.select_tokens(slice(start, None)), layout
        )
        assert found is not None
        return found

    layout = scene.layout()
    n, queries = scene.length - start, layout.select_tokens(slice(start, None))
    alone = planned(scene, grid, slice(4))
    beside = [((0, 1), planned(scene, grid, slice(2))), ((2, 3), planned(scene, near, slice(2)))]
    mixed = merge_plans(beside, 4, 2, queries, layout)
    fewer = merge_plans([((0, 2), beside[0][1]), ((1, 3), None)], 4, 4, queries, layout)
    assert mixed is not None and fewer is not None
    for plan in (alone, mixed):
        for part in parts_to_launch(plan):
            assert part.all_rows == n
            rows = part.q_row.expand(1, 4, -1).sort(-1, descending=True).values
            assert torch.equal(rows[..., :n].flip(-1), torch.arange(n).int().expand(1, 4, n))
            assert (rows[..., n:] == -1).all()
    for plan in (planned(padded, grid, slice(4)), fewer):
        assert [part.all_rows for part in parts_to_launch(plan)] == [None]


def test_a_caller_s_own_queries_are_not_taken_to_be_all_there() -> None:
    """Where some are padding, or the host does not know that they are the last of the keys, no row is left unwritten."""
    scene = Scene((sequence([(TEXT, [9]), (VIDEO, [7] * 30), (TEXT, [12])]),))
    whole = scene.layout()
    query, key, value = scene.tensors()
    n = scene.length
    some = torch.arange(n)[None] >= 20
    grid, missing = Grid(min_stride=2, last_q=16, block=BLOCK), slice(20)
    kept = slice(20, None)
    cases = (
        (replace(whole, valid=some), whole, key, value),
        (whole, whole.select_tokens(kept), key[:, :, kept], value[:, :, kept]),
    )
    for queries, keys, *held in cases:
        plan = grid.plan(query, held[0], queries, keys)
        assert plan is not None
        assert [part.all_rows for part in parts_to_launch(plan)] == [None]
        out, lse = attend_plan(plan, query, *held, scene.size**-0.5, reference.op)
        assert (out[:, :, missing] == 0).all() and (lse[:, :, missing] == -torch.inf).all()
        want = masked(query, *held, plan.to_mask(), scene.size**-0.5)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    for start in (0, 100):
        plan = grid.plan(query[:, :, start:], key, whole.select_tokens(slice(start, None)), whole)
        assert plan is not None and [p.all_rows for p in parts_to_launch(plan)] == [n - start]
