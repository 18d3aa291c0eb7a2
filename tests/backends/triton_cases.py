"""The Triton backend against the oracle: collected by `test_triton` in Triton's interpreter, by `test_triton_gpu` on CUDA.

Triton must be told to interpret before it is imported, so the interpreted run is a process of its own. Its products of
bfloat16 matrices are wrong, so that type waits for a device.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.backends import reference
from mmaccel.backends import triton as backend
from mmaccel.backends.ops import block_attend as schema
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.block_attend import KeySpan, Part
from mmaccel.backends.triton.prefill import attend
from mmaccel.backends.triton.prefill.attend import block_attend
from mmaccel.backends.triton.prefill.kernel import WAVES, SplitListPieces
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TEXT, VIDEO
from mmaccel.core.prefill.plan import AttentionPlan, span_from_table
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.policies.sparse import PerHead
from tests.policies.sparse.scenes import Scene, sequence
from tests.policies.sparse.test_contract import CASES, HEADS, small

from . import oracle
from .interpreted import DEVICE, DTYPES, INTERPRETED, some
from .oracle import budget, draw, flat, full_plan, random_plan, with_extras

SCENE = Scene(
    (
        sequence([(TEXT, [5]), (VIDEO, [5, 5, 5, 3]), (TEXT, [1]), (VIDEO, [5] * 4), (TEXT, [14])]),
        sequence([(TEXT, [3]), (VIDEO, [6] * 5), (TEXT, [9])]),
    ),
    heads=3,
    groups=1,
    size=16,
    seed=11,
)
"""Two modalities, ragged frames, an island of one token, padding on the left; three heads a group: a pair is short."""
WIDE = replace(operators.INTERPRETED, shared=attend.PAIRS)


def check(
    plan: AttentionPlan,
    tensors: list[Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    scale: float = 0.25,
    kernel: Callable[..., tuple[Tensor, Tensor]] = block_attend,
) -> tuple[Tensor, Tensor]:
    """As `oracle.check`, on the device and in `dtype`."""
    return oracle.check(plan.to(DEVICE), [t.to(DEVICE, dtype) for t in tensors], scale, kernel)


FEW = ("a_shape", "vertical_slash", "grid", "block_topk", "sf_strided", "boundary_2d", "per_head")
"""Patterns that are interpreted: of each way of listing one."""


@pytest.mark.parametrize(
    ("name", "part", "sinks"),
    some(FEW if INTERPRETED else CASES, [(0, None), (20, 2)], [None, 4, 0]),
    ids=str,
)
def test_patterns(monkeypatch, name: str, part: tuple[int, int | None], sinks: int | None) -> None:
    """Every registered pattern, and what a window of 21 columns shows of it, with sinks also where neighbouring lists are
    read together; then as a later piece of the prompt, each row split into pieces of two blocks."""
    start, chunk = part
    scene = replace(SCENE, start=start)
    plan = scene.plan(small(name))
    if plan is None:
        assert name == "dense"
        return
    if sinks is not None:
        plan = plan.limit_to_window(sinks, 21)
    if INTERPRETED and sinks:
        monkeypatch.setattr(operators, "find_device_limits", lambda _: WIDE)
    check_served(plan, list(scene.tensors(torch.float32)), partial(block_attend, chunk=chunk))


def check_served(plan: AttentionPlan, tensors: list[Tensor], kernel=block_attend) -> None:
    """As `check`, for plans that may leave heads to the dense operator, which tells no log-sum-exp."""
    if plan.dense is None:
        check(plan, tensors, kernel=kernel)
        return
    assert len(plan.dense.heads) < plan.heads
    plan = plan.to(DEVICE)
    query, key, value = (t.to(DEVICE) for t in tensors)
    exact, allowed = budget(query, key, value, plan.to_mask(), 0.25)
    out, _ = attend_plan(plan, query, key, value, 0.25, kernel)
    assert float((out.double() - exact).abs().max()) <= allowed


@settings(max_examples=4 if INTERPRETED else 40)
@given(
    seed=st.integers(0, 2**16),
    lead=st.sampled_from(["", "b", "h", "bh"]),
    groups=st.sampled_from([1, 2, 4]),
    sizes=st.sampled_from([(30, 50), (1, 70), (40, 33)]),
    chunk=st.sampled_from([None, 1, 2]),
    scale=st.sampled_from([0.0, 0.25, -0.3, 1.7]),
)
def test_random_plans(
    seed: int, lead: str, groups: int, sizes: tuple[int, int], chunk: int | None, scale: float
) -> None:
    plan = random_plan(seed, lead=lead, n_query=sizes[0], n_key=sizes[1])
    check(plan, draw(plan, groups, 16, seed), scale=scale, kernel=partial(block_attend, chunk=chunk))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    some([("", None), ("bh", 2)] if INTERPRETED else [("", None), ("h", 2), ("bh", None), ("b", 1)], DTYPES),
    ids=str,
)
def test_biases_and_keys_of_their_own(kind: tuple[str, int | None], dtype: torch.dtype) -> None:
    """Four spans, of which one has a bias, one keys of its own, one both, and one neither."""
    lead, chunk = kind
    plan = with_extras(random_plan(5, lead=lead, n_query=30, n_key=50), 2, 16, 5)
    tensors = draw(plan, 2, 16, 5)
    check(plan, tensors, dtype, kernel=partial(block_attend, chunk=chunk))
    if INTERPRETED and lead:
        return
    # A cache with room for more, of another stride.
    query, key, value = (t.to(DEVICE, dtype) for t in tensors)
    room = torch.full((2, 2, 50, 40), torch.nan, device=DEVICE, dtype=dtype)[..., 3:35:2].copy_(key)
    moved = plan.to(DEVICE)
    want = attend_plan(moved, query, key, value, 0.25, block_attend)
    got = attend_plan(moved, query, room, value, 0.25, block_attend)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    ("sizes", "dtype"), some([(64, 64), (80, 80), (96, 96), (128, 128), (24, 40)], DTYPES), ids=str
)
def test_head_sizes(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    plan = random_plan(sum(sizes), batch=1, n_query=30, n_key=60, lead="h")
    tensors = draw(plan, 2, sizes[0], 4, sizes[1])
    check(plan, tensors, dtype, scale=sizes[0] ** -0.5)


def blocks_plan(block_q: int, block_k: int, lead: str, spans: int = 2, heads: int = 4) -> AttentionPlan:
    """Rows over `spans` spans, disjoint in keys, of which some pairs are tested."""
    rng = torch.Generator().manual_seed(block_q + block_k + spans)
    shape = (1, heads if lead else 1)
    P, N = 2 * block_q, 2 * block_k
    q_row = torch.rand(*shape, P, generator=rng).argsort(-1).int()
    rows = torch.rand(*shape, spans * N, generator=rng).argsort(-1).int()
    rows.masked_fill_(torch.rand(rows.shape, generator=rng) < 0.1, -1)
    made = []
    for s, k_row in enumerate(rows.split(N, -1)):
        q_pos, k_pos = (torch.randint(0, N, (*shape, n), generator=rng, dtype=torch.int32) for n in (P, N))
        table = torch.rand(*shape, 2, 2, generator=rng) < 0.7
        made.append(span_from_table(q_row, k_row, q_pos, k_pos, -s, N // 2, table, block_q, block_k))
    return AttentionPlan((Part(q_row, tuple(made)),), block_q, block_k, 1, heads, P, spans * N)


@pytest.mark.parametrize(
    ("blocks", "lead"), some([(64, 64), (128, 128), (256, 16), (16, 256)], ["", "h"]), ids=str
)
def test_blocks_larger_than_a_tile(blocks: tuple[int, int], lead: str) -> None:
    plan = blocks_plan(*blocks, lead)
    check(plan, draw(plan, 2, 16, 1))


@pytest.mark.parametrize("chunk", [None, 2])
def test_many_spans(chunk: int | None) -> None:
    """More spans than one loop walks, and than one piece of a split row covers."""
    plan = blocks_plan(16, 16, "h", spans=9, heads=2)
    check(plan, draw(plan, 1, 16, 1), kernel=partial(block_attend, chunk=chunk))


def test_the_wide_places_of_a_span_widen_all() -> None:
    plan = blocks_plan(16, 16, "h")
    part, (first, second) = plan.parts[0], plan.parts[0].spans
    second = replace(second, q_pos=second.q_pos.long() + 2**40, k_pos=second.k_pos.long() + 2**40)
    check(replace(plan, parts=(Part(part.q_row, (first, second)),)), draw(plan, 2, 16, 1))


def test_tensors_of_any_strides() -> None:
    """Queries as a projection leaves them, keys in a cache that has room for more, values backwards by stride of heads."""
    plan = random_plan(9, n_query=30, n_key=50)
    tensors = draw(plan, 2, 16, 3)
    query, key, value = (t.to(DEVICE) for t in tensors)
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    room = torch.full((plan.batch, 2, 99, 24), torch.nan, device=DEVICE)
    room[:, :, 7:57, 3:19] = key
    spread = torch.full((plan.batch, 2, 50, 32), torch.nan, device=DEVICE)
    spread[..., ::2] = value
    arguments = flat(plan.to(DEVICE).parts[0], plan)
    want = block_attend(query, key, value, *arguments, 0.25)
    got = block_attend(turned, room[:, :, 7:57, 3:19], spread[..., ::2], *arguments, 0.25)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_lists_that_are_views() -> None:
    """Shared tensors expanded, and tensors whose last dimension is not dense, give what copies give."""
    plan = random_plan(2, n_query=30, n_key=50, lead="b").to(DEVICE)
    part = plan.parts[0]

    def spread(t: Tensor) -> Tensor:
        return t[..., None].expand(*t.shape, 2).contiguous()[..., 0].expand(2, 4, -1)

    def viewed(span: KeySpan) -> KeySpan:
        row, kind = span.lists.row, span.lists.kind
        lists = replace(
            span.lists, row=row.expand(2, 4, -1, 5).transpose(2, 3).contiguous().mT, kind=spread(kind)
        )
        rows, q, k = (spread(t) for t in (span.k_row, span.q_pos, span.k_pos))
        return KeySpan(rows, q, k, span.lo, span.hi, lists)

    views = replace(plan, parts=(Part(spread(part.q_row), tuple(map(viewed, part.spans))),))
    tensors = [t.to(DEVICE) for t in draw(plan, 2, 16, 3)]
    want = attend_plan(plan, *tensors, 0.25, block_attend)
    got = attend_plan(views, *tensors, 0.25, block_attend)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_rows_that_see_nothing_are_zero() -> None:
    """Query blocks without a list, rows that the test leaves nothing, padded rows; an unseen key may hold anything."""
    plan = random_plan(3, n_query=40, n_key=64)
    part, span = plan.parts[0], plan.parts[0].spans[0]
    table = torch.zeros(2, 4, part.q_row.shape[-1] // 16, span.k_row.shape[-1] // 32, dtype=torch.bool)
    table[:, ::2, 0] = True
    order = (part.q_row, span.k_row, span.q_pos, span.k_pos, span.lo, span.hi, table)
    plan = replace(plan, parts=(Part(part.q_row, (span_from_table(*order, 16, 32),)),))
    query, key, value = draw(plan, 2, 16, 1)
    _, lse = check(plan, [query, key, value])
    assert (lse == -torch.inf).any() and lse.isfinite().any()
    nan = torch.where(plan.to_mask().any(2).view(2, 2, 2, -1).any(2)[..., None], 0.0, torch.nan)
    assert nan.isnan().any()
    kept = [t.to(DEVICE) for t in (query, key + nan, value + nan)]
    assert attend_plan(plan.to(DEVICE), *kept, 0.25, block_attend)[0].isfinite().all()


def test_full_blocks_are_not_tested() -> None:
    plan = full_plan()
    assert plan.to_mask().all()
    check(plan, draw(plan, 2, 16, 2))


def test_a_row_is_split_where_lists_are_uneven() -> None:
    """One block of queries with every key, the rest with one block: by itself the kernel splits the long list alone."""
    n = 64 * 16
    q_row, k_row = (torch.arange(m, dtype=torch.int32).view(1, 1, m) for m in (48, n))
    table = torch.zeros(1, 1, 3, n // 16, dtype=torch.bool)
    table[..., 0], table[:, :, 1] = True, True
    zero = torch.zeros(1, 1, 48, dtype=torch.int32)
    span = span_from_table(q_row, k_row, zero, 0 * k_row, 0, 1, table, 16, 16)
    plan = AttentionPlan((Part(q_row, (span,)),), 16, 16, batch=1, heads=2, n_query=48, n_key=n)
    tensors = draw(plan, 1, 16, 5)
    _, lse = check(plan, tensors)
    if INTERPRETED:
        work = SplitListPieces.split([span.lists.list_lengths], 1, 1, 3, 1, n // 16, 1)
        assert int(work.split_sizes[0]) == 32
        assert work.pieces.tolist() == [1, 2, 1]
        assert work.item[:4].tolist() == [[1, 0], [1, 1], [2, 0], [0, 0]]
        assert work.item[4:, 0].tolist() == [-1] * (WAVES - 1)
        whole = check(plan, tensors, kernel=partial(block_attend, chunk=99))
        torch.testing.assert_close(lse, whole[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("chunk", "in_order"), some([None, 1], [True, False]))
def test_every_row_is_written_where_nothing_is_laid_out_before(
    chunk: int | None, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows, of which some see nothing: what the memory held before is nowhere left."""
    plan = random_plan(18, lead="", n_query=30, n_key=50).to(DEVICE)
    part = plan.parts[0]
    rows = part.q_row.shape[-1] - 2
    row = torch.arange(rows + 2, dtype=torch.int32, device=DEVICE)[None, None]
    q_row = torch.where(row < rows, row, -1)
    q_row = q_row if in_order else q_row.flip(-1).contiguous()
    part = replace(part, q_row=q_row, ordered=rows if in_order else None, all_rows=rows)
    tensors = [t.to(DEVICE) for t in draw(replace(plan, parts=(part,)), 2, 16, 3)]
    query = torch.nn.functional.pad(tensors[0], (0, 0, 0, rows - 30))

    def poisoned(self: Tensor, *size: int, **named: object) -> Tensor:
        return torch.full(size, 77.0, dtype=named.get("dtype", self.dtype), device=self.device)  # type: ignore[arg-type]

    arguments = (query, *tensors[1:], *flat(part, plan), 0.25, rows)
    known = [t.clone() for t in block_attend(*arguments, chunk=chunk)]
    unknown = flat(replace(part, ordered=None, all_rows=None), plan)
    apart = (*arguments[:3], *unknown, 0.25, rows)
    want = block_attend(*apart, chunk=chunk)
    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    got = block_attend(*arguments, chunk=chunk)
    for a, b, c in zip(known, got, want, strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)
    assert (got[1] == -torch.inf).any()


