"""Large pieces of host memory, pinned where a device reads them, and files mapped into memory when it has run out; and the
table that tells in which slot of them each unit lies, on the host and on the device."""

from __future__ import annotations

import heapq
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmaccel.core.errors import StoreError

SLAB_BYTES = 256 * 2**20
"""A power of two, for the allocator of pinned memory rounds up to one. Thousands of small pinned pieces would also run into
the system's limit of maps."""

LEAST = 64
"""Slots of a slab at least, where files are made of them."""

SPARE = 1 / 16
"""The share of the host's memory that is left to everything else."""


@dataclass(frozen=True)
class Shape:
    """What a unit is: layers, kv heads G, tokens P, head size D, and the type of its numbers."""

    layers: int
    groups: int
    tokens: int
    size: int
    dtype: torch.dtype

    @property
    def unit(self) -> tuple[int, int, int, int]:
        """Keys and values of one unit in one layer: [2, G, P, D]."""
        return 2, self.groups, self.tokens, self.size

    @property
    def nbytes(self) -> int:
        """Bytes of one unit in one layer."""
        return 2 * self.groups * self.tokens * self.size * self.dtype.itemsize

    def facts(self) -> dict[str, Any]:
        """Its fields, as a saved store tells them."""
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch.")}

    def side(self, name: str, tensor: Tensor, n: int) -> Tensor:
        """`tensor` [G, n * P, D], with or without a batch of 1; refused when its units are not like these."""
        found = tensor[0] if tensor.dim() == 4 and tensor.shape[0] == 1 else tensor
        wanted = self.groups, n * self.tokens, self.size
        if tuple(found.shape) != wanted or found.dtype != self.dtype:
            raise StoreError(
                f"host store: {name} of {n} units is {found.dtype} {list(found.shape)} and should be {self.dtype} "
                f"{list(wanted)}; all units of a stream have one size."
            )
        return found.detach()


