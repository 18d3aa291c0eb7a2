"""Every backend against dense attention under the plan's own mask, in float64; the dense operator against its rules."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.backends import reference, select
from mmaccel.backends.ops import dense_attend as dense
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.backends.reference import block_attend
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.policies.sparse import AShape, Grid
from tests.spies import Largest, heard, product

from .oracle import (
    PATTERNS,
    budget,
    check,
    draw,
    drawn,
    full_plan,
    log_sum_exp,
    masked,
    pattern_plan,
    random_plan,
    with_extras,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# flash-attn 4 has tiles and types of its own: `test_flash` and `test_flash_gpu` hold it to the same.
BACKENDS = [
    name for name, reason in select.why_unusable(DEVICE).items() if reason is None and name != "flash"
]


def move(plan: AttentionPlan, tensors: Sequence[Tensor], dtype: torch.dtype):
    return tuple(t.to(DEVICE, dtype) for t in tensors), plan.to(DEVICE)


@pytest.mark.parametrize(
    ("backend", "name", "start", "dtype"),
    product(BACKENDS, PATTERNS, [0, 70], [torch.float32, torch.float16, torch.bfloat16], together=2),
    ids=str,
)
def test_patterns(backend: str, name: str, start: int, dtype: torch.dtype) -> None:
    plan, scene = pattern_plan(name, start)
    tensors, plan = move(plan, scene.tensors(torch.float32), dtype)
    check(plan, tensors, scene.size**-0.5, select.get_op(backend, DEVICE))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**16),
    lead=st.sampled_from(["", "b", "h", "bh"]),
    groups=st.sampled_from([1, 2, 4]),
    sizes=st.sampled_from([(50, 90), (1, 200), (130, 33)]),
)
def test_random_plans(backend: str, seed: int, lead: str, groups: int, sizes: tuple[int, int]) -> None:
    plan = random_plan(seed, lead=lead, n_query=sizes[0], n_key=sizes[1])
    tensors, plan = move(plan, draw(plan, groups, 16, seed), torch.float32)
    assert plan.spans_per_pair().max() <= 1
    check(plan, tensors, 0.25, select.get_op(backend, DEVICE))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**16), lead=st.sampled_from(["", "b", "h", "bh"]), groups=st.sampled_from([1, 2, 4])
)
def test_biases_and_keys_of_their_own(backend: str, seed: int, lead: str, groups: int) -> None:
    """Against float64 over the keys of the sequence and those of the spans; the plan says what it adds and computes."""
    plan = with_extras(random_plan(seed, lead=lead), groups, 16, seed)
    tensors, plan = move(plan, draw(plan, groups, 16, seed), torch.float32)
    assert plan.parts[0].needs_extensions and plan.spans_per_pair().max() <= 1
    assert plan.to_mask().shape[-1] == plan.n_key + 80 and plan.to_bias()[..., plan.n_key :].any()
    check(plan, tensors, 0.25, select.get_op(backend, DEVICE))


@pytest.mark.parametrize("name", list(PATTERNS))
def test_the_oracle_is_exact_in_float64(name: str) -> None:
    plan, scene = pattern_plan(name, 33)
    query, key, value = scene.tensors()
    mask, scale = plan.to_mask(), scene.size**-0.5
    out, lse = attend_plan(plan, query, key, value, scale, reference.op)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, masked(query, key, value, mask, scale), rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, log_sum_exp(query, key, mask, scale), rtol=0, atol=1e-13)


@pytest.mark.parametrize("lead", ["", "bh"])
def test_long_lists_go_in_slices(lead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_plan(5, lead=lead, n_query=60, n_key=700)
    query, key, value = (t.double() for t in draw(plan, 2, 16, 5))
    whole = attend_plan(plan, query, key, value, 0.3, reference.op)
    monkeypatch.setattr(reference, "BUDGET", 2 * plan.block_q * plan.block_k)
    sliced = attend_plan(plan, query, key, value, 0.3, reference.op)
    torch.testing.assert_close(sliced[0], whole[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(sliced[1], whole[1], rtol=0, atol=1e-13)


def test_full_blocks_are_not_tested() -> None:
    """A block called FULL is seen whole, even where the range test would hide it: the kinds are binding."""
    plan = full_plan()
    query, key, value = (t.double() for t in draw(plan, 2, 16, 2))
    out, _ = attend_plan(plan, query, key, value, 0.25, reference.op)
    everything = torch.ones(1, 1, 16, 64, dtype=torch.bool)
    torch.testing.assert_close(out, masked(query, key, value, everything, 0.25), rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a_shape", "vertical_slash"])
def test_compiled_flex_walks_the_lists(name: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    from mmaccel.backends import flex

    plan, scene = pattern_plan(name, 0)
    query, key, value = scene.tensors(torch.float32)
    part = plan.parts[0]
    mask, rows = flex.make_block_mask(part, plan.block_q, plan.block_k, (plan.batch, plan.heads))
    heads = plan.heads
    out = torch.compile(flex_attention)(
        flex.gather_head_rows(query, part.q_row.expand(plan.batch, -1, -1)),
        flex.gather_head_rows(key, rows, heads),
        flex.gather_head_rows(value, rows, heads),
        block_mask=mask,
        scale=scene.size**-0.5,
        enable_gqa=rows.shape[1] == 1,
    )
    rows_of = part.q_row.clamp(min=0).long()[..., None].expand_as(out)
    exact, allowed = budget(query, key, value, plan.to_mask(), scene.size**-0.5)
    served = (part.q_row >= 0)[..., None] & plan.to_mask().any(-1, keepdim=True).gather(2, rows_of[..., :1])
    error = (out.double() - exact.gather(2, rows_of)).masked_fill(~served, 0.0)
    assert float(error.abs().max()) <= allowed


S = 4096


def tensors(n_query: int = S) -> list[Tensor]:
    return drawn(1, (2, 1), n_query, S, 16)


def test_the_measure_sees_what_it_is_for() -> None:
    query, key, _ = tensors()
    with Largest() as seen:
        query @ key.transpose(2, 3)
    assert seen.entries >= S * S


@pytest.mark.parametrize(
    "pattern", [AShape(window=3000), Grid(stride="free", max_stride=32)], ids=lambda p: p.name
)
def test_reference(pattern) -> None:
    query, key, value = tensors()
    layout = TokenLayout.text(1, S)
    with Largest() as seen:
        plan = pattern.plan(query, key, layout, layout)
        attend_plan(plan, query, key, value, 0.25, block_attend)
    assert seen.entries < S * S


LEFT, MIDDLE = torch.ones(1, S, dtype=torch.bool), torch.ones(1, S, dtype=torch.bool)
LEFT[:, :100] = False
MIDDLE[:, 2000:2010] = False


@pytest.mark.parametrize(
    ("n_query", "named"),
    [
        (S, {}),
        (S - 500, dict(start=500)),
        (S, dict(window=700, sinks=9)),
        (S, dict(window=S + 1)),
        (S, dict(valid=LEFT)),
        (S, dict(valid=MIDDLE, window=900)),
        (S, dict(column=torch.arange(S).flip(0))),
    ],
    ids=["square", "late", "window", "wide window", "left padding", "holes", "columns"],
)
def test_dense(n_query: int, named: dict[str, Any]) -> None:
    query, key, value = tensors(n_query)
    with Largest() as seen:
        dense_attend.plain(query, key, value, 0.25, **named)
    assert seen.entries < n_query * S


@cache
def band(n_query: int, n_key: int, start: int, sinks: int, window: int | None) -> Tensor:
    """The rules for keys that are all there, of one sequence."""
    return rules(n_query, n_key, start, None, sinks, window, None, 1)


def rules(
    n_query: int,
    n_key: int,
    start: int,
    valid: list[list[bool]] | None,
    sinks: int,
    window: int | None,
    column: list[int] | None,
    batch: int,
) -> Tensor:
    """[B, 1, n_query, n_key] bool."""
    at, own = torch.tensor(column or range(n_key)), torch.arange(start, start + n_query)
    there = torch.tensor(valid or [[True] * n_key] * batch)
    # Without columns of their own keys are counted by valid ones, so that padding shifts neither sinks nor windows.
    rank = at.expand(batch, -1) if column else there.cumsum(1) - 1
    place = own.expand(batch, -1)
    if not column:
        place = place.where(own >= n_key, rank[:, own.clamp(max=n_key - 1)])
    gap = place[:, :, None] - rank[:, None]
    seen = there[:, None] & (at <= own[:, None])
    if window is not None:
        seen &= (gap < window) | (rank[:, None] < sinks)
    gone = (at == own[:, None]) & ~there[:, None]
    return (seen & ~gone.any(-1, keepdim=True))[:, None]


def dense_inputs(batch: int, heads: tuple[int, int], n_query: int, n_key: int, seed: int) -> list[Tensor]:
    return [t.double() for t in drawn(batch, heads, n_query, n_key, 8, seed)]


@st.composite
def paddings(draw: st.DrawFn, batch: int, n: int) -> list[list[bool]] | None:
    kind = draw(st.sampled_from(["none", "left", "right", "both", "holes", "all"]))
    if kind == "none":
        return None
    rows = []
    for _ in range(batch):
        left = draw(st.integers(0, n)) if kind in ("left", "both") else 0
        right = draw(st.integers(0, n - left)) if kind in ("right", "both") else 0
        row = [False] * left + [True] * (n - left - right) + [False] * right
        if kind == "holes":
            row = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        rows.append(row)
    return rows


@given(st.data())
def test_rules(data: st.DataObject) -> None:
    batch, n_key = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    start = data.draw(st.sampled_from([0, 0, n_key // 2, n_key - 1]))
    n_query = n_key - start
    heads = data.draw(st.sampled_from([(4, 2), (2, 2), (3, 1)]))
    valid = data.draw(paddings(batch, n_key))
    window = data.draw(st.sampled_from([None, 1, 5, 11, 60]))
    sinks = data.draw(st.sampled_from([0, 1, 4, 60]))
    column = data.draw(st.sampled_from([None, None, "shuffled", "chosen"]))
    query, key, value = dense_inputs(batch, heads, n_query, n_key, data.draw(st.integers(0, 999)))
    columns = None
    if column == "shuffled":
        columns = torch.randperm(n_key, generator=torch.Generator().manual_seed(n_key)).tolist()
    elif column == "chosen":
        columns = [3 * n for n in range(n_key)]
        start *= 3
    got = dense.dense_attend(
        query,
        key,
        value,
        0.3,
        start=start,
        valid=None if valid is None else torch.tensor(valid),
        sinks=sinks,
        window=window,
        column=None if columns is None else torch.tensor(columns),
    )
    mask = rules(n_query, n_key, start, valid, sinks, window, columns, batch)
    torch.testing.assert_close(got, masked(query, key, value, mask, 0.3), rtol=0, atol=1e-12)


ROWS = [
    dict(n_query=600, start=0),
    dict(n_query=400, start=200),
    dict(n_query=1, start=599),
    dict(n_query=600, start=0, window=100, sinks=7),
    dict(n_query=300, start=300, window=290, sinks=40),
]


@pytest.mark.parametrize(
    ("case", "dtype"), product(ROWS, [torch.float32, torch.float16, torch.bfloat16]), ids=str
)
def test_blocks_of_rows(case: dict[str, int], dtype: torch.dtype) -> None:
    """Longer than one block of rows, in the types of models."""
    case = dict(case)
    n_query = case.pop("n_query")
    query, key, value = (t.to(dtype) for t in dense_inputs(1, (4, 2), n_query, 600, 3))
    mask = band(n_query, 600, case["start"], case.get("sinks", 0), case.get("window"))
    exact, allowed = budget(query, key, value, mask, 0.3)
    got = dense.dense_attend(query, key, value, 0.3, **case)
    assert got.dtype == dtype
    assert float((got.double() - exact).abs().max()) <= allowed


def test_keys_after_the_last_query_are_not_seen() -> None:
    query, key, value = dense_inputs(1, (4, 2), 10, 30, 4)
    mask = rules(10, 30, 5, None, 0, None, None, 1)
    got = dense.dense_attend(query, key, value, 0.3, start=5)
    torch.testing.assert_close(got, masked(query, key, value, mask, 0.3), rtol=0, atol=1e-12)


def test_columns_of_each_sequence() -> None:
    query, key, value = dense_inputs(2, (4, 2), 6, 30, 5)
    columns = torch.stack([torch.arange(30), torch.arange(30).flip(0) * 2])
    got = dense.dense_attend(query, key, value, 0.3, start=20, column=columns, window=9, sinks=2)
    for b in range(2):
        mask = rules(6, 30, 20, None, 2, 9, columns[b].tolist(), 1)
        want = masked(query[b : b + 1], key[b : b + 1], value[b : b + 1], mask, 0.3)
        torch.testing.assert_close(got[b : b + 1], want, rtol=0, atol=1e-12)


def test_padding_reads_the_host_once_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = heard(monkeypatch, dense, "_extent", lambda valid: 1)
    query, key, value = dense_inputs(2, (4, 2), 20, 20, 6)
    dense.dense_attend(query, key, value, 0.3)
    assert reads == []
    dense.dense_attend(query, key, value, 0.3, valid=torch.ones(2, 20, dtype=torch.bool))
    assert reads == [1]


@pytest.mark.parametrize("keys", [3, 64, 2000])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_of_a_few_rows(rows: int, keys: int) -> None:
    """What a CUDA device computes for float32; `test_cuda.py` has it there."""
    query, key, value = drawn(2, (3, 3), rows, keys, 64)
    mask = band(rows, keys, keys - rows if keys > rows else 0, 0, None)[:, :, :rows]
    exact, allowed = budget(query, key, value, mask, 0.125)
    given = None if bool(mask.all()) else mask
    got = dense._by_products(query, key, value, 0.125, given)
    assert float((got.double() - exact).abs().max()) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_one_by_one_are_the_heads(dtype: torch.dtype) -> None:
    """Bit for bit; the call may be ended before each."""
    draw, turns = torch.Generator().manual_seed(1), list[None]()
    query, key, value = (torch.randn(1, h, 1500, 16, generator=draw).to(dtype) for h in (4, 2, 2))
    got = dense.attend_by_heads(lambda: turns.append(None), query, key, value, 0.25)
    assert torch.equal(got, dense_attend(query, key, value, 0.25)) and len(turns) == 4


@pytest.mark.parametrize("rows", [5, dense.SLICE, 2 * dense.SLICE + 9])
def test_rows_in_slices_are_the_rows(rows: int) -> None:
    """Causal to the row, whatever comes before; and others may have their turn between two slices."""
    draw = torch.Generator().manual_seed(rows)
    query, key, value = (
        torch.randn(1, h, n, 16, generator=draw) for h, n in ((4, rows), (2, rows + 37), (2, rows + 37))
    )
    turns: list[None] = []
    got = dense.attend_in_slices(lambda: turns.append(None), query, key, value, 0.25, 37, True)
    whole = dense_attend(query, key, value, 0.25, 37)
    assert (got - whole).abs().max() <= 1e-6
    assert len(turns) == -(-rows // dense.SLICE) - 1
    assert torch.equal(dense.attend_in_slices(lambda: None, query, key, value, 0.25, 37, False), whole)
