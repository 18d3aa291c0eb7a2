"""Across the wire: units written to the host, and read back in one of several ways, each counted and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mmaccel.backends.ops.gather import gather_units, grain_of
from mmaccel.core.errors import check_choice
from mmaccel.policies.kv.store.pinned_slabs import Shape, Slabs
from mmaccel.policies.kv.store.slot_allocator import runs
from mmaccel.policies.kv.store.streams import Lanes, Mark, on_device

Way = Literal["auto", "copies", "gather", "pieces"]
"""Across the wire: as few large copies as runs of slots allow; one launch that reads host memory by an index; keys and
values of each unit by a copy of their own; or, "auto", the cheaper of the first two."""

REPEATS = 5
LARGE = 32 * 2**20
"""Bytes of the larger of the two transfers that a line is drawn through."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a transfer: so much for each copy or launch, and so much for each byte."""

    copy: float
    copy_byte: float
    launch: float
    launch_byte: float

    def way(self, copies: int, nbytes: int) -> Way:
        """The cheaper way for `nbytes` bytes in `copies` runs."""
        by_copies = copies * self.copy + nbytes * self.copy_byte
        return "gather" if self.launch + nbytes * self.launch_byte < by_copies else "copies"


_known: dict[tuple[str, Shape], Cost] = {}


def measured(device: torch.device, shape: Shape, slab: Tensor) -> Cost:
    """The costs on a CUDA `device`, from transfers out of the pinned slab [slots, 2, G, P, D] of any content."""
    place = str(device), shape
    if place not in _known:
        _known[place] = _measure(device, shape, slab)
    return _known[place]


