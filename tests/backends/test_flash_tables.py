"""What is made of lists for flash-attn 4, without it: tables, tiles, turns of heads, what a tested tile compares."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.backends import flash
from mmaccel.backends.flash import attend
from mmaccel.backends.flash.tiles import TileSizes, compact_mask_rows, join_tiles, subdivide_mask_blocks
from mmaccel.backends.ops import dense_attend
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.block_attend import FULL, BlockLists, KeySpan, Part
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.plan import FAR, AttentionPlan, pad_rows, span_by_range
from mmaccel.policies.sparse import AShape

from .flash_cases import check, recorded
from .oracle import PATTERNS, draw, drawn, flat, random_plan
from .test_flash import planned

CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", [*PATTERNS, "", "b", "h", "bh"])
def test_tables_hold_what_is_listed(name: str) -> None:
    """Of lists one after another, and of some heads alone."""
    plan = planned(name, 16, 0)[0] if name in PATTERNS else random_plan(7, lead=name, n_query=150, n_key=300)
    for span in (span for part in plan.parts for span in part.spans):
        lists, table = span.lists, span.lists.to_dense_table()
        offset, block, kind = lists.flatten()
        b, h, m, n = table.shape
        want = torch.full((b * h * m, n), -1, dtype=table.dtype)
        row = torch.repeat_interleave(torch.arange(b * h * m), offset.diff().flatten())
        want[row, block.long()] = kind.to(table.dtype)
        assert torch.equal(table, want.view(table.shape))
        if h > 2:
            assert torch.equal(lists.for_heads(slice(1, 3)).to_dense_table(), table[:, 1:3])


@given(seed=st.integers(0, 2**16), queries=st.sampled_from([1, 2, 8]), keys=st.sampled_from([1, 2, 4]))
def test_tiles_of_blocks(seed: int, queries: int, keys: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    m, n = (int(torch.randint(1, 12, (), generator=rng)) for _ in range(2))
    kinds = torch.randint(-1, 3, (1, 2, m, n), generator=rng, dtype=torch.int8)
    kinds[:, :, : m // 2] = FULL
    listed, full = join_tiles(kinds, queries, keys)
    for h in range(2):
        for i in range(-(-m // queries)):
            for j in range(-(-n // keys)):
                tile = kinds[0, h, i * queries : (i + 1) * queries, j * keys : (j + 1) * keys]
                assert listed[0, h, i, j] == (tile >= 0).any()
                assert full[0, h, i, j] == ((tile == FULL).all() and tile.shape[1] == keys)
    count, index = compact_mask_rows(listed)
    assert count.dtype == index.dtype == torch.int32
    assert count.stride(-1) == index.stride(-1) == 1
    for row, (c, i) in zip(
        listed.flatten(0, 2), zip(count.flatten(), index.flatten(0, 2), strict=True), strict=True
    ):
        assert i[: int(c)].tolist() == row.nonzero().flatten().tolist()
    parts = subdivide_mask_blocks(kinds, queries, keys)
    assert torch.equal(parts, kinds.repeat_interleave(queries, 2).repeat_interleave(keys, 3))


@pytest.mark.parametrize(
    ("heads", "group", "room", "want"),
    [
        (8, 4, 10, [range(8)]),
        (8, 4, 4, [range(4), range(4, 8)]),
        (8, 4, 3, [range(i, i + 2) for i in range(0, 8, 2)]),
        (14, 7, 6, [range(i, i + 1) for i in range(14)]),
        (12, 2, 5, [range(0, 4), range(4, 8), range(8, 12)]),
    ],
)
def test_turns_are_of_whole_groups_or_of_a_part_of_one(
    heads: int, group: int, room: int, want: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "ROOM", room * 5 * 7)
    lists = BlockLists(torch.zeros(1, heads, 5, 5, dtype=torch.long), None, torch.zeros(1, 1, 7))
    assert [range(s.start, s.stop) for s in attend.iter_head_slices([lists], heads, group)] == want
    shared = BlockLists(lists.row[:, :1], None, lists.kind)
    assert list(attend.iter_head_slices([shared], heads, group)) == [slice(0, heads)]


def test_tiles() -> None:
    assert TileSizes.choose(64, 64, True) == TileSizes(128, 128, (2, 2), (1, 1))
    assert TileSizes.choose(16, 256, True) == TileSizes(128, 128, (8, 1), (1, 2))
    assert TileSizes.choose(64, 64, False) == TileSizes(64, 64, (1, 1), (1, 1))
    assert TileSizes.choose(256, 128, False) == TileSizes(128, 128, (1, 1), (2, 1))


@pytest.mark.parametrize(
    ("size", "dtype", "blocks", "why"),
    [
        (64, torch.float32, 64, "computes in float16 or bfloat16, not in float32"),
        (24, torch.float16, 64, "serves heads of 64, 80, 96, 128, not of 24 and 24"),
        (64, torch.float16, 32, "serves these lists in blocks of 64 or more, not of 32 by 32"),
    ],
)
def test_refusals(size: int, dtype: torch.dtype, blocks: int, why: str) -> None:
    plan = random_plan(1, n_query=64, n_key=128, blocks=(blocks, blocks))
    tensors = (torch.zeros(2, h, n, size, dtype=dtype) for h, n in ((4, 64), (2, 128), (2, 128)))
    with pytest.raises(RecipeError, match=re.escape(f"backend: 'flash' {why}; choose 'triton'.")):
        attend.block_attend(*tensors, *flat(plan.parts[0], plan), 0.2)


def test_a_table_has_a_bound() -> None:
    one = torch.zeros(1, 1, 1, 64).half()
    row = torch.zeros(1, 1, 1 << 20, dtype=torch.int32)
    lists = BlockLists(row.new_zeros(1, 1, 1 << 14, 5).long(), row[0, 0, :1], row[..., : 1 << 14])
    part = Part(row, (KeySpan(row, row, row, 0, 1, lists),))
    attend.check_call(one, one, part, 64, 64)
    with pytest.raises(RecipeError, match="at most 268435456 pairs of blocks a head"):
        attend.check_call(one.expand(2, -1, -1, -1), one, part, 64, 64)


def test_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash.why_unusable(torch.device("cpu")) == "it needs a CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert flash.why_unusable(CUDA) == "no CUDA device is visible"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("sm_80", "sm_90", "sm_100", "gfx942"):
        row = operators.find_architecture(name)
        monkeypatch.setattr(operators, "architecture_of", lambda device, row=row: row)
        for there, needed in ((True, None), (False, "it needs flash-attn 4 (pip install flash-attn-4)")):
            monkeypatch.setattr(flash, "is_installed", lambda there=there: there)
            assert flash.why_unusable(CUDA) == (row.lacks["flash"] if row.lacks else needed)
            assert dense_attend.uses_flash_attn_4(CUDA) == (there and name in ("sm_90", "sm_100"))


def side_by_side(
    rng: torch.Generator,
    q_row: Tensor,
    q_pos: Tensor,
    n_key: int,
    cuts: list[int],
    *blocks: int,
    **known: Any,
) -> tuple[KeySpan, ...]:
    """Ranges one after another between `cuts`, over the first keys, as many as each span has."""
    k_pos = torch.arange(n_key + -n_key % blocks[1], dtype=torch.int32).expand(len(q_row), 1, -1)
    spans, edges = [], sorted(cuts)
    for i, (lo, hi) in enumerate(zip(edges, [*edges[1:-1], FAR], strict=False)):
        some = int(torch.randint(1, n_key + 1, (), generator=rng)) if i else n_key
        room = some + -some % blocks[1]
        mine, rank = torch.where(k_pos < some, k_pos, -1)[..., :room], k_pos[..., :room]
        told = dict(ordered=some, ranks=True, **known)
        spans.append(span_by_range(q_row, mine, q_pos, rank, lo, hi, *blocks, **told))
    return tuple(spans)


RANGES: dict[str, Any] = {
    "seed": st.integers(0, 2**16),
    "blocks": st.sampled_from([(16, 16), (64, 64), (128, 32), (32, 256)]),
    "counts": st.tuples(st.integers(1, 300), st.integers(1, 300)),
    "cuts": st.lists(st.integers(-40, 330), min_size=2, max_size=5, unique=True),
}


@given(**RANGES, shuffled=st.booleans())
def test_runs_of_keys(
    seed: int, blocks: tuple[int, int], counts: tuple[int, int], cuts: list[int], shuffled: bool
) -> None:
    """Ranges side by side over the first keys, as many as each span has; queries of any places and rows."""
    rng = torch.Generator().manual_seed(seed)
    n, n_key = counts
    row = torch.randperm(n, generator=rng, dtype=torch.int32) if shuffled else torch.arange(n).int()
    q_row = pad_rows(row[None, None], blocks[0])
    q_pos = torch.randint(-1, n_key, q_row.shape, generator=rng, dtype=torch.int32)
    spans = side_by_side(rng, q_row, q_pos, n_key, cuts, *blocks)
    plan = AttentionPlan((Part(q_row, spans),), *blocks, 1, 4, n, n_key)
    tensors = [t.half() for t in draw(plan, 2, 16, seed)]
    with recorded(16) as (told, _):
        check(plan, tensors)
        unknown = tuple(replace(span, ranks=False) for span in spans)
        check(replace(plan, parts=(Part(q_row, unknown),)), tensors)
    assert [args[6] for args in told] == [True, False]


@given(**RANGES, first=st.integers(-150, 300), batch=st.sampled_from([1, 2]))
def test_bands_of_keys(
    seed: int, blocks: tuple[int, int], counts: tuple[int, int], first: int, cuts: list[int], batch: int
) -> None:
    """Queries whose places follow each other need no tensor, whatever the first: also before all keys, and past them. What
    lists are not known to hold all of is told as runs, and what is listed is as ever what counts."""
    rng = torch.Generator().manual_seed(seed)
    n, n_key = counts
    queries = torch.arange(n + -n % blocks[0], dtype=torch.int32).expand(batch, 1, -1)
    q_row, q_pos = (torch.where(queries < n, queries + more, -1) for more in (0, first))
    spans = side_by_side(rng, q_row, q_pos, n_key, cuts, *blocks, q_first=first)
    part = Part(q_row, spans, ordered=n, all_rows=n)
    plan = AttentionPlan((part,), *blocks, batch, 4, n, n_key)
    tensors = [t.half() for t in draw(plan, 2, 16, seed)]
    # Lists of the same span that begin a block late, where their kinds are not told.
    row = spans[0].lists.row.clone()
    row[..., 0] += row[..., 1].clamp(max=1)
    row[..., 1:4] = (row[..., 1:4] - 1).clamp(min=0)
    late = replace(spans[0], lists=replace(spans[0].lists, row=row), complete=False)
    with recorded(16) as (told, _):
        check(plan, tensors)
        check(plan.limit_to_first_rows(max(n - 20, 1)), tensors)
        check(replace(plan, parts=(replace(part, spans=(late, *spans[1:])),)), tensors)
    assert [args[8] is None for args in told] == [False, False, True]


@given(
    seed=st.integers(0, 2**16),
    block=st.sampled_from([16, 64, 128, 256]),
    n=st.integers(1, 400),
    start=st.one_of(st.sampled_from([0, 126, 127, 128, 254]), st.integers(0, 400)),
    sink=st.sampled_from([100, 128, 200, 256, 384]),
    window=st.one_of(st.sampled_from([128, 255, 256, 257, 384]), st.integers(1, 500)),
)
def test_first_keys_need_no_test(seed: int, block: int, n: int, start: int, sink: int, window: int) -> None:
    """Whole tiles of them are FULL where the window leaves them, or none of theirs is seen but by it."""
    n_key = start + n
    tensors = [t.half() for t in drawn(1, (2, 1), n, n_key, 16, seed)]
    layout = TokenLayout.text(1, n_key)
    pattern = AShape(sink=sink, window=window, block=block)
    plan = pattern.plan(*tensors[:2], layout.select_tokens(slice(start, None)), layout)
    assert plan is not None
    with recorded(16) as (told, patch):
        check(plan, tensors)
        patch.setattr(attend, "key_bounds", lambda *args: None)
        check(plan, tensors)
    alone = window >= 256 and min(sink, n_key) % 128 == 0
    assert len(told[0][8]) == (3 if alone else 6) and told[1][8] is None
