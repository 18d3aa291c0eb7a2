"""Host memory for a stream's units: slabs (blocks of pinned memory, or memory-mapped files), slots, and copy queues."""

from __future__ import annotations

import heapq
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.backends.ops.clusters import copy_units, slab_alignment
from mmaccel.core.errors import StoreError
from mmaccel.core.memory.buffers import CopyQueues, UnitRowMap, free_host_bytes, on_device, total_host_bytes
from mmaccel.policies.kv.store import saved

SLAB_BYTES = 16 * 2**20
"""A power of two, for the allocator of pinned memory rounds up to one. While a slab is pinned, for some 0.8 ms a MiB (H100),
the driver lets nobody else on, no token of an answer either."""
PIECES, FILE_BYTES = 2**14, 256 * 2**20
"""Slabs of a whole host at most, and the size of files: a system maps 65,530 pieces for a process."""
LEAST = 64
"""Slots of a slab at least, where files are made of them."""
ROWS, ADDRESSES = 512, 1024
"""Units at least that a `SlotTable` has rows for, and slabs that a `GatherTable` has room for: more cost captured graphs."""
SPARE = 1 / 16
"""The share of the host's memory that is left to everything else."""
SHARES = 64
"""Into so many slabs at least goes what all stores of the process may take together."""


@dataclass(frozen=True)
class UnitShape:
    """The shape of a stored unit (frame): layers, kv heads G, tokens P, head size D, and the data type."""

    layers: int
    groups: int
    tokens: int
    size: int
    dtype: torch.dtype

    @property
    def tensor_shape(self) -> tuple[int, int, int, int]:
        """Keys and values of one unit (frame) in one layer: [2, G, P, D]."""
        return 2, self.groups, self.tokens, self.size

    @property
    def nbytes(self) -> int:
        """Bytes of one unit (frame) in one layer."""
        return 2 * self.groups * self.tokens * self.size * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Return the shape's fields as JSON-ready values, for a saved store."""
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch.")}

    def check_and_squeeze_batch(self, name: str, tensor: Tensor, n: int) -> Tensor:
        """Return `tensor` as [G, n * P, D], without a batch of 1; raises `StoreError` for another shape or type."""
        found = tensor[0] if tensor.dim() == 4 and tensor.shape[0] == 1 else tensor
        wanted = self.groups, n * self.tokens, self.size
        if tuple(found.shape) != wanted or found.dtype != self.dtype:
            raise StoreError(
                f"host store: {name} of {n} units is {found.dtype} {list(found.shape)} and should be {self.dtype} "
                f"{list(wanted)}; all units of a stream have one size."
            )
        return found.detach()


