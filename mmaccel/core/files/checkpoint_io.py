"""Reads and writes safetensors and JSON files, never pickle; checks what it reads, and syncs what it writes to disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import MmaccelError, ModelError, quoted
from mmaccel.core.files import outside

OnHost = Callable[[Mapping[str, Tensor]], object]
Wanted = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and type of each tensor of a file; -1 in a shape stands for any size."""
WAIT_S = 10.0
"""Seconds that a save waits for another one to end."""
DEFERRED_BYTES = 1 << 30
"""The most bytes of tensors that a save copies, to write them when it no longer holds the model."""
_on_devices = threading.BoundedSemaphore(8)
"""Each file whose copies lie on devices holds one of these until its save ends."""
STAGED_BYTES = 1 << 24
"""Of pinned memory, by which copies go to the host: launches of other threads may wait for one to pageable memory."""
_staging = threading.Lock()
NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}
"""What a file system says that cannot write a file or a folder to the disk on demand."""


class _Deferred:
    def __init__(self) -> None:
        self.work, self.ends, self.room = list[Callable[[], object]](), ExitStack(), DEFERRED_BYTES


_deferred: ContextVar[_Deferred | None] = ContextVar("_deferred", default=None)


@contextmanager
def defer_writes() -> Iterator[None]:
    """Context in which `write_tensors` copies tensors, up to `DEFERRED_BYTES`, and files are written at the end: a save
    enters it before it holds the model, which others use while files are written. A device copies in the order of its
    current stream: until the end, nothing may change the tensors on another stream."""
    deferred = _Deferred()
    with deferred.ends:
        mark = _deferred.set(deferred)
        try:
            yield
        finally:
            _deferred.reset(mark)
        for write in deferred.work:
            write()


def write_or_defer(write: Callable[[], object], end: Callable[[], object] = lambda: None) -> None:
    """Call `write`, within `defer_writes` at its end; and then `end`, also if `write` failed or was not called."""
    if (deferred := _deferred.get()) is not None:
        deferred.work.append(write)
        deferred.ends.callback(end)
        return
    try:
        write()
    finally:
        end()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], then: OnHost = lambda host: None) -> None:
    """Write tensors (also views and device tensors) into one safetensors file (see `defer_writes`), then call `then` with
    what was written, on the host; raises OSError."""
    deferred, size = _deferred.get(), sum(tensor.nbytes for tensor in tensors.values())
    if deferred is None or size > deferred.room:
        host = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
        return _write_file(path, host, then)
    deferred.room -= size
    deferred.work.append(partial(_write_copies, path, *_copy(tensors, deferred.ends), then))
    return None


def _copy(tensors: Mapping[str, Tensor], ends: ExitStack) -> tuple[dict[str, Tensor], dict[Any, Any]]:
    """Return copies of tensors: on their devices, with the event of each device after which they are there, so that the
    caller need not wait; on the host if a device has no room, or too many files wait with such copies for `ends`."""
    if any(one.is_cuda for one in tensors.values()) and _on_devices.acquire(blocking=False):
        ends.callback(_on_devices.release)
        with suppress(torch.OutOfMemoryError):
            copies = {name: one.detach().clone() for name, one in tensors.items()}
            devices = {one.device for one in copies.values() if one.is_cuda}
            return copies, {at: torch.cuda.current_stream(at).record_event() for at in devices}
    return {name: one.detach().to("cpu", copy=True) for name, one in tensors.items()}, {}


def _write_copies(path: Path, copies: dict[str, Tensor], made: dict[Any, Any], then: OnHost) -> None:
    for device, event in made.items():
        # On a stream of its own: passes that were launched since do not wait for the copy to the host.
        side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_event(event)
        with torch.cuda.stream(side):
            copies |= {name: _to_host(one, side) for name, one in copies.items() if one.device == device}
    _write_file(path, {name: one.contiguous() for name, one in copies.items()}, then)


def _to_host(tensor: Tensor, side: Any) -> Tensor:
    """Return a copy on the host of a tensor on a device whose current stream is `side`."""
    with _staging:
        if (room := _staging_room()) is None:
            return tensor.cpu()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        parts = (torch.split(one.flatten().view(torch.uint8), len(room)) for one in (tensor, host))
        for there, here in zip(*parts, strict=True):
            room[: len(there)].copy_(there, non_blocking=True)
            side.synchronize()
            here.copy_(room[: len(there)])
    return host


