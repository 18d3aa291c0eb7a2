"""A session that watches a file: still moments are watched through, and what comes before an error is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import media
from mmaccel.core.errors import VideoError
from mmaccel.media import Video
from tests.media.films import write_film
from tests.models.streams import every_stream, logits, open_session

TIGHT = every_stream(frames=4, window=6)


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames 0.1 s apart with still moments of 2.5, 4 and 9 s: 18 s."""
    times = [0, 0.1, 2.6, 2.7, 6.7, 6.8, 15.8, *(15.9 + n / 10 for n in range(21))]
    return write_film(tmp_path_factory.mktemp("slides") / "slides.mkv", len(times), times=times)


@pytest.mark.parametrize("kv", ["rekv", "mosaic"])
def test_a_still_moment_is_watched(slides: Path, kv: str) -> None:
    with open_session("random-ov", TIGHT[kv]) as session, open_session("random-ov", TIGHT[kv]) as twin:
        assert session.watch(slides, fps=1.0) == 18
        assert session.shown == [float(tick) for tick in range(18)]
        for clip in media.clips(slides, fps=1.0, frames_per_clip=64, gaps="mark"):
            twin.watch(clip)
        torch.testing.assert_close(logits(session), logits(twin), rtol=0, atol=1e-5)
        assert twin.shown == session.shown


@pytest.mark.parametrize("error", [VideoError("it is silent."), RuntimeError("broken"), KeyboardInterrupt()])
def test_the_clips_before_an_error_are_kept(
    slides: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    inner: Callable[..., Iterator[Video]] = media.clips

    def broken(path: Path, **how: Any) -> Iterator[Video]:
        clips = inner(path, **how | {"frames_per_clip": 4})
        yield from (next(clips), next(clips))
        raise error

    with (
        open_session("random-ov", TIGHT["rekv"]) as session,
        open_session("random-ov", TIGHT["rekv"]) as twin,
    ):
        monkeypatch.setattr(media, "clips", broken)
        with pytest.raises(type(error)) as caught:
            session.watch(slides, fps=1.0)
        told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        if not isinstance(error, KeyboardInterrupt):
            assert told.endswith("the 8 frames before it are kept.")
        twin.watch(media.read(slides, fps=1.0).at(slice(8)))
        assert len(session) == 8
        torch.testing.assert_close(logits(session), logits(twin), rtol=0, atol=1e-5)
        with pytest.raises(type(error)):
            session.watch(slides, times=[20.0 + n for n in range(18)], fps=1.0)
        assert len(session) == 8, "of a call with times, all is taken in or nothing"
