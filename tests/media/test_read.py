"""Reading files: times, rates, numbers, spans, sizes, rotation, memory; and which frames are chosen, without any video."""

import itertools
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmaccel import media
from mmaccel.core.errors import VideoError
from mmaccel.media.container import Source
from mmaccel.media.sampling import evenly_spaced_frames, half_period, pick_nearest, sampling_times
from tests import python
from tests.media.films import Film, numbers, set_matrix, write_film
from tests.spies import refusal


def test_count_equals_the_stock_loader(film: Film) -> None:
    video_utils = pytest.importorskip("transformers.video_utils")
    path = film(frames=48)
    stock, metadata = video_utils.load_video(str(path), num_frames=8, backend="pyav")
    video = media.read(path, frames=8)
    assert torch.equal(video.frames.permute(0, 2, 3, 1), torch.from_numpy(stock))
    assert numbers(video.frames) == list(metadata.frames_indices)
    told = metadata.sampled_fps if hasattr(metadata, "sampled_fps") else 8 / 48 * 10
    assert video.fps == pytest.approx(told)


def test_numbers_of_frames_and_a_span(film: Film) -> None:
    """A number that does not divide; more than there are; and those of a part."""
    assert numbers(media.read(film(frames=47), frames=13).frames) == evenly_spaced_frames(47, 13)
    path = film()
    assert len(media.read(path, fps=5, max_frames=100)) == 30
    assert numbers(media.read(path, start=2.0, stop=2.5).frames) == [20, 21, 22, 23, 24]
    assert numbers(media.read(path, start=2.0, stop=4.0, fps=1).frames) == [20, 30]
    assert numbers(media.read(path, start=2.0, stop=4.0, frames=4).frames) == [20, 25, 30, 35]
    assert media.read(path, start=5.8).times.tolist() == pytest.approx([5.8, 5.9])


