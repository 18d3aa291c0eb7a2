"""What flash-attn 4 is called with, without it: masks, ranges and orders of plans, and how often anything is launched.

Its kernel is written out over all pairs (`flash_cases`); `test_flash_gpu` runs the real one, `test_flash_tables` holds what
is made of lists beforehand.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmaccel.backends import cost, flash, natural, select
from mmaccel.backends.flash import attend, limits
from mmaccel.backends.flash import kept as keep
from mmaccel.backends.natural import counted, first_rows, rows_in_order
from mmaccel.core.layout import TokenLayout
from mmaccel.core.lower import attend_plan
from mmaccel.core.plan import FAR, AttentionPlan, Part, pad_rows, span_by_range
from mmaccel.policies.sparse import AShape, BlockTopK, TriShape
from mmaccel.policies.sparse.intra import IntraPattern
from tests.policies.sparse.scenes import Scene
from tests.policies.sparse.test_no_reads import NoReads

from .flash_cases import written_out
from .oracle import budget, flat
from .plans import PATTERNS, SCENE, random_plan


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The kernel written out; what it was called with. Head sizes of small scenes are let through."""
    found: list[tuple[Any, ...]] = []

    def told(*args: Any) -> tuple[Tensor, Tensor]:
        found.append(args)
        return written_out(*args)

    monkeypatch.setattr(attend, "call", told)
    monkeypatch.setattr(attend, "SIZES", (16, SCENE.size))
    return found


def planned(name: str, block: int, start: int) -> tuple[AttentionPlan, tuple[Tensor, ...]]:
    scene = Scene(SCENE.sequences, start, SCENE.heads, SCENE.groups, SCENE.size, SCENE.seed)
    tensors = tuple(t.half() for t in scene.tensors(torch.float32))
    layout = scene.layout()
    plan = replace(PATTERNS[name], block=block).plan(*tensors[:2], layout.take(slice(start, None)), layout)
    assert plan is not None
    return plan, tensors


def check(plan: AttentionPlan, tensors: Sequence[Tensor], scale: float = 0.2, **named: Any) -> None:
    mask = plan.to_mask()
    out, lse = attend_plan(plan, *tensors, scale, lambda *args: attend.block_attend(*args, **named))
    exact, allowed = budget(*tensors, mask, scale)
    assert out.shape == exact.shape and out.dtype == tensors[0].dtype and lse.dtype == torch.float32
    assert float((out.double() - exact).abs().max()) <= allowed
    blind = ~mask.any(-1).expand(lse.shape)
    assert (out[blind] == 0).all() and torch.equal(lse == -torch.inf, blind)


@pytest.mark.parametrize("start", [0, 70])
@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_patterns(name: str, block: int, start: int, calls: list[tuple[Any, ...]]) -> None:
    check(*planned(name, block, start))
    assert calls


@pytest.mark.parametrize("name", ["a_shape", "grid", "grid_free", "k_boundary"])
@pytest.mark.parametrize("block", [16, 32])
def test_small_blocks_in_their_order_go_together(name: str, block: int, calls: list[tuple[Any, ...]]) -> None:
    check(*planned(name, block, 0))
    assert {(args[4].queries, args[4].keys) for args in calls} == {(128, 128)}


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**16),
    lead=st.sampled_from(["", "b", "h", "bh"]),
    blocks=st.sampled_from([(64, 64), (128, 64), (64, 128), (128, 256)]),
    scale=st.sampled_from([0.25, -0.3]),
)
def test_random_plans(seed: int, lead: str, blocks: tuple[int, int], scale: float) -> None:
    """Shuffled rows, lists of their own, several spans; a row at a time through rooms for one head."""
    plan = random_plan(seed, lead=lead, n_query=150, n_key=300, blocks=blocks)
    rng = torch.Generator().manual_seed(seed)
    shapes = ((4, 150), (2, 300), (2, 300))
    tensors = tuple(torch.randn(2, h, n, 16, generator=rng).half() for h, n in shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "call", written_out)
        patch.setattr(attend, "SIZES", (16,))
        check(plan, tensors, scale)
        patch.setattr(attend, "ROOM", 1)
        check(plan, tensors, scale)


