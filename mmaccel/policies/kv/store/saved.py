"""A host store saved on disk: safetensors files of some units (frames) each, and a JSON file that lists their contents.

Version, shapes, sizes and a checksum of every file are verified before use. A file of the last save is linked under a new
name while at least half of its units (frames) are there, so that a save writes only what is new. The units of a memory's
window are among them: the store gets them later, unchanged, and need not write them again.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, StoreError, quoted
from mmaccel.core.files import checkpoint_io, outside

VERSIONS = 1, 2, 3, 4
"""Of saved stores: those that can be read, the last is written. The first named groups of units that lay together; files of
the second held no units but those of the store; files of the third were of one layer, and held no unit of a window."""
INDEX = "store.json"
FILE_BYTES, FILES = 256 * 2**20, 8
"""The most bytes of a file, unless a unit has more; and how many small files in a row become one. A small file has at most
that share of the units that fill a file."""
NEVER = 1 << 62


Sides = tuple[Tensor, Tensor]
"""Keys and values [L, G, n * P, D] of n units (frames) of all layers, on the host if they were read."""


class Window(NamedTuple):
    """Units (frames) from `first` on, which the store does not hold yet."""

    first: int
    sides: Sides


@dataclass(frozen=True)
class SavedUnitsFile:
    """A file of a saved store: the `units` (frames) of one layer that it holds, its checksum, and its `_identity`. `paths`:
    where the last save put it, and where it was before, which is used if that save failed later on."""

    units: list[int]
    paths: tuple[Path, ...]
    crc: int
    identity: tuple[int, ...]


@dataclass(frozen=True)
class _Group:
    """Layers that hold the same `units` (frames), ascending: the `files` that a save has of them, and those of the last save
    that it has yet to link."""

    layers: tuple[int, ...]
    units: list[int]
    files: list[SavedUnitsFile]
    to_link: list[SavedUnitsFile]

    def missing_units(self) -> list[int]:
        """Return the units that are in none of these files."""
        there = {unit for one in (*self.files, *self.to_link) for unit in one.units}
        return [unit for unit in self.units if unit not in there]


def save_store(store: Any, folder: Path, window: Window | None, end: Callable[[], object]) -> None:
    """Save a `store`, and a memory's `window` as it is now, to `folder` (see `checkpoint_io.write_or_defer`); raises
    `StoreError` on failure."""
    try:
        write = _StoreSave(store, folder, window).write
    except BaseException:
        end()
        raise
    checkpoint_io.write_or_defer(write, end)


class _StoreSave:
    """A save of `store`, and of a memory's `window`, to `folder`. It is made while both stay as they are, and keeps what is
    new in the window (as `checkpoint_io.write_tensors` does); `write` does the rest."""

    def __init__(self, store: Any, folder: Path, window: Window | None) -> None:
        self._store, self._folder, self._tokens = store, folder, store.shape.tokens
        self._paths = (folder / f"store-{n:05d}.safetensors" for n in itertools.count())
        first = NEVER if window is None else window.first
        late = range(first, first + (0 if window is None else window.sides[0].shape[2] // self._tokens))
        alike = dict[tuple[int, ...], list[int]]()
        for layer in range(store.shape.layers):
            alike.setdefault((*store.units(layer), *late), []).append(layer)
        with _failures_told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._groups = [self._begin((*layers,), [*units], first) for units, layers in alike.items()]
            for one in self._groups:
                if window is not None:
                    self._keep_window(one, window)

    def _most(self, layers: Sequence[int]) -> int:
        """Units that fill a file."""
        unit_bytes: int = len(layers) * self._store.shape.nbytes
        return max(1, FILE_BYTES // unit_bytes)

    def _begin(self, layers: tuple[int, ...], units: list[int], first: int) -> _Group:
        last, held = self._store.written.get(layers, []), set(units)
        held_by_half = [one for one in last if 2 * len(held.intersection(one.units)) >= len(one.units)]
        used = _without_small_files(held_by_half, self._most(layers))
        # The window goes on before `write`: what cannot be linked of it is kept now.
        now = [file for one in used if one.units[-1] >= first for file in self._link(one)]
        return _Group(layers, units, now, [one for one in used if one.units[-1] < first])

    def _keep_window(self, group: _Group, window: Window) -> None:
        """Write what is new in the window, or keep it to be written."""
        new = [unit for unit in group.missing_units() if unit >= window.first]
        whole = len(group.layers) == self._store.shape.layers
        for some in _split(new, self._most(group.layers), in_a_row=True):
            columns = slice(*((unit - window.first) * self._tokens for unit in (some[0], some[-1] + 1)))
            rows = [
                side[:, :, columns] if whole else side[[*group.layers], :, columns] for side in window.sides
            ]
            self._write_file(group, some, *rows)

    def write(self) -> None:
        """Link or write all else, and the index."""
        with _failures_told(self._folder):
            for group in self._groups:
                while group.to_link:
                    group.files.extend(self._link(group.to_link.pop(0)))
                new = group.missing_units()
                if new:
                    self._store.wait_for_copies()
                for some in _split(new, self._most(group.layers)):
                    self._write_file(group, some, *self._gathered(group.layers, some))
            pieces = [piece for group in self._groups for piece in map(partial(_piece, group), group.files)]
            index = {"version": VERSIONS[-1], "shape": self._store.shape.to_json(), "pieces": pieces}
            (self._folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        self._store.written = {group.layers: group.files for group in self._groups}

    def _gathered(self, layers: Sequence[int], units: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values [L, G, n * P, D] of units that the store holds."""
        shape = self._store.shape
        size = len(layers), shape.groups, len(units), shape.tokens, shape.size
        key, value = (torch.empty(size, dtype=shape.dtype, device="cpu") for _ in "kv")
        for row, layer in enumerate(layers):
            for at, unit in enumerate(units):
                key[row, :, at], value[row, :, at] = self._store.unit_view(layer, unit)[0]
        return key.flatten(2, 3), value.flatten(2, 3)

    def _write_file(self, group: _Group, units: list[int], key: Tensor, value: Tensor) -> None:
        path = next(self._paths)

        def note(host: Mapping[str, Tensor]) -> None:
            crc = _checksum(host["key"], host["value"])
            group.files.append(SavedUnitsFile(units, (path,), crc, _identity(path)))

        checkpoint_io.write_tensors(path, {"key": key, "value": value}, note)

    def _link(self, last: SavedUnitsFile) -> list[SavedUnitsFile]:
        """Hard-link a file of the last save, and return it; return nothing if it is gone, is another user's, or another file
        has taken its name."""
        path = next(self._paths)
        for old in last.paths if last.identity and last.identity[0] == self._folder.stat().st_uid else ():
            with suppress(OSError):
                os.link(old, path)
                if _identity(path) == last.identity:
                    return [replace(last, paths=(path, old))]
                path.unlink()
        return []