@cache
def _staging_room() -> Tensor | None:
    """`STAGED_BYTES` of pinned memory for the process; None if the host can pin no more."""
    with suppress(RuntimeError):
        return torch.empty(STAGED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    return None


def _write_file(path: Path, host: dict[str, Tensor], then: OnHost) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # The format refuses tensors that share memory.
    seen: set[int] = set()
    for name, tensor in host.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            host[name] = tensor.clone()
        seen.add(storage.data_ptr())
    try:
        save_file(host, str(path))
    except SafetensorError as error:
        # The library tells what the system says in words alone.
        code = re.search(r"os error (\d+)", str(error))
        number = int(code.group(1)) if code else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    then(host)


def read_tensors(path: Path, wanted: Wanted, device: torch.device) -> dict[str, Tensor]:
    """Read the tensors of a file, which must have the names, shapes and types of `wanted`; raises `ModelError`."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    outside.check_regular_file(path, path.name, ModelError, fix="the file is damaged")
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            for name, (shape, dtype) in wanted.items():
                if name not in names:
                    raise ModelError(f"{path.name} lacks {name}; the file is damaged or of another stream.")
                tensor = file.get_tensor(name)
                pairs = zip(shape, tensor.shape, strict=False)
                fits = len(shape) == tensor.ndim and all(a in (-1, b) for a, b in pairs)
                if not fits or tensor.dtype != dtype:
                    has, want = (
                        f"{list(size)} {str(kind).removeprefix('torch.')}"
                        for size, kind in ((tensor.shape, tensor.dtype), (shape, dtype))
                    )
                    raise ModelError(
                        f"{path.name}: {name} is {has} where {want} is wanted; it is of another stream."
                    )
                tensors[name] = tensor.to(device)
    except (OSError, SafetensorError, ValueError) as error:
        reason = outside.os_reason(error)
        raise ModelError(f"{path.name} cannot be read ({reason}); the file is damaged.") from error
    return tensors


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write `facts` into a JSON file."""
    path.write_text(json.dumps(facts, indent=1, allow_nan=False), encoding="utf-8")


def read_json(path: Path, wanted: Mapping[str, type]) -> dict[str, Any]:
    """Read a JSON mapping that has at least the names of `wanted`, each of its type; raises `ModelError`."""
    facts = outside.read_json(path, path.name, ModelError, fix="the file is damaged")
    if not isinstance(facts, dict):
        raise ModelError(f"{path.name} holds no mapping; the file is damaged.")
    for name, kind in wanted.items():
        value = facts.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(
                f"{path.name}: {name} is {quoted(value)} where {kind.__name__} is wanted; the file is damaged."
            )
    return facts


def check_ints(value: Any, what: str, end: int, failure: type[MmaccelError] = ModelError) -> list[int]:
    """Return `value`, a list of whole numbers from 0 to below `end`; for any other raise `failure`, naming it `what`."""
    if not isinstance(value, list) or any(type(one) is not int or not 0 <= one < end for one in value):
        raise failure(f"{what} is {quoted(value)} where numbers below {end} are wanted; the file is damaged.")
    return value


def write_owner_only_text(path: Path, text: str) -> None:
    """Write a text file that only its owner may read, and sync it to disk; raises OSError."""
    with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)  # there may have been a file
        file.write(text)
    sync_to_disk(path)


def sync_to_disk(path: str | Path) -> None:
    """Wait until a file, or the names in a folder, are on disk, if the file system can tell; raises OSError."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


@contextmanager
def lock_folder(place: Path) -> Iterator[None]:
    """Context that waits for a running save to folder `place`, then locks it; the lock also ends with the process."""
    handle, late = os.open(place, os.O_RDONLY), time.monotonic() + WAIT_S
    try:
        with suppress(OSError):  # a file system without locks
            while not _lock(handle):
                if time.monotonic() > late:
                    raise ModelError(
                        f"save: another save writes to {place} and has not ended after {WAIT_S:g} s; save again later, "
                        "or give another path."
                    )
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