def test_the_part_has_an_order_of_its_own(calls: list[tuple[Any, ...]]) -> None:
    """Without `rows`, what is given back is in the part's order, and what its fake says."""
    plan = random_plan(4, n_query=150, n_key=300, blocks=(64, 64))
    tensors = tuple(torch.randn(2, h, n, 16).half() for h, n in ((4, 150), (2, 300), (2, 300)))
    arguments = (*tensors, *flat(plan.parts[0], plan), 0.2)
    out, lse = attend.block_attend(*arguments)
    wide, sums = attend.block_attend(*arguments, 150)
    row = plan.parts[0].q_row.long()
    there = row >= 0
    picked = wide.gather(2, row.clamp(min=0)[..., None].expand(out.shape))
    assert torch.equal(out, picked.masked_fill(~there[..., None], 0.0))
    assert torch.equal(lse, sums.gather(2, row.clamp(min=0)).masked_fill(~there, -torch.inf))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        for rows, real in ((0, (out, lse)), (150, (wide, sums))):
            for fake, one in zip(flash.op(*arguments, rows), real, strict=True):
                assert (one.shape, one.dtype, one.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_rows_in_their_order_stay_where_they_are(calls: list[tuple[Any, ...]]) -> None:
    """Queries are read where they lie, and keys too where there is one span; a permuted order is gathered."""
    scene = Scene(SCENE.sequences[:1], 0, 4, 2, 16)
    tensors = tuple(t.half() for t in scene.tensors(torch.float32))
    layout = scene.layout()
    for pattern, queries, keys in (
        (AShape(sink=0, window=40, block=64), True, True),
        (AShape(sink=9, window=40, block=64), True, True),
        (BlockTopK(block=64, stride=16, sink=9), True, True),
        (PATTERNS["grid"], False, False),
    ):
        plan = pattern.plan(*tensors[:2], layout, layout)
        assert plan is not None
        calls.clear()
        check(plan, tensors)
        assert [args[0].data_ptr() == tensors[0].data_ptr() for args in calls] == [queries] * len(calls)
        assert [args[1].data_ptr() == tensors[1].data_ptr() for args in calls] == [keys] * len(calls)


@pytest.mark.parametrize("start", [0, 70])
@pytest.mark.parametrize("block", [16, 64, 128, 256])
@pytest.mark.parametrize(
    "pattern",
    [
        AShape(sink=0, window=40),
        AShape(sink=9, window=40),
        AShape(sink=80, window=1),
        TriShape(sink=70, window=9, bottom=20),
        PATTERNS["grid"],
    ],
    ids=lambda p: f"{type(p).__name__}-{getattr(p, 'sink', '')}",
)
def test_keys_in_their_order_are_told_as_runs(
    pattern: IntraPattern, block: int, start: int, calls: list[tuple[Any, ...]]
) -> None:
    """A query then reads the keys that it sees as runs, and nothing of a key."""
    scene = Scene(SCENE.sequences[:1], start, 4, 2, 16)
    tensors = tuple(t.half() for t in scene.tensors(torch.float32))
    layout = scene.layout()
    plan = replace(pattern, block=block).plan(*tensors[:2], layout.take(slice(start, None)), layout)
    assert plan is not None
    check(plan, tensors)
    # Of a tri-shape two parts are joined into one.
    by_key = isinstance(pattern, AShape)
    assert calls and {args[6] for args in calls} == {by_key}
    for args in calls if by_key else []:
        assert args[1].data_ptr() == tensors[1].data_ptr() and not args[5]
        assert len(args[9]) == 3 * len(plan.parts[0].spans)
    calls.clear()
    # Of a layout of its own it is not known that the queries are the last keys.
    apart = replace(layout, position=layout.position.clone()).take(slice(start, None))
    plan = replace(pattern, block=block).plan(*tensors[:2], apart, layout)
    assert plan is not None
    check(plan, tensors)
    assert calls and {args[6] for args in calls} == {by_key}
    for args in calls if by_key else []:
        assert args[1].data_ptr() == tensors[1].data_ptr() and len(args[5]) == len(plan.parts[0].spans)
        assert args[9] is None


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**16),
    blocks=st.sampled_from([(16, 16), (64, 64), (128, 32), (32, 256)]),
    counts=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    cuts=st.lists(st.integers(-40, 330), min_size=2, max_size=5, unique=True),
    shuffled=st.booleans(),
)
def test_runs_of_keys(
    seed: int, blocks: tuple[int, int], counts: tuple[int, int], cuts: list[int], shuffled: bool
) -> None:
    """Ranges side by side over the first keys, as many as each span has; queries of any places and rows."""
    rng = torch.Generator().manual_seed(seed)
    n, n_key = counts
    row = torch.randperm(n, generator=rng, dtype=torch.int32) if shuffled else torch.arange(n).int()
    q_row = pad_rows(row[None, None], blocks[0])
    q_place = torch.randint(-1, n_key, q_row.shape, generator=rng, dtype=torch.int32)
    width = n_key + -n_key % blocks[1]
    keys = natural.counted(1, n_key, width, torch.device("cpu"))
    k_place = natural.ranks(1, width, torch.device("cpu"))[:, None]
    spans = []
    edges = sorted(cuts)
    for i, (lo, hi) in enumerate(zip(edges, [*edges[1:-1], FAR], strict=False)):
        some = int(torch.randint(1, n_key + 1, (), generator=rng)) if i else n_key
        room = some + -some % blocks[1]
        mine = natural.first_of(keys[:, None], some, room)
        spans.append(span_by_range(q_row, mine, q_place, k_place[..., :room], lo, hi, *blocks))
    plan = AttentionPlan((Part(q_row, tuple(spans)),), *blocks, 1, 4, n, n_key)
    tensors = tuple(
        torch.randn(1, h, m, 16, generator=rng).half() for h, m in ((4, n), (2, n_key), (2, n_key))
    )
    told: list[tuple[Any, ...]] = []

    def kernel(*args: Any) -> tuple[Tensor, Tensor]:
        told.append(args)
        return written_out(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "call", kernel)
        patch.setattr(attend, "SIZES", (16,))
        check(plan, tensors)
        patch.setattr(limits, "are_ranks", lambda place: False)
        check(plan, tensors)
    assert [args[6] for args in told] == [True, False]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    blocks=st.sampled_from([(16, 16), (64, 64), (128, 32), (32, 256)]),
    counts=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    first=st.integers(-150, 300),
    cuts=st.lists(st.integers(-40, 330), min_size=2, max_size=5, unique=True),
    batch=st.sampled_from([1, 2]),
)
def test_bands_of_keys(
    seed: int,
    blocks: tuple[int, int],
    counts: tuple[int, int],
    first: int,
    cuts: list[int],
    batch: int,
) -> None:
    """Queries whose places follow each other need no tensor, whatever the first: also before all keys, and past them. What
    lists are not known to hold all of is told as runs, and what is listed is as ever what counts."""
    rng = torch.Generator().manual_seed(seed)
    (n, n_key), cpu = counts, torch.device("cpu")
    room, width = n + -n % blocks[0], n_key + -n_key % blocks[1]
    q_row = natural.counted(batch, n, room, cpu)[:, None]
    q_place = natural.places_from(first, batch, n, room, cpu)[:, None]
    keys, k_place = (
        natural.counted(batch, n_key, width, cpu)[:, None],
        natural.ranks(batch, width, cpu)[:, None],
    )
    spans, edges = [], sorted(cuts)
    for i, (lo, hi) in enumerate(zip(edges, [*edges[1:-1], FAR], strict=False)):
        some = int(torch.randint(1, n_key + 1, (), generator=rng)) if i else n_key
        wide = some + -some % blocks[1]
        mine = natural.first_of(keys, some, wide)
        spans.append(span_by_range(q_row, mine, q_place, k_place[..., :wide], lo, hi, *blocks))
    plan = AttentionPlan((Part(q_row, tuple(spans)),), *blocks, batch, 4, n, n_key)
    tensors = tuple(
        torch.randn(batch, h, m, 16, generator=rng).half() for h, m in ((4, n), (2, n_key), (2, n_key))
    )
    few = first_rows(q_row, max(n - 20, 1))
    # Lists of the same span that begin a block late, where their kinds are not told.
    row = spans[0].lists.row.clone()
    row[..., 0] += row[..., 1].clamp(max=1)
    row[..., 1:4] = (row[..., 1:4] - 1).clamp(min=0)
    late = replace(spans[0], lists=replace(spans[0].lists, row=row))
    told: list[tuple[Any, ...]] = []

    def kernel(*args: Any) -> tuple[Tensor, Tensor]:
        told.append(args)
        return written_out(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "call", kernel)
        patch.setattr(attend, "SIZES", (16,))
        check(plan, tensors)
        check(replace(plan, parts=(Part(few, tuple(spans)),)), tensors)
        check(replace(plan, parts=(Part(q_row, (late, *spans[1:])),)), tensors)
    assert [args[9] is None for args in told] == [False, False, True]


