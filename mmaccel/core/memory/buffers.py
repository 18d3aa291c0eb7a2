"""Helpers of KV memories: growing buffers, the buffer rows of a stream's units (frames), copies to the device and queues of
its work, free host memory, and work on one CPU thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.core.errors import ModelError
from mmaccel.core.files import checkpoint_io

# Places beyond what is needed: an eighth, within these bounds, for doubling would waste half the device at 1M tokens; and at
# least `LEAST` where the caller gives the share.
ROOM_MIN, ROOM_MAX, LEAST = 256, 8192, 256
KEPT = 1024
"""Entries up to which a buffer is never too long."""


def grow_buffer(
    buffer: Tensor | None,
    axis: int,
    length: int,
    *,
    like: Tensor | None = None,
    used: int | None = None,
    fill: float | None = None,
    share: float | None = None,
    pinned: bool = False,
) -> Tensor:
    """Return `buffer` if it has room for `length` along `axis`, else a larger copy of its first `used` entries (None: all).

    like    gives shape, type and device if there is no buffer yet
    fill    value of the new entries; None leaves them uninitialised
    share   extra room as a share of `length`; None: an eighth, between `ROOM_MIN` and `ROOM_MAX` entries
    pinned  allocate the copy in pinned host memory
    """
    if buffer is not None and buffer.shape[axis] >= length:
        return buffer
    source = like if buffer is None else buffer
    assert source is not None
    shape = list(source.shape)
    room = min(max(length // 8, ROOM_MIN), ROOM_MAX) if share is None else max(int(length * share), LEAST)
    shape[axis] = length + room
    # A buffer born in inference mode could not be written outside of it, and a stream may outlive the mode.
    with torch.inference_mode(False):
        out = torch.empty(shape, dtype=source.dtype, device=source.device, pin_memory=pinned)
        if fill is not None:
            out.fill_(fill)
    if buffer is not None:
        count = min(buffer.shape[axis], buffer.shape[axis] if used is None else used)
        out.narrow(axis, 0, count).copy_(buffer.narrow(axis, 0, count))
        if buffer.is_cuda and not torch.cuda.is_current_stream_capturing():
            buffer.record_stream(torch.cuda.current_stream(buffer.device))  # it may be of another one
    return out


def on_device(numbers: list[int] | Tensor, device: torch.device) -> Tensor:
    """Return a host tensor, or a list of numbers as a long tensor, on `device`, without a device sync."""
    here = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    pinned = device.type == "cuda" and here.numel() > 0
    return here.pin_memory().to(device, non_blocking=True) if pinned else here.to(device)


def is_too_long(used: int, room: int) -> bool:
    """Return whether to replace a buffer of `room` entries, of which `used` are in use, by a smaller one. CUDA graphs that
    read it are lost then."""
    return room > max(KEPT, 4 * used)


def as_words(*tensors: Tensor) -> list[Tensor]:
    """Return views of `tensors` [..., D] by words of 16 bytes; the tensors themselves if they differ in data type, rows of
    one do not begin and end at words, or their device may not know such words. PyTorch copies tensors with strides
    element by element: as words they are fewer."""
    one, size = tensors[0], 16 // tensors[0].element_size()
    steps = [(x.shape[-1], x.storage_offset(), *x.stride()[:-1]) for x in tensors]
    whole = not any(n % size for some in steps for n in some) and one.device.type in ("cpu", "cuda")
    fits = whole and all(x.stride(-1) == 1 and x.dtype == one.dtype for x in tensors)
    return [x.view(torch.complex128) for x in tensors] if fits else list(tensors)


class UnitRowMap:
    """Maps the units (frames) of a stream to rows of a buffer, on the host, in NumPy; rows of forgotten units are reused.

    The first k rows belong to the units `old` [k], ascending, and each later row n to unit n + `gap`. Until `keep_rows` is
    called, a unit's row is its number. With `may_move`, set where a stream is to forget units, what is captured as a CUDA
    graph looks rows up from the start.
    """

    def __init__(self) -> None:
        self.may_move = False
        self.clear()

    @property
    def moves(self) -> bool:
        """Whether rows differ from numbers, or may later."""
        return self.may_move or self.gap > 0

    def clear(self) -> None:
        """Reset the mapping: the buffer row of each unit (frame) is its number."""
        self.old, self.gap = np.zeros(0, dtype=np.int64), 0

    def keep_rows(self, rows: int, kept: Tensor) -> None:
        """Keep of the buffer's `rows` rows only those at indices `kept` [k], ascending, and renumber them from 0."""
        self.old, self.gap = self.units_of(rows)[kept.numpy()], self.gap + rows - len(kept)

    def forget_from(self, end: int) -> None:
        """Forget the units (frames) from number `end` on; the next units get these numbers."""
        if end < self.gap + len(self.old):
            self.old = self.old[: self.count_rows_below(end)]
            self.gap = end - len(self.old)

    def units_of(self, rows: int) -> Any:
        """Return the numbers [rows] of the units (frames) that the first `rows` rows of the buffer belong to."""
        late = np.arange(len(self.old), max(rows, len(self.old))) + self.gap
        return np.concatenate([self.old, late])[:rows]

    def rows_of(self, units: Any) -> Any:
        """Return the buffer rows of the units (frames) `units`, an array of any shape; -1 for forgotten ones."""
        if not self.gap:
            return units
        fresh, at = units - self.gap, np.searchsorted(self.old, units)
        known = np.append(self.old, -1)[at] == units
        return np.where(fresh >= len(self.old), fresh, np.where(known, at, -1))

    def count_rows_below(self, end: int) -> int:
        """Return the number of buffer rows of units (frames) numbered below `end`."""
        return max(end - self.gap, int(np.searchsorted(self.old, end))) if self.gap else end

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping from units (frames) to buffer rows as a JSON-ready dictionary, for `load_dict`."""
        return {"old": self.old.tolist(), "gap": self.gap} if self.gap else {}

    def load_dict(self, told: dict[str, Any], units: int) -> int:
        """Restore the mapping that `to_dict` returned, for a stream of `units` units (frames); return the row count."""
        (gap,) = checkpoint_io.check_ints([told.get("gap", 0)], "index: gap", units + 1)
        old = checkpoint_io.check_ints(told.get("old", []), "index: old", units)
        if old != sorted(set(old)) or len(old) > units - gap:
            raise ModelError("index: old does not fit the stream; the file is damaged.")
        self.old, self.gap = np.array(old, dtype=np.int64), gap
        return units - gap


UNKNOWN = 2**62
"""More than there is: what is not known limits nothing."""
MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")
FORMS = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)
"""Limit, use and statistics of the container around this process, and how names of these begin, in both forms of the
system's control groups."""