@pytest.mark.parametrize("name", ["film.mp4", "film.mkv", "film.ts"])
@pytest.mark.parametrize("how", [{"fps": 0.1}, {"frames": 4}, {"fps": 1, "start": 30.0}])
def test_seeking_changes_nothing_but_the_work(
    film: Film, name: str, how: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = film(name, 500, height=32, width=64, gop=25)
    decoded = 0
    frames, decode = Source.frames, Source._decode

    def counted(self: Source) -> Iterator[object]:
        nonlocal decoded
        for frame in decode(self):
            decoded += 1
            yield frame

    monkeypatch.setattr(Source, "_decode", counted)
    quick = media.read(path, **how)
    work, decoded = decoded, 0
    monkeypatch.setattr(Source, "seek", lambda self, place, target: None)
    monkeypatch.setattr(Source, "frames", lambda self, start=0.0: frames(self))
    slow = media.read(path, **how)
    assert torch.equal(quick.frames, slow.frames) and torch.equal(quick.times, slow.times)
    assert work < 0.75 * decoded


@pytest.mark.parametrize(
    ("matrix", "corner"),
    [
        pytest.param((1, 0, 0, 1), (0, 0), id="upright"),
        pytest.param((0, 1, -1, 0), (0, -1), id="a quarter clockwise"),
        pytest.param((0, -1, 1, 0), (-1, 0), id="a quarter back"),
        pytest.param((-1, 0, 0, -1), (-1, -1), id="upside down"),
        pytest.param((-1, 0, 0, 1), (0, -1), id="mirrored"),
        pytest.param((1, 0, 0, -1), (-1, 0), id="mirrored top to bottom"),
        pytest.param((0, 1, 1, 0), (0, 0), id="transposed"),
    ],
)
def test_the_display_matrix_is_honoured(
    film: Film, matrix: tuple[int, int, int, int], corner: tuple[int, int]
) -> None:
    path = set_matrix(film(frames=2), *matrix)
    video = media.read(path)
    assert video.frames.shape[2:] == ((128, 64) if matrix[1] else (64, 128))
    red = (video.frames[0, 0].int() - video.frames[0, 1].int()) > 150
    rows, columns = (place.float().mean() for place in red.nonzero(as_tuple=True))
    height, width = red.shape
    assert red[corner]
    assert (rows < height / 2) == (corner[0] == 0) and (columns < width / 2) == (corner[1] == 0)
    resized = media.read(path, size=(40, 20))
    assert resized.frames.shape[2:] == (40, 20) and resized.frames[(0, 0, *corner)] > 150


def test_size_is_applied_while_decoding(film: Film) -> None:
    path = film(frames=4)
    small = media.read(path, size=(32, 64)).frames
    assert small.shape == (4, 3, 32, 64)
    area = torch.nn.functional.avg_pool2d(media.read(path).frames.float(), 2)
    assert (small.float() - area).abs().mean() < 2


def test_more_than_memory_is_refused_before_decoding(film: Film, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmaccel.media.reader.free_host_bytes", lambda: 1_000_000)
    monkeypatch.setattr(Source, "frames", lambda *_: pytest.fail("frames were decoded"))
    with pytest.raises(VideoError, match=r"60 frames of 128x64 .* need .* GiB .*: give fps=, frames="):
        list(media.read(film()).frames)


def test_memory_is_watched_while_the_length_is_unknown(film: Film, monkeypatch: pytest.MonkeyPatch) -> None:
    path = film("live.mkv", muxer={"live": "1"})
    seen: list[tuple[int, int | None]] = []
    monkeypatch.setattr("mmaccel.media.reader.AHEAD", 8)
    monkeypatch.setattr("mmaccel.media.reader.free_host_bytes", lambda: 10**9 if len(seen) < 20 else 1000)
    with pytest.raises(VideoError, match=r"8 frames of 128x64 .* are free: give fps="):
        media.read(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (24, None)


@pytest.mark.always
def test_memory_follows_the_kept_frames_not_the_film(tmp_path: Path) -> None:
    path = write_film(tmp_path / "long.mp4", 700, height=240, width=320, gop=700)
    code = f"""
        import resource
        from mmaccel import media
        media.read({str(path)!r}, fps=10, stop=1.0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        video = media.read({str(path)!r}, fps=0.5)
        print(len(video), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    kept, kilobytes = map(int, python("-c", textwrap.dedent(code)).stdout.split())
    assert kept == 35
    # All 700 frames are 154 MiB; those kept are 8 MiB, and decoders hold a few more.
    assert kilobytes < 60_000


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"fps": 1, "frames": 2}, "fps and frames exclude each other: give one of them."),
        ({"fps": 0}, "fps=0 must be a positive number of frames a second."),
        ({"fps": float("inf")}, "fps=inf must be a positive number of frames a second."),
        ({"frames": 0}, "frames=0 must be at least 1."),
        ({"max_frames": -1}, "max_frames=-1 must be at least 1."),
        ({"start": -1.0}, "start=-1.0 must be 0 or more seconds."),
        ({"start": 2.0, "stop": 2.0}, "stop=2.0 must lie after start=2.0."),
        ({"size": (0, 3)}, "size=(0, 3) must be (height, width), each at least 1."),
    ],
)
def test_wrong_arguments_are_told_before_the_file_is_touched(wrong: dict[str, object], sentence: str) -> None:
    assert refusal(lambda: media.read("no-such-file.mp4", **wrong), VideoError) == sentence


def test_asking_for_more_than_there_is(film: Film) -> None:
    path = film(frames=6)
    with pytest.raises(
        VideoError, match=r"frames=9 is more than the 6 frames of .*film.mp4: ask for fewer\."
    ):
        media.read(path, frames=9)
    for how in ({"fps": 1}, {"frames": 1}, {}):
        with pytest.raises(
            VideoError, match=r"of 0\.60 s has no frame from start=9\.0: choose a span inside"
        ):
            media.read(path, start=9.0, **how)


@given(st.integers(1, 500), st.integers(1, 500))
def test_uniform_starts_at_the_first_frame_and_spreads_evenly(total: int, count: int) -> None:
    if count > total:
        return
    numbers = evenly_spaced_frames(total, count)
    assert numbers == (np.arange(count) * total // count).tolist()
    assert len(set(numbers)) == count and numbers[0] == 0 and numbers[-1] < total


def test_grid_ends_before_stop() -> None:
    assert list(sampling_times(1.0, 4, 2.0)) == [1.0, 1.25, 1.5, 1.75]
    assert list(itertools.islice(sampling_times(0.0, 3), 4)) == [0.0, 1 / 3, 2 / 3, 1.0]


@given(st.sets(st.integers(0, 4000), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 3000))
def test_nearest_agrees_with_a_search_over_all(places: set[int], fps: int, tail: int) -> None:
    times = np.array(sorted(places)) / 1000
    end = times[-1] + tail / 1000
    kept = [
        round(place * 1000)
        for place, _ in pick_nearest(
            zip(times, times, strict=True),
            sampling_times(0.0, fps),
            None,
            lambda place, _: place + tail / 1000,
        )
    ]
    wanted = list(
        itertools.takewhile(lambda target: target <= times[-1] or target < end, sampling_times(0.0, fps))
    )
    gaps = np.abs(times[None] - np.array(wanted)[:, None])
    first = np.argmax(gaps <= gaps.min(1, keepdims=True) + 1e-9, axis=1)
    assert kept == [round(times[place] * 1000) for place in first]


@given(st.floats(1, 120), st.floats(0.01, 1), st.floats(0, 1), st.integers(2, 60), st.booleans())
def test_even_frames_are_taken_as_the_nearest(
    rate: float, share: float, start: float, count: int, rounded: bool
) -> None:
    """At a rate of at most the source's; also where the container rounds times to milliseconds."""
    times = [round(n / rate, 3) if rounded else n / rate for n in range(count)]
    stream, fps = list(zip(times, range(count), strict=True)), rate * share
    ticks = list(sampling_times(start / fps, fps, times[-1]))
    assert list(pick_nearest(stream, ticks, early=half_period(fps))) == list(pick_nearest(stream, ticks))


def test_a_still_moment_shows_the_frame_that_stands() -> None:

    def shown(stream: list[tuple[float, str]], fps: float, end: float) -> str:
        ticks = sampling_times(0.0, fps, end)
        return "".join(item for _, item in pick_nearest(stream, ticks, early=half_period(fps)))

    found = shown([(0.0, "a"), (0.4, "b"), (10.0, "c"), (11.0, "d")], 2.0, 11.1)
    assert found == "a" + "b" * 19 + "ccd", "c comes at 10 s, tick 20"
    late = shown([(0.0, "a"), (9.7, "c"), (20.0, "d")], 1.0, 12)
    assert late == "a" * 10 + "cc", "c comes 0.7 s after tick 9 and 0.3 s before tick 10"
    early = shown([(0.0, "a"), (9.3, "c"), (20.0, "d")], 1.0, 11)
    assert early == "a" * 9 + "cc", "c comes 0.3 s after tick 9: the nearest tick shows it"
    first = shown([(3.0, "a"), (9.0, "b")], 1.0, 10)
    assert first == "a" * 9 + "b", "before the first frame nothing stands"


def test_nearest_holds_two_items_at_a_time() -> None:
    class Item:
        pass

    alive: weakref.WeakSet[Item] = weakref.WeakSet()
    most = 0

    def stream() -> Iterator[tuple[float, Item]]:
        nonlocal most
        for place in range(5000):
            item = Item()
            alive.add(item)
            most = max(most, len(alive))
            yield float(place), item

    picked = sum(1 for _ in pick_nearest(stream(), sampling_times(0.0, 0.1)))
    assert picked == 500
    assert most <= 4
