"""Captures of several threads and streams, without a device."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mmaccel
from mmaccel.backends.ops.block_attend import Part
from mmaccel.core.decoding import replay
from mmaccel.core.decoding.draft import verify_chain
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.attention import AttentionConfig
from mmaccel.core.prefill.plan import FAR, AttentionPlan, span_by_range
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import register, registry
from mmaccel.policies.sparse import block_topk
from mmaccel.policies.sparse.block_topk import BlockTopK
from mmaccel.policies.sparse.orders import rank_at_or_before, sequence_order
from tests.spies import beside, finish


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the streams of a device, and for what enters them."""
    for name in ("_side", "_create_handles"):
        monkeypatch.setattr(replay, name, mock.MagicMock())
    for name in ("current_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())


def replays_here() -> replay.CudaGraphCache:
    replays = replay.CudaGraphCache(torch.device("cpu"))
    replays.works = True
    return replays


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Tells by which backend all is compiled."""
    whole = torch.compile
    torch._dynamo.reset()

    def by(backend: Any, when: str | None = "always") -> None:
        monkeypatch.setattr(torch, "compile", lambda plain, **how: whole(plain, backend=backend, **how))
        monkeypatch.delenv(replay.COMPILE, raising=False)
        if when is not None:
            monkeypatch.setenv(replay.COMPILE, when)

    yield by
    torch._dynamo.reset()


def test_one_capture_is_over_before_another_begins(monkeypatch: pytest.MonkeyPatch, side: None) -> None:
    """All captures on a device are on one stream, which cannot begin a second one: sessions on two models in two threads."""
    order: list[str] = []

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            order.append("begin")
            # Time for another thread.
            time.sleep(0.02)

        def capture_end(self) -> None:
            order.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(replay, "_create_handles", lambda device: order.append("handles"))
    finish(beside(*[lambda: replay.capture_graph(lambda: None, torch.device("cuda"), None)] * 4))
    assert order == ["handles", "begin", "end"] * 4


def test_what_is_replayed_on_two_streams_is_captured_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's workspace hangs on the stream of the capture, and both may be at work at a time."""
    number, used = itertools.count(), list[int]()
    now = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)

    def stream(side: Any) -> Any:
        used.append(side.number)
        return contextlib.nullcontext()

    def new() -> Any:
        n = next(number)
        return SimpleNamespace(number=n, cuda_stream=9 + n, wait_stream=id)

    told = dict(CUDAGraph=mock.MagicMock, Stream=new, current_stream=lambda: now, stream=stream)
    for name, one in {**told, "device": lambda _: contextlib.nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, one)
    monkeypatch.setattr(replay, "_create_handles", id)
    replay._side.cache_clear()
    for now.cuda_stream in 2 * (0, 5):
        replay.capture_graph(lambda: None, torch.device("cuda"), None)
    replay._side.cache_clear()
    assert used == 2 * [0, 1]


def test_what_cannot_be_captured_is_run_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried once more, for a kernel may have had to be loaded, and again when what it reads has been moved."""
    tried = []

    def refuses(*_: Any) -> Any:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "_Replay", type("Refuses", (), {"__new__": refuses}))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    replays, one = replays_here(), torch.ones(3)
    for count in range(1, 5):
        (two,) = replays("twice", lambda n=count: (2 * one * n,))
        assert torch.equal(two, 2.0 * one * count)
    assert len(tried) == 2
    replays.drop_if_moved("elsewhere")
    for _ in range(4):
        replays("twice", lambda: (2 * one,))
    assert len(tried) == 4


class Repeated:
    """As a captured function behaves: the values of the host are those of the capture, results lie in fixed places."""

    def __init__(self, work: Any, out: Any, device: Any, pool: Any) -> None:
        self.work, self.out = work, out
        MADE.append(self)

    def __call__(self) -> Any:
        made = self.work()
        for place, one in zip(self.out, made, strict=bool(self.out)):
            place.copy_(one)
        return self.out or made


class Recorded(Repeated):
    """As a captured function behaves: its first call records what operators do, and to which tensors; later calls do that
    again, and nothing of Python's. What waits for the device cannot be recorded."""

    calls: list[Any] | None = None

    def __call__(self) -> Any:
        if self.calls is None:
            with _Recorder() as record:
                self.out = super().__call__()
            self.calls = record.calls
            return self.out
        for call, given, named, out in self.calls:
            for place, made in zip(tree_leaves(out), tree_leaves(call(*given, **named)), strict=True):
                # A view of what it was given shows that.
                if isinstance(made, torch.Tensor) and made.data_ptr() != place.data_ptr():
                    place.copy_(made)
        return self.out


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = list[Any]()

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if call is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = call(*given, **(named or {}))
        self.calls.append((call, given, named or {}, out))
        return out


MADE: list[Repeated] = []


def repeating(monkeypatch: pytest.MonkeyPatch) -> replay.CudaGraphCache:
    monkeypatch.setattr(replay, "_Replay", Repeated)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    MADE.clear()
    return replays_here()


