"""A watch that was killed goes on where its last save was; one that stalls or breaks off says so and keeps what it has."""

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mmaccel import media
from mmaccel.cli import main
from mmaccel.cli.journal import WatchSource, find_resume_point, journal_path
from mmaccel.core.streams import session_io
from mmaccel.core.streams.session import VideoSession
from tests.cli import Call, after, interrupt
from tests.media.films import halting, write_film
from tests.media.odd import CASES
from tests.spies import broken, heard, returned

QUESTIONS = ("--question", "what was first ?@9", "--question", "how many ?")


class Killed(BaseException):
    """The process is gone: nothing handles it."""


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames 0.2 s apart with still moments of 2.5, 4 and 9 s: 22.5 s."""
    times = [0, 0.2, 2.7, 2.9, 6.9, 7.1, 16.1, *(16.3 + n / 5 for n in range(31))]
    return write_film(tmp_path_factory.mktemp("slides") / "slides.mkv", len(times), times=times)


KNOWN: dict[str, tuple[Any, dict[str, Any]]] = {}
"""By memory, what a watch of the slides to their end tells, and what it saves."""


def memory(folder: Path) -> dict[str, Any]:
    """The sizes and checksums of a saved session's files, whatever folder they lie in."""
    files: dict[str, Any] = json.loads((folder / "session.json").read_text())["files"]
    return {
        name[name.find("memory/") :] if "memory/" in name else Path(name).name: one
        for name, one in files.items()
    }


def kill() -> None:
    raise Killed


@pytest.mark.always
@pytest.mark.parametrize(
    ("kv", "when"),
    [
        ("mosaic", "between two saves"),
        ("rekv", "before a save"),
        ("mosaic", "after a save"),
        ("rekv", "stopped"),
    ],
)
def test_a_killed_watch_goes_on(
    call: Call, ov: str, slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: str, when: str
) -> None:
    folder = tmp_path / "killed"
    base = f"watch {slides} --model {ov} --recipe {kv} --fps 1 --clip 5 --max-new-tokens 3 --json".split()
    # Saved after each clip, which ends a pass, killed or not.
    monkeypatch.setattr("mmaccel.cli.journal.PeriodicSaver.save_if_due", lambda keeper: keeper.save(False))
    base += ["--save-every", "1e-9"]
    if kv not in KNOWN:
        told = call.object(*base, *QUESTIONS, "--save", tmp_path / "whole")
        assert (told["frames"], told["ended"]) == (23, "end")
        KNOWN[kv] = told, memory(tmp_path / "whole")
    whole, kept_of_it = KNOWN[kv]
    words = [str(one) for one in (*base, *QUESTIONS, "--save", folder)]
    with monkeypatch.context() as patch:
        if when in ("between two saves", "stopped"):
            patch.setattr(media, "clips", after(3, media.clips, interrupt if when == "stopped" else kill))
        else:
            third = Mock(side_effect=[None, None, Killed])
            (heard if when == "before a save" else returned)(patch, session_io, "save_session", third)
        with pytest.raises((Killed, SystemExit)):
            main(words)
    kept = json.loads((folder / "session.json").read_text())["frames"]
    assert kept == (10 if when == "before a save" else 15)
    # The recipe is that of the saved session.
    again = [one for one in base if one not in ("--recipe", kv)]
    status, out, err = call(*again, *QUESTIONS[2:], "--load", folder, "--save", folder)
    later = json.loads(out)
    assert (status, later["frames"], later["seconds"]) == (0, 23, 22.0)
    assert f"continues at {kept - 0.5:g} s of {slides}" in err
    assert later["answers"][-1]["answer"] == whole["answers"][-1]["answer"]
    assert later["answers"][-1]["evidence"] == whole["answers"][-1]["evidence"]
    assert memory(folder) == kept_of_it
    if when != "stopped":
        return
    # What was read to its end is not read again.
    over = f"nothing of {slides} is left to watch: the saved session has watched it to its end.\n"
    with monkeypatch.context() as patch:
        patch.setattr(media, "clips", None)
        status, out, err = call(*again, *QUESTIONS[2:], "--load", folder, "--save", folder)
    anew = json.loads(out)
    assert (status, err, anew["frames"], anew["ended"]) == (0, over, 23, "end")
    assert anew["answers"][0]["answer"] == later["answers"][0]["answer"]
    assert memory(folder) == kept_of_it
    assert call(*again, "--load", folder)[2] == over
    # Another file follows what there is.
    another = tmp_path / "another.mkv"
    another.write_bytes(slides.read_bytes())
    assert call.object("watch", another, *again[2:], "--load", folder)["frames"] == 46


