"""`CudaGraphCache` captures repeated work as CUDA graphs and replays it; `LazilyCompiled` compiles a function if it pays."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from mmaccel.backends.ops.operator import REPLAYED_ON
from mmaccel.core.errors import warn

Work = Callable[[], tuple[Tensor, ...]]
_handles = threading.local()
_alone = threading.Lock()
"""Held while something is captured: a stream captures one thing at a time, and models may be at work in several threads."""


def capture_graph(work: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Any, Any]:
    """Capture `work` as a CUDA graph without running it; return the graph and the tensors that a replay fills. Their
    contents are valid until another graph of `pool` is replayed.

    `torch.cuda.graph` is not used: it would collect garbage and free the pool at each of many captures.
    """
    with _alone, torch.cuda.device(device):
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side = _side(device, now.cuda_stream)
        side.wait_stream(now)
        with torch.cuda.stream(side):
            _create_handles(device)
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    out = work()
                finally:
                    graph.capture_end()
            except BaseException:
                # Some releases of PyTorch leave the pool of a failed capture recording (pytorch/pytorch#180395).
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
                raise
        now.wait_stream(side)
    return graph, out


def _create_handles(device: torch.device) -> None:
    """Give the thread its handles of cuBLAS and cuDNN: a thread that has run no product yet would create them within the
    capture, which is not allowed there."""
    if device not in (done := vars(_handles).setdefault("devices", set())):
        done.add(device)
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        one = torch.ones(1, 8, 1, 1, dtype=torch.half, device=device)
        with suppress(RuntimeError):  # of a cuDNN that does not work, which whoever needs it is told
            torch.conv2d(one, one.expand(8, 8, 1, 1).contiguous())


@cache
def _side(device: torch.device, replaying: int) -> Any:
    """The stream of all captures for one stream of a device: libraries keep a workspace for each stream that they have seen,
    and what is replayed on two streams at a time, a draft beside its target, may not work in one."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    REPLAYED_ON[side.cuda_stream] = replaying
    return side


class GraphBuffers:
    """Input and output buffers of captured work, by name, and the memory pool of its graphs. Several caches may share one
    if what they replay runs one after another, and leaves nothing in the pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._rooms = device, dict[Hashable, Tensor]()
        self._pool: Any = None
        self._stream: Any = None
        self._keeper: Any = None
        self.unfit = False  # whether the first work could not be captured: no other will be
        self.captured = set[Hashable]()
        """Names of work that was captured with these buffers: it can be captured again without being run before."""

    def get_buffer(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the buffer `name`, allocated once, as zeros."""
        known = (name, shape, dtype)
        if known not in self._rooms:
            with torch.inference_mode(False):
                self._rooms[known] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._rooms[known]

    def get_part(self, name: Hashable, shape: tuple[int, ...], most: int, dtype: torch.dtype) -> Tensor:
        """Return the first elements of the buffer `name` of `most`, as `shape`: work of all sizes shares one."""
        return self.get_buffer(name, (most,), dtype)[: math.prod(shape)].view(shape)

    def clear(self) -> None:
        """Drop all buffers, and the pool."""
        self._rooms.clear()
        self.captured.clear()
        self.drop_pool()

    @property
    def pool(self) -> Any:
        """The pool in which graphs that use these buffers are captured."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            if self._device.type == "cuda":  # a pool whose graphs are all gone takes no other
                keep = partial(torch.zeros, 1, device=self._device)
                self._keeper = capture_graph(keep, self._device, self._pool)
        return self._pool

    def drop_pool(self) -> None:
        """Capture in another pool from now on: one in which a capture failed may take no more."""
        self._pool = self._keeper = None

    def wait_for_last_user(self) -> None:
        """Make the current CUDA stream, if it is not the last caller's, wait for that one, which used the same buffers."""
        if self._device.type == "cuda":
            last, self._stream = self._stream, torch.cuda.current_stream(self._device)
            if last not in (None, self._stream):
                self._stream.wait_stream(last)