class Slabs:
    """Slabs of `per` slots of one unit and layer each; slot s is entry ``s % per`` of slab ``s // per``.

    Memory is taken slab by slab up to `cap` bytes, and never the last `SPARE` of what the host has; pinned memory one slab
    ahead of need. Files after that, with `disk`, each of its full length from the start, so that a disk that fills up later
    harms nothing that was stored.
    """

    def __init__(
        self, shape: Shape, pinned: bool, slab_bytes: int, cap: int | None, disk: bool, folder: Path | None
    ) -> None:
        self._shape, self._pinned, self._cap, self._disk = shape, pinned, cap, disk
        self.folder = folder
        # Files take slabs of the same size, and should be few.
        least = min(slab_bytes, LEAST * shape.nbytes) if disk else shape.nbytes
        self._bytes = slab_bytes if cap is None else _fitting(slab_bytes, cap, least)
        self.per = max(1, self._bytes // shape.nbytes)
        self.slabs: list[Tensor] = []
        self._ahead: _Ahead | None = None
        self.files: list[Path] = []
        self.in_memory = 0
        self._remove = weakref.finalize(self, _remove, self.files, [])

    def grow(self) -> bool:
        """One slab more; False when memory is used up and there is no disk. Raises `StoreError` when the disk is full."""
        if not self.files:
            made = None if self._ahead is None else self._ahead.result()
            self._ahead = None
            # What could not be had ahead of need may be there by now.
            if made is None and self._room():
                made = self._memory()
            if made is not None:
                self.slabs.append(made)
                self.in_memory += 1
                # Pinning a slab takes a tenth of a second, and a stream fills one in less: not while frames wait.
                if self._pinned and self._room():
                    self._ahead = _Ahead(self._memory)
                return True
        if not self._disk:
            return False
        self.slabs.append(self._file())
        return True

    def entry(self, start: int, end: int) -> Tensor:
        """[end - start, 2, G, P, D], the slots of one slab."""
        slab, first = divmod(start, self.per)
        return self.slabs[slab][first : first + end - start]

    def memory_bytes(self) -> int:
        return self.in_memory * self._bytes

    def disk_bytes(self) -> int:
        return len(self.files) * self._bytes

    def close(self) -> None:
        """Let go of the memory, and remove the files."""
        if self._ahead is not None:
            self._ahead.result()
        self.slabs.clear()
        self.in_memory, self._ahead = 0, None
        # PyTorch keeps pinned memory that was let go of, where it can tell it not to.
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        if self._pinned and empty is not None:
            empty()
        self._remove()

    def why_full(self, slots: int | None = None) -> str:
        """What stands in the way of another slab, and the mend; `slots`: of a pass for which the oldest gave way already."""
        mend, need = "spill to disk (spill='disk'), drop frames (spill='drop_oldest')", ""
        if slots is not None:
            need = f" and a pass needs at least {slots * self._shape.nbytes}"
            mend = "watch fewer frames at a time, spill to disk (spill='disk')"
        if self._cap is not None and self.memory_bytes() + self._bytes > self._cap:
            return f"its cap of {self._cap} bytes is reached{need}; raise cap (a policy's host_bytes), {mend}"
        return f"the host has {host_available()} bytes left{need}; {mend}, or free memory"

    def _room(self) -> bool:
        if self._cap is not None and self.memory_bytes() + self._bytes > self._cap:
            return False
        return host_available() - self._bytes >= SPARE * host_total()

    def _memory(self) -> Tensor | None:
        try:
            # Written in any mode later, so not born in inference mode.
            with torch.inference_mode(False):
                raw = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=self._pinned)
        except (RuntimeError, MemoryError):
            return None
        return self._cut(raw)

    def _file(self) -> Tensor:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="mmaccel-"))
            self._remove.detach()
            self._remove = weakref.finalize(self, _remove, self.files, [self.folder])
        path = self.folder / f"slab-{os.getpid()}-{id(self):x}-{len(self.files):05d}.bin"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _occupy(path, self._bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StoreError(
                f"host store: {self._bytes} more bytes do not fit on the disk under {self.folder} ({error.strerror}); "
                "free room there, name another folder, or raise cap (a policy's host_bytes)."
            ) from error
        with torch.inference_mode(False):
            raw = torch.from_file(str(path), shared=True, size=self._bytes, dtype=torch.uint8)
        self.files.append(path)
        return self._cut(raw)

    @torch.inference_mode(False)
    def _cut(self, raw: Tensor) -> Tensor:
        used = raw[: self.per * self._shape.nbytes]
        return used.view(self._shape.dtype).view(self.per, *self._shape.unit)


class _Ahead:
    """What `make` gives, made by a thread of its own."""

    def __init__(self, make: Callable[[], Tensor | None]) -> None:
        self._made: Tensor | None = None

        def work() -> None:
            self._made = make()

        self._thread = threading.Thread(target=work, name="mmaccel-slab", daemon=True)
        self._thread.start()

    def result(self) -> Tensor | None:
        """It, once it is there."""
        self._thread.join()
        return self._made


def _fitting(slab_bytes: int, cap: int, least: int) -> int:
    """A slab of at most `slab_bytes`, halved until whole slabs use seven eighths of the cap or more."""
    while slab_bytes // 2 >= least and (slab_bytes > cap or cap % slab_bytes > cap // 8):
        slab_bytes //= 2
    return slab_bytes


def _occupy(path: Path, nbytes: int) -> None:
    """A file of `nbytes` bytes whose room on the disk is taken: a map of a file with holes could fail at any write."""
    with path.open("xb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return
        left, zeros = nbytes, bytes(2**20)
        while left:
            left -= file.write(zeros[:left])


def _remove(files: list[Path], folders: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
    files.clear()
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


UNKNOWN = 2**62
"""More than there is: what is not known limits nothing."""

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")
FORMS = (
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)
"""Limit, use and statistics of the container around this process, in both forms of the system's control groups."""


def host_total() -> int:
    """Bytes of memory of the host, or of the container around this process where that is less."""
    return min(_host("MemTotal"), *(_number(limit) for limit, *_ in FORMS))


def host_available() -> int:
    """Bytes that can still be taken without harm; the system's copies of files give way and do not count as used."""
    left = _host("MemAvailable")
    for limit, use, stat, cached in FORMS:
        most = _number(limit)
        if most < UNKNOWN:
            left = min(left, most - _number(use, 0) + sum(_statistics(stat, cached)))
    return max(0, left)


def _host(name: str) -> int:
    found = [int(line.split()[1]) * 1024 for line in _lines(MEMINFO) if line.startswith(f"{name}:")]
    return found[0] if found else UNKNOWN


def _number(name: str, otherwise: int = UNKNOWN) -> int:
    lines = _lines(GROUP / name)
    return min(int(lines[0]), UNKNOWN) if lines and lines[0].isdigit() else otherwise


def _statistics(name: str, wanted: tuple[str, ...]) -> list[int]:
    return [int(line.split()[1]) for line in _lines(GROUP / name) if line.split()[0] in wanted]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split("\n")[:-1]
    except OSError:
        return []


class SlotTable:
    """Which slot each unit of each layer has; [L, units] numbers, -1 for none, which widen with the unit numbers."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self._device = device
        self.slot = np.full((layers, 0), -1, dtype=np.int64)
        self.size = 0
        """Slots that there are."""
        self.free: list[int] = []
        """A heap of those that no unit has."""
        self._copy: Tensor | None = None
        self._stale = True

    def grow(self, slots: int) -> None:
        """Add `slots` slots at the end."""
        # Behind all others: it stays a heap.
        self.free += range(self.size, self.size + slots)
        self.size += slots

    def put(self, layer: int, units: Sequence[int]) -> list[int]:
        """Units of a layer have slots from now on, the first that are free."""
        slots = [heapq.heappop(self.free) for _ in units]
        width, have = max(units) + 1, self.slot.shape[1]
        if width > have:
            more = np.full((len(self.slot), max(width, 2 * have) - have), -1, dtype=np.int64)
            self.slot = np.concatenate([self.slot, more], 1)
        self.slot[layer, units] = slots
        self._stale = True
        return slots

    def drop(self, layer: int, units: Iterable[int]) -> None:
        """Units of a layer have no slots; those that have none are passed over."""
        for unit in units:
            if self.look(layer, unit) >= 0:
                heapq.heappush(self.free, self.look(layer, unit))
                self.slot[layer, unit] = -1
                self._stale = True

    def look(self, layer: int, unit: int) -> int:
        """The slot of a unit, -1 where it has none."""
        return int(self.slot[layer, unit]) if 0 <= unit < self.slot.shape[1] else -1

    def units(self, layer: int, first: int = 0) -> list[int]:
        """The units from number `first` on that a layer holds, ascending."""
        return [first + int(unit) for unit in np.flatnonzero(self.slot[layer, first:] >= 0)]

    def held(self) -> NDArray[np.intp]:
        """The units that some layer holds, ascending."""
        return np.flatnonzero((self.slot >= 0).any(0))

    def rows(self) -> Tensor:
        """The slots on the device: uploaded whole, and only when asked for after a change, for streams change in one
        phase and are asked in another. They stay where they are until the table widens."""
        if self._copy is None or self._copy.shape != self.slot.shape:
            with torch.inference_mode(False):
                self._copy = torch.empty(self.slot.shape, dtype=torch.long, device=self._device)
            self._stale = True
        if self._stale:
            self._copy.copy_(on_device(torch.from_numpy(self.slot).clone(), self._device))
            self._stale = False
        return self._copy

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return 0 if self._copy is None else self._copy.nbytes


def on_device(numbers: list[int] | Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, or long numbers, on `device`, without waiting for what that computes."""
    here = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    pinned = device.type == "cuda" and here.numel() > 0
    return here.pin_memory().to(device, non_blocking=True) if pinned else here.to(device)