def _piece(group: _Group, file: SavedUnitsFile) -> dict[str, Any]:
    """What the index says of a file."""
    gone = sorted({*file.units}.difference(group.units))
    about = {"layers": group.layers, "units": file.units, "gone": gone, "crc": file.crc}
    return {"file": file.paths[0].name, **about}


def _split(units: Sequence[int], most: int, in_a_row: bool = False) -> Iterator[list[int]]:
    """Yield ascending `units` in parts of at most `most`; `in_a_row`: parts without gaps."""
    part = list[int]()
    for unit in units:
        if part and (len(part) == most or (in_a_row and unit != part[-1] + 1)):
            yield part
            part = []
        part.append(unit)
    if part:
        yield part


def _without_small_files(files: Sequence[SavedUnitsFile], most: int) -> list[SavedUnitsFile]:
    """Return `files` without those whose units go into one file: `FILES` in a row, all small (`most` units fill a file), the
    first at most twice as large as the last. What they become counts as one of the next."""
    kept = list[tuple[int, SavedUnitsFile | None]]()
    for one in sorted(files, key=lambda one: one.units[0]):
        kept.append((len(one.units), one))
        while len(sizes := [size for size, _ in kept[-FILES:]]) == FILES:
            if max(sizes) * FILES > most or sizes[0] > 2 * sizes[-1]:
                break
            kept[-FILES:] = [(sum(sizes), None)]
    return [one for _, one in kept if one is not None]


@contextmanager
def _failures_told(folder: Path) -> Iterator[None]:
    """Context that turns an `OSError` into a `StoreError`."""
    try:
        yield
    except OSError as error:
        why = f"cannot write to {folder} ({error.strerror}); give another folder"
        raise StoreError(f"host store: {why}.") from error


def _identity(path: Path, mode: int | None = None) -> tuple[int, ...]:
    """Return owner, device, inode, time of last change and size of a file, by which it differs from any other; nothing if
    it is missing, is a link or no regular file, or does not have the permissions `mode`, if given."""
    try:
        told = path.lstat()
    except OSError:
        return ()
    fits = stat.S_ISREG(told.st_mode) and mode in (None, stat.S_IMODE(told.st_mode))
    return (told.st_uid, told.st_dev, told.st_ino, told.st_mtime_ns, told.st_size) if fits else ()