def test_sessions_asked_in_turns_each_find_their_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = repeating(monkeypatch)
    memories = [torch.full((2,), float(n)) for n in range(replay.KEPT)]
    given = replays.get_buffer("given", (2,), torch.float32)
    for turn in range(4):
        for memory in memories:
            given.fill_(turn)
            (out,) = replays("sum", lambda m=memory: (given + m,), at=memory.data_ptr())
            assert torch.equal(out, given + memory)
    assert len(MADE) == replay.KEPT


def test_of_many_places_the_last_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = repeating(monkeypatch)

    def ask(at: int) -> int:
        before = len(MADE)
        replays("one", lambda: (torch.ones(1),), at=at)
        return len(MADE) - before

    for at in range(replay.KEPT):
        assert [ask(at), ask(at), ask(at)] == [0, 1, 0]
    # The first is used again, so that the second is the one to go.
    assert [ask(0), ask(99), ask(99)] == [0, 0, 1]
    assert ask(0) == 0
    assert [ask(1), ask(1)] == [0, 1]
    assert sum(map(len, replays._held.values())) == replay.KEPT


def test_of_all_names_the_last_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions of ever other lengths, beside an answer that comes again and again."""
    replays = repeating(monkeypatch)
    monkeypatch.setattr(replay, "MOST", 20)
    for length in range(100):
        for name in (("question", length), "answer"):
            for _ in range(3):
                assert replays(name, lambda: (torch.ones(1),))[0].item() == 1
        assert sum(map(len, replays._held.values())) <= replay.MOST
    captured = [replays.is_captured(key) for key in ("answer", ("question", 99), ("question", 3))]
    assert captured == [True, True, False]
    assert len(MADE) == 101


def test_what_comes_to_lie_where_something_lay_is_what_a_replay_reads(monkeypatch) -> None:
    """A session is closed, and another's memory of the same shape is made of what it gave back."""
    replays = repeating(monkeypatch)
    room = torch.zeros(4)
    for number in range(4):
        memory = room.view(2, 2) if number % 2 else room.view(2, 2).clone()
        memory.fill_(float(number))
        at = memory.data_ptr(), memory.shape, memory.stride()
        (out,) = replays("double", lambda m=memory: (2 * m,), at=at)
        assert torch.equal(out, 2 * memory)
    again = room.view(2, 2).fill_(7.0)
    (out,) = replays("double", lambda: (again * 0,), at=(again.data_ptr(), again.shape, again.stride()))
    # The capture's own function, to what lies there now.
    assert len(MADE) >= 1 and torch.equal(out, 2 * again)


def test_a_failed_capture_is_over_and_leaves_nothing_behind(monkeypatch, side: None) -> None:
    """Nor its pool recording: shown with stand-ins for streams and graphs, for a device cannot be broken."""
    made, ended = list[Any](), list[Any]()
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: ended.append(of), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    class Graph:
        capturing = False

        def __init__(self) -> None:
            made.append(self)

        def capture_begin(self, **_: Any) -> None:
            self.capturing = True

        def capture_end(self) -> None:
            self.capturing = False

    def work() -> tuple[torch.Tensor, ...]:
        if made and made[-1].capturing:
            raise RuntimeError("no room")
        return (torch.ones(1),)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    replays = replays_here()
    for lasting in (True, False):
        for _ in range(3):
            assert torch.equal(replays(lasting, work, lasting=lasting)[0], torch.ones(1))
    assert len(made) == len(ended) == torch.cuda.graph_pool_handle.call_count == 4  # type: ignore[attr-defined]
    assert not any(graph.capturing for graph in made)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_what_is_compiled_has_lost_by_then_what_compiling_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.delenv(replay.COMPILE, raising=False)
    monkeypatch.setattr(torch, "compile", lambda plain, **how: made.append(how) or plain)
    work = replay.LazilyCompiled(doubled, warmup_s=1.0)
    for _ in range(9):
        assert work("small", 0.0, torch.ones(2)).tolist() == [2.0, 2.0]
    assert not made
    for call in range(1, 6):
        work(call, 0.3, torch.ones(2))  # each of a size of its own
        work("large", 0.3, torch.ones(2))
        assert len(made) == (call >= 4) and made[:1] in ([], [dict(fullgraph=True, dynamic=False)])
    monkeypatch.setenv(replay.COMPILE, "never")
    monkeypatch.setattr(work, "_compiled", lambda x: pytest.fail("compiled"))
    work("large", 0.3, torch.ones(2))


def test_what_is_compiled_anew_for_the_same_sizes_has_that_to_lose_again(
    compiles: Callable[..., None],
) -> None:
    """What the host knows of a prompt is of a graph too: one for each prompt would be half a minute for each."""
    counter, graphs = CompileCounterWithBackend("eager"), [0]
    compiles(counter, when=None)
    work = replay.LazilyCompiled(torch.mul, warmup_s=1.0)
    for number in range(40):
        assert work("one", 0.25, torch.ones(2), number).tolist() == [number] * 2
        graphs.append(counter.frame_count)
    assert graphs[3:7] == [0, 1, 2, 2] and graphs[-1] == replay.SIZES and not work.failed


