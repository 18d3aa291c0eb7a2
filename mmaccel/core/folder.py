"""The folder of a saved session: what a save writes there, and what it may remove.

A save writes its files into a new folder within the session's, ``data-1``, ``data-2``, ..., and then moves `session.json`,
which lists them, into place. A save that is killed leaves the former `session.json` with its files, or the new one with its
own. At the end the files that the former list names are removed, one by one. A note, `.mmaccel-saving.json`, says what is to
be removed, so that the next save ends what a killed one left. Every other file stays where it is.

The new files are on the disk before their list is, and the former ones go when the list is on the disk, so that a loss of
power does the same as a kill.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from mmaccel.core import outside, saving
from mmaccel.core.errors import ModelError, shown

FORMAT, VERSION = "mmaccel session", 5
UNSEALED = 2
"""The version whose facts have no checksum; it is read too."""
FACTS, FILM, MEMORY = "session.json", "film.safetensors", "memory"
NOTE = ".mmaccel-saving.json"
DATA = re.compile(r"data-[1-9][0-9]{0,8}")
ENDINGS = (".safetensors", ".json")
"""Of all files that a save writes."""
WAIT_S = 10.0
"""Seconds that a save waits for another one to end."""
NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}
"""What a file system says that cannot write a file or a folder to the disk on demand."""


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


def listed(place: Path) -> set[str]:
    """The files that the `session.json` of a folder lists, by their paths within it; of a folder without one, none."""
    if not (place / FACTS).exists():
        return set()
    return _names(_marked(place / FACTS))


def _names(told: Mapping[str, Any]) -> set[str]:
    """The files that a list of ours names; none where it is damaged."""
    files = told.get("files")
    return (
        {name for name in files if isinstance(name, str) and ours(name)}
        if isinstance(files, dict | list)
        else set()
    )


def ours(name: str) -> bool:
    """Whether a path within the folder is one that a save writes."""
    parts = PurePosixPath(name).parts
    if ".." in parts or not parts or "\0" in name:
        return False
    first = parts[0]
    return (first == FILM and len(parts) == 1) or (
        len(parts) > 1 and (first == MEMORY or DATA.fullmatch(first) is not None)
    )


def replace(place: Path, write: Callable[[Path], Mapping[str, Any]]) -> None:
    """Write a session anew into the folder `place`, which is made where there is none.

    write  fills the folder it is given and returns what `session.json` is to say; after an error in it the former session
           is as it was
    """
    made = [one for one in (place, *place.parents) if not one.exists()]
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with _alone(place):
            _sweep(place)
            numbers = [int(name[5:]) for name in os.listdir(place) if DATA.fullmatch(name)]
            part = place / f"data-{max(numbers, default=0) + 1}"
            note = {"format": FORMAT, "version": VERSION, "part": part.name, "files": sorted(listed(place))}
            try:
                write_private(place / NOTE, json.dumps(note))
                part.mkdir(mode=0o700)
                saving.write_json(part / FACTS, write(part))
                for root, _, files in os.walk(part):
                    for name in files:
                        os.chmod(os.path.join(root, name), 0o600)
                        sync(os.path.join(root, name))
                    os.chmod(root, 0o700)
                    sync(root)
                for one in [folder.parent for folder in made]:
                    sync(one)
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
    if note:
        kept = listed(place)
        part = note.get("part")
        left = _names(note)
        if isinstance(part, str) and DATA.fullmatch(part):
            left |= {str(file.relative_to(place)) for file in _files(place / part) if file.suffix in ENDINGS}
        for name in left - kept:
            path = place / name
            if path.parent.resolve() == path.parent:  # and no link leads out of the folder
                with suppress(OSError):
                    path.unlink()
        for folder in sorted({p for name in left - kept for p in (place / name).parents}, reverse=True):
            _rmdir_below(place, folder)
        if isinstance(part, str) and DATA.fullmatch(part):
            for root, _, _ in os.walk(place / part, topdown=False):
                _rmdir_below(place, Path(root))
    with suppress(OSError):
        (place / NOTE).unlink()


def _files(folder: Path) -> Iterator[Path]:
    for root, _, files in os.walk(folder):
        yield from (Path(root, name) for name in files)


def _rmdir_below(place: Path, folder: Path) -> None:
    if place in folder.parents and not folder.is_symlink():
        with suppress(OSError):
            folder.rmdir()  # only where it is empty


def _marked(path: Path) -> dict[str, Any]:
    """The contents of a JSON file that a save wrote; empty for a file without our mark or of an unknown version."""
    try:
        told = outside.read_json(path, path.name, ModelError)
    except ModelError:
        return {}
    known = isinstance(told, dict) and told.get("format") == FORMAT
    return told if known and told.get("version") in range(UNSEALED, VERSION + 1) else {}


def write_private(path: Path, text: str) -> None:
    """Write a text file that only its owner may read, and wait until it is on the disk; raises OSError."""
    with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)  # there may have been a file
        file.write(text)
    sync(path)


def sync(path: str | Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, where the file system can tell; raises OSError."""
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
def _alone(place: Path) -> Iterator[None]:
    """Keep other saves out of the folder, once none is under way; the lock is the system's and ends with the process."""
    handle, late = os.open(place, os.O_RDONLY), time.monotonic() + WAIT_S
    try:
        with suppress(OSError):  # a file system without locks
            while not _locks(handle):
                if time.monotonic() > late:
                    raise ModelError(
                        f"save: another save writes to {place} and has not ended after {WAIT_S:g} s; save again later, "
                        "or give another path."
                    )
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _locks(handle: int) -> bool:
    """Lock a file; False where somebody else has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read(folder: Path) -> dict[str, Any]:
    """What the `session.json` of a saved session says, its mark and version checked; raises `ModelError`."""
    if not (folder / FACTS).is_file():
        raise ModelError(
            f"{folder} is not a saved session: it has no {FACTS}; give the folder that save wrote."
        )
    kinds = {"format": str, "version": int, "recipe": dict, "files": dict, "model": str, "dtype": str}
    told = saving.read_json(folder / FACTS, kinds)
    if told["format"] != FORMAT or told["version"] not in range(UNSEALED, VERSION + 1):
        raise ModelError(
            f"{folder} is {shown(told['format'])} of version {told['version']}; this mmaccel reads version {VERSION}."
        )
    if not all(map(ours, told["files"])) or not (told.get("data") is None or _is_data(told["data"])):
        raise ModelError(f"{folder}: the list of files in {FACTS} is damaged; save the session again.")
    return told


def _is_data(name: Any) -> bool:
    return isinstance(name, str) and DATA.fullmatch(name) is not None