@settings(max_examples=40)
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
    rng = torch.Generator().manual_seed(seed)
    tensors = tuple(
        torch.randn(1, h, m, 16, generator=rng).half() for h, m in ((2, n), (1, n_key), (1, n_key))
    )
    layout = TokenLayout.text(1, n_key)
    pattern = AShape(sink=sink, window=window, block=block)
    plan = pattern.plan(*tensors[:2], layout.take(slice(start, None)), layout)
    assert plan is not None
    told: list[tuple[Any, ...]] = []

    def kernel(*args: Any) -> tuple[Tensor, Tensor]:
        told.append(args)
        return written_out(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "call", kernel)
        patch.setattr(attend, "SIZES", (16,))
        check(plan, tensors)
        patch.setattr(attend, "key_bounds", lambda *args: None)
        check(plan, tensors)
    alone = window >= 256 and min(sink, n_key) % 128 == 0
    assert len(told[0][9]) == (3 if alone else 6) and told[1][9] is None


def test_places_that_follow_each_other_are_known() -> None:
    cpu = torch.device("cpu")
    place = natural.places_from(-2, 2, 5, 8, cpu)
    assert place.tolist() == [[-2, -1, 0, 1, 2, -1, -1, -1]] * 2
    assert natural.first_place(place) == natural.first_place(place[:, None]) == (-2, 5)
    for other in (place[:, :5], place[:1], place[1:], place.clone(), place.T, place.view(torch.float32)):
        assert natural.first_place(other) is None
    known = len(natural._places)
    view = place[:, None]
    del place, other
    assert natural.first_place(view) == (-2, 5)
    view[0, 0, 1] = 7
    assert natural.first_place(view) is None
    del view
    assert len(natural._places) == known - 1
    assert natural.first_place(natural.places_from(0, 1, 3, 8, torch.device("meta"))) is None


