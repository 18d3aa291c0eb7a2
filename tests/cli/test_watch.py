"""How `mmaccel ask` reads a video: sources without an index, large frames, sentences in the command's words."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import VideoSession
from mmaccel.cli.choices import own_options, read_video
from mmaccel.cli.console import bars
from mmaccel.core.errors import VideoError, VideoWarning
from mmaccel.media import reader
from mmaccel.media.preprocess import Pixels, size_of
from tests.cli import Call
from tests.media.films import numbers, write_film

SQUARE = Pixels(size={"height": 14, "width": 14}, fps=1000.0)  # every frame
PATCHES = Pixels(
    size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56},
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
)


def look(path: object, pixels: Pixels = SQUARE, **how: Any) -> Any:
    with bars() as progress:
        return read_video(
            str(path),
            SimpleNamespace(video=pixels, style=None, own_video_settings=True, tiny=None),
            progress,
            **how,
        )


def test_a_source_without_an_index_needs_no_option(tmp_path: Path) -> None:
    path = write_film(tmp_path / "bare.h264", 60, format="h264")
    assert numbers(look(path).frames) == list(range(60))
    assert numbers(look(path, max_frames=8).frames) == list(range(0, 60, 8))


@pytest.mark.parametrize(
    ("pixels", "size"),
    [(SQUARE, (14, 14)), (PATCHES, (28, 56)), (Pixels(size={}, do_resize=False), (64, 128))],
)
def test_fit_is_what_the_processor_does(pixels: Pixels, size: tuple[int, int]) -> None:
    assert size_of(pixels, 30, 64, 128) == size


def test_a_long_film_is_shrunk_to_what_the_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    path = write_film(tmp_path / "film.mp4", 40, height=160, width=256)
    exact = look(path).frames
    assert exact.shape == (40, 3, 160, 256)
    monkeypatch.setattr(reader, "ROOM", 40 * 3 * 160 * 256 - 1)
    monkeypatch.setattr(reader, "host_available", lambda: 1 << 20)
    small = look(path).frames
    assert small.shape == (40, 3, 28, 45) and numbers(look(path, frames=4).frames) == [0, 10, 20, 30]
    means = [frames.float().mean((0, 2, 3)) for frames in (exact, small)]
    torch.testing.assert_close(*means, rtol=0, atol=2.0)
    assert not [one for one in recwarn if issubclass(one.category, VideoWarning)]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"frames": 9}, "--frames 9 is more than the 6 frames of PATH: ask for fewer."),
        ({"frames": 0}, "--frames 0 must be at least 1."),
        ({"max_frames": 0}, "--max-frames 0 must be at least 1."),
        ({"fps": -1.0}, "--fps -1.0 must be a positive number of frames a second."),
        ({"fps": float("inf")}, "--fps inf must be a positive number of frames a second."),
    ],
)
def test_errors_name_the_options_of_the_command(tmp_path: Path, how: dict[str, Any], sentence: str) -> None:
    # The name of the file holds the words that are looked for.
    path = write_film(tmp_path / "frames=fps=.mp4", 6)
    with pytest.raises(VideoError) as caught:
        look(path, **how)
    assert str(caught.value).replace(str(path), "PATH") == sentence


def test_too_little_memory_names_the_options_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_film(tmp_path / "film.mp4", 6)
    monkeypatch.setattr(reader, "host_available", lambda: 1000)
    with pytest.raises(VideoError, match=r"are free: give --fps, --frames or --max-frames\.$"):
        look(path)
    bare = write_film(tmp_path / "bare.h264", 6, format="h264")
    monkeypatch.setattr(reader, "host_available", lambda: 1 << 40)
    with pytest.raises(VideoError, match=r"its number of frames: use --fps instead of --frames\.$"):
        look(bare, frames=2)


def test_warnings_name_no_argument_the_command_lacks(tmp_path: Path) -> None:
    path = write_film(tmp_path / "wide.mp4", 1, height=2, width=4100)
    with pytest.warns(VideoWarning, match=r"frames of 4100x2 were shrunk to 4096x2 and none lost\.$"):
        look(path)
    with pytest.warns(UserWarning, match="max_side= stays"), own_options():
        import warnings

        warnings.warn("max_side= stays", UserWarning, stacklevel=1)


def test_no_full_collection_comes_between_tokens(
    call: Call, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before the first frame is frozen for the command, and for it alone: a session leaves the user's garbage
    collector as it is."""
    seen, watch = list[int](), VideoSession.watch
    noted = lambda self, *given, **how: (seen.append(gc.get_freeze_count()), watch(self, *given, **how))[1]  # noqa: E731
    monkeypatch.setattr(VideoSession, "watch", noted)
    path = write_film(tmp_path / "film.mp4", 6)
    how = "--live", "--question", "hi", "--model", ov, "--max-new-tokens", 1
    assert call("watch", path, *how)[0] == 0
    assert seen and min(seen) > 10_000 and gc.get_freeze_count() == 0
    with VideoSession(mmaccel.load_model(ov), mmaccel.load_processor(ov), None, kv="mosaic") as session:
        before = gc.get_threshold(), gc.isenabled()
        session.watch(torch.zeros(2, 3, 84, 140, dtype=torch.uint8), fps=1.0)
        session.ask("hi", 1)
        assert (gc.get_threshold(), gc.isenabled()) == before and seen[-1] == gc.get_freeze_count() == 0


def test_ask_takes_a_bare_stream(call: Call, ov: str, tmp_path: Path) -> None:
    path = write_film(tmp_path / "bare.h264", 20, format="h264")
    words = f"--model {ov} --json --fps 25 --max-frames 4 --max-new-tokens 1"
    assert call.object("ask", path, "hi", *words.split())["frames"] == 3
