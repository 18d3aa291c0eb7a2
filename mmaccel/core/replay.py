"""Functions of tensors that a device runs again and again: captured once, and launched as one from then on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]
_First = tuple[Tensor, ...] | Literal["unfit"]
"""Where the results of a function that has run once will go; or that it cannot be captured."""

_alone = threading.Lock()
"""Held while something is captured: a stream captures one thing at a time, and models may be at work in several threads."""


def captured(work: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Any, Any]:
    """A CUDA graph of `work`, which is not run, and what a replay of it writes to, until another graph of the pool replays.

    Not by `torch.cuda.graph`, which collects garbage and gives the pool back: there are many captures, one after another.
    """
    with _alone, torch.cuda.device(device):
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side = _side(device, now.cuda_stream)
        side.wait_stream(now)
        with torch.cuda.stream(side):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                out = work()
            finally:
                graph.capture_end()
        now.wait_stream(side)
    return graph, out


@functools.cache
def _side(device: torch.device, replaying: int) -> Any:
    """The stream of all captures for one stream of a device: libraries keep a workspace for each stream that they have seen,
    and what is replayed on two streams at a time, a draft beside its target, may not work in one."""
    with torch.cuda.device(device):
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class Replays:
    """Functions by name, each of tensors of fixed shapes; whatever else it reads stays where it is as long as `mark` does.

    The first call of a name runs the function as it is written, and so does every call where there is no CUDA. The second
    captures it; one that cannot be captured is run as it is written from then on. What a function gives lies where its own
    next call writes, and no other, from the first call on.

    Of a name there are captures for the last `KEPT` values of `at`: sessions on one model that are asked in turns each find
    theirs. What `at` names may be freed, and something else of the same shape come to lie there: a capture reads what is
    there when it is replayed, and so does to the new tensor what it did to the old one. It reads nothing else that can be
    freed: what it was given, its results and the rooms are its own, and the mark covers the rest.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._works = device.type == "cuda"
        self._held: dict[Hashable, dict[Hashable, _Replay | _First]] = {}
        self._rooms: dict[Hashable, Tensor] = {}
        self._mark: Hashable = None
        self._pool: Any = None

    @property
    def works(self) -> bool:
        """Whether anything is captured: then what a host value changes is best told to a function by a tensor."""
        return self._works

    def under(self, mark: Hashable) -> None:
        """What functions read is where `mark` says, or has been moved: then captures are given up."""
        if mark != self._mark:
            self._held.clear()
            self._rooms.clear()
            self._mark, self._pool = mark, None

    def room(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor for functions, zero at first, always the same until the mark changes; what is in it is the last one's."""
        known = (name, shape, dtype)
        if known not in self._rooms:
            with torch.inference_mode(False):
                self._rooms[known] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._rooms[known]

    def __call__(self, name: Hashable, work: Work, *given: Tensor, at: Hashable = None) -> tuple[Tensor, ...]:
        """What `work` makes of `given`; `at` says where lies what this function alone reads beside what `mark` covers."""
        if not self._works:
            return work(*given)
        ways = self._held.setdefault(name, {})
        # The last one used is the last of all.
        held = ways.pop(at, None)
        if held is None:
            if len(ways) == KEPT:
                del ways[next(iter(ways))]
            out = work(*given)
            with torch.inference_mode(False):
                held = ways[at] = tuple(torch.empty_like(one) for one in out)
            _copied(held, out)
            return held
        if isinstance(held, tuple):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                held = _Replay(work, given, held, self._device, self._pool)
            except RuntimeError:
                held = UNFIT
        ways[at] = held
        return work(*given) if isinstance(held, str) else held(*given)


KEPT = 8
"""Captures of one function, each for other places. One of a layer's takes some hundred kilobytes of the device."""


def _copied(places: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """`out` into `places`: a launch for all of one type."""
    for kind in {one.dtype for one in out}:
        some = [number for number, one in enumerate(out) if one.dtype == kind]
        torch._foreach_copy_([places[number] for number in some], [out[number] for number in some])


UNFIT: Literal["unfit"] = "unfit"
"""In the place of results: of a function that waits for the device, and so cannot be captured."""


class _Replay:
    """`out`: where results go. Those of the graph itself lie in memory that graphs captured before may work in."""

    def __init__(
        self,
        work: Work,
        given: tuple[Tensor, ...],
        out: tuple[Tensor, ...],
        device: torch.device,
        pool: Any,
    ) -> None:
        # Captures write to them from whatever mode they are replayed in.
        with torch.inference_mode(False):
            self._given = [torch.empty_like(one) for one in given]
        self._out = out
        self._graph, _ = captured(lambda: self._run(work), device, pool)

    def _run(self, work: Work) -> None:
        _copied(self._out, work(*self._given))

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        for place, one in zip(self._given, given, strict=True):
            place.copy_(one)
        self._graph.replay()
        return self._out