def test_what_lists_reach_is_known_of_what_they_were_made_for() -> None:
    cpu = torch.device("cpu")
    q_row, keys = (natural.counted(1, n, 64, cpu)[:, None] for n in (40, 60))
    place, k_place = natural.places_from(20, 1, 40, 64, cpu)[:, None], natural.ranks(1, 64, cpu)[:, None]
    of = q_row, keys, place, k_place
    row = span_by_range(*of, 0, 9, 16, 16).lists.row
    pairs = natural.band(*of, 0, 9, (16, 16))
    assert pairs == natural.Band(40, 60, 20, 0, 9, (16, 16)) and natural.reaches(row, pairs)
    assert natural.reaches(row, pairs._replace(rows=30, keys=50))
    for other in (
        dict(rows=41),
        dict(keys=61),
        dict(first=21),
        dict(lo=-1),
        dict(hi=10),
        dict(blocks=(16, 32)),
    ):
        assert not natural.reaches(row, pairs._replace(**other))
    assert not natural.reaches(row.clone(), pairs) and not natural.reaches(row[:, :, :2], pairs)
    for i in range(4):
        assert natural.band(*(t.clone() if i == j else t for j, t in enumerate(of)), 0, 9, (16, 16)) is None
    more = natural.counted(1, 41, 64, cpu)[:, None]
    assert natural.band(more, *of[1:], 0, 9, (16, 16)) is None
    known = len(natural._reach)
    row[..., 1] = 0
    assert not natural.reaches(row, pairs)
    del row
    assert len(natural._reach) == known - 1


