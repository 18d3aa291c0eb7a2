"""Across the wire: the queues of device work that a store issues, and units written to the host and read back through them.

A lane runs what it is given in order; two lanes know nothing of each other but through a mark on one that the other waits
for. All device work of a store goes through lanes, so that a test can put lanes in their place that run late and in any
order that the marks admit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops.clusters import gather_units, grain_of
from mmaccel.policies.kv.store.pinned_slabs import Shape, Slabs, on_device

# Untyped in PyTorch.
_CUDA: Any = torch.cuda


class Mark:
    """A point in the order of a lane; here of the host's own work, which is done when it is issued."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def sync(self) -> None:
        """Block the host until all that was issued before the mark has run."""

    def seconds(self, later: Mark) -> float:
        """From this mark to a later one, both done and both timed."""
        return later.at - self.at


class Lane:
    """An ordered queue of work; here the host itself."""

    def run(self, work: Callable[[], None]) -> None:
        """Issue `work`; what it does may happen later, but not before what was issued earlier."""
        work()

    def mark(self, timed: bool = False) -> Mark:
        """The point after all that was issued so far."""
        return Mark()

    def wait(self, mark: Mark) -> None:
        """What is issued from now on runs after `mark`."""

    def uses(self, tensor: Tensor) -> None:
        """`tensor`, made on another lane, is read by work issued here: its memory must outlast that."""

    def sync(self) -> None:
        """Block the host until all that was issued has run."""
        self.mark().sync()


class Lanes:
    """The lane on which the model computes, and the one of the wire; here of a device without streams."""

    def __init__(self) -> None:
        self._wire = Lane()

    @property
    def compute(self) -> Lane:
        return self._wire

    @property
    def wire(self) -> Lane:
        return self._wire

    def join(self) -> None:
        """What computes from now on runs after all that the wire was given."""
        self.compute.wait(self.wire.mark())


class _Event(Mark):
    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self.event = _CUDA.Event(enable_timing=timed)
        self.event.record(stream)

    def sync(self) -> None:
        self.event.synchronize()

    def seconds(self, later: Mark) -> float:
        assert isinstance(later, _Event)
        return float(self.event.elapsed_time(later.event)) / 1000


class _Stream(Lane):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def mark(self, timed: bool = False) -> Mark:
        return _Event(self.stream, timed)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _Event)
        self.stream.wait_event(mark.event)

    def uses(self, tensor: Tensor) -> None:
        tensor.record_stream(self.stream)


class _Current(_Stream):
    """The stream that is current: work goes there as it is."""

    def run(self, work: Callable[[], None]) -> None:
        work()


