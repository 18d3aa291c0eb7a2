"""Lists made, and work made of them before a launch, by Triton kernels against the plain ones; `test_triton` runs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.backends.ops import block_lists
from mmaccel.backends.ops import operator as operators
from mmaccel.backends.ops.block_attend import FULL, Part
from mmaccel.backends.ops.block_lists import FIELDS, assemble_slices
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.backends.triton.prefill import attend, lists
from mmaccel.backends.triton.prefill import kernel as working
from mmaccel.backends.triton.prefill.kernel import MOST_PIECES, WAVES, SplitListPieces
from mmaccel.backends.triton.prefill.lists import assemble_slices as launched
from mmaccel.backends.triton.prefill.lists import merge_adjacent_query_blocks, prefix_count_masked_blocks
from mmaccel.core.prefill.merge_heads import PackedSlice, TensorPacker
from mmaccel.core.prefill.plan import AttentionPlan, span_by_range
from mmaccel.core.prefill.sparse import attend_plan, window_plan

from .interpreted import DEVICE, INTERPRETED
from .oracle import flat
from .triton_cases import draw

FAR = 2**31 - 1


def order(
    n: int, lead: tuple[int, int], wide: bool, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, some runs of them and some single ones absent, and ascending places with ties and gaps."""
    row = torch.arange(n, dtype=torch.int32).repeat(*lead, 1)
    row[torch.rand(*lead, n, generator=rng) < 0.1] = -1
    begin, end = sorted(torch.randint(0, n, (2,), generator=rng).tolist())
    row[:, :, begin:end] = -1
    place = torch.randint(0, 3, (*lead, n), generator=rng).cumsum(-1)
    return row, place + (1 << 33) if wide else place.to(torch.int32)


