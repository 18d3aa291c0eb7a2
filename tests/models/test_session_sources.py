"""What a session watches: a file, a pipe, an address or a camera, of which what comes before a silence, an error or an
end is kept; and times, at which units stand as the model has frames of them, and of which a question sees those frames
alone."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import media
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import MmaccelWarning, ModelError, VideoError, VideoStalled
from mmaccel.core.streams import sources
from mmaccel.core.streams.sources import Clip
from mmaccel.media import Video
from mmaccel.media.container import Source
from tests.media.films import answering, silent_pipe, write_film
from tests.media.odd import even, write
from tests.media.test_live import gone, readers
from tests.models.streams import (
    FPS,
    QUESTION,
    SEARCHES,
    every_stream,
    film,
    inputs_of,
    logits,
    open_session,
    pair,
    resumed,
)
from tests.spies import crossed, product

FRAMES = 24
SOON_S, AFTER_S, LATE_S = 0.5, 2.5, 9.0
"""When a `watch` of nothing and of something is ended, and less than the 10 s after which it would tell a stall."""


def watched(
    session: mmaccel.VideoSession, path: Path | str, how: str, count: int = 0, **more: Any
) -> tuple[int, float]:
    """The frames that `watch` takes in, and the seconds it lasts, when it is ended once so many are in, or by its time."""

    def cancel() -> None:
        late = time.monotonic() + LATE_S
        while session.frames < count and time.monotonic() < late:
            time.sleep(0.02)
        time.sleep(SOON_S)
        session.cancel()

    timer = threading.Thread(target=cancel)
    if how == "cancel":
        timer.start()
    else:
        more["timeout"] = AFTER_S if count else SOON_S
    began = time.monotonic()
    told = "was cancelled" if how == "cancel" else "reached its timeout"
    with pytest.warns(
        MmaccelWarning, match=rf"watch: it {told}; it took in \d+ frames and left out"
    ) as caught:
        done = session.watch(path, fps=1.0, **more)
    took = time.monotonic() - began
    timer.join() if how == "cancel" else None
    assert f"took in {done} frames" in str(caught[-1].message)
    return done, took


@crossed(how=["timeout", "cancel"], sent=[False, True])
def test_a_silent_pipe_is_left(tmp_path: Path, how: str, sent: bool) -> None:
    film = write(tmp_path / "film.ts", even(FRAMES, 1.0), gop=1)
    data, others = film.read_bytes() if sent else b"", readers()
    with open_session("random-ov", "recent") as session, silent_pipe(tmp_path / "pipe.ts", data):
        done, took = watched(session, tmp_path / "pipe.ts", how, FRAMES - 4 if sent else 0)
        assert took < LATE_S and done == session.frames
        assert FRAMES - 4 <= done < FRAMES if sent else done == 0, done
        assert gone(others), "no thread reads on"
        session.watch(film, fps=1.0)
        assert session.frames == done + FRAMES, "the session goes on"


@crossed(how=["timeout", "cancel"], timed=[False, True])
def test_a_slow_decoder_is_left(tmp_path: Path, monkeypatch, how: str, timed: bool) -> None:
    film, frames = write(tmp_path / "film.mp4", even(140, 1.0)), Source.frames

    def slow(self: Source, start: float = 0.0) -> Iterator[Any]:
        for number, one in enumerate(frames(self, start)):
            time.sleep(0.3 if number > 70 else 0)
            yield one

    monkeypatch.setattr(Source, "frames", slow)
    more = {"times": even(140, 1.0)} if timed else {}
    with open_session("random-ov", "recent") as session:
        done, took = watched(session, film, how, 64, **more)
        assert took < LATE_S and done == session.frames == 64


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_an_address_that_never_answers_is_left(how: str) -> None:
    over = threading.Event()
    with open_session("random-ov", "recent") as session, answering(lambda request: over.wait(20)) as site:
        try:
            done, took = watched(session, f"{site}/camera.ts", how)
        finally:
            over.set()
    assert done == 0 and took < LATE_S


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
def test_the_clips_before_an_error_are_kept(slides: Path, monkeypatch, error: BaseException) -> None:
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
        twin.watch(media.read(slides, fps=1.0).select_frames(slice(8)))
        assert len(session) == 8
        torch.testing.assert_close(logits(session), logits(twin), rtol=0, atol=1e-5)
        with pytest.raises(type(error)):
            session.watch(slides, times=[20.0 + n for n in range(18)], fps=1.0)
        assert len(session) == 8, "of a call with times, all is taken in or nothing"


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
            session.cancel()
            while True:
                check()

    with open_session("random-ov", TIGHT["rekv"]) as session:
        session._stream_adapter.iterate_clips = clips  # type: ignore[method-assign]
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
        session._stream_adapter.iterate_clips = clips  # type: ignore[method-assign]
        with pytest.raises(VideoStalled):
            session.watch("rtsp://camera")
        assert session.frames == 3 and not session.events
        for how in ({"video": film(2)}, {"video": "a.mp4", "times": [1.0]}):
            with pytest.raises(ModelError, match="reconnect: it opens a path or URL again"):
                session.watch(**how, reconnect=True)


NAME = "random-qwen"  # two frames a unit, four positions a second
STEP = 0.5
"""Seconds between two frames of the dense video that has a frame at each of the times."""

UNITS = (0, 1, 2, 7, 9, 10, 31, 32)
"""The units of the dense video that are kept."""

EVERY = every_stream(positions="original")
WHOLE = {name: kv for name, kv in EVERY.items() if name not in ("no_cache", "window")}
"""Memories that keep and see all. What "no_cache" and "window" show is always closed up, one unit after the other."""
CALLS = product(WHOLE, (1, 3, 16))


def times() -> list[float]:
    """Of both frames of each unit."""
    return [5.0 + 2 * unit * STEP + half * STEP for unit in UNITS for half in (0, 1)]


def stock(dense: int, step: float = STEP) -> Tensor:
    """[3, 1, S]: the stock model's positions of a prompt with `dense` units of two frames, `step` seconds apart."""
    model, processor = pair(NAME)
    frames = film(1).expand(2 * dense, -1, -1, -1)
    content = [{"type": "video", "video": frames}, {"type": "text", "text": QUESTION}]
    inputs = processor.chat(content, fps=1 / step)
    names = ("input_ids", "video_grid_thw", "second_per_grid_ts", "attention_mask", "mm_token_type_ids")
    return model.model.get_rope_index(**{name: inputs[name] for name in names})[0]


