"""A host store saved on disk: safetensors files of bounded size, and a JSON file that lists their contents.

Version, shapes, sizes and a checksum of every file are verified before use. A file of the last save is linked under a new
name while the store holds at least half of its units (frames), so that a save writes only what is new.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, StoreError, quoted
from mmaccel.core.files import checkpoint_io, outside

VERSIONS = 1, 2, 3
"""Of saved stores: those that can be read, the last is written. The first named groups of units that lay together; files of
the second held no units but those of the store."""
INDEX = "store.json"
FILE_BYTES, FILES = 32 * 2**20, 8
"""The most bytes of a file; and how many files whose units would fill one are written as one, as they are when later units
are there."""


@dataclass(frozen=True)
class SavedUnitsFile:
    """A file of a saved store: the `units` (frames) of one layer that it holds, its checksum, and its `_identity`. `paths`:
    where the last save put it, and where it was before, which is used if that save failed later on."""

    units: list[int]
    paths: tuple[Path, ...]
    crc: int
    identity: tuple[int, ...]


def write_store(store: Any, folder: Path) -> None:
    """Write all units (frames) of `store` once its transfers have ended; raises `StoreError` if that fails."""
    store.wait_for_copies()
    most, written = max(1, FILE_BYTES // store.shape.nbytes), dict[tuple[int, int], list[SavedUnitsFile]]()
    told, paths = list[dict[str, Any]](), (folder / f"store-{n:05d}.safetensors" for n in itertools.count())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for layer in range(store.shape.layers):
            held = store.units(layer)
            for number, some in itertools.groupby(held, lambda unit: unit // most):
                units, files = set(some), list[SavedUnitsFile]()
                last = store.written.get((layer, number), [])
                if len(last) >= FILES or (len(last) > 1 and number < held[-1] // most):
                    last = []  # into one file
                for one in last:
                    if 2 * len(units.intersection(one.units)) >= len(one.units):
                        files += _link_last_file(one, next(paths))
                if new := sorted(units.difference(*(one.units for one in files))):
                    kept, path = torch.cat([store.unit_view(layer, unit) for unit in new]), next(paths)
                    checkpoint_io.write_tensors(path, {"units": kept})
                    files.append(SavedUnitsFile(new, (path,), _checksum(kept), _identity(path)))
                written[layer, number] = files
                for one in files:
                    gone = [unit for unit in one.units if unit not in units]
                    about = {"layer": layer, "units": one.units, "gone": gone, "crc": one.crc}
                    told.append({"file": one.paths[0].name, **about})
        index = {"version": VERSIONS[-1], "shape": store.shape.to_json(), "pieces": told}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"host store: cannot write to {folder} ({error.strerror}); give another folder."
        ) from error
    store.written = written


def _link_last_file(last: SavedUnitsFile, path: Path) -> list[SavedUnitsFile]:
    """Hard-link the file of the last save to `path`, and return it; return nothing if it is gone, is another user's, or
    another file has taken its name."""
    for old in last.paths if last.identity and last.identity[0] == path.parent.stat().st_uid else ():
        with suppress(OSError):
            os.link(old, path)
            if _identity(path) == last.identity:
                return [replace(last, paths=(path, old))]
            path.unlink()
    return []


def _identity(path: Path, mode: int | None = None) -> tuple[int, ...]:
    """Return owner, device, inode, time of last change and size of a file, by which it differs from any other; nothing if
    it is missing, is a link or no regular file, or does not have the permissions `mode`, if given."""
    try:
        told = path.lstat()
    except OSError:
        return ()
    fits = stat.S_ISREG(told.st_mode) and mode in (None, stat.S_IMODE(told.st_mode))
    return (told.st_uid, told.st_dev, told.st_ino, told.st_mtime_ns, told.st_size) if fits else ()


def read_store(store: Any, folder: Path, end: int) -> None:
    """Read the units (frames) below `end` saved in `folder` into the empty `store`, whose next save links the files; raises
    `StoreError` if that fails."""
    most = max(1, FILE_BYTES // store.shape.nbytes)
    try:
        index = outside.read_json(folder / INDEX, INDEX, StoreError, fix="save it again")
        if index["version"] not in VERSIONS:
            raise StoreError(
                f"host store: {folder} is of version {quoted(index['version'])} and this is version {VERSIONS[-1]}; save "
                "it again."
            )
        if index["shape"] != store.shape.to_json():
            raise StoreError(
                f"host store: {folder} holds units of {quoted(index['shape'], 120)} and the store is for "
                f"{store.shape.to_json()}; load it with the model and frame size it was saved with."
            )
        for piece in index["pieces"]:
            layer, units, path = piece["layer"], piece["units"], folder / piece["file"]
            checkpoint_io.check_ints([layer], f"{INDEX}: layer", store.shape.layers, StoreError)
            checkpoint_io.check_ints(units, f"{INDEX}: units", end, StoreError)
            gone = checkpoint_io.check_ints(piece.get("gone", []), f"{INDEX}: gone", end, StoreError)
            if path.name != piece["file"]:
                raise ValueError(f"{quoted(piece['file'])} is not a file of a store")
            wanted = {"units": ((len(units), *store.shape.tensor_shape), store.shape.dtype)}
            # Taken before the file is read: one that takes its name later is not linked. A save sets these permissions.
            identity = _identity(path, 0o600)
            kept = checkpoint_io.read_tensors(path, wanted, torch.device("cpu"))["units"]
            if _checksum(kept) != piece["crc"]:
                raise ValueError(f"{path.name} is not what was written")
            for unit, (key, value) in zip(units, kept, strict=True):
                here = unit not in gone
                if here and store.put_layer(layer, [unit], key.to(store.device), value.to(store.device)):
                    # Whoever saved it does not know that some are no more.
                    raise StoreError(
                        f"host store: {folder} holds more than this host has room for; free memory, or load it on a "
                        "host with as much as the one it was saved on."
                    )
            if units and units == sorted(units) and units[0] // most == units[-1] // most:
                one = SavedUnitsFile(units, (path,), piece["crc"], identity)
                store.written.setdefault((layer, units[0] // most), []).append(one)
    except (OSError, KeyError, TypeError, ValueError, IndexError, ModelError) as error:
        why = str(error)[:200].rstrip(".")
        raise StoreError(f"host store: {folder} is damaged or incomplete ({why}); save it again.") from error


def _checksum(kept: Tensor) -> int:
    raw: Any = kept.contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw)


def allocate_file(path: Path, nbytes: int) -> None:
    """Create a file of `nbytes` bytes whose disk space is allocated: writing to a memory map of a sparse file could fail."""
    with path.open("xb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return
        left, zeros = nbytes, bytes(2**20)
        while left:
            left -= file.write(zeros[:left])