def total_host_bytes() -> int:
    """Return the bytes of host memory, or of the container around this process if that is less."""
    limits = (_numbers(GROUP / limit).get("", UNKNOWN) for limit, *_ in FORMS)
    return min(_numbers(MEMINFO, 1024).get("MemTotal", UNKNOWN), UNKNOWN, *limits)


def free_host_bytes() -> int:
    """Return the bytes of host memory that can still be allocated; the file cache does not count as used."""
    left = _numbers(MEMINFO, 1024).get("MemAvailable", UNKNOWN)
    for limit, use, stat, begin in FORMS:
        most = _numbers(GROUP / limit).get("", UNKNOWN)
        if most < UNKNOWN:
            cached = _numbers(GROUP / stat)
            files = sum(cached.get(f"{begin}{kind}_file", 0) for kind in ("inactive", "active"))
            left = min(left, most - _numbers(GROUP / use).get("", 0) + files)
    return max(0, left)


def _numbers(path: Path, unit: int = 1) -> dict[str, int]:
    """The numbers in a file of the system, each in `unit`s, by the name in its line, "" where there is none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    rows = [["", *line.removesuffix(" kB").replace(":", "").split()] for line in lines]
    return {row[-2]: int(row[-1]) * unit for row in rows if row[-1].isdigit()}


@contextmanager
def single_cpu_thread() -> Iterator[None]:
    """Context in which PyTorch uses one CPU thread for this thread's operations.

    An operation of about ten microseconds gains little from a second thread, and waits for it: for milliseconds, if that
    core is busy pinning memory, reading video or launching kernels.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Untyped in PyTorch.
_CUDA: Any = torch.cuda


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
    `QueueMark` of another. `current`: the caller's current CUDA stream is already `stream`."""

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