@pytest.mark.parametrize(("lead", "chunk"), some(["", "bh"], [None, 1]))
def test_rows_at_their_places(lead: str, chunk: int | None) -> None:
    """In the order of the query the kernel writes what the order of the part says; what no row serves is zero."""
    plan = random_plan(12, lead=lead, n_query=30, n_key=50).to(DEVICE)
    tensors = [t.to(DEVICE) for t in draw(plan, 2, 16, 3)]
    arguments = (*tensors, *flat(plan.parts[0], plan), 0.25)
    want = schema.scatter_to_query_order(*block_attend(*arguments, chunk=chunk), plan.parts[0].q_row, 37)
    got = block_attend(*arguments, 37, chunk=chunk)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w) and g.stride() == w.stride()


def test_nothing_to_do() -> None:
    plan = random_plan(6, n_query=30, n_key=50).to(DEVICE)
    query, key, value = (t.to(DEVICE) for t in draw(plan, 2, 16, 3))
    arguments = flat(plan.parts[0], plan)
    out, lse = block_attend(query, key[:, :, :0], value[:, :, :0], *arguments, 0.25)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_float64_is_refused() -> None:
    plan = random_plan(6, n_query=30, n_key=50)
    with pytest.raises(
        RecipeError, match=r"'triton' computes in .*, not in torch.float64; choose 'reference'"
    ):
        attend_plan(plan, *(t.double() for t in draw(plan, 2, 16, 3)), 0.25, block_attend)


