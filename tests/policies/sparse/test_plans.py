"""Plans: a window's share of them by every backend, and that making and running them reads nothing back."""

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from mmaccel.backends import select
from mmaccel.backends.ops import operator
from mmaccel.backends.ops.block_attend import KeySpan, Part, empty_output, memoize
from mmaccel.backends.ops.lines import has_kernel
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.merge_heads import merge_plans
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.sparse import attend_plan, parts_to_launch
from mmaccel.core.registry import registry
from mmaccel.policies.sparse.estimate import LastQueryAttention
from tests.backends.oracle import budget, random_plan, with_extras
from tests.spies import product

from .scenes import Scene, scenes, sequence
from .test_contract import CASES, NAMES, listed_by_hand, small

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal",
    "is_nonzero", "item",
    "lift_fresh",  # a tensor made of Python numbers, or an index given as a list: its way to a device is waited for
}  # fmt: skip
SCENE = Scene(
    (
        sequence(
            [(TEXT, [5]), (VIDEO, [6, 6, 6, 5]), (TEXT, [1]), (VIDEO, [6] * 9), (IMAGE, [7]), (TEXT, [30])]
        ),
        sequence([(TEXT, [3]), (VIDEO, [6] * 10), (TEXT, [20])]),
    )
)


class NoReads(TorchDispatchMode):
    """Refuses what would wait for a device: values of tensors, results whose sizes depend on values, lists sent there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        sized = (kwargs or {}).get("output_size") is not None
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        # A number put where an index tensor says is sent there first.
        sent = name.startswith("index_put") and args[2].dim() == 0
        if name in READS or masks or sent or (name == "repeat_interleave" and not sized):
            raise AssertionError(f"{func} reads from the device")
        return func(*args, **(kwargs or {}))


def no_lists(self: torch.Tensor) -> list[Any]:
    raise AssertionError("tolist reads from the device")


@pytest.mark.parametrize(
    "read",
    [
        *(lambda t: int(t.sum()), lambda t: t[t > 0], lambda t: t.nonzero(), lambda t: t[[0, 2]]),
        lambda t: t.__setitem__(t % 2, 7),
    ],
)
def test_the_guard_sees_reads(read: Any) -> None:
    with NoReads(), pytest.raises(AssertionError, match="reads from the device"):
        read(torch.arange(4))


@pytest.mark.parametrize(
    ("name", "start"), product([*CASES, *(f"plain {name}" for name in NAMES)], [0, 37]), ids=str
)
def test_a_plan_reads_nothing(name: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer looks at the layouts; every further one, on tensors of its own, at nothing."""
    pattern = registry("sparse")[name[6:]]() if name.startswith("plain ") else small(name)
    scene = Scene(SCENE.sequences, start)
    query, key, _ = scene.tensors()
    layout = scene.layout()
    queries = layout.select_tokens(slice(start, None))
    first = pattern.plan(query, key, queries, layout)
    other, _, _ = Scene(SCENE.sequences, start, seed=5).tensors()
    monkeypatch.setattr(torch.Tensor, "tolist", no_lists)
    monkeypatch.setattr(operator, "needs_torch_library", lambda: False)  # the plain forms are looked into
    with NoReads():
        plan = pattern.plan(other, key, queries, layout)
        if plan is not None:
            plan.count_listed_pairs()
            parts_to_launch(plan)
    assert (plan is None) == (first is None)


def test_heads_that_lie_apart_are_put_together_without_reads() -> None:
    """The first layer sends the numbers of the heads to the device; further ones find them there."""
    query, key, _ = SCENE.tensors()
    layout, heads = SCENE.layout(), query.shape[1]
    one, two = (small(name).plan(query, key, layout, layout) for name in ("a_shape", "tri_shape"))
    assert heads == 4 and one is not None and two is not None

    def whole() -> None:
        plan = merge_plans([((0, 2), one), ((1,), two), ((3,), None)], heads, 2, layout, layout)
        assert plan is not None and plan.dense is not None
        plan.count_listed_pairs()

    whole()
    with NoReads():
        whole()