def _measure(device: torch.device, shape: Shape, slab: Tensor) -> Cost:
    units = max(1, min(slab.shape[0], LARGE // shape.nbytes))
    out = torch.empty(2, shape.groups, units * shape.tokens, shape.size, dtype=shape.dtype, device=device)
    flat = torch.empty(units, *shape.unit, dtype=shape.dtype, device=device)
    base = torch.zeros(1, dtype=torch.long, device=device)
    # Scattered, so that neighbours do not help.
    few = torch.zeros(1, dtype=torch.long, device=device)
    many = (torch.arange(units, device=device) * 7) % slab.shape[0]

    def copies(pieces: int) -> Callable[[], None]:
        edges = [i * units // pieces for i in range(pieces + 1)]

        def work() -> None:
            for begin, end in pairwise(edges):
                flat[begin:end].copy_(slab[begin:end], non_blocking=True)

        return work

    def gather(slot: Tensor) -> Callable[[], None]:
        return lambda: gather_units(out[:, :, : slot.shape[0] * shape.tokens], [slab], base, slot)

    single = _seconds(device, copies(1))
    pieces = min(units, 16)
    split = _seconds(device, copies(pieces))
    one, all_ = _seconds(device, gather(few)), _seconds(device, gather(many))
    copy = max(0.0, (split - single) / max(1, pieces - 1))
    launch_byte = max(0.0, (all_ - one) / max(1, (units - 1) * shape.nbytes))
    return Cost(
        copy=copy,
        copy_byte=max(0.0, single - copy) / (units * shape.nbytes),
        launch=max(0.0, one - launch_byte * shape.nbytes),
        launch_byte=launch_byte,
    )


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    """The least of some runs: what else the device does only adds."""
    taken = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


PENDING = 512
"""Timed transfers that may await being read; then the oldest are waited for, so that events do not pile up."""


BASES = 64
"""Lists of slabs that are kept, their addresses on the device."""


@dataclass(eq=False)
class _Laid:
    """Slabs, and what divides all their addresses; on the device, made and read on the wire's lane alone, the bytes from the
    first to each."""

    slabs: list[Tensor]
    grain: int
    base: Tensor = field(init=False)


class Wire:
    """What moves units between slots on the host and tensors on the device; all of it on the lane of the wire.

    `copies` counts every copy of a run of slots, in or out, and a gather as one.
    """

    def __init__(self, shape: Shape, slabs: Slabs, lanes: Lanes, device: torch.device) -> None:
        self._shape, self._slabs, self._lanes, self._device = shape, slabs, lanes, device
        self._known: dict[tuple[Any, ...], _Laid] = {}
        self._last: tuple[Sequence[Tensor], _Laid] | None = None
        self._cost: Cost | None = None
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
        self._note("seconds_out", began, wire.mark(timed=True))
        self._count(puts=1, copies_out=len(found), bytes_out=len(slots) * self._shape.nbytes)

    def read(self, slots: list[int], out: Tensor, way: Way, after: Mark | None) -> Mark:
        """Units at `slots` into `out` [2, G, n * P, D], once `after` has passed; the mark after which they are there."""
        wire = self._lanes.wire
        if after is not None:
            wire.wait(after)
        began = wire.mark(timed=True)
        disk = [i for i, slot in enumerate(slots) if self._slabs.on_disk(slot)]
        memory = [i for i, slot in enumerate(slots) if not self._slabs.on_disk(slot)] if disk else None
        if disk:
            self._copies([slots[i] for i in disk], out, disk)
            self._count(disk_in=len(disk))
        here = slots if memory is None else [slots[i] for i in memory]
        if here:
            way = self.way(here) if way == "auto" else way
            if way == "gather":
                self._gather(here, out, memory)
            elif way == "pieces":
                self._pieces(here, out, memory)
            else:
                self._copies(here, out, memory)
        ready = wire.mark(timed=True)
        self._note("seconds_in", began, ready)
        self._count(fetches=1, bytes_in=len(slots) * self._shape.nbytes)
        return ready

    def read_indexed(self, slot: Tensor, out: Tensor, after: Mark, places: Sequence[Tensor] = ()) -> Mark:
        """As `read`, by slots [n] on the device, which `after` is the mark of; one gather. -1 gives zeros.

        places  tensors [m, 2, G, P, D] on the device, whose slots come after those of the host; the same sequence holds the
                same tensors
        """
        wire = self._lanes.wire
        wire.wait(after)
        wire.uses(slot)
        began = wire.mark(timed=True)
        self._gather(slot, out, None, places)
        ready = wire.mark(timed=True)
        self._note("seconds_in", began, ready)
        self._count(fetches=1)
        return ready

    def crossed(self, units: int) -> None:
        """Count units that a gather by an index on the device brought from the host."""
        self._count(bytes_in=units * self._shape.nbytes)

    def way(self, slots: list[int]) -> Way:
        """The cheaper way for `slots`, from what both cost on this device."""
        if self._device.type != "cuda" or not self._slabs.in_memory:
            return "copies"
        if self._cost is None:
            self._cost = measured(self._device, self._shape, self._slabs.entry(0, self._slabs.per))
        pieces = len(runs(sorted(slots), self._slabs.per))
        return self._cost.way(pieces, len(slots) * self._shape.nbytes)

    def settle(self) -> None:
        """Wait for all that is under way."""
        self._lanes.wire.sync()

    def times(self) -> dict[str, float]:
        """Seconds the wire was busy, in and out; waits for what is under way."""
        self._settle_times(0)
        return dict(self.seconds)

    def forget(self) -> None:
        """Slabs have come or gone."""
        self._known.clear()
        self._last = None

    def _copies(self, slots: list[int], out: Tensor, place: list[int] | None) -> None:
        """Ascending runs of slots into a piece of device memory, few and large; from there to their places in `out`."""
        order = sorted(range(len(slots)), key=slots.__getitem__)
        ascending = [slots[i] for i in order]
        found = runs(ascending, self._slabs.per)
        target = order if place is None else [place[i] for i in order]
        entries = [self._slabs.entry(ascending[b], ascending[b] + e - b) for b, e in found]

        def work() -> None:
            staged = out.new_empty(len(slots), *self._shape.unit)
            for (begin, end), entry in zip(found, entries, strict=True):
                _copy(staged[begin:end], entry)
            units = staged.permute(1, 2, 0, 3, 4)
            view = in_units(out, self._shape.tokens)
            if target == list(range(view.shape[2])):
                view.copy_(units)
            else:
                view.index_copy_(2, on_device(target, out.device), units)

        self._lanes.wire.run(work)
        self._count(copies_in=len(found))

    def _pieces(self, slots: list[int], out: Tensor, place: list[int] | None) -> None:
        """Keys and values of every unit by a copy of their own, as ReKV moves them."""
        entries = [self._slabs.entry(slot, slot + 1)[0] for slot in slots]
        target = range(len(slots)) if place is None else place

        def work() -> None:
            view = in_units(out, self._shape.tokens)
            for at, entry in zip(target, entries, strict=True):
                for side in (0, 1):
                    _copy(view[side, :, at], entry[side])

        self._lanes.wire.run(work)
        self._count(copies_in=2 * len(slots))

    def _gather(
        self, slot: list[int] | Tensor, out: Tensor, place: list[int] | None, places: Sequence[Tensor] = ()
    ) -> None:
        laid = self._laid(places)

        def work() -> None:
            wanted = slot if isinstance(slot, Tensor) else on_device(slot, self._device)
            if place is None:
                gather_units(out, laid.slabs, laid.base, wanted, laid.grain)
                return
            # A gather writes the whole of what it is given, and units from elsewhere lie in between.
            part = out.new_empty(*out.shape[:2], len(place) * self._shape.tokens, out.shape[3])
            gather_units(part, laid.slabs, laid.base, wanted, laid.grain)
            view = in_units(out, self._shape.tokens)
            units = in_units(part, self._shape.tokens)
            view.index_copy_(2, on_device(place, self._device), units)

        self._lanes.wire.run(work)
        self._count(copies_in=1, gathers=1)

    def _laid(self, places: Sequence[Tensor]) -> _Laid:
        """The slabs in memory and those of `places`, kept while these stay where they are."""
        if self._last is not None and self._last[0] is places:
            return self._last[1]
        held = self._slabs.in_memory
        at = held, *((one.data_ptr(), len(one)) for one in places)
        if at not in self._known:
            if len(self._known) >= BASES:
                self._known.clear()
            slabs = self._slabs.slabs[:held]
            # Without slabs the first place takes their part, whatever its size.
            per = self._slabs.per if slabs else max((len(one) for one in places), default=0)
            slabs = [*slabs, *(one[i : i + per] for one in places for i in range(0, len(one), per))]
            laid = self._known[at] = _Laid(slabs, grain_of(slabs))
            apart = [one.data_ptr() - slabs[0].data_ptr() for one in slabs]

            def tell() -> None:
                # On the compute lane it would be sent after the mark that the wire has waited for.
                laid.base = on_device(apart, self._device)

            self._lanes.wire.run(tell)
        self._last = places, self._known[at]
        return self._known[at]

    def _count(self, **more: float) -> None:
        for name, by in more.items():
            self.counts[name] += by

    def _note(self, kind: str, began: Mark, ended: Mark) -> None:
        self._timed.append((kind, began, ended))
        if len(self._timed) > PENDING:
            self._settle_times(PENDING // 2)

    def _settle_times(self, keep: int) -> None:
        """Read all but the last `keep` timed transfers."""
        cut = max(0, len(self._timed) - keep)
        for kind, began, ended in self._timed[:cut]:
            ended.sync()
            self.seconds[kind] += began.seconds(ended)
        del self._timed[:cut]


def check_way(way: str) -> None:
    """Raise `RecipeError` unless `way` is one."""
    check_choice("host store", "way", way, get_args(Way))


def in_units(tensor: Tensor, tokens: int) -> Tensor:
    """A view [..., n, P, D] of `tensor` [..., n * P, D]."""
    return tensor.view(*tensor.shape[:-2], -1, tokens, tensor.shape[-1])


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)
