"""Saves a session to a folder and loads it: which files a save writes and may remove, and how they are read back.

A save writes ``film.safetensors`` and the memory's own files into a new folder within the session's, ``data-1``, ``data-2``,
..., and then moves `session.json` into place. That lists the files with their sizes and checksums, which are verified before
anything is read, as its own checksum is; a host store verifies its own files while it reads them.

A save that is killed leaves the former `session.json` with its files, or the new one with its own. At the end the files that
the former list names are removed, one by one. A note, `.mmaccel-saving.json`, lists what is to be removed, so that the next
save completes what a killed one left. All other files stay. New files are synced to disk before their list, and former ones
removed after that, so that a power failure has the same effect as a kill.
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
from shutil import rmtree
from typing import Any

from mmaccel.core.attach import StreamAdapter
from mmaccel.core.errors import DraftError, MmaccelError, ModelError, quoted
from mmaccel.core.files import checkpoint_io, outside
from mmaccel.core.files.checkpoint_io import lock_folder, sync_to_disk, write_owner_only_text
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.recipe import Recipe, load_session_recipe
from mmaccel.core.streams.saved_stream import (
    FILM,
    MEMORY,
    as_json_value,
    check_saved_model,
    damaged_session_error,
    read_stream,
    saved_content_fields,
    write_stream,
)
from mmaccel.core.streams.stream_runner import GuardedDraftStream, StreamRunner

FORMAT, VERSION = "mmaccel session", 5
UNSEALED = 2
"""The version whose facts have no checksum; it is read too."""
FACTS, DRAFT = "session.json", "draft"
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
KINDS = {"format": str, "version": int, "recipe": dict, "files": dict, "model": str, "dtype": str}


def save_session(path: Path, recipe: Recipe, live: StreamRunner) -> None:
    """Save a session to the folder `path`; raises `ModelError` if it cannot be written."""
    check_session_path(path)
    # Where a link leads to: the link stays, and what it led to is what is written anew.
    place, adapter = path.resolve(), live.adapter
    assert isinstance(adapter, StreamAdapter)  # a prompt's stream ends with its call

    def write(part: Path) -> dict[str, Any]:
        if (draft := live.draft_stream.stream) is not None:
            with live.adapter.turns.hold():
                (part / DRAFT).mkdir()
                try:
                    draft.save(part / DRAFT)
                except OSError:
                    raise  # nor could the target's stream be written there
                except Exception:
                    with live.draft_stream.drop_on_error():
                        raise
        # Files, checksums, and waiting for the disk leave the model to others.
        with checkpoint_io.defer_writes(), live.adapter.turns.hold():
            written = write_stream(part, live)
        if live.draft_stream.failed:
            rmtree(part / DRAFT, ignore_errors=True)
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "recipe": as_json_value(recipe.to_dict()),
            "model": adapter.weights_checksum(),
            **written,
            "data": part.name,
            "files": {name: _print_of(place, Path(name)) for name in sorted(_files(place, part))},
        }
        return add_checksum(facts)

    try:
        _replace(place, write)
    except OSError as error:
        reason = outside.os_reason(error)
        raise ModelError(f"save: {path} cannot be written ({reason}); give a path with room.") from error


def saved_recipe(path: Path) -> Recipe:
    """Return the recipe of the session saved at `path`; raises `ModelError` if it cannot be opened."""
    return load_session_recipe(path, _read(path)["recipe"])


def open_saved_session(open_session: Callable[[Recipe], Any], path: Path) -> Any:
    """Return the session that `open_session` makes of the saved recipe; raises `DraftError` if its draft is not there."""
    recipe = saved_recipe(path)
    try:
        return open_session(recipe)
    except DraftError as error:
        mend = f"a draft given as a loaded model is not saved: open a session with it, and call its load({str(path)!r})"
        raise DraftError(f"{str(error).rstrip('.')}; {mend}.") from error


def load_saved_dtype(path: Path) -> str:
    """Return the name of the dtype of the model whose session is saved at `path`; raises `ModelError` as `saved_recipe`."""
    return str(_read(path)["dtype"])


def load_saved_frame_rate(path: Path) -> float | None:
    """Return the frames a second of the first clip of the session saved at `path`, or None; raises as `saved_recipe`."""
    rate = _read(path).get("fps")
    return rate if isinstance(rate, float) and 0 < rate < math.inf else None


def load_session(
    where: Path,
    adapter: StreamAdapter,
    recipe: Recipe,
    kv: StreamPolicy,
    open_draft_stream: Callable[[], GuardedDraftStream],
) -> StreamRunner:
    """Load a saved session: its stream, with the memory `kv`, and its draft's stream, which `open_draft_stream` opens.

    Raises an `MmaccelError` if the stream does not fit the model, and warns if the draft's does not. Retries if another
    process saves to the folder meanwhile and removes files.
    """
    left = READS
    while True:
        before, left = _version_of(where), left - 1
        try:
            live, data = _load(where, adapter, recipe, kv)
            with adapter.turns.hold():
                live.draft_stream = open_draft_stream()
                try:
                    if live.draft_stream.stream is not None:
                        live.draft_stream.stream.load(data / DRAFT)
                except Exception:
                    if left and _version_of(where) != before:
                        live.close()
                        continue
                    with live.draft_stream.drop_on_error():
                        raise
            return live
        except (MmaccelError, OSError) as error:
            if left and _version_of(where) != before:
                continue
            if isinstance(error, MmaccelError):
                raise
            reason = outside.os_reason(error)
            raise ModelError(f"{where} cannot be read ({reason}); save the session again.") from error


def add_checksum(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON-ready `facts` with their CRC-32 checksum added."""
    bare = {name: value for name, value in facts.items() if name != CHECKSUM}
    return {**bare, CHECKSUM: zlib.crc32(json.dumps(bare, sort_keys=True).encode())}


