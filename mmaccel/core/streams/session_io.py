"""A session on disk: what a save writes into its folder and may remove, and how a session is read back.

A save writes ``film.safetensors`` and the memory's own files into a new folder within the session's, ``data-1``,
``data-2``, ..., and then moves `session.json` into place. That lists the files with their sizes and checksums, which are
checked before anything is read, as its own checksum is; a store of units checks its own pieces while it reads them.

A save that is killed leaves the former `session.json` with its files, or the new one with its own. At the end the files
that the former list names are removed, one by one. A note, `.mmaccel-saving.json`, says what is to be removed, so that the
next save ends what a killed one left. Every other file stays where it is. The new files are on the disk before their list
is, and the former ones go when the list is on the disk, so that a loss of power does the same as a kill.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from mmaccel.core.attach import StreamAdapter
from mmaccel.core.errors import MmaccelError, ModelError, shown
from mmaccel.core.files import checkpoint_io, outside
from mmaccel.core.files.checkpoint_io import locked, sync, write_private
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.recipe import Recipe, saved_recipe
from mmaccel.core.streams.stream_runner import StreamInfo, StreamRunner

FORMAT, VERSION = "mmaccel session", 5
UNSEALED = 2
"""The version whose facts have no checksum; it is read too."""
FACTS, FILM, MEMORY = "session.json", "film.safetensors", "memory"
NOTE = ".mmaccel-saving.json"
DATA = re.compile(r"data-[1-9][0-9]{0,8}")
ENDINGS = (".safetensors", ".json")
"""Of all files that a save writes."""
CHECKSUM = "checksum"
STORE = "store"
"""Folders of a memory that check themselves."""
READ_BYTES = 1 << 24
READS = 5
"""How often a session is read at most, while another process saves to its folder."""
PIXELS = 1 << 25
"""Most pixels of a frame: 8K."""
KINDS = {"format": str, "version": int, "recipe": dict, "files": dict, "model": str, "dtype": str}


def _is_size(value: Any) -> bool:
    """Whether it is a height and a width in pixels, of a frame that memory has room for."""
    whole = isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)
    return whole and value[0] * value[1] <= PIXELS


def _counts(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


SIZES: dict[str, Callable[[Any], bool]] = {
    "size": _is_size,
    "raw": lambda value: value is None or _is_size(value),
    "fps": lambda value: value is None or (isinstance(value, float) and 0 < value < math.inf),
    **dict.fromkeys(("unit", "frames"), _counts(1)),
    **dict.fromkeys(("units", "marks", "pending"), _counts(0)),
}
"""What `session.json` says of a stream, and what it must be."""


def save(path: Path, adapter: StreamAdapter, recipe: Recipe, live: StreamRunner) -> None:
    """Write a session into the folder `path`; raises `ModelError` where that cannot be."""
    writable(path)
    # Where a link leads to: the link stays, and what it led to is what is written anew.
    place, info = path.resolve(), live.info

    def write(part: Path) -> dict[str, Any]:
        (part / MEMORY).mkdir()
        live.state.save(part / MEMORY)
        tensors = {
            "spans": torch.tensor(info.spans, dtype=torch.long).view(-1, 2),
            "times": torch.tensor(info.times, dtype=torch.float64),
            "marks": info.marks,
        }
        checkpoint_io.write_tensors(
            part / FILM, tensors if info.pending is None else {**tensors, "pending": info.pending}
        )
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "model": adapter.signature(),
            "dtype": _name(adapter.dtype),
            "recipe": _plain(recipe.to_dict()),
            "size": info.size,
            "fps": None if info.fps is None else float(info.fps),
            "unit": info.unit,
            "timed": info.timed,
            "raw": info.raw,
            "frames": len(info.times),
            "units": len(info.spans),
            "marks": info.marks.shape[0],
            "pending": 0 if info.pending is None else info.pending.shape[0],
            "data": part.name,
            "files": {name: _print_of(place, Path(name)) for name in sorted(_files(place, part))},
        }
        return sealed(facts)

    try:
        _replace(place, write)
    except OSError as error:
        reason = outside.reason(error)
        raise ModelError(f"save: {path} cannot be written ({reason}); give a path with room.") from error


def recipe_of(path: Path) -> Recipe:
    """The recipe a session was saved with; raises `ModelError` where it cannot be opened."""
    return saved_recipe(path, _read(path)["recipe"])


def load(where: Path, adapter: StreamAdapter, recipe: Recipe, kv: StreamPolicy) -> StreamRunner:
    """The stream of a saved session, whose memory is `kv`; raises an `MmaccelError` when it does not fit.

    It is read again where another process saves to the folder meanwhile, which removes the files that were to be read.
    """
    left = READS
    while True:
        before, left = _version_of(where), left - 1
        try:
            return _load(where, adapter, recipe, kv)
        except (MmaccelError, OSError) as error:
            if left and _version_of(where) != before:
                continue
            if isinstance(error, MmaccelError):
                raise
            reason = outside.reason(error)
            raise ModelError(f"{where} cannot be read ({reason}); save the session again.") from error


def sealed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-ready facts with the CRC-32 over all of them."""
    bare = {name: value for name, value in facts.items() if name != CHECKSUM}
    return {**bare, CHECKSUM: zlib.crc32(json.dumps(bare, sort_keys=True).encode())}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    """As it is after a way through JSON."""

    def refuse(one: Any) -> None:
        raise ModelError("recipe: it holds an object that cannot be saved; name its policies instead.")

    return json.loads(json.dumps(value, default=refuse))