class CudaLanes(Lanes):
    """The stream that is current when it is asked for, and a stream of the store's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wire = _Stream(_CUDA.Stream(device))

    @property
    def compute(self) -> Lane:
        return _Current(torch.cuda.current_stream(self._device))


PENDING = 512
"""Timed transfers that may await being read; then the oldest are waited for, so that events do not pile up."""


@dataclass(eq=False)
class _Laid:
    """Slabs, and what divides all their addresses; on the device, made and read on the wire's lane alone, the bytes from the
    first to each."""

    slabs: list[Tensor]
    grain: int
    base: Tensor = field(init=False)


class Wire:
    """What moves units between slots on the host and tensors on the device; all of it on the lane of the wire.

    Out by a copy for each run of slots. In by one launch that reads host memory by an index; what a device cannot read, a
    store with files, by copies of runs. `copies` counts every copy of a run, in or out, and a gather as one.
    """

    def __init__(self, shape: Shape, slabs: Slabs, lanes: Lanes, device: torch.device) -> None:
        self._shape, self._slabs, self._lanes, self._device = shape, slabs, lanes, device
        self._laid: tuple[Sequence[Tensor], _Laid] | None = None
        self._timed: list[tuple[str, Mark, Mark]] = []
        self.counts = dict.fromkeys(
            ("puts", "copies_out", "bytes_out", "fetches", "copies_in", "bytes_in", "gathers", "disk_in"), 0.0
        )
        self.seconds = {"seconds_in": 0.0, "seconds_out": 0.0}

    def write(self, slots: list[int], packed: Tensor) -> None:
        """Units `packed` [n, 2, G, P, D], made on the compute lane, into `slots`."""
        wire = self._lanes.wire
        wire.wait(self._lanes.compute.mark())
        wire.uses(packed)
        began = wire.mark(timed=True)
        found = runs(slots, self._slabs.per)
        for begin, end in found:
            entry = self._slabs.entry(slots[begin], slots[begin] + end - begin)
            wire.run(partial(_copy, entry, packed[begin:end]))
        self._note("seconds_out", began)
        self.count(puts=1, copies_out=len(found), bytes_out=len(slots) * self._shape.nbytes)

    def read(self, slots: list[int], out: Tensor) -> Mark:
        """Units at `slots` into `out` [2, G, n * P, D], made on the compute lane; the mark after which they are there."""
        wire = self._lanes.wire
        wire.wait(self._lanes.compute.mark())
        began = wire.mark(timed=True)
        if self._slabs.files:
            self._copies(slots, out)
        elif slots:
            self._gather(slots, out, ())
        self.count(fetches=1, bytes_in=len(slots) * self._shape.nbytes)
        return self._note("seconds_in", began)

    def gather(self, slot: Tensor, out: Tensor, places: Sequence[Tensor]) -> tuple[Mark, Mark]:
        """What lies at `slot` [n] on the device, made on the compute lane, into `out` [2, G, n * P, D] or [2, G, n, P, D] by
        one launch; -1 gives zeros. The marks before and after it; bytes are counted by whoever knows them.

        places  tensors [m, 2, G, P, D] on the device that may be read too: their slots come after the host's, each place
                beginning where a slab would; the same sequence holds the same tensors
        """
        wire = self._lanes.wire
        made = self._lanes.compute.mark(timed=True)
        wire.wait(made)
        wire.uses(slot)
        began = wire.mark(timed=True)
        self._gather(slot, out, places)
        self.count(fetches=1)
        return made, self._note("seconds_in", began)

    def times(self) -> dict[str, float]:
        """Seconds the wire was busy, in and out; waits for what is under way."""
        self._settle_times(0)
        return dict(self.seconds)

    def forget(self) -> None:
        """Slabs have come or gone."""
        self._laid = None

    def count(self, **more: float) -> None:
        """Add to the counts of these names."""
        for name, by in more.items():
            self.counts[name] += by

    def _copies(self, slots: list[int], out: Tensor) -> None:
        """Ascending runs of slots into a piece of device memory, few and large; from there to their places in `out`."""
        order = sorted(range(len(slots)), key=slots.__getitem__)
        ascending = [slots[i] for i in order]
        found = runs(ascending, self._slabs.per)
        entries = [self._slabs.entry(ascending[b], ascending[b] + e - b) for b, e in found]

        def work() -> None:
            staged = out.new_empty(len(slots), *self._shape.unit)
            for (begin, end), entry in zip(found, entries, strict=True):
                _copy(staged[begin:end], entry)
            units = staged.permute(1, 2, 0, 3, 4)
            in_units(out, self._shape.tokens).index_copy_(2, on_device(order, out.device), units)

        self._lanes.wire.run(work)
        disk = sum(slot // self._slabs.per >= self._slabs.in_memory for slot in slots)
        self.count(copies_in=len(found), disk_in=disk)

    def _gather(self, slot: list[int] | Tensor, out: Tensor, places: Sequence[Tensor]) -> None:
        laid = self._lay(places)

        def work() -> None:
            wanted = slot if isinstance(slot, Tensor) else on_device(slot, self._device)
            gather_units(out, laid.slabs, laid.base, wanted, laid.grain)

        self._lanes.wire.run(work)
        self.count(copies_in=1, gathers=1)

    def _lay(self, places: Sequence[Tensor]) -> _Laid:
        """The slabs in memory and those of `places`, kept while these stay where they are."""
        if self._laid is None or self._laid[0] is not places:
            slabs = list(self._slabs.slabs)
            # Without slabs the first place takes their part, whatever its size.
            per = self._slabs.per if slabs else max((len(one) for one in places), default=0)
            slabs += [one[i : i + per] for one in places for i in range(0, len(one), per)]
            laid = _Laid(slabs, grain_of(slabs))
            apart = [one.data_ptr() - slabs[0].data_ptr() for one in slabs]

            def tell() -> None:
                # On the compute lane it would be sent after the mark that the wire has waited for.
                laid.base = on_device(apart, self._device)

            self._lanes.wire.run(tell)
            self._laid = places, laid
        return self._laid[1]

    def _note(self, kind: str, began: Mark) -> Mark:
        """What was issued since `began` is timed; the mark after it."""
        ended = self._lanes.wire.mark(timed=True)
        self._timed.append((kind, began, ended))
        if len(self._timed) > PENDING:
            self._settle_times(PENDING // 2)
        return ended

    def _settle_times(self, keep: int) -> None:
        """Read all but the last `keep` timed transfers."""
        cut = max(0, len(self._timed) - keep)
        for kind, began, ended in self._timed[:cut]:
            ended.sync()
            self.seconds[kind] += began.seconds(ended)
        del self._timed[:cut]


def runs(slots: list[int], per: int) -> list[tuple[int, int]]:
    """Slots as runs ``(start, end)`` of positions in the list: consecutive, and within one slab of `per` slots."""
    found: list[tuple[int, int]] = []
    begin = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1 or slots[i] % per == 0:
            found.append((begin, i))
            begin = i
    return found


def in_units(tensor: Tensor, tokens: int) -> Tensor:
    """A view [..., n, P, D] of `tensor` [..., n * P, D]."""
    return tensor.view(*tensor.shape[:-2], -1, tokens, tensor.shape[-1])


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)