def read_store(store: Any, folder: Path, first: int, end: int) -> Sides | None:
    """Read the units (frames) below `first` saved in `folder` into the empty `store`, whose next save links the files, and
    return those of ``first .. end``, a memory's window; None if there are none, or an earlier version saved them elsewhere.
    Raises `StoreError` on failure."""
    shape, late = store.shape, end - first
    size = shape.layers, shape.groups, late, shape.tokens, shape.size
    window = [torch.empty(size, dtype=shape.dtype, device="cpu") for _ in "kv"]
    there = torch.zeros(size[:1] + size[2:3], device="cpu")
    try:
        index = outside.read_json(folder / INDEX, INDEX, StoreError, fix="save it again")
        if index["version"] not in VERSIONS:
            raise StoreError(
                f"host store: {folder} is of version {quoted(index['version'])} and this is version {VERSIONS[-1]}; save "
                "it again."
            )
        if index["shape"] != shape.to_json():
            raise StoreError(
                f"host store: {folder} holds units of {quoted(index['shape'], 120)} and the store is for "
                f"{shape.to_json()}; load it with the model and frame size it was saved with."
            )
        latest = index["version"] == VERSIONS[-1]
        for piece in index["pieces"]:
            layers = piece["layers"] if latest else [piece["layer"]]
            units, path = piece["units"], folder / piece["file"]
            checkpoint_io.check_ints(layers, f"{INDEX}: layers", shape.layers, StoreError)
            checkpoint_io.check_ints(units, f"{INDEX}: units", end, StoreError)
            gone = checkpoint_io.check_ints(piece.get("gone", []), f"{INDEX}: gone", end, StoreError)
            if path.name != piece["file"] or len({*layers}) < len(layers) or len({*units}) < len(units):
                raise ValueError(f"{INDEX} cannot say that of {quoted(piece['file'])}")
            # Taken before the file is read: one that takes its name later is not linked. A save sets these permissions.
            identity = _identity(path, 0o600)
            sides, crc = _read_file(path, shape, len(layers), len(units), latest)
            if crc != piece["crc"]:
                raise ValueError(f"{path.name} is not what was written")
            kept = [at for at, unit in enumerate(units) if unit < first and unit not in gone]
            ahead = [at for at, unit in enumerate(units) if unit >= first and unit not in gone]
            for row, layer in enumerate(layers):
                pair = [side[row][:, kept].flatten(1, 2).to(store.device) for side in sides]
                if store.put_layer(layer, [units[at] for at in kept], *pair):
                    # Whoever saved it does not know that some are no more.
                    raise StoreError(
                        f"host store: {folder} holds more than this host has room for; free memory, or load it on a "
                        "host with as much as the one it was saved on."
                    )
                for at in ahead:
                    there[layer, units[at] - first] = 1
                    for side, found in zip(window, sides, strict=True):
                        side[layer, :, units[at] - first] = found[row, :, at]
            if latest and units and units == sorted(units):
                one = SavedUnitsFile(units, (path,), piece["crc"], identity)
                store.written.setdefault((*layers,), []).append(one)
        if latest and not there.all():
            raise ValueError(f"units of the window, {first} to {end - 1}, are missing")
    except (OSError, KeyError, TypeError, ValueError, IndexError, ModelError) as error:
        why = str(error)[:200].rstrip(".")
        raise StoreError(f"host store: {folder} is damaged or incomplete ({why}); save it again.") from error
    return (window[0].flatten(2, 3), window[1].flatten(2, 3)) if latest and late else None


def _read_file(path: Path, shape: Any, layers: int, count: int, latest: bool) -> tuple[list[Tensor], int]:
    """Keys and values, each [L, G, n, P, D], of a file of `count` units, and its checksum."""
    if not latest:
        wanted: checkpoint_io.Wanted = {"units": ((count, *shape.tensor_shape), shape.dtype)}
        units = checkpoint_io.read_tensors(path, wanted, torch.device("cpu"))["units"]
        return list(units.permute(1, 2, 0, 3, 4)[:, None]), _checksum(units)
    size = layers, shape.groups, count * shape.tokens, shape.size
    wanted = dict.fromkeys(("key", "value"), (size, shape.dtype))
    sides = [*checkpoint_io.read_tensors(path, wanted, torch.device("cpu")).values()]
    return [one.view(*size[:2], count, *shape.tensor_shape[2:]) for one in sides], _checksum(*sides)


def _checksum(*tensors: Tensor) -> int:
    crc = 0
    for one in tensors:
        raw: Any = one.contiguous().view(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(raw, crc)
    return crc


def allocate_file(path: Path, nbytes: int) -> None:
    """Create a file of `nbytes` bytes whose disk space is allocated: writing to a memory map of a sparse file could fail."""
    with path.open("xb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return
        left, zeros = nbytes, bytes(2**20)
        while left:
            left -= file.write(zeros[:left])
