"""What flash-attn 4 is called with, without it: masks, ranges and orders of plans, and how often anything is launched.

Its kernel is written out over all pairs (`flash_cases`); `test_flash_gpu` runs the real one, `test_flash_tables` holds what
is made of lists beforehand.
flash-attn 2 and 3: when dense attention goes to them, with what, and what comes back; a stand-in computes it over all pairs.
The real ones run on a CUDA device where they are installed.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmaccel.backends import flash, measure, select
from mmaccel.backends.flash import attend
from mmaccel.backends.ops import dense_attend as dense
from mmaccel.backends.ops import operator as operators
from mmaccel.core.errors import RecipeError
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.policies.sparse import AShape, BlockTopK, TriShape
from mmaccel.policies.sparse.orders import IntraPattern
from tests.policies.sparse.scenes import Scene
from tests.policies.sparse.test_plans import NoReads
from tests.spies import Ops, product

from .flash_cases import check, recorded, written_out
from .oracle import PATTERNS, SCENE, budget, draw, drawn, flat, masked, random_plan, with_extras

ALONE = Scene(SCENE.sequences[:1], 0, 4, 2, 16)
"""One sequence, of its own length."""


@pytest.fixture
def calls() -> Iterator[list[tuple[Any, ...]]]:
    """The kernel written out; what it was called with. Head sizes of small scenes are let through."""
    with recorded(16, SCENE.size) as (found, _):
        yield found


def planned(name: str, block: int, start: int) -> tuple[AttentionPlan, tuple[Tensor, ...]]:
    return replace(SCENE, start=start).planned(replace(PATTERNS[name], block=block), torch.float16)


@pytest.mark.parametrize(("name", "block", "start"), product(PATTERNS, [64, 128, 256], [0, 70], together=2))
def test_patterns(name: str, block: int, start: int, calls: list[tuple[Any, ...]]) -> None:
    check(*planned(name, block, start))
    assert calls


@pytest.mark.parametrize("name", ["a_shape", "grid", "grid_free", "k_boundary"])
@pytest.mark.parametrize("block", [16, 32])
def test_small_blocks_in_their_order_go_together(name: str, block: int, calls: list[tuple[Any, ...]]) -> None:
    check(*planned(name, block, 0))
    assert {(args[4].queries, args[4].keys) for args in calls} == {(128, 128)}


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**16),
    lead=st.sampled_from(["", "b", "h", "bh"]),
    blocks=st.sampled_from([(64, 64), (128, 64), (64, 128), (128, 256)]),
    scale=st.sampled_from([0.25, -0.3]),
)
def test_random_plans(seed: int, lead: str, blocks: tuple[int, int], scale: float) -> None:
    """Shuffled rows, lists of their own, several spans; a row at a time through rooms for one head."""
    plan = random_plan(seed, lead=lead, n_query=150, n_key=300, blocks=blocks)
    tensors = [t.half() for t in draw(plan, 2, 16, seed)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "call_flash_attn", written_out)
        patch.setattr(attend, "SIZES", (16,))
        check(plan, tensors, scale)
        patch.setattr(attend, "ROOM", 1)
        check(plan, tensors, scale)


def test_the_part_has_an_order_of_its_own(calls: list[tuple[Any, ...]]) -> None:
    """Without `rows`, what is given back is in the part's order, and what its fake says."""
    plan = random_plan(4, n_query=150, n_key=300, blocks=(64, 64))
    tensors = [t.half() for t in draw(plan, 2, 16, 4)]
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
    """Queries are read where they lie, and keys too where there is one span; a permuted order is gathered. So it is for the
    first rows of an order, as where the last rows of a prompt are dense: they are zero, and nothing is gathered."""
    for pattern, queries, keys in (
        (AShape(sink=0, window=40, block=64), True, True),
        (AShape(sink=9, window=40, block=64), True, True),
        (BlockTopK(block=64, stride=16, sink=9), True, True),
        (PATTERNS["grid"], False, False),
    ):
        plan, tensors = ALONE.planned(pattern, torch.float16)
        calls.clear()
        check(plan, tensors)
        assert [args[0].data_ptr() == tensors[0].data_ptr() for args in calls] == [queries] * len(calls)
        assert [args[1].data_ptr() == tensors[1].data_ptr() for args in calls] == [keys] * len(calls)
        calls.clear()
        check(plan.limit_to_first_rows(90), tensors)
        assert [args[0].data_ptr() == tensors[0].data_ptr() for args in calls] == [queries] * len(calls)