class CudaGraphCache:
    """Caches CUDA graphs of repeated work, by name. The work reads and writes fixed addresses; the host passes inputs
    through buffers (`get_buffer`).

    The first call of a name runs the work eagerly, the second captures it, later ones replay. Without CUDA, and for work
    that cannot be captured, every call is eager.

    A capture stays valid while `mark` (see `drop_if_moved`) does not change. `mark` must cover each address that the work
    reads, except those that `at` names: for each name the captures of the last `KEPT` values of `at` are kept, so that
    sessions that share a model each find theirs, and about `MOST` captures in all. Data at addresses named by `at` may be
    freed: a replay reads whatever data of the same shape is there now. Buffers and results belong to this cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.works = device.type == "cuda"
        """Whether anything is captured: then a number of the host that changes is best given to work by a tensor."""
        self.warm = True
        """Whether the last call took what such a call takes from now on: it was not the first, and captured nothing."""
        # By name and place: a capture; where results of work that has run once will go (nowhere: empty); or that it cannot
        # be captured.
        self._held: dict[Hashable, dict[Hashable, _Replay | tuple[Tensor, ...] | Literal["unfit"]]] = {}
        self._buffers, self._failed = GraphBuffers(device), set[Hashable]()  # what could not be captured once
        self._mark: Hashable = None

    def drop_if_moved(self, mark: Hashable) -> None:
        """Declare by the key `mark` where the data lies that captured work reads; if it differs from the last one, all
        captures and buffers are dropped. If the current CUDA stream is not the last caller's, it waits for that one, which
        used the same buffers."""
        self._buffers.wait_for_last_user()
        if mark != self._mark:
            self._held.clear()
            self._failed.clear()
            self._buffers.clear()
            self._mark = mark

    def is_captured(self, name: Hashable, at: Hashable = None) -> bool:
        """Return whether a call of `name` will not capture any more: it replays a graph, or can never be captured. `at` is
        the key of the addresses it reads; with ``at=...`` (Ellipsis) a capture at any addresses counts."""
        held = self._held.get(name, {})
        some = held.values() if at is ... else [held.get(at)]
        return not self.works or any(isinstance(one, _Replay | str) for one in some)

    def get_buffer(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the input or output buffer `name` of captured work: allocated once, as zeros, and dropped when `mark`
        changes."""
        return self._buffers.get_buffer(name, shape, dtype)

    def __call__(
        self,
        name: Hashable,
        work: Work,
        at: Hashable = None,
        lasting: bool = True,
        shared: GraphBuffers | None = None,
    ) -> tuple[Tensor, ...]:
        """The results of `work`; `at` says where that lies which this work alone reads beside what `mark` covers. It is
        captured in the pool of `shared`, if given, at once if another cache has captured work of this name there; work that
        returns nothing may share one with other caches.

        Results last until the next call of `name`. Where they are not `lasting`, they are copied nowhere, and any other
        call may write over them.
        """
        if not self.works:
            return work()
        # The last one used is the last of all.
        ways = self._held[name] = self._held.pop(name, {})
        held = ways.pop(at, None)
        self.warm = held is not None and not isinstance(held, tuple)
        if held is None:
            if len(ways) == KEPT:
                del ways[next(iter(ways))]
            elif sum(map(len, self._held.values())) >= MOST and len(self._held) > 1:
                del self._held[next(iter(self._held))]
            held = () if shared is not None and name in shared.captured else None
        if held is None:
            out = work()
            with torch.inference_mode(False):
                ways[at] = places = tuple(torch.empty_like(one) for one in out) if lasting else ()
            _copied(places, out)
            return places or out
        if isinstance(held, tuple):
            buffers = shared or self._buffers
            try:
                held = _Replay(work, held, self._device, buffers.pool)
                if shared is not None:
                    shared.captured.add(name)
            except RuntimeError as error:
                buffers.drop_pool()
                if isinstance(error, torch.OutOfMemoryError):
                    ways[at] = held  # the next call captures it, if there is room by then
                    return work()
                if (name, at) not in self._failed:  # a kernel may have had to be loaded
                    self._failed.add((name, at))
                    ways[at] = held
                    return work()
                held = "unfit"  # it waits for the device
                if shared is not None and not shared.captured:
                    shared.unfit = True
                    cause = error.__context__ or error  # ending the capture fails too
                    why = " ".join(f"{type(cause).__name__}: {cause}".split())[:200]
                    warn(f"passes of this model cannot be captured as CUDA graphs, and run slower ({why}).")
            self._failed.discard((name, at))
        ways[at] = held
        return work() if isinstance(held, str) else held()