class Slabs:
    """Host memory in slabs (large blocks) of `per` slots, each for one unit (frame) of one layer; slot s is entry ``s %
    per`` of slab ``s // per``.

    Memory is allocated slab by slab: at most `cap` bytes, at most `together` bytes with the process's other stores, and so
    that `SPARE` bytes of the host's memory stay free. Pinned memory is allocated one slab ahead of need. With `disk`, slabs
    beyond that are files, each allocated at its full length, so that a disk that fills up later harms nothing stored.
    """

    def __init__(
        self,
        shape: UnitShape,
        pinned: bool,
        slab_bytes: int | None,
        cap: int | None,
        disk: bool,
        folder: Path | None,
        together: int | None = None,
    ) -> None:
        self._shape, self._pinned, self._cap, self._disk, self._together = shape, pinned, cap, disk, together
        if slab_bytes is None:
            slab_bytes = FILE_BYTES if disk else SLAB_BYTES
            # Units that do not fill a slab leave an eighth of it empty at most.
            while slab_bytes < max(min(total_host_bytes(), 2**42) // PIECES, 8 * shape.nbytes):
                slab_bytes *= 2
        # Files take slabs of the same size, and should be few.
        least = min(slab_bytes, LEAST * shape.nbytes) if disk else shape.nbytes
        if cap is not None:
            # Whole slabs are to use seven eighths of the cap or more.
            while slab_bytes // 2 >= least and (slab_bytes > cap or cap % slab_bytes > cap // 8):
                slab_bytes //= 2
        while together is not None and slab_bytes // 2 >= least and slab_bytes > together // SHARES:
            slab_bytes //= 2
        self.slab_bytes, self.per = slab_bytes, max(1, slab_bytes // shape.nbytes)
        self.slabs: list[Tensor] = []
        self.in_memory = 0
        self._ahead: tuple[threading.Thread, list[Tensor | None]] | None = None
        self.folder, self._own_folder = folder, list[Path]()
        self.files: list[Path] = []
        self._remove = weakref.finalize(self, _remove, self.files, self._own_folder)
        _open[self] = None

    def add_slab(self) -> bool:
        """Allocate a slab; return False if memory is full and there is no disk. Raises `StoreError` if the disk is full."""
        if not self.files:
            with _taking:
                made = self._awaited()
                # What could not be had ahead of need may be there by now.
                if made is None and self._room():
                    made = self._memory()
                if made is not None:
                    self.slabs.append(made)
                    self.in_memory += 1
                    # Not while frames wait for it.
                    if self._pinned and self._room():
                        self._begin()
                    return True
        if self._disk:
            self.slabs.append(self._file())
        return self._disk

    def free_last_slab(self) -> None:
        """Free the last slab, which must be one in memory."""
        self.slabs.pop()
        self.in_memory -= 1
        self._emptied()

    def _emptied(self) -> None:
        # PyTorch keeps pinned memory that was let go of, where it can tell it not to.
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        if self._pinned and empty is not None:
            empty()

    def slot_views(self, slots: list[int]) -> list[Tensor]:
        """Return views [n, 2, G, P, D] of the memory of `slots`, in order; consecutive slots of one slab share a view."""
        cuts = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1 or slots[i] % self.per == 0]
        found = []
        for begin, end in zip([0, *cuts], [*cuts, len(slots)], strict=True):
            slab, first = divmod(slots[begin], self.per)
            found.append(self.slabs[slab][first : first + end - begin])
        return found

    def memory_bytes(self) -> int:
        """Return the bytes of host memory allocated in slabs."""
        return self.in_memory * self.slab_bytes

    def disk_bytes(self) -> int:
        """Return the bytes of files allocated as slabs."""
        return len(self.files) * self.slab_bytes

    def close(self) -> None:
        """Free the slabs' memory, and remove their files."""
        self._awaited()
        self.slabs.clear()
        self.in_memory = 0
        self._emptied()
        self._remove()

    def full_store_message(self, slots: int | None = None) -> str:
        """Return the error of a full store: why no slab can be added, and the fix. `slots`: how many a pass needs."""
        mend, need = "spill to disk (spill='disk'), drop frames (spill='drop_oldest')", ""
        if slots is not None:
            need = f" and a pass needs at least {slots * self._shape.nbytes}"
            mend = "watch fewer frames at a time, spill to disk (spill='disk')"
        if self.next_slab_exceeds_process_limit:
            return f"all stores together may take {self._together} bytes{need}; raise process_bytes, {mend}"
        if self._at_cap():
            return f"its cap of {self._cap} bytes is reached{need}; raise cap (a policy's host_bytes), {mend}"
        return f"the host has {free_host_bytes()} bytes left{need}; {mend}, or free memory"

    @property
    def next_slab_exceeds_process_limit(self) -> bool:
        """Whether another slab would exceed the limit for all stores of the process."""
        stores = [one for key in _open.keyrefs() if (one := key()) is not None]
        taken = sum(one.slab_bytes * (one.in_memory + (one._ahead is not None)) for one in stores)
        return self._together is not None and taken + self.slab_bytes > self._together

    def _at_cap(self) -> bool:
        return self._cap is not None and self.memory_bytes() + self.slab_bytes > self._cap

    def _room(self) -> bool:
        spare = free_host_bytes() - self.slab_bytes >= SPARE * total_host_bytes()
        return spare and not self._at_cap() and not self.next_slab_exceeds_process_limit

    def _memory(self) -> Tensor | None:
        try:
            # Written in any mode later, so not born in inference mode.
            with torch.inference_mode(False):
                raw = torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        except (RuntimeError, MemoryError):
            return None
        return self._cut(raw)

    def _begin(self) -> None:
        """Start to make a slab in a thread of its own."""
        made: list[Tensor | None] = []
        work = lambda: made.append(self._memory())  # noqa: E731
        thread = threading.Thread(target=work, name="mmaccel-slab", daemon=True)
        thread.start()
        self._ahead = thread, made

    def _awaited(self) -> Tensor | None:
        """The slab that was begun, if any, and if it could be had."""
        if self._ahead is None:
            return None
        thread, made = self._ahead
        thread.join()
        self._ahead = None
        return made[0] if made else None

    def _file(self) -> Tensor:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="mmaccel-"))
            self._own_folder.append(self.folder)
        path = self.folder / f"slab-{os.getpid()}-{id(self):x}-{len(self.files):05d}.bin"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            saved.allocate_file(path, self.slab_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StoreError(
                f"host store: {self.slab_bytes} more bytes do not fit on the disk under {self.folder} ({error.strerror}); "
                "free room there, name another folder, or raise cap (a policy's host_bytes)."
            ) from error
        with torch.inference_mode(False):
            raw = torch.from_file(str(path), shared=True, size=self.slab_bytes, dtype=torch.uint8)
        self.files.append(path)
        return self._cut(raw)

    @torch.inference_mode(False)
    def _cut(self, raw: Tensor) -> Tensor:
        used = raw[: self.per * self._shape.nbytes]
        return used.view(self._shape.dtype).view(self.per, *self._shape.tensor_shape)


_open: weakref.WeakKeyDictionary[Slabs, None] = weakref.WeakKeyDictionary()  # `keyrefs` list it in one step
_taking = threading.RLock()
"""Held while memory is taken, so that stores of several threads do not take the same twice."""


def _remove(files: list[Path], folders: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
    files.clear()
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


class SlotTable:
    """Which slot holds each unit (frame) in each layer: `slot` [L, rows] on the host, -1 for none. `at` maps a unit to its
    row; `free` is a heap of free slots. When rows run out, rows of units that no layer holds are reused."""

    @torch.inference_mode(False)
    def __init__(self, layers: int, device: torch.device) -> None:
        self.slot, self.at = np.full((layers, 0), -1, dtype=np.int64), UnitRowMap()
        self.copy = torch.zeros(layers, 0, dtype=torch.long, device=device)  # what `rows_of` gave last
        self.free, self.stale = list[int](), True

    def assign_slots(self, layers: Sequence[int], units: Sequence[int]) -> list[int]:
        """Assign the lowest free slots to units (frames) of some layers, and return them, layer by layer."""
        slots = [heapq.heappop(self.free) for _ in range(len(layers) * len(units))]
        if (self._row(units) < 0).any():
            old, held = self.slot, np.flatnonzero((self.slot >= 0).any(0))
            known = self.at.units_of(old.shape[1])[held]
            every = np.union1d(known, units)
            self.at.old, self.at.gap = every, int(every[-1]) + 1 - len(every)
            size = min(old.shape[1], 2 * len(held)) if held.max(initial=0) + 1 == len(held) else len(held)
            self.slot = np.full((len(old), max(len(every), 2 * size, ROWS)), -1, dtype=np.int64)
            self.slot[:, self.at.rows_of(known)] = old[:, held]
        self.slot[np.ix_(layers, self._row(units))] = np.reshape(slots, (len(layers), -1))
        self.stale = True
        return slots

    def _row(self, units: Sequence[int]) -> Any:
        """The rows [n] of units, -1 for none."""
        row = self.at.rows_of(np.array(units, dtype=np.int64))
        return np.where((row >= 0) & (row < self.slot.shape[1]), row, -1)

    def free_slots(self, units: Sequence[int]) -> None:
        """Free the slots of units (frames) in all layers, if they have any."""
        row = self._row(units)
        held = self.slot[:, row := row[row >= 0]]
        for slot in held[held >= 0].tolist():
            heapq.heappush(self.free, slot)
            self.stale = True
        self.slot[:, row] = -1

    def find_slots(self, layers: Sequence[int], units: Sequence[int]) -> Any:
        """Return the slots [L, n] of units (frames) in some layers, -1 for none."""
        row, found = self._row(units), np.full((len(layers), len(units)), -1)
        found[:, row >= 0] = self.slot[np.ix_(layers, row[row >= 0])]
        return found

    def slots_on_device(self) -> Tensor:
        """Return the table `slot` on the device. The first call after a change uploads it whole. The tensor's address is the
        same until the number of rows changes."""
        if self.stale:
            if self.copy.shape != self.slot.shape:
                with torch.inference_mode(False):
                    self.copy = self.copy.new_empty(self.slot.shape)
            self.copy.copy_(on_device(torch.from_numpy(self.slot).clone(), self.copy.device))
            self.stale = False
        return self.copy


def view_by_unit(tensor: Tensor, tokens: int) -> Tensor:
    """Return a view [..., n, P, D] of `tensor` [..., n * P, D]."""
    return tensor.view(*tensor.shape[:-2], -1, tokens, tensor.shape[-1])


@dataclass(eq=False)
class GatherTable:
    """Addresses of the units (frames) in a store's slabs and in `places`. A CUDA graph can capture a copy that reads them.

    places  tensors [m, 2, G, P, D] on the device
    slabs   the store's slabs [slots, 2, G, P, D], then `places`, cut into pieces as long; empty after the slabs change
    grain   a number of bytes that divides all addresses
    base    a list of one tensor, long, on the device: the distance in bytes of each slab from the first; then unused space
    """

    places: Sequence[Tensor]
    slabs: list[Tensor] = field(default_factory=list)
    grain: int = 1
    base: list[Tensor] = field(default_factory=list)
    _key: tuple[Any, ...] = ()

    def fill_from_slabs(self, held: Slabs, lanes: CopyQueues, device: torch.device) -> None:
        """Fill the table from the slabs `held`, in its old device tensor if that has room; for copies queued from now on."""
        slabs = list(held.slabs)
        # Without slabs the first place takes their part, whatever its size.
        per = held.per if slabs else max((len(one) for one in self.places), default=0)
        slabs += [one[i : i + per] for one in self.places for i in range(0, len(one), per)]
        apart = [one.data_ptr() - slabs[0].data_ptr() for one in slabs]
        room = max(ADDRESSES, 1 << len(slabs).bit_length())
        base = self.base if self.base and len(self.base[0]) >= room else []
        compute = lanes.compute_queue  # by the wire's side the current stream is the wire's
        lanes.wire.wait(compute.record_mark())

        def send() -> None:
            if not base:
                with torch.inference_mode(False):
                    base.append(torch.zeros(room, dtype=torch.long, device=device))
                compute.keep_alive(base[0])
            base[0][: len(apart)] = on_device(apart, device)

        # On the compute lane it would be sent after the mark that the wire has waited for.
        lanes.wire.run(send)
        self.slabs, self.grain, self.base = slabs, slab_alignment(slabs), base
        self._key = slabs[0].data_ptr(), slabs[0].shape, self.grain

    @property
    def capture_key(self) -> Any:
        """A value that stays equal as long as a captured copy by this table stays valid, once the table is filled again."""
        return self.base and (*self._key, self.base[0].data_ptr())

    def copy_units(self, slot: Tensor, out: Tensor, run: Callable[[Callable[[], object]], None]) -> None:
        """Copy the units in `slot` [n] to `out`, as `HostStore.gather` does, by `run` (of a `DeviceQueue`)."""
        slabs, base, grain = self.slabs, self.base, self.grain
        run(lambda: copy_units(out, slabs, base[0], slot, grain))


class GatherTables:
    """The `GatherTable` objects of a store, which must all be filled again when its slabs change."""

    def __init__(self, slabs: Slabs, lanes: CopyQueues, device: torch.device) -> None:
        self._of, self._all = (slabs, lanes, device), weakref.WeakSet[GatherTable]()
        self._last = GatherTable(())

    def find(self, places: Sequence[Tensor] = (), held: GatherTable | None = None) -> GatherTable:
        """Return a filled table of slabs and `places` for copies queued from now on: `held`, from which captures then read
        these `places`; else the last one, or a new one."""
        table = held or (self._last if self._last.places is places else GatherTable(places))
        if table.places is not places or not table.slabs:
            table.places = places
            table.fill_from_slabs(*self._of)
            self._all.add(table)
        self._last = self._last if held else table
        return table

    def invalidate(self) -> None:
        """Empty all tables, since the store's slabs have changed; `find` fills them again."""
        for one in self._all:
            one.slabs = []