def wanted(frames: Tensor) -> Tensor:
    """[V] the stock model's logits after the kept units, each at the position it has in the dense video."""
    model, processor = pair(NAME)
    content = [{"type": "video", "video": frames}, {"type": "text", "text": QUESTION}]
    inputs = processor.chat(content, fps=FPS)
    film_ids = inputs["input_ids"][0] == processor.video_token_id
    first, count = int(film_ids.nonzero()[0]), int(film_ids.sum()) // len(UNITS)
    whole = stock(UNITS[-1] + 1)
    units = [whole[..., first + u * count : first + (u + 1) * count] for u in UNITS]
    after = whole[..., first + (UNITS[-1] + 1) * count :]
    positions = torch.cat([whole[..., :first], *units, after], -1)
    with torch.no_grad():
        return model(**inputs, position_ids=positions).logits[0, -1]


@pytest.mark.parametrize(("kv", "call"), CALLS)
def test_uneven_times_have_the_stock_model_s_positions(kv: str, call: int) -> None:
    frames = film(2 * len(UNITS))
    with open_session(NAME, WHOLE[kv]) as session, open_session(NAME, WHOLE[kv]) as even:
        for begin in range(0, len(frames), call):
            part = slice(begin, begin + call)
            session.watch(frames[part], times=times()[part])
        assert (logits(session) - wanted(frames)).abs().max() <= 1e-4
        even.watch(frames, fps=1 / STEP)
        assert (logits(even) - wanted(frames)).abs().max() > 1e-3, "the comparison can fail"


@pytest.mark.parametrize("kv", ["full", "mosaic", "recent"])
def test_even_times_change_nothing(kv: str) -> None:
    tight = every_stream(frames=4, window=6)[kv]
    with open_session(NAME, tight) as timed, open_session(NAME, tight) as rated:
        timed.watch(film(12)[:4], times=[0.5 * n for n in range(4)], fps=2.0)
        timed.watch(film(12)[4:], times=[0.5 * n for n in range(4, 12)])
        rated.watch(film(12)[:4], fps=2.0)
        rated.watch(film(12)[4:])
        assert torch.equal(logits(timed), logits(rated)) and timed.shown == rated.shown


@pytest.mark.parametrize("kv", ["full", "mosaic", "livevlm", "rekv", "streammem"])
def test_a_saved_stream_goes_on_at_its_times(tmp_path: Path, kv: str) -> None:
    """Units that are not complete stand where their first frame does."""
    frames = film(2 * len(UNITS))
    frames[-1] = frames[-2]
    with open_session(NAME, WHOLE[kv]) as session:
        session.watch(frames[:9], times=times()[:9])
        with resumed(session, tmp_path / "stream") as again:
            with pytest.raises(ModelError, match="times"):
                again.watch(frames[9:], times=[1e3 + n for n in range(6)])
            again.watch(frames[9:-1], times=times()[9:-1])
            assert (logits(again) - wanted(frames)).abs().max() <= 1e-4


