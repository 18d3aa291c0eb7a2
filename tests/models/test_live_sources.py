"""A camera that stalls, breaks off or ends is on record, and watched again when it is back."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mmaccel.core.errors import MmaccelWarning, ModelError, VideoError, VideoStalled
from mmaccel.core.streams import sources
from mmaccel.core.streams.parts import Clip
from tests.models.streams import QUESTION, every_stream, film, open_session

TIGHT = every_stream(frames=4, window=6)


def test_a_source_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FIRST_S", 0.05)
    frames, opened = film(12), list[float]()

    def clips(video: Any, fps: Any, check: Any) -> Any:
        opened.append(time.monotonic())
        if len(opened) == 1:
            yield Clip(frames[:3], [0.0, 0.5, 1.0], 2.0, part=True)
            raise VideoStalled("rtsp://camera", 10.0, 3)
        if len(opened) in (2, 3):
            raise VideoError("rtsp://camera cannot be opened; try again.")
        if len(opened) == 4:
            yield Clip(frames[3:6], [0.0, 0.5, 1.0], 2.0, part=True)
        else:
            yield Clip(frames[6:9], [0.0, 0.5, 1.0], 2.0, part=True)
            while True:
                check()
                time.sleep(0.01)

    with open_session("random-ov", TIGHT["rekv"]) as session:
        session._stream_adapter.clips = clips  # type: ignore[method-assign]
        threading.Timer(2.0, session.cancel).start()
        with pytest.warns(MmaccelWarning, match="cancelled; it took in 9 frames"):
            assert session.watch("rtsp://camera", reconnect=True) == 9
        stall, end = session.events
        assert (stall.kind, stall.seconds, end.kind) == ("stall", 1.0, "end")
        assert "nothing came for 10 s" in stall.why and stall.lasted and end.lasted
        assert opened[3] - opened[2] > opened[2] - opened[1] >= 0.1
        times = session.shown
        assert times[3] == pytest.approx(1.0 + stall.lasted) and times[4] == pytest.approx(times[3] + 0.5)
        assert times[6] == pytest.approx(times[5] + end.lasted)
        assert session.ask(QUESTION, 2).ids


def test_without_it_a_stall_is_an_error() -> None:
    def clips(video: Any, fps: Any, check: Any) -> Any:
        yield Clip(film(3), [0.0, 0.5, 1.0], 2.0, part=True)
        raise VideoStalled("rtsp://camera", 10.0, 3)

    with open_session("random-ov", TIGHT["rekv"]) as session:
        session._stream_adapter.clips = clips  # type: ignore[method-assign]
        with pytest.raises(VideoStalled):
            session.watch("rtsp://camera")
        assert session.frames == 3 and not session.events
        for how in ({"video": film(2)}, {"video": "a.mp4", "times": [1.0]}):
            with pytest.raises(ModelError, match="reconnect: it opens a path or URL again"):
                session.watch(**how, reconnect=True)