def _version_of(where: Path) -> tuple[int, int, int] | None:
    """What another `session.json` has another of; None where there is none."""
    with suppress(OSError):
        stat = (where / FACTS).stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
    return None


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
            f"{where} is {quoted(form)} of version {version}; this mmaccel reads version {VERSION}."
        )
    if not (all(map(_is_session_file, facts["files"])) and (data is None or _is_data(data))):
        raise damaged_session_error(where, f"the list of files in {FACTS} is none")
    if version != UNSEALED and CHECKSUM not in facts:
        raise damaged_session_error(where, f"{FACTS} has no {CHECKSUM}")
    if CHECKSUM in facts and facts != add_checksum(facts):
        raise damaged_session_error(where, f"{FACTS} is not what was written")
    return facts


def _load(where: Path, adapter: StreamAdapter, recipe: Recipe, kv: StreamPolicy) -> tuple[StreamRunner, Path]:
    """The stream, and the folder that it was read from."""
    facts = _read(where)
    check_saved_model(where, facts, adapter)
    saved = facts["recipe"].get("kv")
    if saved_content_fields(load_session_recipe(where, {"kv": saved}, again=True).kv) != saved_content_fields(
        recipe.kv
    ):
        raise ModelError(
            f"{where} was saved with kv {quoted(saved, 200)}; open the session with the same kv and fields."
        )
    # Before version 4 the files were in the folder itself.
    data = where / facts.get("data", "")
    if not {str((data / FILM).relative_to(where)), *_files(where, data / MEMORY)} <= set(facts["files"]):
        raise damaged_session_error(where, f"the list of files in {FACTS} is not whole")
    for name, known in facts["files"].items():
        _check_file(where, name, known)
    with adapter.turns.hold():
        return read_stream(data, where / FACTS, facts, adapter, kv, recipe.chunk), data


def _print_of(where: Path, name: Path) -> list[int | None]:
    """Size and CRC-32 of a file; no checksum of a store's tensors, which its list has."""
    file = where / name
    if STORE in name.parts and name.suffix != ".json":
        return [file.stat().st_size, None]
    size = crc = 0
    with file.open("rb") as stream:
        while piece := stream.read(READ_BYTES):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return [size, crc]


def _check_file(where: Path, name: str, known: Any) -> None:
    """Raise `ModelError` unless the file is the one that was written."""
    if not (isinstance(known, list) and len(known) == 2 and all(type(n) is int or n is None for n in known)):
        raise damaged_session_error(where, f"the list of files in {FACTS} is none")
    file = where / name
    size = file.stat().st_size if file.is_file() else None
    if size is None:
        raise damaged_session_error(where, f"{name} is missing")
    if size != known[0]:
        raise damaged_session_error(where, f"{name} has {size} bytes of {known[0]}")
    # Earlier versions had no checksum of a store's list.
    if known[1] is not None and _print_of(where, Path(name)) != known:
        raise damaged_session_error(where, f"{name} is not what was written")


def check_session_path(path: Path) -> None:
    """Check that a session can be saved to `path`; raise `ModelError` if not, for example because other files are there."""
    try:
        place = path.resolve()
        above = next(one for one in (place, *place.parents) if one.exists())
        if not above.is_dir() and above != place:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        names = set(os.listdir(place)) if above == place and above.is_dir() else set()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be written ({outside.os_reason(error)}); give another path."
        ) from error
    is_ours = not names - {NOTE} or (FACTS in names and _marked(place / FACTS)) or _marked(place / NOTE)
    if not above.is_dir() or not is_ours:
        raise ModelError(f"{path} exists and is not a saved session; give another path.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ModelError(f"{path} cannot be written (permission denied); give another path.")


def _is_session_file(name: str) -> bool:
    """Return whether a save writes the path `name` within a session's folder; all other files there belong to the user."""
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
    return {name for name in listed if isinstance(name, str) and _is_session_file(name)}


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
        with lock_folder(place):
            _sweep(place)
            numbers = [int(name[5:]) for name in os.listdir(place) if _is_data(name)]
            part = place / f"data-{max(numbers, default=0) + 1}"
            former = sorted(_names(_marked(place / FACTS)))
            note = {"format": FORMAT, "version": VERSION, "part": part.name, "files": former}
            try:
                write_owner_only_text(place / NOTE, json.dumps(note))
                part.mkdir(mode=0o700)
                checkpoint_io.write_json(part / FACTS, write(part))
                for root, _, files in os.walk(part):
                    for path, mode in (*((Path(root, name), 0o600) for name in files), (Path(root), 0o700)):
                        path.chmod(mode)
                        sync_to_disk(path)
                for one in made:
                    sync_to_disk(one.parent)
                os.replace(part / FACTS, place / FACTS)
            except BaseException:
                _sweep(place)
                raise
            sync_to_disk(place)
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