def test_what_cannot_be_compiled_runs_as_it_is_written(compiles: Callable[..., None]) -> None:
    """Whatever is missing, a compiler of C++ say; said once."""
    tried: list[Any] = []

    def compiler(*_: Any) -> Any:
        tried.append(_)
        raise RuntimeError("no compiler is found")

    compiles(compiler)
    work = replay.LazilyCompiled(doubled, warmup_s=1.0)
    with pytest.warns(
        mmaccel.MmaccelWarning, match="doubled cannot be compiled.*no compiler is found"
    ) as said:
        assert [work(0, 0.0, torch.ones(1)).item() for _ in range(3)] == [2.0] * 3
    assert len(said) == len(tried) == 1


@dataclass(frozen=True, kw_only=True)
class Heavier(SparsePattern):
    """The half of the key blocks that the mean of a query block weighs heaviest, and its own: as a third party writes it."""

    def plan(self, query: Any, key: Any, q_layout: Any, k_layout: Any) -> AttentionPlan:
        queries, keys = (sequence_order(one, block=self.block) for one in (q_layout, k_layout))
        q_row, q_pos = queries.row[:, None], rank_at_or_before(keys, queries)[:, None]
        own = q_pos.unflatten(-1, (-1, self.block)).amax(-1, keepdim=True) // self.block
        means = [
            torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % self.block)).unflatten(2, (-1, self.block))
            for x in (query, key.repeat_interleave(query.shape[1] // key.shape[1], 1))
        ]
        score = means[0].mean(3) @ means[1].mean(3).mT
        number = torch.arange(score.shape[-1])
        table = (score >= score.median(-1, keepdim=True).values) | (number == own)
        order = q_row, keys.row[:, None], q_pos, keys.rank[:, None]
        span = span_by_range(*order, 0, FAR, self.block, self.block, table=table & (number <= own))
        return AttentionPlan((Part(q_row, (span,)),), self.block, self.block, *query.shape[:3], key.shape[2])

    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        return (-(-n_key // self.block)) ** 2


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("asked", [None, False])
def test_a_third_party_s_pattern_is_compiled_unless_it_says_no(
    asked: bool | None, backend: str, compiles: Callable[..., None], forgotten: None
) -> None:
    """One graph for all layers and prompts of a length, and the plans of the pattern itself."""
    kind = type("Heavier", (Heavier,), {})
    kind = register("sparse", "heavier", compile=asked)(dataclass(frozen=True, kw_only=True)(kind))
    config = AttentionConfig(Recipe.load(sparse={"name": "heavier", "block": 16}), "reference", None)
    compiles(counter := CompileCounterWithBackend(backend))
    for _ in range(2):
        layout = TokenLayout.text(1, 90)
        for layer in range(3):
            query, key = torch.randn(1, 4, 90, 8), torch.randn(1, 2, 90, 8)
            plan = config.plan(layer, query, key, key, layout, layout)
            want = kind(block=16).plan(query, key, layout, layout)
            assert plan is not None and torch.equal(plan.to_mask(), want.to_mask())
    assert counter.frame_count == (asked is None)


def test_only_patterns_are_registered_to_be_compiled() -> None:
    with pytest.raises(mmaccel.MmaccelError, match="compile is of sparse patterns alone"):
        register("kv", "none", compile=True)(registry("kv")["full"])


@pytest.mark.slow
def test_what_runs_compiled_on_a_gpu_gives_its_results_by_inductor(
    compiles: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance bit for bit; a choice of blocks the same blocks. One graph each."""
    compiles(counter := CompileCounterWithBackend("inductor"))
    p, q = torch.randn(2, 5, 999).softmax(-1)
    given = q[:4].multinomial(1)[:, 0], p, q[:4], torch.rand(4)
    for got, want in zip(
        replay.LazilyCompiled(verify_chain, 1.0)(0, 0.0, *given), verify_chain(*given), strict=True
    ):
        assert torch.equal(got, want)
    assert counter.frame_count == 1
    pattern, layout = BlockTopK(block=16, sink=16, budget=0.5), TokenLayout.text(1, 400)
    monkeypatch.setattr(block_topk, "_CHOICE", replay.LazilyCompiled(block_topk._choice, 1.0))
    for _ in range(2):
        query, key = torch.randn(1, 4, 400, 8), torch.randn(1, 2, 400, 8)
        plan = pattern.plan(query, key, layout, layout)
        monkeypatch.setenv(replay.COMPILE, "never")
        want = pattern.plan(query, key, layout, layout)
        monkeypatch.setenv(replay.COMPILE, "always")
        assert plan is not None and want is not None and torch.equal(plan.to_mask(), want.to_mask())
    assert counter.frame_count == 2