def _version_of(where: Path) -> tuple[int, int, int] | None:
    """What another `session.json` has another of; None where there is none."""
    with suppress(OSError):
        stat = (where / FACTS).stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
    return None


def _damaged(where: Path, fault: str) -> ModelError:
    return ModelError(f"{where}: {fault}; the session is damaged, save it again.")


def _read(where: Path) -> dict[str, Any]:
    """What the `session.json` of a saved session says: its mark, version and checksum checked."""
    if not (where / FACTS).is_file():
        raise ModelError(
            f"{where} is not a saved session: it has no {FACTS}; give the folder that save wrote."
        )
    facts = checkpoint_io.read_json(where / FACTS, KINDS)
    form, version, data = facts["format"], facts["version"], facts.get("data")
    if form != FORMAT or version not in range(UNSEALED, VERSION + 1):
        raise ModelError(
            f"{where} is {shown(form)} of version {version}; this mmaccel reads version {VERSION}."
        )
    if not (all(map(ours, facts["files"])) and (data is None or _is_data(data))):
        raise _damaged(where, f"the list of files in {FACTS} is none")
    if version != UNSEALED and CHECKSUM not in facts:
        raise _damaged(where, f"{FACTS} has no {CHECKSUM}")
    if CHECKSUM in facts and facts != sealed(facts):
        raise _damaged(where, f"{FACTS} is not what was written")
    return facts