def test_the_first_rows_of_an_order_stay_where_they_are(calls: list[tuple[Any, ...]]) -> None:
    """As where the last rows of a prompt are dense: they are zero, and nothing is gathered."""
    scene = Scene(SCENE.sequences[:1], 0, 4, 2, 16)
    tensors = tuple(t.half() for t in scene.tensors(torch.float32))
    layout = scene.layout()
    for pattern, own in ((AShape(sink=9, window=40, block=64), True), (PATTERNS["grid"], False)):
        plan = pattern.plan(*tensors[:2], layout, layout)
        assert plan is not None
        parts = tuple(replace(p, q_row=first_rows(p.q_row, 90)) for p in plan.parts)
        calls.clear()
        check(replace(plan, parts=parts), tensors)
        assert [args[0].data_ptr() == tensors[0].data_ptr() for args in calls] == [own] * len(calls)


def test_an_order_is_known_while_it_lives() -> None:
    row = counted(2, 5, 8, torch.device("cpu"))
    assert row.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]] * 2
    assert rows_in_order(row) == rows_in_order(row[:, None]) == 5
    few = first_rows(row[:, None], 3)
    assert few.tolist() == [[[0, 1, 2, -1, -1, -1, -1, -1]]] * 2
    assert rows_in_order(few) == 3 and rows_in_order(first_rows(row, 7)) == 5
    for other in (row[:, :5], row[:1], row[1:], row.clone(), row.T, first_rows(row.clone(), 3)):
        assert rows_in_order(other) is None
    meta = [counted(1, n, 8, torch.device("meta")) for n in (3, 5)]
    assert [rows_in_order(one) for one in meta] == [None, None]
    known = len(natural._made)
    del row
    assert len(natural._made) == known - 1 and rows_in_order(few) == 3


def test_ranks_are_known_while_their_memory_is_there() -> None:
    cpu = torch.device("cpu")
    with torch.inference_mode():
        place = natural.ranks(2, 7, cpu)[:, None]
        assert place.tolist() == [[[0, 1, 2, 3, 4, 5, 6]]] * 2
        assert natural.are_ranks(place) and natural.are_ranks(place[..., :5])
        for other in (place[..., 1:], place[..., ::2], place.clone(), place.mT, place.view(torch.float32)):
            assert not natural.are_ranks(other)
        known = len(natural._ranks)
        del place, other
        assert len(natural._ranks) == known - 1
    assert not natural.are_ranks(natural.ranks(1, 5, torch.device("meta")))
    row = counted(1, 9, 12, cpu)
    few = natural.first_of(row[:, None], 3, 4)
    assert few.tolist() == [[[0, 1, 2, -1]]] and rows_in_order(few) == 3
    every = natural.first_of(row[:, None], 10, 12)
    assert torch.equal(every[:, 0], row) and rows_in_order(every) == 9
    assert rows_in_order(natural.first_of(row.flip(-1), 3, 4)) is None


@pytest.mark.parametrize("inference", [False, True])
def test_what_was_written_to_is_no_longer_known(inference: bool) -> None:
    cpu = torch.device("cpu")
    with torch.inference_mode(inference):
        row, place = counted(1, 5, 8, cpu), natural.ranks(2, 7, cpu)
        few, some = first_rows(row, 3), natural.first_of(row, 2, 4)
        assert [rows_in_order(t) for t in (row, few, some)] == [5, 3, 2] and natural.are_ranks(place)
        row[:, None][..., 0] = 4
        assert rows_in_order(row) is None and rows_in_order(row[:, None]) is None
        assert natural.rows_together([row]) is None and rows_in_order(first_rows(row, 3)) is None
        assert rows_in_order(few) == 3 and rows_in_order(some) == 2
        few.copy_(row)
        some.add_(1)
        assert rows_in_order(few) is None and rows_in_order(some) is None
        place[0, :1].fill_(3)
        assert not natural.are_ranks(place) and not natural.are_ranks(place[:, None])


