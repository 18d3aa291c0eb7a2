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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, StoreError, quoted
from mmaccel.core.files import checkpoint_io, outside

VERSIONS = 1, 2, 3, 5
"""Of saved stores: those that can be read, the last is written. The first named groups of units that lay together; files of
the second held no units but those of the store; files of the third were of one layer, and held no unit of a window."""
INDEX = "store.json"
FILE_BYTES, FILES = 256 * 2**20, 8
"""The most bytes of a file, unless a unit has more; and how many files in a row become one, if it has room for them."""
NEVER = 1 << 62
"""Above the number of any unit: the first unit of a window that is not there."""


Tensors = Mapping[str, Tensor]
Pairs = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [1, G, n * P, D] of n units (frames), of each layer."""


class Window(NamedTuple):
    """Units (frames) from `first` on, which the store does not hold yet."""

    first: int
    pairs: Pairs


@dataclass(frozen=True)
class SavedUnitsFile:
    """A file of a saved store: the `units` (frames) of one layer that it holds, its checksum, and its `_identity`. `paths`:
    where the last save put it, and where it was before, which is used if that save failed later on."""

    units: list[int]
    paths: tuple[Path, ...]
    crc: int
    identity: tuple[int, ...]


class Rows(NamedTuple):
    """Tensors [n, ...] by name, of n `units` (frames), ascending: what a memory's index keeps of each."""

    units: list[int]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class _Group:
    """What a save keeps of some layers that hold the same `units` (frames), ascending; or `Rows`, if there are no `layers`.

    most     units that fill a file
    first    units from this one on may change after the save, or their number
    tensors  some of the units -> what their file holds
    files    those of this save; `to_link`: those of the last one that are still to be linked
    """

    layers: tuple[int, ...]
    units: list[int]
    most: int
    first: int
    tensors: Callable[[list[int]], dict[str, Tensor]]
    files: list[SavedUnitsFile] = field(default_factory=list)
    to_link: list[SavedUnitsFile] = field(default_factory=list)

    def missing_units(self) -> list[int]:
        """Return the units that are in none of these files."""
        there = {unit for one in (*self.files, *self.to_link) for unit in one.units}
        return [unit for unit in self.units if unit not in there]


def save_store(
    store: Any, folder: Path, window: Window | None, rows: Rows | None, end: Callable[[], object]
) -> None:
    """Save a `store`, and a memory's `window` and `rows` as they are now, to `folder`; call `end` when all is written (see
    `checkpoint_io.write_or_defer`). Raises OSError."""
    try:
        write = _StoreSave(store, folder, window, rows).write
    except BaseException:
        end()
        raise
    checkpoint_io.write_or_defer(write, end)