IN_ORDER = [
    AShape(sink=0, window=40),
    AShape(sink=9, window=40),
    AShape(sink=80, window=1),
    TriShape(sink=70, window=9, bottom=20),
    PATTERNS["grid"],
]


@pytest.mark.parametrize(
    ("pattern", "block", "start"), product(IN_ORDER, [16, 64, 128, 256], [0, 70]), ids=str
)
def test_keys_in_their_order_are_told_as_runs(
    pattern: IntraPattern, block: int, start: int, calls: list[tuple[Any, ...]]
) -> None:
    """A query then reads the keys that it sees as runs, and nothing of a key."""
    scene, pattern = replace(ALONE, start=start), replace(pattern, block=block)
    plan, tensors = scene.planned(pattern, torch.float16)
    check(plan, tensors)
    # Of a tri-shape two parts are joined into one.
    by_key = type(pattern) is AShape
    assert calls and {args[6] for args in calls} == {by_key}
    for args in calls if by_key else []:
        assert args[1].data_ptr() == tensors[1].data_ptr() and not args[5]
        assert len(args[8]) == 3 * len(plan.parts[0].spans)
    calls.clear()
    # Of a layout of its own it is not known that the queries are the last keys.
    layout = scene.layout()
    apart = replace(layout, position=layout.position.clone()).select_tokens(slice(start, None))
    plan = pattern.plan(*tensors[:2], apart, layout)
    assert plan is not None
    check(plan, tensors)
    assert calls and {args[6] for args in calls} == {by_key}
    for args in calls if by_key else []:
        assert args[1].data_ptr() == tensors[1].data_ptr() and len(args[5]) == len(plan.parts[0].spans)
        assert args[8] is None


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("rows", [None, 90])
def test_what_follows_from_a_plan_is_made_once(
    rows: int | None, inference: bool, calls: list[tuple[Any, ...]]
) -> None:
    """For all layers whose plans follow from the layouts alone, also with their last rows cut off. A copy starts anew."""
    pattern = AShape(sink=9, window=40, block=64)
    with torch.inference_mode(inference):
        tensors, layout = ALONE.tensors(torch.float16), ALONE.layout()
        # Of a layout of its own it is not known that the queries are the last keys: more is made.
        queries = replace(layout, position=layout.position.clone())
        counts = []
        for i in range(4):
            plan = pattern.plan(*tensors[:2], queries, layout)
            assert plan is not None
            plan = plan.to("cpu") if i == 3 else plan
            with Ops() as ops:
                attend_plan(plan if rows is None else plan.limit_to_first_rows(rows), *tensors, 0.2, flash.op)
            counts.append(ops.count)
        assert counts[1] == counts[2] < counts[0] / 2, counts
        assert counts[3] == counts[0]
        assert len({id(t) for args in calls[:3] for t in args[3]}) == 4


@pytest.mark.parametrize("name", list(PATTERNS))
def test_nothing_is_read_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on: the kernel itself is left out."""
    plan, tensors = planned(name, 64, 0)
    monkeypatch.setattr(attend, "SIZES", (SCENE.size,))

    def nothing(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query), query.new_empty(*query.transpose(1, 2).shape[:3], dtype=torch.float32)

    monkeypatch.setattr(attend, "call_flash_attn", nothing)
    with NoReads():
        attend_plan(plan, *tensors, 0.2, attend.block_attend)


@pytest.mark.parametrize("window", [False, True])
def test_another_backend_serves_what_is_declined(calls: list[tuple[Any, ...]], window: bool) -> None:
    """A span with a bias or keys of its own, and a window: the plan's operator is passed over, its function refuses."""
    plan = random_plan(3, blocks=(64, 64))
    plan = plan.limit_to_window(4, 20) if window else with_extras(plan, 2, 16, 3)
    tensors = [t.half() for t in draw(plan, 2, 16, 3)]
    out, lse = attend_plan(plan, *tensors, 0.2, flash.op)
    want = attend_plan(plan, *tensors, 0.2, select.get_op("reference", "cpu"))
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1]) and not calls
    with pytest.raises(
        RecipeError,
        match="'flash' serves no bias, no keys of a span's own and no window of a part; choose 'triton'",
    ):
        attend_plan(plan, *tensors, 0.2, attend.block_attend)