def test_rows_that_were_written_to_are_no_longer_all_of_them() -> None:
    rows = [torch.tensor([[[0, 2, -1]]]), torch.tensor([[[1, 3]]])]
    natural.tell_together(rows, 4)
    assert natural.rows_together(rows) == 4
    rows[1][..., 0] = 3
    assert natural.rows_together(rows) is None
    natural.tell_together(rows[:1], 2)
    assert natural.rows_together(rows[:1]) == 2


class Ops(TorchDispatchMode):
    """Counts what is launched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inference", [False, True])
def test_what_follows_from_a_plan_is_made_once(inference: bool, calls: list[tuple[Any, ...]]) -> None:
    """For all layers whose plans have the same tensors, as long as these are there, and nobody writes to them."""
    scene = Scene(SCENE.sequences[:1], 0, 4, 2, 16)
    pattern = AShape(sink=9, window=40, block=64)
    with torch.inference_mode(inference):
        tensors = tuple(t.half() for t in scene.tensors(torch.float32))
        layout = scene.layout()
        # Of a layout of its own it is not known that the queries are the last keys: more is made.
        queries = replace(layout, position=layout.position.clone())
        gc.collect()
        before = len(keep._kept)
        counts = []
        for _ in range(3):
            plan = pattern.plan(*tensors[:2], queries, layout)
            assert plan is not None
            with Ops() as ops:
                attend_plan(plan, *tensors, 0.2, attend.block_attend)
            counts.append(ops.count)
        assert counts[1] == counts[2] < counts[0] / 2, counts
        assert len({id(t) for args in calls for t in args[3]}) == 4 and len(keep._kept) == before + 2
        if not inference:
            plan.parts[0].spans[0].q_place.sub_(1)
            attend_plan(plan, *tensors, 0.2, attend.block_attend)
            assert not torch.equal(calls[-1][5][0], calls[0][5][0])
    del plan, queries, layout
    gc.collect()
    assert len(keep._kept) <= before


def test_places_that_were_written_to_are_told_as_runs(calls: list[tuple[Any, ...]]) -> None:
    scene = Scene(SCENE.sequences[:1], 0, 4, 2, 16)
    tensors, layout = tuple(t.half() for t in scene.tensors(torch.float32)), scene.layout()
    plan = AShape(sink=9, window=40, block=64).plan(*tensors[:2], layout, layout)
    assert plan is not None
    check(plan, tensors)
    assert calls[-1][9] is not None and not calls[-1][5]
    plan.parts[0].spans[0].q_place.sub_(1)
    attend_plan(plan, *tensors, 0.2, attend.block_attend)
    assert calls[-1][9] is None and len(calls[-1][5]) == 2


@pytest.mark.parametrize("name", list(PATTERNS))
def test_nothing_is_read_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on: the kernel itself is left out."""
    plan, tensors = planned(name, 64, 0)
    monkeypatch.setattr(attend, "SIZES", (SCENE.size,))

    def nothing(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query), query.new_empty(*query.transpose(1, 2).shape[:3], dtype=torch.float32)

    monkeypatch.setattr(attend, "call", nothing)
    with NoReads():
        attend_plan(plan, *tensors, 0.2, attend.block_attend)


def test_auto_passes_over_what_is_refused(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal while costs are measured leaves the backend untried; blocks are those of the pattern."""
    monkeypatch.setattr(attend, "SIZES", (64,))
    backends = {"reference": select.get("reference", "cpu"), "flash": attend.block_attend}
    how = dict(lengths=(256, 512), bench=lambda run, device: (run(), 1.0)[1])
    shape = select.Shape(2, 1, 64, torch.float16)
    costs = cost.measure(torch.device("cpu"), shape, backends, block=64, **how)
    assert set(costs.sparse) == {"reference", "flash"} and calls
    for other, block in ((shape, 32), (replace(shape, dtype=torch.float32), 64)):
        costs = cost.measure(torch.device("cpu"), other, backends, block=block, **how)
        assert set(costs.sparse) == {"reference"} and "RecipeError" in costs.untried["flash"]
