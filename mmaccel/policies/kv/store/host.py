"""`HostStore`: a stream's keys and values in host memory, by layer and unit (frame), copied from and to the device."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError, StoreError
from mmaccel.core.memory.buffers import CopyQueues, QueueMark, on_device
from mmaccel.core.registry import one_of
from mmaccel.policies.kv.store import saved
from mmaccel.policies.kv.store.slabs import GatherTables, Slabs, SlotTable, UnitShape, view_by_unit

Spill = Literal["refuse", "disk", "drop_oldest"]
"""When the host may hold no more: refuse, write to files, or forget the oldest units."""
MOST = 1 << 31
"""Units are numbers below this."""
PENDING, BEHIND = 512, 512 << 20
"""Timed transfers that may await being read, and their bytes to the host; then the older half is waited for, so that neither
events nor copies of what leaves pile up on the device."""
COUNTED = ("puts", "copies_out", "bytes_out", "fetches", "copies_in", "bytes_in", "gathers", "disk_in")


class HostStore:
    """Keys and values of units (frames, or temporal patches of frames) of all layers in host memory.

    A unit of a layer is P tokens of G kv heads of size D, keys and values side by side, so that it is copied as one piece:
    to the host by a copy for each run of slots, back by one launch that reads host memory by an index, or, if units are in
    files, which a device cannot read, by copies of runs. Units are numbered by the caller, from 0; numbers may have gaps and
    need not be the same in every layer. All device work goes through `lanes` (two queues): all methods but `counters`,
    `wait_for_copies`, `save`, `load`, `close` and those that use the disk return before their transfers have ended; what is
    returned may be used on the current CUDA stream.

    device      where units come from and go to; its host memory is pinned on CUDA, and plain elsewhere
    cap         most bytes of host memory; None: as much as the host can spare
    spill       if memory is full: "refuse"; "disk", write to files; or "drop_oldest", forget the oldest units
    folder      for files with spill="disk" (a temporary folder by default); removed by `close`
    slab_bytes  host memory is allocated in pieces of this size; None: small ones, so that allocation never blocks for long
    together    most bytes that it and all other stores of the process take; None: no such cap
    lanes       the CUDA streams that compute and copy; None: made here (given only in tests)

    Raises `StoreError` in one sentence when the store is full, closed, or lacks what was requested; on any failure except in
    `load`, nothing that was stored before is lost.
    """

    def __init__(
        self,
        shape: UnitShape,
        device: torch.device | str,
        *,
        cap: int | None = None,
        spill: Spill = "refuse",
        folder: str | Path | None = None,
        slab_bytes: int | None = None,
        together: int | None = None,
        lanes: CopyQueues | None = None,
    ) -> None:
        for field, number in {**vars(shape), "slab_bytes": slab_bytes}.items():
            if field != "dtype" and number is not None and number < 1:
                raise RecipeError(f"host store: {field} is {number}; give at least 1.")
        if cap is not None and cap < 0:
            raise RecipeError(f"host store: cap is {cap} bytes; give at least 0, or None.")
        one_of(*get_args(Spill)).check("host store", "spill", spill)
        self.shape, self.device, self.spill = shape, torch.device(device), spill
        self.lanes = lanes or CopyQueues(self.device)
        place, on_cuda = None if folder is None else Path(folder), self.device.type == "cuda"
        self.slabs = Slabs(shape, on_cuda, slab_bytes, cap, spill == "disk", place, together)
        self.table = SlotTable(shape.layers, self.device)
        self._closed, self._dropped = False, 0
        self.pinned: Callable[[int], bool] = lambda unit: False  # whether a unit stays when room is made
        self.lost: list[int] = []  # units forgotten to make room; whoever tells of them empties it
        self.relieve: Callable[[], bool] = lambda: False
        """Asked where all stores together have taken what they may: whether another one has given a slab back."""
        self.written: dict[tuple[int, ...], list[saved.SavedUnitsFile]] = {}
        """The files of the last save, by layers, as far as their units are as they were then."""
        self._saving = threading.Lock()  # `save` reads units when it no longer holds the model
        self.gather_tables = GatherTables(self.slabs, self.lanes, self.device)
        self._counts = dict.fromkeys((*COUNTED, "seconds_in", "seconds_out"), 0.0)
        self._timed: list[tuple[str, QueueMark, QueueMark, float]] = []

    # Units in and out.

    def put_layer(self, layer: int, units: Sequence[int], key: Tensor, value: Tensor) -> list[int]:
        """Store units (frames) of one layer on the host: see `put_layers`."""
        return self.put_layers([layer], units, [(key, value)])

    @torch.no_grad()
    def put_layers(
        self, layers: Sequence[int], units: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> list[int]:
        """Store keys and values of n `units` (frames) at `layers`; `pairs` has for each layer two tensors [G, n * P, D], or
        [1, G, n * P, D], unit after unit.

        Returns the units that were forgotten to make room, in all layers: none unless spill="drop_oldest". A unit that a
        layer holds already is refused; so are tensors of another size, and whatever does not fit: nothing is stored then.
        """
        self._open()
        n, L = len(units), len(layers)
        sides = [
            [self.shape.check_and_squeeze_batch(name, x, n) for x in some]
            for name, some in zip(("key", "value"), zip(*pairs, strict=True), strict=True)
        ]
        if len(set(units)) < n or any(unit < 0 for unit in units):
            raise StoreError("host store: units to store are different numbers from 0 on; number each once.")
        if not units:
            return []
        for layer, unit in np.argwhere(self.table.find_slots(layers, units) >= 0):
            told = f"layer {layers[layer]} holds unit {units[unit]} already"
            raise StoreError(f"host store: {told}; drop it first.")
        # First what may fail on the device: nothing has been forgotten or noted yet.
        packed = torch.empty(L, n, *self.shape.tensor_shape, dtype=self.shape.dtype, device=self.device)

        def pack() -> None:
            for side, tensors in enumerate(sides):
                rows = tensors[0][None] if L == 1 else torch.stack(tensors)
                packed[:, :, side] = view_by_unit(rows, self.shape.tokens).transpose(1, 2)

        self.lanes.compute_queue.run(pack)
        gone = self._make_room(L * n, n, keep=units)
        entries = self.slabs.slot_views(self.table.assign_slots(layers, units))
        _, began = self._begin(packed)
        parts = torch.split(packed.flatten(0, 1), [len(one) for one in entries])
        for entry, part in zip(entries, parts, strict=True):
            self.lanes.wire.run(partial(entry.copy_, part, non_blocking=True))
        nbytes = L * n * self.shape.nbytes
        self._end("seconds_out", began, puts=1, copies_out=len(entries), bytes_out=nbytes)
        return gone

    @torch.no_grad()
    def fetch(self, layer: int, units: Sequence[int], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [G, n * P, D] on the device, of `units` (frames), all held, in the given order.

        out     [2, G, n * P, D] to write to: keys, then values; the last two dimensions dense
        """
        self._open()
        target = self.new_device_buffer(len(units)) if out is None else out
        slots = self._slots(layer, units)
        if not slots:
            return target[0], target[1]
        if self.can_gather:
            _, ended = self.gather(on_device(slots, self.device), target)
        else:
            # Ascending runs into a piece of device memory, few and large; from there to their places.
            order = sorted(range(len(slots)), key=slots.__getitem__)
            entries = self.slabs.slot_views([slots[i] for i in order])

            def work() -> None:
                staged = target.new_empty(len(slots), *self.shape.tensor_shape)
                places = torch.split(staged, [len(one) for one in entries])
                for place, entry in zip(places, entries, strict=True):
                    place.copy_(entry, non_blocking=True)
                index = on_device(order, self.device)
                view_by_unit(target, self.shape.tokens).index_copy_(2, index, staged.permute(1, 2, 0, 3, 4))

            _, began = self._begin()
            self.lanes.wire.run(work)
            disk = sum(slot >= self.slot_count for slot in slots)
            ended = self._end("seconds_in", began, fetches=1, copies_in=len(entries), disk_in=disk)
        self.count_copied(len(slots))
        self.lanes.compute_queue.wait(ended)
        return target[0], target[1]

    def gather(self, slot: Tensor, out: Tensor, places: Sequence[Tensor] = ()) -> tuple[QueueMark, QueueMark]:
        """Copy n units (frames) to `out` [2, G, n * P, D] or [2, G, n, P, D], by one launch. `slot` [n], on the device, made
        on the compute queue: the slot of each; -1 gives zeros. Returns the `QueueMark`s before and after the copy. The
        caller passes the number of units copied from the host to `count_copied`.

        places  tensors [m, 2, G, P, D] on the device that may be read too: their slots follow the host's, each tensor's from
                the next multiple of a slab's size; pass the same sequence object for the same tensors
        """
        self._open()
        made, began = self._begin(slot)
        self.gather_tables.find(places).copy_units(slot, out, self.lanes.wire.run)
        return made, self._end("seconds_in", began, fetches=1, copies_in=1, gathers=1)

    def count_copied(self, units: int, gathers: int = 0) -> None:
        """Add to the counters `units` units (frames) of one layer, which were copied from the host by `gather` or a
        `GatherTable`, and the `gathers` copies that a `GatherTable` made."""
        self._counts["bytes_in"] += units * self.shape.nbytes
        for name in ("fetches", "copies_in", "gathers"):
            self._counts[name] += gathers

    @property
    def can_gather(self) -> bool:
        """Whether `gather` can be used: all units (frames) are in memory, none in files."""
        return not self.slabs.files

    @property
    def slot_count(self) -> int:
        """Number of slots in host memory. Slots of files, or of the `places` of `gather`, have numbers from this one on."""
        return self.slabs.in_memory * self.slabs.per

    def new_device_buffer(self, units: int) -> Tensor:
        """Return an uninitialised device tensor [2, G, n * P, D] for n `units`, writable outside inference mode too."""
        with torch.inference_mode(False):
            shape = 2, self.shape.groups, units * self.shape.tokens, self.shape.size
            return torch.empty(shape, dtype=self.shape.dtype, device=self.device)

    def make_room_for(self, units: int) -> list[int]:
        """Make sure that `units` more units (frames) fit in every layer, before any is stored; return the units forgotten.

        Raises `StoreError` if they do not fit, so that a chunk of a stream can be refused before it is computed.
        """
        self._open()
        return self._make_room(units * self.shape.layers, units)

    def forget_from(self, end: int) -> None:
        """Forget the units (frames) from number `end` on, in all layers."""
        self._open(drops=True)
        self.table.free_slots([unit for unit in self.units() if unit >= end])
        self.table.at.forget_from(end)
        self.lost = [unit for unit in self.lost if unit < end]
        for layers, files in self.written.items():
            self.written[layers] = [one for one in files if one.units[-1] < end]

    def drop_units(self, units: Sequence[int]) -> None:
        """Forget `units` (frames) in all layers, whether held or not."""
        self._open(drops=True)
        self.table.free_slots(units)

    def free_last_slab(self) -> list[int] | None:
        """Free the last slab, and forget the oldest units (frames) for which no slab has room then; return those units.
        If there is one slab only, or there are files, or too many units are pinned, change nothing and return None."""
        self._open(drops=True)
        slabs, table = self.slabs, self.table
        left, held = (len(slabs.slabs) - 1) * slabs.per, self.units()
        old = [unit for unit in held if not self.pinned(unit)]
        over = int((table.slot >= 0).sum()) - left
        sizes = (table.find_slots(range(len(table.slot)), old) >= 0).sum(0).cumsum()
        count = int(np.searchsorted(sizes, over)) + 1 if over > 0 else 0
        if slabs.files or left <= 0 or count > len(old):
            return None
        self.wait_for_copies()
        table.free_slots(old[:count])
        table.free = [slot for slot in table.free if slot < left]
        heapq.heapify(table.free)
        for layer, row in np.argwhere(table.slot >= left):
            (kept,) = slabs.slot_views([int(table.slot[layer, row])])
            table.slot[layer, row] = slot = heapq.heappop(table.free)
            slabs.slot_views([slot])[0].copy_(kept)
        table.stale = True
        slabs.free_last_slab()
        self.gather_tables.invalidate()
        self._dropped += count
        self.lost += old[:count]
        return old[:count]

    def units(self, layer: int | None = None) -> list[int]:
        """Return the numbers of the units (frames) that a layer (None: any layer) holds, ascending."""
        slot = self.table.slot if layer is None else self.table.slot[[layer]]
        rows = np.flatnonzero((slot >= 0).any(0))
        found: list[int] = self.table.at.units_of(slot.shape[1])[rows].tolist()
        return found

    def unit_views(self, layer: int, units: Sequence[int]) -> list[Tensor]:
        """Return views [n, 2, G, P, D] of `units` (frames), in order; valid after `wait_for_copies`, while they are held."""
        return self.slabs.slot_views(self._slots(layer, units))

    def nbytes(self) -> int:
        """Return the bytes that the store holds on the device."""
        return self.table.copy.nbytes

    def wait_for_copies(self) -> None:
        """Wait until all transfers between host and device have ended."""
        self._open()
        self.lanes.wire.record_mark().wait_on_host()

    def usage(self) -> dict[str, float]:
        """Return the bytes that the store has taken on the host and in files; nothing is waited for."""
        slabs = self.slabs
        return {"host_bytes": float(slabs.memory_bytes()), "host_disk_bytes": float(slabs.disk_bytes())}

    def counters(self) -> dict[str, float]:
        """Return figures since the store was opened; waits for pending transfers.

        puts, fetches    calls
        copies_out, copies_in  runs of units (frames) transferred by one copy; a gather counts as one
        gathers          launches among `copies_in`
        bytes_out, bytes_in, seconds_out, seconds_in  bytes transferred, and the time that this took
        disk_in          units that came from files
        units            units held, summed over the layers
        dropped          units forgotten to make room
        host_bytes, disk_bytes, index_bytes  memory taken on the host, in files, and on the device
        """
        self._settle_times(0)
        return {
            **self._counts,
            "units": float((self.table.slot >= 0).sum()),
            "dropped": float(self._dropped),
            "host_bytes": float(self.slabs.memory_bytes()),
            "disk_bytes": float(self.slabs.disk_bytes()),
            "index_bytes": float(self.nbytes()),
        }

    def save(self, folder: Path, window: saved.Window | None = None, rows: saved.Rows | None = None) -> None:
        """Write all units (frames), `window` and `rows` as they are now, at the end of `defer_writes`; raises OSError."""
        self._saving.acquire()
        saved.save_store(self, folder, window, rows, self._saving.release)

    def load(
        self, folder: Path, end: int = MOST, first: int | None = None, rows: saved.Tensors | None = None
    ) -> tuple[saved.Pairs | None, saved.Rows | None]:
        """Replace the contents by the units (frames) below `end` saved in `folder`, uncounted. Return the window, units from
        `first` on, and rows, like `rows` [n, ...], saved there. Raises `StoreError` on failure: close the store then."""
        self.forget_from(0)
        self._settle_times(0)
        before = dict(self._counts), self._dropped
        try:
            return saved.read_store(self, folder, end if first is None else first, end, rows or {})
        finally:
            self._settle_times(0)
            self._counts, self._dropped = before

    def close(self) -> None:
        """Release all memory and remove all files; a closed store cannot be used."""
        if not self._closed:
            self._open(drops=True)
            self.lanes.wire.record_mark().wait_on_host()
            self.gather_tables.invalidate()
            self.slabs.close()
            self.table = SlotTable(self.shape.layers, self.device)
            self._closed = True

    def _open(self, drops: bool = False) -> None:
        with self._saving if drops else nullcontext():  # after a save, which reads what it listed
            pass
        if self._closed:
            raise StoreError("host store: it is closed; open another.")

    def _slots(self, layer: int, units: Sequence[int]) -> list[int]:
        slots: list[int] = self.table.find_slots([layer], units)[0].tolist()
        if -1 in slots:
            told = f"layer {layer} does not hold unit {units[slots.index(-1)]}; ask for units that it holds"
            raise StoreError(f"host store: {told}.")
        return slots

    def _make_room(self, slots: int, units: int, keep: Sequence[int] = ()) -> list[int]:
        """See that `slots` slots are free, for a chunk of `units` units; the units that were forgotten for them, none of
        `keep`. Raises where the spill does not let any go, or such a chunk would not fit into an empty store."""
        gone, left = list[int](), None
        while len(self.table.free) < slots:
            size = len(self.slabs.slabs) * self.slabs.per
            if self.slabs.add_slab():
                # Behind all others: it stays a heap.
                self.table.free += range(size, size + self.slabs.per)
                self.gather_tables.invalidate()
                continue
            drops = self.spill == "drop_oldest"
            if drops and self.slabs.next_slab_exceeds_process_limit and self.relieve():
                continue
            if left is None:
                needed, held, layers = units * self.shape.layers, self.units(), range(self.shape.layers)
                left = [unit for unit in held if unit not in keep and not self.pinned(unit)] if drops else []
                room = len(self.table.free) + int((self.table.find_slots(layers, left) >= 0).sum())
                if room < slots or size < needed:
                    why = self.slabs.full_store_message(needed if drops else None)
                    if drops and size >= needed:
                        why = f"{'too many' if left else 'all'} of them are pinned; unpin some"
                    raise StoreError(f"host store: full with {len(held)} frames or units held: {why}.")
            old = left.pop(0)
            self.table.free_slots([old])
            gone.append(old)
            self.lost.append(old)
            self._dropped += 1
        return gone

    def _begin(self, *reads: Tensor) -> tuple[QueueMark, QueueMark]:
        """The wire works behind all that computes by now, and reads tensors made there; the marks where both are."""
        wire, made = self.lanes.wire, self.lanes.compute_queue.record_mark(timed=True)
        wire.wait(made)
        for tensor in reads:
            wire.keep_alive(tensor)
        return made, wire.record_mark(timed=True)

    def _end(self, kind: str, began: QueueMark, **counts: float) -> QueueMark:
        """What the wire was given since `began` is timed, and added to the counts; the mark after it."""
        ended = self.lanes.wire.record_mark(timed=True)
        self._timed.append((kind, began, ended, sent := counts.get("bytes_out", 0.0)))
        if len(self._timed) > PENDING or (sent and sum(one[3] for one in self._timed) > BEHIND):
            self._settle_times(len(self._timed) // 2)
        for name, by in counts.items():
            self._counts[name] += by
        return ended

    def _settle_times(self, keep: int) -> None:
        """Read all but the last `keep` timed transfers."""
        cut = max(0, len(self._timed) - keep)
        for kind, began, ended, _ in self._timed[:cut]:
            ended.wait_on_host()
            self._counts[kind] += began.seconds(ended)
        del self._timed[:cut]