KEPT = 8
"""Captures of one name, each for other places. One of a layer's takes some hundred kilobytes of the device."""
MOST = 4096
"""Captures of all names, which questions of unlike lengths have: those of 64 layers for 8 sessions, 8 times over."""


def _copied(places: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """`out` into `places`: a launch for all of one type."""
    for kind in {one.dtype for one in places}:
        some = [number for number, one in enumerate(places) if one.dtype == kind]
        torch._foreach_copy_([places[number] for number in some], [out[number] for number in some])


class _Replay:
    """A captured graph of `work`, whose results go to `out`; if that is empty they stay in the graph's own memory, in which
    graphs captured before may work."""

    def __init__(self, work: Work, out: tuple[Tensor, ...], device: torch.device, pool: Any) -> None:

        def run() -> tuple[Tensor, ...]:
            made = work()
            _copied(out, made)
            return made

        self._graph, made = capture_graph(run, device, pool)
        self._out = out or made

    def __call__(self) -> tuple[Tensor, ...]:
        self._graph.replay()
        return self._out


COMPILE = "MMACCEL_COMPILE"
"""The variable of the environment that says when a `LazilyCompiled` is compiled: "never"; "always", on every device and
from the first call on; else where it pays."""

SIZES = 4
"""Times that a function is compiled at most, each for up to half a minute: once for each of its sizes."""


class LazilyCompiled:
    """A function of tensors that is compiled by inductor, as one graph, once that pays off; until then it runs eagerly.

    It pays for given tensor sizes once the eager calls of these sizes have cost as much extra time as compiling takes. So
    the total is at most twice that of the better choice, whatever calls come, and nothing is spent on sizes that do not
    recur. Sizes that inductor must compile again must first cost as much extra time again. A
    function that cannot be compiled stays eager, and one warning says why.
    """

    def __init__(self, plain: Callable[..., Any], warmup_s: float) -> None:
        """`plain` reads nothing from its tensors; `warmup_s`, the seconds that compiling takes, is a measured figure."""
        self.plain, self.warmup_s, self.failed = plain, warmup_s, False
        self._graphs, self._lost = 0, dict[Hashable, float]()
        self._paid: set[Hashable] = set()
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, sizes: Hashable, gain_s: float, *args: Any) -> Any:
        """The result for `args`, whose tensors have these `sizes`. Compiled, a call would take `gain_s` seconds less: 0
        where it would not, or nobody knows."""
        if not self._pays(sizes, gain_s):
            return self.plain(*args)
        try:
            if self._compiled is None:
                self._compiled = torch.compile(self.plain, fullgraph=True, dynamic=False)
            counted = torch._dynamo.utils.counters["stats"]
            before = counted["unique_graphs"]
            made = self._compiled(*args)
            if counted["unique_graphs"] > before:
                self._graphs += 1
                if self._lost.pop(sizes, None) is None:
                    self._paid.discard(sizes)
            return made
        except Exception as error:
            self.failed = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            name = getattr(self.plain, "__qualname__", "a function")
            warn(f"{name} cannot be compiled and runs as it is written ({reason}); set {COMPILE}=never.")
        return self.plain(*args)

    def _pays(self, sizes: Hashable, gain_s: float) -> bool:
        how = os.environ.get(COMPILE)
        if self.failed or how == "never" or torch.compiler.is_compiling():
            return False
        if how == "always" or sizes in self._paid:
            return True
        if gain_s <= 0 or self._graphs >= SIZES:
            return False
        self._lost[sizes] = self._lost.get(sizes, 0.0) + gain_s
        if self._lost[sizes] >= self.warmup_s:
            self._paid.add(sizes)
        return sizes in self._paid