def _load(where: Path, adapter: StreamAdapter, recipe: Recipe, kv: StreamPolicy) -> StreamRunner:
    facts, dtype = _read(where), _name(adapter.dtype)
    if facts["model"] != adapter.signature():
        raise ModelError(f"{where} was saved from another model; load it with the model it was saved with.")
    if facts["dtype"] != dtype:
        kind = shown(facts["dtype"])[1:-1]
        raise ModelError(
            f"{where} was saved from a model in {kind} and this one is in {dtype}; load the model in {kind}."
        )
    saved = facts["recipe"].get("kv")
    if _lasting(saved_recipe(where, {"kv": saved}, again=True)) != _lasting(recipe):
        raise ModelError(
            f"{where} was saved with kv {shown(saved, 200)}; open the session with the same kv and fields."
        )
    # Before version 4 the files were in the folder itself.
    data = where / facts.get("data", "")
    if not {str((data / FILM).relative_to(where)), *_files(where, data / MEMORY)} <= set(facts["files"]):
        raise _damaged(where, f"the list of files in {FACTS} is not whole")
    for name, known in facts["files"].items():
        _check_file(where, name, known)
    for name, fits in SIZES.items():
        if name not in facts or not fits(facts[name]):
            raise _damaged(where, f"{name} in {FACTS} cannot be")
    live = StreamRunner(adapter, kv, recipe.chunk, _read_info(data, facts, adapter))
    try:
        if live.info.timed:  # earlier versions placed every unit at the first clip's rate
            live.stream.places.told(0, live.info.shown(0))
        live.state.load(data / MEMORY)
        if (units := live.state.units()) != facts["units"]:
            raise _damaged(data, f"the memory holds {units} units of {facts['units']}")
    except BaseException:
        live.state.close()
        raise
    return live


def _lasting(recipe: Recipe) -> dict[str, Any] | None:
    """The fields of a memory that matter before a question, JSON-ready."""
    if not isinstance(kv := recipe.kv, StreamPolicy):
        return None
    fields = _plain(recipe.to_dict()["kv"]).items()
    return {name: value for name, value in fields if name not in kv.query_time_fields}


def _read_info(data: Path, facts: dict[str, Any], adapter: StreamAdapter) -> StreamInfo:
    wanted: checkpoint_io.Wanted = {
        "marks": ((facts["marks"], adapter.view.geometry.hidden), adapter.dtype),
        "spans": ((facts["units"], 2), torch.long),
        "times": ((facts["frames"],), torch.float64),
        **({"pending": ((facts["pending"], 3, -1, -1), torch.uint8)} if facts["pending"] else {}),
    }
    film = checkpoint_io.read_tensors(data / FILM, wanted, torch.device("cpu"))
    spans, times = [(a, b) for a, b in film["spans"].tolist()], film["times"].tolist()
    ends = [0, *(first + count for first, count in spans)]
    unbroken = all(count > 0 and first == end for (first, count), end in zip(spans, ends, strict=False))
    rising = all(map(math.isfinite, times)) and times == sorted(times)
    if not (unbroken and rising and ends[-1] <= len(times)):
        raise _damaged(data, f"spans or times in {FILM} cannot be")
    (height, width), raw = facts["size"], facts["raw"]
    raw = None if raw is None else (raw[0], raw[1])
    marks, timed = film["marks"].to(adapter.device), facts.get("timed") is True
    more = raw, spans, times, film.get("pending")
    return StreamInfo((height, width), facts["fps"], facts["unit"], marks, timed, *more)


def _print_of(where: Path, name: Path) -> list[int | None]:
    """Size and CRC-32 of a file; no checksum of what is a store's."""
    file = where / name
    if STORE in name.parts:
        return [file.stat().st_size, None]
    size = crc = 0
    with file.open("rb") as stream:
        while piece := stream.read(READ_BYTES):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]


def _check_file(where: Path, name: str, known: Any) -> None:
    """Raise `ModelError` unless the file is the one that was written."""
    if not (isinstance(known, list) and len(known) == 2 and all(type(n) is int or n is None for n in known)):
        raise _damaged(where, f"the list of files in {FACTS} is none")
    file = where / name
    size = file.stat().st_size if file.is_file() else None
    if size is None:
        raise _damaged(where, f"{name} is missing")
    if size != known[0]:
        raise _damaged(where, f"{name} has {size} bytes of {known[0]}")
    if _print_of(where, Path(name)) != known:
        raise _damaged(where, f"{name} is not what was written")


