"""A journal of how far `watch` has read a video, so that a killed `watch` can continue after its last save.

The journal of a session in the folder S is the file .S.mmaccel-journal beside it, with one JSON object a line: one for the
last finished save and one for a running save. A save writes it twice: before the session is written, without the session's
checksum, and afterwards with it.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import NoneType

from mmaccel.cli.console import error_sentence, plural, remark
from mmaccel.cli.program import delay_sigterm
from mmaccel.core.errors import MmaccelError, VideoError
from mmaccel.core.files import outside
from mmaccel.core.files.checkpoint_io import sync_to_disk, write_owner_only_text
from mmaccel.core.streams.session import VideoSession
from mmaccel.core.streams.session_io import FACTS, load_saved_frame_rate

FPS = 0.5
"""Frames a second that are read unless asked otherwise."""
EVERY_S = 60.0
"""Seconds between two saves, unless saving takes more than a tenth of them."""
LIMIT = 1 << 16
"""Most bytes of a journal."""


@dataclass(frozen=True)
class WatchSource:
    """What `watch` reads: the video's absolute path, its size in bytes (None: it is still growing), --fps and --gaps."""

    video: str
    bytes: int | None
    fps: float
    gaps: str


@dataclass(frozen=True)
class ReadProgress:
    """How far a video was read: up to second `until` of the video, which is second `until` + `shift` of the session.

    frames   frames of the session; `session` is the CRC-32 of its session.json (None: the save did not finish)
    whole    whether the video was read to its end
    """

    reading: WatchSource
    until: float
    shift: float
    whole: bool
    frames: int
    session: int | None = None


def journal_path(folder: Path) -> Path:
    """Return the path of the journal of a session saved to `folder`."""
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.mmaccel-journal")


def resume_frame_rate(folder: Path | None) -> float:
    """Return the frames per second at which the session saved in `folder` last read a video. Without a journal: at which it
    read its first clip. If that is unknown too: `FPS`."""
    last = folder and _of_session(folder)
    return last.reading.fps if last else (folder and load_saved_frame_rate(folder)) or FPS


def find_resume_point(folder: Path, reading: WatchSource) -> ReadProgress | None:
    """Find in the journal where the session in `folder` stopped reading this video; None if it read another one. Raises
    `VideoError` if it read this one with other options.

    The result is `whole` if nothing is left: the video was read to its end and is no longer growing.
    """
    last = _of_session(folder)
    if last is None:
        remark(
            f"{reading.video} is watched from its beginning: {folder} does not tell what it has read (a save from Python "
            "does not); to ask without watching, leave the video out."
        )
    if last is None or last.reading.video != reading.video:
        return None
    former = last.reading
    if len({former.bytes, reading.bytes} - {None}) > 1:
        remark(f"{reading.video} is read from its beginning: it is another file than the session had read.")
        return None
    if (former.fps, former.gaps) != (reading.fps, reading.gaps):
        how = f"--fps {former.fps:g} --gaps {former.gaps}"
        raise VideoError(f"--load: {folder} read {reading.video} with {how}; give the same to continue it.")
    if last.whole and None not in (former.bytes, reading.bytes):
        remark(f"nothing of {reading.video} is left to watch: the saved session has watched it to its end.")
        return last
    remark(f"continues at {last.until:g} s of {reading.video}, where the saved session stopped reading.")
    return replace(last, whole=False)


