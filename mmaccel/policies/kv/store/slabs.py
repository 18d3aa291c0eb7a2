"""Host memory for a stream's units: slabs (blocks of pinned memory, or memory-mapped files), slots, and copy queues."""

from __future__ import annotations

import heapq
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.core.errors import StoreError
from mmaccel.core.memory.buffers import UnitRowMap, free_host_bytes, on_device, total_host_bytes
from mmaccel.policies.kv.store import saved

SLAB_BYTES = 16 * 2**20
"""A power of two, for the allocator of pinned memory rounds up to one. While a slab is pinned, for some 0.8 ms a MiB (H100),
the driver lets nobody else on, no token of an answer either."""
PIECES, FILE_BYTES = 2**14, 256 * 2**20
"""Slabs of a whole host at most, and the size of files: a system maps 65,530 pieces for a process."""
LEAST = 64
"""Slots of a slab at least, where files are made of them."""
SPARE = 1 / 16
"""The share of the host's memory that is left to everything else."""
SHARES = 64
"""Into so many slabs at least goes what all stores of the process may take together."""

# Untyped in PyTorch.
_CUDA: Any = torch.cuda


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
        self._shape, self._pinned, self._cap, self._disk = shape, pinned, cap, disk
        self._together = together
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
        """Return the error message of a full store: why no slab can be added, and the fix. `slots`: a pass needs so many."""
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
        if self._together is None:
            return False
        stores = [one for key in _open.keyrefs() if (one := key()) is not None]
        taken = sum(one.slab_bytes * (one.in_memory + (one._ahead is not None)) for one in stores)
        return taken + self.slab_bytes > self._together

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
            self.slot = np.full((len(old), max(len(every), 2 * size)), -1, dtype=np.int64)
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


class QueueMark:
    """A point in the work of a `DeviceQueue` (a CUDA stream, or the host) that can be waited for and timed.

    On CUDA it is an event of `stream`, with a time if `timed`. On the host, where work is done at once, it is the time.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None, timed: bool = False) -> None:
        self.at = time.perf_counter()
        self.event: Any = None
        if stream is not None:
            self.event = _CUDA.Event(enable_timing=timed)
            self.event.record(stream)

    def wait_on_host(self) -> None:
        """Block the host until all work issued before the mark has run."""
        if self.event is not None:
            self.event.synchronize()

    def seconds(self, later: QueueMark) -> float:
        """Return the seconds from this mark to a later one, both done and timed."""
        return later.at - self.at if self.event is None else self.event.elapsed_time(later.event) / 1000.0


class DeviceQueue:
    """An ordered queue of device work, on a CUDA `stream` or the host. Queues run independently unless one waits for a
    `QueueMark` of another. `current`: the stream is already the current one where work is issued."""

    def __init__(self, stream: torch.cuda.Stream | None = None, current: bool = False) -> None:
        self.stream, self._current = stream, current or stream is None

    def run(self, work: Callable[[], object]) -> None:
        """Enqueue `work`. It may run later, but always after earlier work."""
        if self._current:
            work()
        else:
            with torch.cuda.stream(self.stream):
                work()

    def record_mark(self, timed: bool = False) -> QueueMark:
        """Record and return a `QueueMark`, which is reached when all work issued on this queue so far has ended."""
        return QueueMark(self.stream, timed)

    def wait(self, mark: QueueMark) -> None:
        """Make later work of this queue wait for `mark`."""
        if self.stream is not None:
            self.stream.wait_event(mark.event)

    def keep_alive(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor`, made on another queue, until the work issued here has read it (`record_stream`)."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


class CopyQueues:
    """A store's two `DeviceQueue`s: `compute_queue`, on which the model runs, and `wire`, which copies units (frames)
    between host and device. On CUDA `wire` has its own stream; elsewhere both are the host. Tests may replace both."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.wire = device, DeviceQueue(_CUDA.Stream(device) if device.type == "cuda" else None)

    @property
    def compute_queue(self) -> DeviceQueue:
        """The queue of the current CUDA stream, on which the model computes; on a CPU it is `wire` itself."""
        if self._device.type != "cuda":
            return self.wire
        return DeviceQueue(torch.cuda.current_stream(self._device), current=True)

    def wait_for_copies(self) -> None:
        """Make later computation wait for all copies issued so far."""
        self.compute_queue.wait(self.wire.record_mark())
