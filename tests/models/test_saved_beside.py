"""A save that the power fails, and saves and loads of several processes in one folder."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmaccel.core.errors import ModelError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.streams import saved_stream, session_io
from tests.models.streams import FPS, film
from tests.models.test_session_faults import begun
from tests.products import product

pytestmark = pytest.mark.in_turn("kv", 4)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What is synced, moved and removed from now on, in order."""
    found: list[tuple[str, Path]] = []
    sync, move, remove = os.fsync, os.replace, os.unlink

    def synced(handle: int) -> None:
        found.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        sync(handle)

    def moved(old: Any, new: Any, **how: Any) -> None:
        move(old, new, **how)
        found.append(("move", Path(new)))

    def removed(path: Any, **how: Any) -> None:
        remove(path, **how)
        found.append(("remove", Path(path)))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    monkeypatch.setattr(os, "unlink", removed)
    return found


def test_files_are_on_the_disk_before_their_list_and_the_former_ones_go_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a" / "stream"
    with begun("mosaic", 6) as session:
        found = watched(monkeypatch)
        session.save(place)
        move = found.index(("move", place / "session.json"))
        written = {p for p in (place / "data-1").rglob("*") if p.is_file()}
        folders = {p for p in (place / "data-1").rglob("*") if p.is_dir()} | {place / "data-1"}
        before = {path for what, path in found[:move] if what == "sync"}
        note = place / ".mmaccel-saving.json"
        assert len(written) > 5 and written | folders | {note, place / "data-1/session.json"} <= before
        assert {place.parent, tmp_path} <= before and ("sync", place) in found[move:]
        del found[:]
        session.save(place)
        move, removed = found.index(("move", place / "session.json")), found.index(("remove", min(written)))
        assert ("sync", place) in found[move:removed]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_is_saved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    with begun("recent", 3) as session:
        session.save(tmp_path / "s")
        session.load(tmp_path / "s")


def test_a_disk_that_fails_while_it_syncs_leaves_the_former_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun("recent", 3) as session:
        session.save(tmp_path / "s")
        session.watch(film(5)[3:], fps=FPS)

        def broken(handle: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            with pytest.raises(ModelError, match=r"cannot be written \(input/output error\); give a path"):
                session.save(tmp_path / "s")
        session.load(tmp_path / "s")
        assert len(session) == 3


def while_it_loads(monkeypatch: pytest.MonkeyPatch, place: str, work: Callable[[], None]) -> None:
    """Do `work` when a load first reaches `place` of the modules that read a session."""
    module = session_io if hasattr(session_io, place) else saved_stream
    inner, left = getattr(module, place), [work]

    def meanwhile(*given: Any) -> Any:
        if left:
            left.pop()()
        return inner(*given)

    monkeypatch.setattr(module, place, meanwhile)


@pytest.mark.parametrize(
    ("kv", "place"), product(["recent", "mosaic"], ["_check_file", "_print_of", "_read_info"])
)
def test_a_load_beside_a_save_reads_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str, place: str
) -> None:
    with begun(kv, 4) as session, begun(kv, 6) as other, begun(kv, 3) as reader:
        session.save(tmp_path / "s")
        while_it_loads(monkeypatch, place, lambda: other.save(tmp_path / "s"))
        reader.load(tmp_path / "s")
        assert len(reader) == 6


def test_a_load_of_a_damaged_session_does_not_try_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun("recent", 3) as session, begun("recent", 4) as reader:
        session.save(tmp_path / "s")
        (tmp_path / "s" / "data-1" / "film.safetensors").unlink()
        tries = list[int]()
        inner = session_io._check_file

        def checked(*given: Any) -> None:
            tries.append(0)
            os.utime(tmp_path / "s" / "session.json", ns=(len(tries), len(tries)))
            inner(*given)

        with pytest.raises(ModelError, match=r"film.safetensors is missing"):
            reader.load(tmp_path / "s")
        monkeypatch.setattr(session_io, "_check_file", checked)
        with pytest.raises(ModelError, match=r"film.safetensors is missing"):
            reader.load(tmp_path / "s")
        assert len(tries) == session_io.READS and len(reader) == 4


def test_a_save_waits_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "s"
    with begun("recent", 3) as session:
        session.save(place)
        handle = os.open(place, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        other = threading.Timer(0.3, os.close, (handle,))
        other.start()
        session.watch(film(5)[3:], fps=FPS)
        session.save(place)
        other.join()
        session.load(place)
        assert len(session) == 5
        handle = os.open(place, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        monkeypatch.setattr(checkpoint_io, "WAIT_S", 0.2)
        begin = time.monotonic()
        with pytest.raises(ModelError, match=r"another save writes to .* has not ended after 0.2 s; "):
            session.save(place)
        os.close(handle)
        assert 0.2 <= time.monotonic() - begin < 5