def writable(path: Path) -> None:
    """Raises `ModelError` where a session cannot be saved to `path` because something else is there, which is left alone."""
    try:
        place = path.resolve()
        above = next(one for one in (place, *place.parents) if one.exists())
        if not above.is_dir() and above != place:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        names = set(os.listdir(place)) if above == place and above.is_dir() else set()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path} cannot be written ({outside.reason(error)}); give another path.") from error
    is_ours = not names - {NOTE} or (FACTS in names and _marked(place / FACTS)) or _marked(place / NOTE)
    if not above.is_dir() or not is_ours:
        raise ModelError(f"{path} exists and is not a saved session; give another path.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ModelError(f"{path} cannot be written (permission denied); give another path.")


def ours(name: str) -> bool:
    """Whether a path within the folder is one that a save writes."""
    parts = PurePosixPath(name).parts
    if ".." in parts or not parts or "\0" in name:
        return False
    return parts == (FILM,) or (len(parts) > 1 and (parts[0] == MEMORY or _is_data(parts[0])))


def _is_data(name: Any) -> bool:
    return isinstance(name, str) and DATA.fullmatch(name) is not None


def _names(facts: Mapping[str, Any]) -> set[str]:
    """The files that a list of ours names; none where it is damaged."""
    files = facts.get("files")
    listed = files if isinstance(files, dict | list) else ()
    return {name for name in listed if isinstance(name, str) and ours(name)}


def _marked(path: Path) -> dict[str, Any]:
    """The contents of a JSON file that a save wrote; empty for no file, or one without our mark or of an unknown version."""
    try:
        facts = outside.read_json(path, path.name, ModelError)
    except ModelError:
        return {}
    known = isinstance(facts, dict) and facts.get("format") == FORMAT
    return facts if known and facts.get("version") in range(UNSEALED, VERSION + 1) else {}


def _replace(place: Path, write: Callable[[Path], Mapping[str, Any]]) -> None:
    """Write a session anew into the folder `place`, which is made where there is none.

    write  fills the folder it is given and returns what `session.json` is to say; after an error in it the former session
           is as it was
    """
    made = [one for one in (place, *place.parents) if not one.exists()]
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with locked(place):
            _sweep(place)
            numbers = [int(name[5:]) for name in os.listdir(place) if _is_data(name)]
            part = place / f"data-{max(numbers, default=0) + 1}"
            former = sorted(_names(_marked(place / FACTS)))
            note = {"format": FORMAT, "version": VERSION, "part": part.name, "files": former}
            try:
                write_private(place / NOTE, json.dumps(note))
                part.mkdir(mode=0o700)
                checkpoint_io.write_json(part / FACTS, write(part))
                for root, _, files in os.walk(part):
                    for path, mode in (*((Path(root, name), 0o600) for name in files), (Path(root), 0o700)):
                        path.chmod(mode)
                        sync(path)
                for one in made:
                    sync(one.parent)
                os.replace(part / FACTS, place / FACTS)
            except BaseException:
                _sweep(place)
                raise
            sync(place)
            _sweep(place)
    finally:
        if made:
            with suppress(OSError):
                place.rmdir()  # only where nothing was written


def _sweep(place: Path) -> None:
    """Remove what the note names and `session.json` does not list, and then the note."""
    note = _marked(place / NOTE)
    left, part = _names(note), str(note.get("part"))
    folders = {above for name in left for above in (place / name).parents}
    if _is_data(part):
        left |= {name for name in _files(place, place / part) if name.endswith(ENDINGS)}
        folders |= {Path(root) for root, _, _ in os.walk(place / part)}
    for path in (place / name for name in left - _names(_marked(place / FACTS))):
        if path.parent.resolve() == path.parent:  # and no link leads out of the folder
            with suppress(OSError):
                path.unlink()
    for folder in sorted(folders, reverse=True):
        if place in folder.parents and not folder.is_symlink():
            with suppress(OSError):
                folder.rmdir()  # only where it is empty
    with suppress(OSError):
        (place / NOTE).unlink()


def _files(place: Path, folder: Path) -> set[str]:
    """The files below `folder`, as paths within `place`."""
    return {str(Path(root, name).relative_to(place)) for root, _, files in os.walk(folder) for name in files}