def test_is_a_clean_operator() -> None:
    plan = random_plan(7, heads=2, n_query=16, n_key=40).to(DEVICE)
    tensors = [t.to(DEVICE) for t in draw(plan, 1, 16, 3)]
    torch.library.opcheck(backend.op, (*tensors, *flat(plan.parts[0], plan), 0.2))
    schemas = [str(op._opoverload._schema).split("(", 1)[1] for op in (reference.op, backend.op)]
    assert schemas[0] == schemas[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_fake_tells_the_truth(dtype: torch.dtype) -> None:
    plan = random_plan(8, n_query=30, n_key=50).to(DEVICE)
    tensors = [t.to(DEVICE, dtype).transpose(1, 2).contiguous().transpose(1, 2) for t in draw(plan, 2, 16, 3)]
    arguments = (*tensors, *flat(plan.parts[0], plan), 0.2)
    real = backend.op(*arguments)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = backend.op(*arguments)
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


@pytest.mark.parametrize(
    ("name", "start"), some(["grid", "per_head", *["sf_fixed", "tri_shape"] * (not INTERPRETED)], [0, 20])
)
def test_two_blocks_of_queries_as_one(name: str, start: int) -> None:
    """Lists that are runs of blocks in their order are walked two together; of an odd number of them, the last alone."""
    scene = replace(SCENE, start=start, heads=4, groups=2)
    table = {0: {0: HEADS[0], 1: HEADS[1], 2: HEADS[0]}}
    pattern = small(name) if name != "per_head" else PerHead(table=table, block=16)
    plan = scene.plan(pattern)
    plain = [s.lists.index is None for p in plan.parts for s in p.spans]
    assert all(plain)
    wide = replace(
        plan,
        parts=tuple(
            replace(
                p,
                q_row=p.q_row.expand(plan.batch, 4, -1),
                spans=tuple(replace(s, q_pos=s.q_pos.expand(-1, 4, -1)) for s in p.spans),
            )
            for p in plan.parts
        ),
    )
    check_served(wide, list(scene.tensors(torch.float32)))