@pytest.mark.parametrize("seed", range(12))
def test_reach(seed: int) -> None:
    """Leading dimensions shared or not, ranges open or not, keys absent, places of either width, blocks of two sizes."""
    rng = torch.Generator().manual_seed(seed)
    wide, (block_q, block_k) = seed % 4 == 3, [(16, 16), (16, 32), (64, 64)][seed % 3]
    B, H = 1 + seed % 2, 3
    leads = [(1, 1), (B, 1), (1, H), (B, H)]
    q_lead, k_lead = leads[seed % 4], leads[(seed // 4 + seed) % 4]
    q_row, q_pos = order(block_q * 3, q_lead, wide, rng)
    k_row, k_pos = order(block_k * 13, k_lead, wide, rng)
    q_pos[torch.rand(q_pos.shape, generator=rng) < 0.05] = -1
    if seed % 2:
        q_row, k_row = q_row[:1, :1], k_row[:1, :1]
    q_pos = q_pos[..., torch.randperm(q_pos.shape[-1], generator=rng)]
    ranges = [(0, FAR), (0, 70), (-9, 40), (100, FAR)]
    for lo, hi in ranges[seed // 4 % 2 :: 2] if INTERPRETED else ranges:
        arguments = (q_row, k_row, q_pos, k_pos)
        wanted = block_lists.list_band.plain(*arguments, lo, hi, block_q, block_k)
        found = lists.list_band(*(t.to(DEVICE) for t in arguments), lo, hi, block_q, block_k)
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == want.dtype and torch.equal(got.cpu(), want)


def test_reach_over_more_blocks_than_are_looked_at_together() -> None:
    """Runs of empty blocks longer than a step, at the beginning, in the middle and at the end."""
    n = 16 * 2600
    k_row = torch.arange(n, dtype=torch.int32).view(1, 1, n).clone()
    k_row[..., : 16 * 30] = -1
    k_row[..., 16 * 500 : 16 * 2000] = -1
    k_row[..., -16 * 40 :] = -1
    place = torch.arange(n, dtype=torch.int32).view(1, 1, n)
    q_row, q_pos = (t[..., 16 * 480 : 16 * 2100 : 16 * 9].repeat_interleave(16, -1) for t in (place, place))
    wanted = block_lists.list_band.plain(q_row, k_row, q_pos, place, 0, 16 * 100, 16, 16)
    found = lists.list_band(*(t.to(DEVICE) for t in (q_row, k_row, q_pos, place)), 0, 16 * 100, 16, 16)
    assert all(torch.equal(got.cpu(), want) for got, want in zip(found, wanted, strict=True))


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_area(indexed: bool, shared: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    B, H, M, N = 2, 3, 9, 700
    row = torch.zeros(B, H, M, 5, dtype=torch.int64)
    row[..., 0] = torch.randint(0, 20, (B, H, M), generator=rng)
    row[..., 1] = torch.randint(0, 600, (B, H, M), generator=rng)
    row[..., 4] = torch.randint(-5 if indexed else 0, 20, (B, H, M), generator=rng)
    index = torch.arange(5, 660, dtype=torch.int32) if indexed else torch.empty(0, dtype=torch.int32)
    q_row = torch.randint(-1, 3, (1, 1, 16 * M) if shared else (B, H, 16 * M), generator=rng)
    k_row = torch.randint(-1, 1, (B, 1, 32 * N) if shared else (B, H, 32 * N), generator=rng)
    nq, nk = (q_row.view(*q_row.shape[:2], M, 16) >= 0).sum(-1), (k_row.view(B, -1, N, 32) >= 0).sum(-1)
    rows = q_row.to(torch.int32), k_row.to(torch.int32)
    wanted = torch.zeros(B, H, dtype=torch.int64)
    for b in range(B):
        for h in range(H):
            for m in range(M):
                begin, count, _, _, shift = row[b, h, m].tolist()
                entries = range(begin, begin + count)
                blocks = [(int(index[e]) if indexed else e) + shift for e in entries]
                wanted[b, h] += int(nq.expand(B, H, M)[b, h, m]) * int(nk.expand(B, H, N)[b, h, blocks].sum())
    assert torch.equal(block_lists.listed_pairs.plain(row, index, *rows, 16, 32), wanted)
    found = lists.listed_pairs(*(t.to(DEVICE) for t in (row, index, *rows)), 16, 32)
    assert torch.equal(found.cpu(), wanted)


def sheet_of(size: int) -> tuple[TensorPacker, list[PackedSlice]]:
    """Tensors of each type, of pieces of one head and of several, shared and strided, longer than a tile if `size` is."""
    rng = torch.Generator().manual_seed(size)

    def some(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(-5, 100, shape, generator=rng, dtype=dtype).to(DEVICE)

    sheet = TensorPacker()
    narrow = sheet.reserve((2, 5, 2 * size), -1, torch.int32)
    wide = sheet.reserve((2, 5, size), 7, torch.int64)
    lists = sheet.reserve((2, 5, 40, 5), 0, torch.int64)
    kinds = sheet.reserve((1, 1, 33), 1, torch.int8)
    sheet.record_write(narrow, (0, 1, 3), some(2, 3, size), 0)
    sheet.record_write(narrow, (0, 1), some(1, 1, size), size, more=-4)
    sheet.record_write(narrow, (4,), some(2, 1, 2 * size)[..., ::2], 3)
    sheet.record_write(wide, (1, 2), some(2, 7, size)[:, 2:4, : size // 2], size // 4, more=1 << 40)
    sheet.record_write(wide, (4,), some(1, 1, size, dtype=torch.int64), 0)
    sheet.record_write(lists, (0, 2, 3), some(2, 3, 20, 5, dtype=torch.int64), 9, more=1000, shift=7)
    sheet.record_write(lists, (1,), some(1, 1, 40, 5, dtype=torch.int64), 0, more=3)
    sheet.record_write(kinds, (0,), some(1, 1, 21, dtype=torch.int8), 5)
    return sheet, [narrow, wide, lists, kinds]


@pytest.mark.parametrize("size", [5000, 100])
def test_pieces(size: int) -> None:
    sheet, rooms = sheet_of(size)
    fills = len(sheet._fills) // len(FIELDS)
    told = sheet._sources, [*sheet._fills, *sheet._puts], fills, sheet._ends
    for room in rooms:
        made = []
        for way in (assemble_slices.plain, launched):
            sheet._made = way(*told)
            made.append(sheet.packed_tensor(room))
        assert made[0].shape == room.shape and torch.equal(*made)


@settings(max_examples=4 if INTERPRETED else 40)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from([1, 2, 7]),
    st.integers(0, 20),
)
def test_work_fits_the_room_that_is_made_for_it(
    lengths: list[int], chunk: int, tiles: int, slack: int
) -> None:
    """Sizes come from the host alone: every piece has its program, and every piece of a split row its slot."""
    count = torch.tensor(lengths, device=DEVICE).view(1, 1, -1)
    longest = max(lengths) + slack
    given_size = SplitListPieces.split([count], 1, 1, len(lengths), 1, longest, 1, chunk)
    even = SplitListPieces.split([count, 0 * count], 1, 1, len(lengths), tiles, longest, chunk)
    assert even.max_programs == len(lengths) + WAVES * chunk // tiles
    assert int(even.split_sizes[0]) == max(32, -(-sum(lengths) * tiles // (WAVES * chunk)))
    for work in (given_size, even):
        most = int(work.split_sizes[0])
        pieces = [max(1, -(-n // most)) for n in lengths]
        assert work.pieces.tolist() == pieces
        found = work.item.tolist()
        mine = [tuple(one) for one in found if one[0] >= 0]
        assert sorted(mine) == [(row, piece) for row, count in enumerate(pieces) for piece in range(count)]
        assert [row for row, _ in found[len(mine) :]] == [-1] * (work.max_programs - len(mine))
        # The first pieces of split rows, the second ones, and so on, and then the rest: each from the last row to the first.
        split = [row for row in range(len(lengths)) if pieces[row] > 1]
        whole = [row for row in range(len(lengths)) if pieces[row] == 1]
        rounds = [(row, i) for i in range(max(pieces)) for row in split[::-1] if pieces[row] > i]
        assert mine == rounds + [(row, 0) for row in whole[::-1]]
        assert int(work.split_sizes[1]) == sum(pieces[row] for row in split)
        slots = [work.slot[row].item() + piece for row, piece in mine if pieces[row] > 1]
        assert sorted(slots) == list(range(len(slots))) and len(slots) <= work.slots


def test_a_row_has_no_more_pieces_than_there_are_programs_for() -> None:
    """One row of all there is would be cut into a piece for every place on the device."""
    count = torch.zeros(1, 1, 5, dtype=torch.int64, device=DEVICE)
    count[..., 3] = 1 << 16
    work = SplitListPieces.split([count], 1, 1, 5, 1, 1 << 17, 512)
    assert int(work.split_sizes[0]) == (1 << 17) // MOST_PIECES
    assert work.pieces.tolist() == [1, 1, 1, MOST_PIECES // 2, 1]


def test_work_adds_the_lists_of_spans_that_share_them() -> None:
    """A span without heads, one without sequences, and one of all: more rows than a program holds at once."""
    generator = torch.Generator().manual_seed(0)
    counts = [
        torch.randint(0, 30, size, generator=generator, dtype=torch.int64)
        for size in ((1, 1, 900), (1, 3, 900), (2, 3, 900))
    ]
    work = SplitListPieces.split([c.to(DEVICE) for c in counts], 2, 3, 900, 1, 90, 1, 40)
    length = sum(c.expand(2, 3, 900) for c in counts).flatten()
    want = (-(-length // 40)).clamp(min=1)
    assert torch.equal(work.pieces.cpu().long(), want)
    taken = work.item[work.item[:, 0] >= 0].cpu().long()
    assert len(taken) == want.sum() and torch.equal(taken[:, 0].bincount(), want)


@given(seed=st.integers(0, 2**16))
def test_a_pair_holds_what_both_hold(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, 9, (1, 2, 5), generator=rng) for _ in range(4)]
    count = draw[1]
    head = torch.minimum(draw[2], count)
    tail = torch.minimum(torch.maximum(draw[3], head), count)
    row = torch.stack([draw[0], count, head, tail, torch.zeros_like(count)], -1)
    two = merge_adjacent_query_blocks(row.to(DEVICE))
    for h in range(2):
        for m in range(3):
            mine = [row[0, h, i].tolist() for i in (2 * m, 2 * m + 1) if i < 5]
            held = [set(range(b, b + c)) for b, c, *_ in mine]
            sure = [set(range(b + n, b + f)) for b, _, n, f, _ in mine]
            begin, length, near, end, _ = two[0, h, m].tolist()
            assert set().union(*held) <= set(range(begin, begin + length))
            everyone = len(mine) == 2 and all(held)
            wanted = sure[0] & sure[1] if everyone else set()
            assert set(range(begin + near, begin + end)) == wanted


@pytest.mark.parametrize("size", [(1,), (2100,), (2, 3, 70), (1, 2, 4097)])
def test_blocks_that_need_a_test_are_counted(size: tuple[int, ...]) -> None:
    kind = torch.randint(0, 3, size, generator=torch.Generator().manual_seed(0)).to(torch.int8)
    want = torch.nn.functional.pad((kind != FULL).cumsum(-1, dtype=torch.int32), (1, 0))
    assert torch.equal(prefix_count_masked_blocks(kind.to(DEVICE)).cpu(), want)
    if len(size) == 3:
        shared = kind[:1].expand(5, -1, -1)
        assert torch.equal(prefix_count_masked_blocks(shared.to(DEVICE)).cpu(), want[:1].expand(5, -1, -1))


def test_layers_of_a_pass_share_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do all passes under one window; what was made for a plan goes with it."""
    made, of = list[Any](), SplitListPieces.split

    def noted(*given: Any) -> SplitListPieces:
        work = of(*given)
        made.append(ref(work))
        return work

    monkeypatch.setattr(SplitListPieces, "split", noted)
    plan = window_plan.__wrapped__(70, 140, 7, 56, 4, torch.device(DEVICE))
    for layer in range(2):
        query, key, value = (t.to(DEVICE) for t in draw(plan, 2, 16, layer))
        out, _ = attend_plan(plan, query, key, value, 0.25, partial(attend.block_attend, chunk=1))
        want = dense_attend(query, key, value, 0.25, 70, None, 7, 56)
        assert torch.allclose(out, want, atol=1e-3)
    assert len(made) == 1 and made[0]() is not None
    del plan
    assert made[0]() is None


def test_what_shares_a_part_of_a_plan_has_its_own() -> None:
    """Plans in turns with one tensor in common; what is of one that is gone is given back, what was written is made anew."""
    shared, *others = (torch.full((2,), n, device=DEVICE) for n in range(4))
    made = list[int]()

    def sums(other: Tensor) -> Any:
        return lists.get_cached_on_plan([shared, other], "sum", lambda: made.append(1) or shared + other)

    for _ in range(2):
        assert [int(sums(other)[0]) for other in others] == [1, 2, 3]
    assert len(made) == 3 == len(shared.derived)  # type: ignore[attr-defined]
    del others[1:]
    assert int(sums(others[0])[0]) == 1 and len(made) == 3 and len(shared.derived) == 1  # type: ignore[attr-defined]
    others[0] += 5
    assert int(sums(others[0])[0]) == 6


class Watched:
    """A kernel that notes, at every launch, which devices it is told to be on."""

    def __init__(
        self, kernel: Any, on: list[torch.device], seen: list[tuple[str, list[torch.device]]]
    ) -> None:
        self.kernel, self.on, self.seen = kernel, on, seen

    def __getitem__(self, grid: Any) -> Any:
        self.seen.append((self.kernel.__name__, list(self.on)))
        return self.kernel[grid]


def test_every_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be another, where the layers of a model lie on several: Triton launches there."""
    on: list[torch.device] = []
    seen: list[tuple[str, list[torch.device]]] = []
    real = torch.cuda.device_of

    @contextmanager
    def noted(tensor: torch.Tensor) -> Iterator[None]:
        on.append(tensor.device)
        with real(tensor):  # type: ignore[no-untyped-call]
            yield
        on.pop()

    monkeypatch.setattr(torch.cuda, "device_of", noted)
    homes = dict(merge_pairs_kernel=lists, work_items_kernel=working, merge_kernel=attend)
    for name, module in homes.items():
        monkeypatch.setattr(module, name, Watched(getattr(module, name), on, seen))
    place = torch.arange(96, dtype=torch.int32)[None, None]
    span = span_by_range(place, place, place, place, 0, 96, 16, 16)
    plan = AttentionPlan((Part(place, (span,)),), 16, 16, 1, 3, 96, 96).to(DEVICE)
    query, key, value = (t.to(DEVICE) for t in draw(plan, 1, 16, 0))
    here = replace(operators.INTERPRETED, shared=attend.PAIRS)
    monkeypatch.setattr(operators, "find_device_limits", lambda _: here)
    attend.block_attend(query, key, value, *flat(plan.parts[0], plan), 0.25, 96, chunk=2)
    assert [name for name, _ in seen] == ["merge_pairs_kernel", "work_items_kernel", "merge_kernel"]
    assert all(devices == [query.device] for _, devices in seen), seen