def test_auto_passes_over_what_is_refused(calls: list[tuple[Any, ...]], monkeypatch) -> None:
    """A refusal while costs are measured leaves the backend untried; blocks are those of the pattern."""
    monkeypatch.setattr(attend, "SIZES", (64,))
    backends = {"reference": select.get_op("reference", "cpu"), "flash": attend.block_attend}
    how = dict(lengths=(256, 512), bench=lambda run, device: (run(), 1.0)[1])
    shape = measure.AttentionShape(2, 1, 64, torch.float16)
    costs = measure.measure_costs(torch.device("cpu"), shape, backends, block=64, **how)
    assert set(costs.sparse) == {"reference", "flash"} and calls
    for other, block in ((shape, 32), (replace(shape, dtype=torch.float32), 64)):
        costs = measure.measure_costs(torch.device("cpu"), other, backends, block=block, **how)
        assert set(costs.sparse) == {"reference"} and "RecipeError" in costs.untried["flash"]


Calls = list[dict[str, Any]]
SIDES = {None: (-1, -1), 30: (29, 0), 1: (0, 0)}


def causal(n: int, start: int, window: int | None, device: str = "cpu") -> Tensor:
    """[1, 1, n, start + n] bool."""
    gap = torch.arange(start, start + n, device=device)[:, None] - torch.arange(start + n, device=device)
    return ((gap >= 0) & (gap < (window or gap.max() + 1)))[None, None]


def older_draw(
    n: int, start: int, size: int = 16, dtype: torch.dtype = torch.bfloat16, batch: int = 2
) -> Any:
    return [t.to(dtype) for t in drawn(batch, (4, 2), n, start + n, size, n)]


@pytest.fixture
def older_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """A stand-in for flash-attn 2 on this device, of a GPU of compute capability 8; what it was called with."""
    found: Calls = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, **how: Any) -> Tensor:
        assert all(t.stride(-1) == 1 for t in (q, k, v)) and how["causal"]
        found.append({"rows": q.shape[1], "keys": k.shape[1], **how})
        window = how["window_size"][0] + 1 or None
        assert how["window_size"] == SIDES[window]
        mask = causal(q.shape[1], k.shape[1] - q.shape[1], window)
        turned = (t.transpose(1, 2).float() for t in (q, k, v))
        return masked(*turned, mask, softmax_scale).to(q.dtype).transpose(1, 2)

    monkeypatch.setattr(
        dense, "find_older_flash_attn", lambda device: dense.FlashAttnRelease(2, flash_attn_func, square=True)
    )
    monkeypatch.setattr(dense, "OLDER_FROM", 8)
    yield found


@pytest.mark.parametrize(
    ("start", "window", "padding"), [*itertools.product([0, 50], [None, 1, 30], [0]), (0, None, 9)]
)
def test_whole_tail_window_and_padding(
    start: int, window: int | None, padding: int, older_calls: Calls
) -> None:
    """Groups of heads, and queries at the end of the keys; each run of valid columns is a call of its own."""
    query, key, value = older_draw(40, start)
    valid = torch.ones(2, start + 40, dtype=torch.bool)
    valid[1, :padding] = False
    given = valid if padding else None
    out = dense.dense_attend(query, key, value, 0.3, start=start, window=window, valid=given)
    calls = [(40, start + 40), *[(40 - padding, 40 - padding)] * (padding > 0)]
    assert sorted((call["rows"], call["keys"]) for call in older_calls) == sorted(calls)
    mask = causal(40, start, window) & valid[:, None, None] & valid[:, None, start:, None]
    exact, allowed = budget(query, key, value, mask, 0.3)
    assert float((out.double() - exact).abs().max()) <= allowed and not out[1, :, :padding].any()