def _of_session(folder: Path) -> ReadProgress | None:
    """The line of the journal that belongs to the session in `folder`; None of a damaged journal."""
    path = journal_path(folder)
    try:
        lines = map(json.loads, outside.read_text(path, path.name, MmaccelError, most=LIMIT).splitlines())
        points = [ReadProgress(**one | {"reading": WatchSource(**one["reading"])}) for one in lines]
        facts = (folder / FACTS).read_bytes()
        frames = json.loads(facts)["frames"]
    except (MmaccelError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not all(map(_is_sound, points)):
        return None
    sealed = [one for one in points if one.session == zlib.crc32(facts)]
    # One that was killed between its save and its second line.
    unsealed = [one for one in points if one.session is None and one.frames == frames]
    return next(iter(sealed + unsealed), None)


def _is_sound(point: ReadProgress) -> bool:
    """Whether each value is of its kind, and the times are some."""
    reading = point.reading
    kinds: dict[tuple[type, ...], tuple[object, ...]] = {
        (str,): (reading.video, reading.gaps),
        (int, float): (reading.fps, point.until, point.shift),
        (int, NoneType): (reading.bytes, point.session),
        (int,): (point.frames,),
        (bool,): (point.whole,),
    }
    right = all(type(value) in kind for kind, values in kinds.items() for value in values)
    return right and 0 < reading.fps < math.inf and 0 <= point.until < math.inf and math.isfinite(point.shift)


class PeriodicSaver:
    """Saves a session to `folder` periodically, with its journal; without a folder it does nothing.

    source    what `watch` reads; None for one that cannot be continued, such as a camera
    point     where in the source reading began; None: at its beginning
    every     seconds between saves; 0: only at the end
    """

    def __init__(
        self,
        session: VideoSession,
        folder: Path | None,
        source: WatchSource | None,
        point: ReadProgress | None,
        every: float,
    ) -> None:
        self._session, self._folder, self._source = session, folder, source
        self._every, self._last, self._cost = every, time.monotonic(), 0.0
        self._begun, self._until = len(session), 0.0 if point is None else point.until
        self._told, self._saved = False, 0
        self.shift: float | None = None if point is None else point.shift

    def is_due(self) -> bool:
        """Whether it is time for the next periodic save of the session."""
        wait = max(self._every, 10 * self._cost)
        return self._folder is not None and self._every > 0 and time.monotonic() - self._last >= wait

    def save_if_due(self) -> None:
        """Save the session if it is time; a failed save prints a line and is retried later."""
        if not self.is_due():
            return
        begun = time.monotonic()
        try:
            self.save(whole=False)
        except (MmaccelError, OSError) as error:
            remark(f"not saved meanwhile: {error_sentence(error)}")
        self._last = time.monotonic()
        self._cost = self._last - begun

    def save(self, whole: bool) -> bool:
        """Save session and journal; return False without a folder or a frame. `whole`: the video was read to its end."""
        session, folder = self._session, self._folder
        if folder is None or not len(session):
            return False
        with delay_sigterm():
            point = None
            if self._source is not None:
                until, shift = self._until, self.shift or 0.0
                if len(session) > self._begun:
                    # Half a tick later, so that rounding does not bring a frame twice.
                    until = session.seconds - shift + 0.5 / self._source.fps
                point = ReadProgress(self._source, until, shift, whole, len(session))
                self._note(folder, point, _of_session(folder))
            session.save(folder)
            self._saved = len(session)
            if point is not None:
                point = replace(point, session=zlib.crc32((folder / FACTS).read_bytes()))
            self._note(folder, point)
        return True

    def describe_saved(self) -> str:
        """Return in words how many frames are saved; "" without a folder."""
        if self._folder is None:
            return ""
        if not self._saved:
            return f"nothing was saved to {self._folder}"
        if self._saved < len(self._session):
            return f"the first {plural(self._saved, 'frame')} are saved to {self._folder}, the rest is not"
        return f"saved to {self._folder}"

    def _note(self, folder: Path, *points: ReadProgress | None) -> None:
        """Write the journal, or remove it where there is nothing to say; a session is saved without one too."""
        path = journal_path(folder)
        lines = [json.dumps(asdict(one)) + "\n" for one in points if one is not None]
        try:
            if not lines:
                path.unlink(missing_ok=True)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}-part")
            write_owner_only_text(part, "".join(lines))
            os.replace(part, path)
            sync_to_disk(path.parent)
        except OSError as error:
            if not self._told:
                self._told = True
                remark(
                    f"without a journal, which cannot be written beside {folder} ({outside.os_reason(error)}), a killed "
                    "watch cannot be continued."
                )