def test_dense_heads_among_others_are_computed_without_reads() -> None:
    """So that a layer of unlike heads can be captured."""
    query, key, value = SCENE.tensors(torch.float32)
    layout = TokenLayout.text(*key.shape[::2])
    plan = small("a_shape").plan(query, key, layout, layout)
    mixed = merge_plans([((0, 2), plan), ((1, 3), None)], 4, 2, layout, layout)
    assert mixed is not None and mixed.dense is not None

    def kernel(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return empty_output(query, value, rest[0].shape[-1], rest[6])

    attend_plan(mixed, query, key, value, 0.25, kernel)
    with NoReads():
        _, lse = attend_plan(mixed, query, key, value, 0.25, kernel)
    assert lse[:, [1, 3]].isnan().all() and not lse[:, [0, 2]].isnan().any()


def untraceable(*_: Any) -> None:
    """An answer about a device that no tracer can follow."""
    with threading.Lock():
        return None


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The planners ask as on a GPU, and are told that kernels run."""
    monkeypatch.setattr(operator, "why_kernels_unusable", untraceable)
    monkeypatch.setattr(operator, "find_spec", lambda name: untraceable(name) or name)
    told = property(lambda self: has_kernel(self.query.device, self.query.dtype, *self.query.shape[2:]))
    monkeypatch.setattr(LastQueryAttention, "has_kernel", told)
    operator.why_triton_unusable.cache_clear()  # type: ignore[attr-defined]
    yield
    operator.why_triton_unusable.cache_clear()  # type: ignore[attr-defined]


def test_a_graph_of_any_length_asks_what_a_device_is(fused: None) -> None:
    """A length that a tracer leaves open is no constant, and what a device is asked is one."""
    torch._dynamo.reset()
    asked = torch.compile(
        lambda query: query + 1 if has_kernel(query.device, query.dtype, *query.shape[2:]) else query * 0,
        backend="eager", fullgraph=True, dynamic=True,
    )  # fmt: skip
    for rows in (64, 17, 200):
        assert asked(torch.zeros(1, 2, rows, 64)).unique().tolist() == [rows <= 128]


@pytest.mark.filterwarnings("error:Dynamo detected a call to a:UserWarning")
@pytest.mark.parametrize(
    "name", ["per_head", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vertical_slash", "grid"))]
)
def test_what_a_device_is_asked_is_a_constant_of_the_graph(name: str, fused: None) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    query, key, value = SCENE.tensors(torch.float32)
    layer = layer_of(name, SCENE.layout())

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        count = len(graph.graph.output_node().args[0])
        return lambda *inputs: [query] * count  # there is no kernel to run

    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(LastQueryAttention, "has_kernel", False)
        plain.setattr(operator, "why_kernels_unusable", lambda *_: "no kernel runs here")
        layer(query, key, value)  # the host knows the layout
    operator.why_triton_unusable.cache_clear()  # type: ignore[attr-defined]
    torch.compile(layer, backend=seen, fullgraph=True)(query, key, value)
    assert len(graphs) == 1 and "mmaccel" in graphs[0].code
    torch._dynamo.reset()


def test_a_tracer_is_not_asked_whether_a_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    memo: dict[Any, int] = {}
    assert memoize(memo, "one", lambda: 1) == 1 and not memo


def layer_of(name: str, layout: TokenLayout) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A layer's attention under a pattern, planned anew, by the plain backend."""
    pattern, kernel = small(name), select.get_op("reference", "cpu")

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        plan = pattern.plan(query, key, layout, layout)
        assert plan is not None
        return attend_plan(plan, query, key, value, 0.25, kernel)[0]

    return layer


TRACED = ("block_topk", "per_head")
"""In the fast tests, of which the last holds a window, lines and a grid, and the first goes through all that comes before
inductor's own code; in the slow ones all go through inductor."""


@pytest.mark.parametrize(
    "backend, name",
    [
        *(("eager", name) for name in TRACED),
        pytest.param("eager", "boundary_2d", marks=pytest.mark.slow),
        ("aot_eager", TRACED[0]),
        *(pytest.param("inductor", name, marks=pytest.mark.slow) for name in CASES if name != "dense"),
    ],
)
def test_planning_and_attention_are_one_graph(backend: str, name: str) -> None:
    """Once the host knows the layout: nothing of a plan, nor the packing of its parts, breaks the graph."""
    torch._dynamo.reset()
    layer, tensors = layer_of(name, SCENE.layout()), SCENE.tensors(torch.float32)
    want, counter = layer(*tensors), CompileCounterWithBackend(backend)
    got = torch.compile(layer, backend=counter, fullgraph=True)(*tensors)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert counter.frame_count == 1
    torch._dynamo.reset()


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
    row, key = torch.arange(plan.n_key - plan.n_query, plan.n_key)[:, None], torch.arange(plan.n_key)
    return (key < sinks) | (row - key < window)


def check(plan: AttentionPlan, sinks: int, window: int) -> AttentionPlan:
    narrow = plan.limit_to_window(sinks, window)
    assert torch.equal(narrow.to_mask(), plan.to_mask() & window_mask(plan, sinks, window))
    assert plan.may_share_rows or int(narrow.spans_per_pair().max()) <= 1
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
    offset, block, _ = span.lists.flatten()
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
        plan.limit_to_window(sinks, window)
    narrow = check(plan, sinks, window)
    for part in narrow.parts:
        for span in part.spans:
            ends_show_something(narrow, part, span, window_mask(plan, sinks, window))
    if window < 16:
        assert (narrow.count_listed_pairs() < plan.count_listed_pairs()).all()
    assert narrow is plan.limit_to_window(sinks, window)
    assert torch.equal(
        narrow.limit_to_first_rows(37).to_mask(),
        narrow.to_mask() * (torch.arange(plan.n_query) < 37)[:, None],
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
        plan.limit_to_window(sinks, window), query, key, value, 0.25, select.get_op(backend, query.device)
    )
    assert float((out.double() - exact).abs().max()) <= allowed


def test_a_window_that_shows_all_is_none_and_what_cannot_be_narrowed_is_refused() -> None:
    plan = random_plan(3, lead="h", n_query=50, n_key=90)
    assert plan.limit_to_window(4, 90) is plan and plan.limit_to_window(0, 1000) is plan
    with pytest.raises(ValueError, match="has a window already"):
        plan.limit_to_window(4, 20).limit_to_window(0, 10)
    extra = with_extras(plan, 2, 16, 3)
    with pytest.raises(RecipeError, match="stand for many and have no column"):
        extra.limit_to_window(4, 20)
    own = [tuple(span for span in part.spans if span.key is None) for part in extra.parts]
    parts = tuple(replace(part, spans=spans) for part, spans in zip(extra.parts, own, strict=True))
    biased = replace(extra, parts=parts)
    assert any(span.bias is not None for part in biased.parts for span in part.spans)
    mask = window_mask(biased, 4, 20)
    assert torch.equal(biased.limit_to_window(4, 20).to_bias(), biased.to_bias() * mask)