@pytest.mark.parametrize(
    "how",
    [
        {"window": 30, "sinks": 4},
        {"rows": 7},
        {"dtype": torch.float32},
        {"size": 12},
        {"size": 264},
        {"column": torch.arange(40)},
        {"valid": torch.arange(40)[None].expand(2, 40) % 7 != 3},
        {"over": 5},
    ],
    ids=lambda how: " ".join(how),
)
def test_what_it_does_not_compute_goes_the_way_it_went(how: dict[str, Any], older_calls: Calls) -> None:
    n, over = how.pop("rows", 40), how.pop("over", 0)
    query, key, value = older_draw(n, 0, how.pop("size", 16), how.pop("dtype", torch.bfloat16))
    dense.dense_attend(query, key[:, :, : n - over], value[:, :, : n - over], 0.3, **how)
    assert not older_calls


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(name)
    module.flash_attn_func = lambda *_, **__: name  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    "name, there, four, release, square",
    [
        ("sm_80", ("flash_attn", "flash_attn_interface"), True, 2, True),
        ("sm_90", ("flash_attn", "flash_attn_interface"), False, 3, True),
        ("sm_90", ("flash_attn",), False, 2, False),
        ("sm_90", ("flash_attn", "flash_attn_interface"), True, None, None),
        ("sm_100", ("flash_attn",), True, None, None),
        ("sm_120", ("flash_attn",), True, 2, False),
        ("sm_75", ("flash_attn",), False, None, None),
        ("gfx942", ("flash_attn",), False, None, None),
        ("sm_80", (), False, None, None),
    ],
)
def test_which_serves_a_device(
    name: str,
    there: tuple[str, ...],
    four: bool,
    release: int | None,
    square: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an architecture by name, with flash-attn 4 installed or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(operators, "architecture_of", lambda device: operators.find_architecture(name))
    monkeypatch.setattr(flash, "is_installed", lambda: four)
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in there:
        stand_in(module, monkeypatch)
    dense.import_older_flash_attn.cache_clear()
    try:
        found = dense.find_older_flash_attn(torch.device("cuda"))
        assert (found and found.release) == release and (found and found.square) == square
        assert dense.find_older_flash_attn(torch.device("cpu")) is None
    finally:
        dense.import_older_flash_attn.cache_clear()


@pytest.mark.parametrize("square", [True, False])
def test_a_square_goes_to_what_is_faster(square: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dense, "find_older_flash_attn", lambda device: dense.FlashAttnRelease(2, print, square)
    )
    query, key, value = older_draw(40, 0)
    assert bool(dense.find_flash_attn(query, key, value, None)) == square
    assert dense.find_flash_attn(query, key, value, 30)
    assert dense.find_flash_attn(query[:, :, 9:], key, value, None)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 30, 300])
@pytest.mark.parametrize("start", [0, 300])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("release", [2, 3])
def test_the_real_one(release: int, size: int, start: int, window: int | None, monkeypatch) -> None:
    call = dense.import_older_flash_attn(release) if torch.cuda.is_available() else None
    if call is None or operators.why_kernels_unusable(f"flash_{release}", torch.device("cuda")) is not None:
        pytest.skip(f"flash-attn {release} is not installed, or does not run on this device")
    monkeypatch.setattr(
        dense, "find_older_flash_attn", lambda device: dense.FlashAttnRelease(release, call, square=True)
    )
    monkeypatch.setattr(dense, "FLASH_FROM", sys.maxsize)
    for name in ("_sdpa", "_sliding"):
        monkeypatch.setattr(dense, name, None)
    query, key, value = (t.cuda() for t in older_draw(700, start, size))
    out = dense.dense_attend(query, key, value, 0.1, start=start, window=window)
    exact, allowed = budget(query, key, value, causal(700, start, window, "cuda"), 0.1)
    assert float((out.double() - exact).abs().max()) <= allowed
