"""What is made of lists for flash-attn 4, without it: tables, tiles of blocks, turns of heads, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmaccel.backends import flash
from mmaccel.backends.flash import attend
from mmaccel.backends.flash.tiles import Tiles, finer, rooms, tiled
from mmaccel.backends.ops import dense_attend
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.block_attend import FULL
from mmaccel.core.errors import RecipeError
from mmaccel.core.prefill.plan import BlockLists, KeySpan, Part

from .oracle import flat
from .plans import PATTERNS, random_plan
from .test_flash import planned

CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", [*PATTERNS, "", "b", "h", "bh"])
def test_tables_hold_what_is_listed(name: str) -> None:
    """Of lists one after another, and of some heads alone."""
    plan = planned(name, 16, 0)[0] if name in PATTERNS else random_plan(7, lead=name, n_query=150, n_key=300)
    for span in (span for part in plan.parts for span in part.spans):
        lists, table = span.lists, span.lists.table()
        offset, block, kind = lists.flat()
        b, h, m, n = table.shape
        want = torch.full((b * h * m, n), -1, dtype=table.dtype)
        row = torch.repeat_interleave(torch.arange(b * h * m), offset.diff().flatten())
        want[row, block.long()] = kind.to(table.dtype)
        assert torch.equal(table, want.view(table.shape))
        if h > 2:
            assert torch.equal(lists.of(slice(1, 3)).table(), table[:, 1:3])


@given(seed=st.integers(0, 2**16), queries=st.sampled_from([1, 2, 8]), keys=st.sampled_from([1, 2, 4]))
def test_tiles_of_blocks(seed: int, queries: int, keys: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    m, n = (int(torch.randint(1, 12, (), generator=rng)) for _ in range(2))
    kinds = torch.randint(-1, 3, (1, 2, m, n), generator=rng, dtype=torch.int8)
    kinds[:, :, : m // 2] = FULL
    listed, full = tiled(kinds, queries, keys)
    for h in range(2):
        for i in range(-(-m // queries)):
            for j in range(-(-n // keys)):
                tile = kinds[0, h, i * queries : (i + 1) * queries, j * keys : (j + 1) * keys]
                assert listed[0, h, i, j] == (tile >= 0).any()
                assert full[0, h, i, j] == ((tile == FULL).all() and tile.shape[1] == keys)
    count, index = rooms(listed)
    assert count.dtype == index.dtype == torch.int32
    assert count.stride(-1) == index.stride(-1) == 1
    for row, (c, i) in zip(
        listed.flatten(0, 2), zip(count.flatten(), index.flatten(0, 2), strict=True), strict=True
    ):
        assert i[: int(c)].tolist() == row.nonzero().flatten().tolist()
    parts = finer(kinds, queries, keys)
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
    assert [range(s.start, s.stop) for s in attend.turns([lists], heads, group)] == want
    shared = BlockLists(lists.row[:, :1], None, lists.kind)
    assert list(attend.turns([shared], heads, group)) == [slice(0, heads)]


def test_tiles() -> None:
    assert Tiles.of(64, 64, True) == Tiles(128, 128, (2, 2), (1, 1))
    assert Tiles.of(16, 256, True) == Tiles(128, 128, (8, 1), (1, 2))
    assert Tiles.of(64, 64, False) == Tiles(64, 64, (1, 1), (1, 1))
    assert Tiles.of(256, 128, False) == Tiles(128, 128, (1, 1), (2, 1))


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
    attend.refuse(one, one, part, 64, 64)
    with pytest.raises(RecipeError, match="at most 268435456 pairs of blocks a head"):
        attend.refuse(one.expand(2, -1, -1, -1), one, part, 64, 64)


def test_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash.usable(torch.device("cpu")) == "it runs on cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert flash.usable(CUDA) == "no CUDA device is visible"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("sm_80", "sm_90", "sm_100", "gfx942"):
        row = operators.row_named(name)
        monkeypatch.setattr(operators, "row_of", lambda device, row=row: row)
        for there, needed in ((True, None), (False, "it needs flash-attn 4 (pip install flash-attn-4)")):
            monkeypatch.setattr(flash, "installed", lambda there=there: there)
            assert flash.usable(CUDA) == (row.lacks["flash"] if row.lacks else needed)
            assert dense_attend.runs_flash_4(CUDA) == (there and name in ("sm_90", "sm_100"))