@pytest.mark.parametrize("kv", ["rekv", "mosaic", "recent", "streammem", "livevlm"])
def test_a_pause_longer_than_the_model_reaches(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair(NAME)[0].model.language_model.config, "max_position_embeddings", 400)
    tight = every_stream(frames=4, window=6, positions="original")[kv]
    moments = [0.5 * n for n in range(12)] + [1e6 + 0.5 * n for n in range(12)] + [1e7, 1e7 + 3]
    with open_session(NAME, tight) as session:
        for begin in range(0, 26, 5):
            part = slice(begin, begin + 5)
            session.watch(torch.cat([film(25), film(1)])[part], times=moments[part])
        answer = session.ask(QUESTION, 3)
        positions = session._live.stream.positions  # type: ignore[union-attr]
        assert len(answer.ids) == 3 and torch.isfinite(logits(session)).all()
        assert int(positions.positions_by_time(0, 13).max()) < 400


def test_a_family_without_seconds_goes_by_numbers() -> None:
    assert adapter_for(pair("random-ov")[0]).stream_time_scale(pair("random-ov")[0], {}) is None  # type: ignore[attr-defined]
    with open_session("random-ov", "full") as session, open_session("random-ov", "full") as even:
        session.watch(film(6), times=[0.0, 1.0, 5.0, 9.0, 100.0, 101.0])
        even.watch(film(6), fps=1.0)
        assert torch.equal(logits(session), logits(even))


KEEPERS = {**{name: kv for name, kv in TIGHT.items() if name not in ("window", "recent")}, **SEARCHES}
COUNT = 25


@torch.no_grad()
def masked(name: str, begin: int, end: int) -> torch.Tensor:
    """[V] what the plain model says where the words of the question see, of the frames, those from `begin` to `end`."""
    model, processor = pair(name)
    inputs, whole = inputs_of(name, COUNT), inputs_of(name, COUNT)
    shown = (inputs["input_ids"][0] == processor.video_token_id).nonzero()[:, 0]
    pace = 2 if name == "random-qwen" else 1
    units = -(-COUNT // pace)
    per = len(shown) // units
    length, last = inputs["input_ids"].shape[1], int(shown[units * per - 1])
    mask = torch.full((length, length), -torch.inf).triu(1)
    gone = shown[: units * per].view(units, per)
    gone = torch.cat([gone[: begin // pace], gone[end // pace :]]).flatten()
    rows = torch.arange(last + 1, length)
    mask[rows[:, None], gone] = -torch.inf
    inputs["attention_mask"] = mask[None, None]
    positions = {}
    if hasattr(model.model, "get_rope_index"):
        given = {k: v for k, v in whole.items() if "pixel" not in k}
        positions["position_ids"] = model.model.get_rope_index(**given)[0]
    return model(**inputs, **positions).logits[0, -1]


def test_it_is_the_model_that_sees_no_other_frames() -> None:
    with open_session("random-ov", every_stream()["full"], COUNT) as session:
        for begin, end in ((4, 9), (0, 3), (20, 25)):
            want = masked("random-ov", begin, end)
            between = begin / FPS, (end - 1) / FPS
            assert torch.allclose(logits(session, concurrent=True, between=between), want, atol=2e-4)
        whole = logits(session, concurrent=True)
        assert not torch.allclose(whole, want, atol=1e-3)
        assert torch.allclose(logits(session, concurrent=True, between=(0.0, 1e9)), whole, atol=2e-4)


@crossed(kv=KEEPERS, name=["random-ov", "random-qwen"])
def test_it_rests_on_frames_of_that_time(name: str, kv: str) -> None:
    with open_session(name, KEEPERS[kv], COUNT) as session:
        plain = session.ask(QUESTION, 4)
        for begin, end in ((2.0, 4.0), (8.0, 12.0)):
            answer = session.ask(QUESTION, 4, between=(begin, end))
            assert answer.ids and answer.evidence
            assert all(begin <= one.seconds <= end for one in answer.evidence)
        again = session.ask(QUESTION, 4)
        assert (again.ids, again.evidence) == (plain.ids, plain.evidence), "it leaves no trace"


def test_a_time_of_which_nothing_is_left() -> None:
    with open_session("random-ov", every_stream(frames=4, window=6)["recent"], COUNT) as session:
        assert session.ask(QUESTION, 2, between=(11.0, 12.0)).ids
        with pytest.raises(ModelError, match="kv 'recent' holds nothing of that time any more"):
            session.ask(QUESTION, 2, between=(1.0, 3.0))
        for between in ((40.0, 50.0), (3.0, 2.0), (2.1, 2.3)):
            with pytest.raises(ModelError, match="between: no frame was shown from"):
                session.ask(QUESTION, 2, between=between)
        assert session.ask(QUESTION, 2).ids