class _StoreSave:
    """A save of `store`, and of a memory's `window` and `rows`, to `folder`. It is made while all stay as they are, and
    keeps what is new in window and rows (as `checkpoint_io.write_tensors` does); `write` does the rest."""

    def __init__(self, store: Any, folder: Path, window: Window | None, rows: Rows | None) -> None:
        self._store, self._folder, self._window = store, folder, window
        self._paths = (folder / f"store-{n:05d}.safetensors" for n in itertools.count())
        folder.mkdir(parents=True, exist_ok=True)
        self._groups = [*self._groups_of_layers(), *self._group_of_rows(rows)]
        for group in self._groups:
            self._begin(group)

    def _groups_of_layers(self) -> Iterator[_Group]:
        store, first, late = self._store, NEVER, range(0)
        if self._window is not None:
            first = self._window.first
            late = range(first, first + self._window.pairs[0][0].shape[2] // store.shape.tokens)
        alike = dict[tuple[int, ...], list[int]]()
        for layer in range(store.shape.layers):
            alike.setdefault((*store.units(layer), *late), []).append(layer)
        for units, layers in alike.items():
            most = max(1, FILE_BYTES // (len(layers) * store.shape.nbytes))
            yield _Group((*layers,), [*units], most, first, partial(self._keys_and_values, layers))

    def _group_of_rows(self, rows: Rows | None) -> Iterator[_Group]:
        if rows is not None and rows.units:
            places = {unit: place for place, unit in enumerate(rows.units)}
            most = FILE_BYTES * len(rows.units) // max(1, sum(one.nbytes for one in rows.tensors.values()))

            def some_rows(units: list[int]) -> dict[str, Tensor]:
                some = slice(places[units[0]], places[units[-1]] + 1)  # views: a device may have no room
                return {name: one[some] for name, one in rows.tensors.items()}

            yield _Group((), rows.units, max(1, most), 0, some_rows)

    def _begin(self, group: _Group) -> None:
        """Choose which files of the last save to link, and keep what may change."""
        last, held = self._store.written.get(group.layers, []), set(group.units)
        held_by_half = [one for one in last if 2 * len(held.intersection(one.units)) >= len(one.units)]
        for one in _without_small_files(held_by_half, group.most):
            if one.units[-1] < group.first:
                group.to_link.append(one)
            else:  # what cannot be linked of these is kept now
                group.files.extend(self._link(one))
        new = [unit for unit in group.missing_units() if unit >= group.first]
        for some in _split(new, group.most, group.units):
            self._write_file(group, some)

    def write(self) -> None:
        """Link or write all else, and the index."""
        for group in self._groups:
            while group.to_link:
                group.files.extend(self._link(group.to_link.pop(0)))
            if new := group.missing_units():
                self._store.wait_for_copies()
            for some in _split(new, group.most):
                self._write_file(group, some)
        pieces = [piece for group in self._groups for piece in _pieces(group)]
        index = {"version": VERSIONS[-1], "shape": self._store.shape.to_json(), "pieces": pieces}
        (self._folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        self._store.written = {group.layers: group.files for group in self._groups}

    def _keys_and_values(self, layers: list[int], units: list[int]) -> dict[str, Tensor]:
        """Keys and values [G, n * P, D] by layer, of units that the store holds, or of units of the window in a row."""
        store, window, found = self._store, self._window, dict[str, Tensor]()
        for layer in layers:
            if window is not None and units[-1] >= window.first:
                columns = slice(
                    *((unit - window.first) * store.shape.tokens for unit in (units[0], units[-1] + 1))
                )
                sides = [side[0, :, columns] for side in window.pairs[layer]]
            else:
                both = torch.cat(store.unit_views(layer, units))  # [n, 2, G, P, D]
                sides = [one.flatten(1, 2) for one in both.permute(1, 2, 0, 3, 4)]
            found |= zip((f"key.{layer}", f"value.{layer}"), sides, strict=True)
        return found

    def _write_file(self, group: _Group, units: list[int]) -> None:
        path = next(self._paths)

        def note(host: Tensors) -> None:
            crc = _checksum(host)
            group.files.append(SavedUnitsFile(units, (path,), crc, _identity(path)))

        checkpoint_io.write_tensors(path, group.tensors(units), note)

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


def _pieces(group: _Group) -> Iterator[dict[str, Any]]:
    """Yield what the index says of each file."""
    held = set(group.units)
    for one in group.files:
        about = {"layers": group.layers, "units": one.units, "gone": sorted({*one.units} - held)}
        yield {"file": one.paths[0].name, "crc": one.crc, **about}


def _split(units: Sequence[int], most: int, of: Sequence[int] = ()) -> Iterator[list[int]]:
    """Yield ascending `units` in parts of at most `most`; and, if given, each a part of the list `of`, without a gap."""
    place, part = {unit: at for at, unit in enumerate(of)}, list[int]()
    for unit in units:
        if part and (len(part) == most or (place and place[unit] != place[part[-1]] + 1)):
            yield part
            part = []
        part.append(unit)
    if part:
        yield part


def _without_small_files(files: Sequence[SavedUnitsFile], most: int) -> list[SavedUnitsFile]:
    """Return `files` without those whose units go into one file: `FILES` in a row that one has room for (`most` units), the
    first at most twice as large as the last. What they become counts as one of the next."""
    kept = list[tuple[int, SavedUnitsFile | None]]()
    for one in sorted(files, key=lambda one: one.units[0]):
        kept.append((len(one.units), one))
        while len(sizes := [size for size, _ in kept[-FILES:]]) == FILES:
            if sum(sizes) > most or sizes[0] > 2 * sizes[-1]:
                break
            kept[-FILES:] = [(sum(sizes), None)]
    return [one for _, one in kept if one is not None]


def _identity(path: Path, mode: int | None = None) -> tuple[int, ...]:
    """Return owner, device, inode, time of last change and size of a file, by which it differs from any other; nothing if
    it is missing, is a link or no regular file, or does not have the permissions `mode`, if given."""
    try:
        told = path.lstat()
    except OSError:
        return ()
    fits = stat.S_ISREG(told.st_mode) and mode in (None, stat.S_IMODE(told.st_mode))
    return (told.st_uid, told.st_dev, told.st_ino, told.st_mtime_ns, told.st_size) if fits else ()


def read_store(
    store: Any, folder: Path, first: int, end: int, rows: Tensors
) -> tuple[Pairs | None, Rows | None]:
    """Read the units (frames) below `first` saved in `folder` into the empty `store`, whose next save links the files.
    Return the units ``first .. end`` of a memory's window, on the host, None without any; and its rows, like `rows`
    [n, ...]. Earlier versions saved both elsewhere: then both are None. Raises `StoreError` on failure."""
    shape, late = store.shape, [dict[int, list[Tensor]]() for _ in range(store.shape.layers)]
    row_units, row_parts = list[int](), {name: [one[:0].cpu()] for name, one in rows.items()}
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
            wanted = _wanted(shape, layers, len(units), rows, latest)
            tensors = checkpoint_io.read_tensors(path, wanted, torch.device("cpu"))
            if _checksum(tensors) != piece["crc"]:
                raise ValueError(f"{path.name} is not what was written")
            if latest and units and units == sorted(units):
                one = SavedUnitsFile(units, (path,), piece["crc"], identity)
                store.written.setdefault((*layers,), []).append(one)
            held = [at for at, unit in enumerate(units) if unit not in gone]
            if not layers:
                row_units += [units[at] for at in held]
                for name, part in tensors.items():
                    row_parts[name].append(part[held])
                continue
            kept = [at for at in held if units[at] < first]
            ahead = [at for at in held if units[at] >= first]
            for layer in layers:
                sides = (
                    [tensors[f"{side}.{layer}"] for side in ("key", "value")]
                    if latest
                    else _former_sides(**tensors)
                )
                by_unit = [one.view(shape.groups, len(units), shape.tokens, shape.size) for one in sides]
                pair = [one[:, kept].flatten(1, 2).to(store.device) for one in by_unit]
                if store.put_layer(layer, [units[at] for at in kept], *pair):
                    # Whoever saved it does not know that some are no more.
                    raise StoreError(
                        f"host store: {folder} holds more than this host has room for; free memory, or load it on a "
                        "host with as much as the one it was saved on."
                    )
                if late[layer].keys() & {units[at] for at in ahead}:
                    raise ValueError("it has a unit of the window twice")
                late[layer] |= {units[at]: [one[:, at] for one in by_unit] for at in ahead}
        if latest and any(len(one) != end - first for one in late):
            raise ValueError(f"units of the window, {first} to {end - 1}, are missing")
        if len({*row_units}) < len(row_units):
            raise ValueError("it has rows of a unit twice")
    except (OSError, KeyError, TypeError, ValueError, IndexError, ModelError) as error:
        why = str(error)[:200].rstrip(".")
        raise StoreError(f"host store: {folder} is damaged or incomplete ({why}); save it again.") from error
    if not latest:
        return None, None
    order = sorted(range(len(row_units)), key=row_units.__getitem__)
    told = {name: torch.cat(parts)[order] for name, parts in row_parts.items()}
    by_layer = [zip(*(one[unit] for unit in sorted(one)), strict=True) for one in late if one]
    window = [(torch.cat(key, 1)[None], torch.cat(value, 1)[None]) for key, value in by_layer]
    return window or None, Rows([row_units[at] for at in order], told)


def _former_sides(units: Tensor) -> list[Tensor]:
    """Keys and values [G, n * P, D] of `units` [n, 2, G, P, D], as a file of an earlier version has them."""
    return [one.flatten(1, 2) for one in units.permute(1, 2, 0, 3, 4)]


def _wanted(
    shape: Any, layers: Sequence[int], count: int, rows: Tensors, latest: bool
) -> checkpoint_io.Wanted:
    """What a file of `count` units (frames) of some layers holds, or, of none, of rows."""
    if not latest:
        return {"units": ((count, *shape.tensor_shape), shape.dtype)}
    if not layers:
        return {name: ((count, *one.shape[1:]), one.dtype) for name, one in rows.items()}
    size = shape.groups, count * shape.tokens, shape.size
    names = (f"{side}.{layer}" for layer in layers for side in ("key", "value"))
    return dict.fromkeys(names, (size, shape.dtype))


def _checksum(tensors: Tensors) -> int:
    crc = 0
    for _, one in sorted(tensors.items()):
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