def test_a_session_goes_on_at_its_own_rate(
    call: Call, ov: str, slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the default rate, by which the same film would be read again as a second one."""
    base = ("watch", slides, "--model", ov, "--json")
    with monkeypatch.context() as patch:
        patch.setattr(media, "clips", after(1, media.clips))
        call(*base, "--recipe", "recent", "--fps", 1, "--clip", 5, "--live", "--save", tmp_path / "s")
    for other in (("--fps", 2), ("--gaps", "skip")):
        told = (
            f"--load: {tmp_path / 's'} read {slides} with --fps 1 --gaps hold; give the same to continue it."
        )
        assert call.error(*base, *other, "--load", tmp_path / "s") == f"error: {told}\n"
    status, out, err = call(*base, "--load", tmp_path / "s")
    assert (status, json.loads(out)["frames"]) == (0, 23) and err.startswith("continues at 4.5 s of ")
    journal_path(tmp_path / "s").unlink()
    status, out, err = call(*base, "--load", tmp_path / "s")
    assert json.loads(out)["frames"] == 5 + 23, "at the rate of its first clip"
    assert "is watched from its beginning: " in err and err.count("\n") == 1
    grown = tmp_path / "grown.mkv"
    grown.write_bytes(slides.read_bytes())
    call(*base[:1], grown, *base[2:], "--load", tmp_path / "s", "--save", tmp_path / "s")
    grown.write_bytes(slides.read_bytes() + b"0")
    status, out, err = call(*base[:1], grown, *base[2:], "--load", tmp_path / "s")
    assert json.loads(out)["frames"] == 5 + 23 + 23
    assert err == f"{grown} is read from its beginning: it is another file than the session had read.\n"


def test_a_stall_is_told_and_what_came_is_kept(call: Call, ov: str, tmp_path: Path) -> None:
    data, path = write_film(tmp_path / "whole.ts", 60).read_bytes(), tmp_path / "camera.ts"
    words = ("watch", path, "--model", ov, "--fps", 5, "--clip", 8, "--follow", "--timeout", 0.5, "--json")
    words += ("--question", "how many ?", "--max-new-tokens", 1)
    with halting(data, path, pause=60.0):
        status, out, err = call(*words, "--recipe", "recent", "--save", tmp_path / "s")
    told = json.loads(out)
    taken = told["frames"]
    assert status == 2 and 0 < taken < 30
    assert (told["ended"], told["complete"]) == ("stall", False)
    assert told["unanswered"] == [] and len(told["answers"]) == 1
    stall = (
        f"{path} stalled: nothing came for 0.5 s after {taken} frames, and it has not ended; raise --timeout."
    )
    assert told["error"] == stall and err == f"saved {taken} frames to {tmp_path / 's'}\nerror: {stall}\n"
    status, out, err = call(*words, "--load", tmp_path / "s", "--save", tmp_path / "s")
    assert (status, json.loads(out)["frames"], json.loads(out)["ended"]) == (0, 30, "end")
    assert f"continues at {taken / 5 - 0.1:g} s of" in err
    # What was followed to its end may have grown since.
    status, out, err = call(*words, "--load", tmp_path / "s")
    assert (status, json.loads(out)["frames"], json.loads(out)["ended"]) == (0, 30, "end")
    assert err.endswith(f"nothing of {path} is left to watch behind 5.9 s.\n")


def test_gaps_are_skipped_or_listed(call: Call, ov: str, slides: Path) -> None:
    base = ("watch", slides, "--model", ov, "--recipe", "recent", "--fps", 1)
    told = call.object(*base, "--gaps", "skip", "--json")
    assert told["frames"] == 12 and told["events"] == []
    status, _, err = call(*base, "--gaps", "mark")
    assert status == 0 and "watched 23 frames, 22 s" in err
    assert re.search(
        r"(?m)^memory: \d+ of 23 steps of time \(frames\) on the device; device \d+ MiB; peak [\d.]+ [MG]iB$",
        err,
    )
    gaps = [line for line in err.splitlines() if line.startswith("gap")]
    assert gaps == ["gap at 2 s, 1 s", "gap at 4 s, 3 s", "gap at 9 s, 7 s"], "each still moment is one gap"
    err = call.error(*base, "--gaps", "wait")
    assert err.startswith("error: gaps='wait' must be one of 'hold', 'skip', 'mark'.")


@pytest.mark.parametrize("name", ["slides, mkv", "screen recording at 0.2 fps", "joined recordings", "gif"])
def test_an_odd_file_is_watched(call: Call, ov: str, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = tmp_path / f"odd.{case.suffix}"
    case.make(path)
    fps = case.fps
    words = ("--question", "how many ?", "--max-new-tokens", 1, "--json")
    told = call.object("watch", path, "--model", ov, "--recipe", "recent", "--fps", fps, *words)
    assert told["ended"] == "end" and len(told["answers"]) == 1
    assert told["frames"] == len(media.read(path, fps=fps)) and told["seconds"] == (told["frames"] - 1) / fps


def test_rare_slides_are_watched_at_a_rate_above_their_mean(call: Call, ov: str, tmp_path: Path) -> None:
    """Three slides in 24 s: 0.125 frames a second, of which each is on the screen at eight ticks of --fps 1."""
    path = write_film(tmp_path / "slide.mp4", 3, times=[0, 8, 16])
    words = ("--model", ov, "--max-new-tokens", 1, "--fps", 1)
    status, _, err = call("watch", path, *words, "--recipe", "recent")
    own = media.read(path).source_fps
    assert own < 0.2 and (status, err.splitlines()[0]) == (
        0,
        f"reads 1 frames a second (--fps); the source has {own:g} on average, and what stands is taken as --gaps says.",
    )
    frames = len(media.read(path, fps=1))
    assert frames > 16 and f"watched {frames} frames" in err
    assert call("ask", path, "how many ?", *words)[0] == 0
    for more in ((), ("--follow", "--timeout", 0.3)):
        told = f"error: --fps: 1e+09 is more than the 240 frames a second that can be read of {path}; give no more.\n"
        assert call.error("watch", path, *words, "--fps", 1e9, *more) == told


@pytest.mark.parametrize("name", ["runs/today/stream", "n" * 245, "blocked"])
def test_a_session_is_saved_where_its_journal_cannot_be(
    call: Call, ov: str, slides: Path, tmp_path: Path, name: str
) -> None:
    place = tmp_path / name
    if name == "blocked":
        place.with_name(".blocked.mmaccel-journal-part").mkdir()
    base = ("watch", slides, "--model", ov, "--recipe", "recent", "--fps", 0.5, "--json")
    status, out, err = call(*base, "--save", place)
    assert status == 0 and json.loads(out)["saved"] == str(place) and (place / "session.json").is_file()
    if name == "runs/today/stream":
        assert journal_path(place).stat().st_mode & 0o777 == 0o600 and err == ""
    else:
        assert err.startswith("without a journal") and err.count("\n") == 1


def test_a_journal_is_on_the_disk_before_the_former_one_goes(
    call: Call, ov: str, slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = journal_path(tmp_path / "s")
    place.with_name(f"{place.name}-part").write_text("of a watch that was killed, readable by all")
    found = list[str]()
    heard(monkeypatch, os, "fsync", lambda n: found.append(f"sync {os.readlink(f'/proc/self/fd/{n}')}"))
    heard(monkeypatch, os, "replace", lambda old, new, **_: found.append(f"move {new}"))
    base = ("watch", slides, "--model", ov, "--recipe", "recent", "--fps", 0.1, "--json")
    assert call(*base, "--save", tmp_path / "s")[0] == 0 and place.stat().st_mode & 0o777 == 0o600
    order = [f"sync {place}-part", f"move {place}", f"sync {tmp_path}"]
    steps = [one for one in found if one in order]
    assert steps[:3] == order and steps[-3:] == order and f"move {tmp_path / 's' / 'session.json'}" in found


GOOD: dict[str, Any] = {"until": 4.5, "shift": 0.0, "whole": False, "frames": 3, "session": None}
READ: dict[str, Any] = {"video": "/a.mp4", "bytes": 5, "fps": 1.0, "gaps": "hold"}
DAMAGED: dict[str, Any] = {
    "until": {**GOOD, "until": "x"},
    "until nan": {**GOOD, "until": float("nan")},
    "until -1": {**GOOD, "until": -1.0},
    "shift": {**GOOD, "shift": None},
    "fps": {**GOOD, "reading": {**READ, "fps": "x"}},
    "bytes": {**GOOD, "reading": {**READ, "bytes": []}},
    "whole": {**GOOD, "whole": 0},
    "a list": [],
    "deep": None,
}


@pytest.mark.parametrize("name", [*DAMAGED, "pipe", "bytes of no text", "none"])
def test_a_damaged_journal_is_as_if_there_were_none(tmp_path: Path, name: str, capsys: Any) -> None:
    folder, reading = tmp_path / "s", WatchSource(**READ)
    folder.mkdir()
    (folder / "session.json").write_text('{"frames": 3}')
    place = journal_path(folder)
    place.write_text(json.dumps({**GOOD, "reading": READ}))
    assert find_resume_point(folder, reading) is not None
    told = DAMAGED.get(name)
    place.write_text(json.dumps({"reading": READ, **told} if isinstance(told, dict) else told))
    if name == "deep":
        place.write_text("[" * 60_000)
    elif name == "bytes of no text":
        place.write_bytes(b"\xff\xfe")
    elif name in ("pipe", "none"):
        place.unlink()
        if name == "pipe":
            os.mkfifo(place)
    assert find_resume_point(folder, reading) is None
    assert "watched from its beginning" in capsys.readouterr().err


def test_an_error_that_nobody_foresaw_loses_nothing(
    call: Call, ov: str, slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What was watched is saved and what was answered is shown before it is raised."""
    bug, late = RuntimeError("a bug"), lambda session, *_, **__: len(session) >= 10
    broken(monkeypatch, VideoSession, "watch", bug, late)
    words = ("watch", slides, "--model", ov, "--recipe", "recent", "--fps", 1, "--clip", 5, "--json")
    words += ("--question", "what ?@3", "--max-new-tokens", 1, "--live", "--save", tmp_path / "s")
    with pytest.raises(RuntimeError, match="a bug"):
        main([str(one) for one in words])
    told = json.loads(capsys.readouterr().out)
    assert told["saved"] == str(tmp_path / "s") and len(told["answers"]) == 1
    assert told["error"] == "RuntimeError: a bug" and told["ended"] == "error"
    assert json.loads((tmp_path / "s" / "session.json").read_text())["frames"] == told["frames"] >= 10
