"""Odd videos, each with the true schedule of its frames, written in process."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.media.films import Stamp, card, set_matrix, write

HEIGHT, WIDTH = 48, 112


def even(count: int, rate: float = 10.0, start: float = 0.0) -> list[float]:
    return [start + number / rate for number in range(count)]


@dataclass(frozen=True)
class Odd:
    """An odd video.

    make    writes it to a path
    shown   when each frame is shown, in seconds from the first, and `numbers` which it is (0, 1, 2, ...)
    end     when the last frame ends
    fps     the rate at which it is sampled
    kinds   the events that are met, gaps aside
    lossy   a warning of lost frames is right
    fails   no frame can be read, and the sentence that says so
    """

    suffix: str
    make: Callable[[Path], Any]
    shown: tuple[float, ...] = ()
    end: float = 0.0
    numbers: tuple[int, ...] = ()
    fps: float = 1.0
    kinds: frozenset[str] = field(default_factory=frozenset)
    lossy: bool = False
    fails: str = ""
    turned: int = 0


CASES: dict[str, Odd] = {}


def odd(
    name: str,
    suffix: str,
    times: Sequence[float],
    make: Callable[[Path], Any] | None = None,
    *,
    end: float | None = None,
    shown: Sequence[float] | None = None,
    numbers: Sequence[int] | None = None,
    **how: Any,
) -> None:
    """Add a case; without `make` it is `write` of `times`, with what of `how` is none of the case's own."""
    seen = tuple(times if shown is None else shown)
    own = {field: how.pop(field) for field in ("fps", "lossy", "turned") if field in how}
    CASES[name] = Odd(
        suffix=suffix,
        kinds=frozenset(how.pop("kinds", ())),
        make=make or (lambda path: write(path, times, **how)),
        shown=seen,
        end=seen[-1] + 0.1 if end is None else end,
        numbers=tuple(range(len(seen)) if numbers is None else numbers),
        **own,
    )


def gap(seconds: float) -> list[float]:
    """A second of motion, a still moment, a second of motion."""
    return [*even(10), *even(11, start=0.9 + seconds)]


# Still moments.
for seconds in (2.5, 4, 9):
    for suffix in ("mp4", "mkv"):
        odd(f"gap of {seconds} s, {suffix}", suffix, gap(seconds))
odd("gap of 4 s, ts", "ts", gap(4))
odd("gap of 9 s at half a frame a second", "mp4", gap(9), fps=0.5)
odd("gap of an hour", "mkv", gap(3600), fps=1 / 60)
odd("screen recording at 0.2 fps", "mp4", even(7, 0.2))
odd("still at the beginning", "mkv", [0, *even(12, start=6.3)])
odd("motion now and then", "mkv", [t + s for s in (0, 17.3, 60.1, 61.9) for t in even(6)])
odd("two frames, 25 s apart", "mp4", [0, 25])


def lasts(seconds: float, count: int) -> Stamp:
    """The last of `count` packets lasts so long."""

    def stamp(number: int, packet: Any) -> None:
        packet.duration = round((seconds if number == count - 1 else 0.1) / packet.time_base)

    return stamp


odd("one frame that stands 5 s", "mp4", [0], end=5, stamp=lasts(5, 1))

# Variable rates, and cases in two containers.
rng = np.random.default_rng(5)
VARIABLE = np.round(np.cumsum([0, *rng.choice([0.008, 0.034, 0.1, 0.41, 1.3], 39)]), 3).tolist()
for suffix in ("mp4", "mkv"):
    odd(f"variable rate, {suffix}", suffix, VARIABLE, fps=2.3)
    odd(f"slides, {suffix}", suffix, [0, 10, 20, 30])
    odd(f"still at the end, {suffix}", suffix, even(10), end=0.9 + 6, stamp=lasts(6, 10))
    odd(f"one frame, {suffix}", suffix, [0])
odd("variable rate with B-frames", "mkv", VARIABLE, fps=2.3, bframes=2)
odd("a thousand frames a second", "mkv", even(40, 1000), fps=70)
odd("B-frames, ts", "ts", even(31), bframes=3, fps=3)
odd("B-frames, mp4", "mp4", even(31), bframes=3, fps=3)

# Repeats.


def doubled(number: int, packet: Any) -> None:
    """Each packet of four comes with the time of the one before."""
    packet.dts = 100 * number - 150
    if number % 4 == 3:
        packet.pts -= 100


REPEATED = [time - (0.1 if number % 4 == 3 else 0) for number, time in enumerate(even(24))]
repeated = partial(write, times=even(24), stamp=doubled)
for suffix in ("mkv", "ts"):
    odd(f"repeated times, {suffix}", suffix, REPEATED, repeated, kinds=["repeat"], end=2.4)


def frozen(number: int, packet: Any) -> None:
    packet.pts = packet.dts = 0


odd("every frame at one time", "mkv", [0.0] * 8, lambda p: write(p, even(8), stamp=frozen), kinds=["repeat"])

# Clocks that begin anew.


def joined(*parts: tuple[int, int]) -> Callable[[Path], None]:
    """Recordings of so many frames one behind the other, each of times that begin at a tick of 1/90000 s."""

    def make(path: Path) -> None:
        data, first, how = b"", 0, {"base": Fraction(1, S), "muxer": {"mpegts_copyts": "1"}}
        for count, shift in parts:
            data += write(path, even(count), first=first, shift=shift, **how).read_bytes()
            first += count
        path.write_bytes(data)

    return make


S = 90000
odd("joined recordings", "ts", even(50), joined((20, S), (30, S)), kinds=["restart"], fps=2.5)
three = joined((25, 9 * S), (15, 3 * S), (20, S))
odd("three recordings", "ts", even(60), three, kinds=["restart"], fps=2.5)
odd("joined recordings, sparse", "ts", even(400), joined((200, S), (200, S)), kinds=["restart"], fps=0.3)
# The container marks the packet before the jump, as it does where data are lost: nothing tells the two apart.
jump = [*even(20), *even(20, start=32)]
odd("joined with a jump of 30 s", "ts", jump, joined((20, S), (20, 33 * S)), lossy=True)
odd("a clock set a day ahead", "ts", even(40), joined((20, S), (20, 93000 * S)), kinds=["restart"])
odd("a counter that runs over", "ts", even(40), joined((40, 2**33 - 2 * S)), fps=2)
odd("another size on the way", "ts", even(40), lambda path: path.write_bytes(
    write(path, even(20), muxer={"mpegts_copyts": "1"}).read_bytes()
    + write(path, even(20), first=20, size=(64, 144), shift=2000, muxer={"mpegts_copyts": "1"}).read_bytes()
), lossy=True)  # fmt: skip

# Times that are missing, below zero or far away.
for codec, suffix in (("libx264", "h264"), ("libx265", "hevc"), ("mjpeg", "mjpeg"), ("mpeg2video", "m2v")):
    pixels = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    odd(
        f"bare {suffix}", suffix, even(50, 25), codec=codec, pixels=pixels, rate=25, base=Fraction(1, 25), fps=2.5, end=2,
        kinds=["untimed"] if suffix in ("h264", "hevc") else [],
        options={"x265-params": "log-level=none:bframes=0"} if codec == "libx265" else None,
    )  # fmt: skip
odd("avi", "avi", even(30), codec="mpeg4", base=Fraction(1, 10))
odd("avi of pictures", "avi", even(30), codec="mjpeg", pixels="yuvj420p", base=Fraction(1, 10))
odd("times below zero, mp4", "mp4", even(30), shift=-700, muxer={"use_editlist": "0"})
odd("times below zero, mkv", "mkv", even(30), shift=-700)
early = partial(write, times=even(30), shift=-600)
odd("an edit list cuts the beginning", "mp4", even(24), early, numbers=range(6, 30))
odd("an edit list delays the beginning", "mp4", even(30), shift=2000)
odd("90000 hours late", "mkv", even(30), shift=324_000_000_000, muxer={"avoid_negative_ts": "0"})
odd("90000 hours late, mp4", "mp4", even(30), shift=324_000_000_000, muxer={"use_editlist": "0"})
odd("a huge time base", "mp4", gap(4), muxer={"video_track_timescale": "90000000"})
odd("a coarse time base", "mp4", even(30), base=Fraction(1, 10), muxer={"video_track_timescale": "10"})

# What is cut short.


def cut(path: Path, share: float, **how: Any) -> Path:
    data = write(path, even(60), **how).read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


for suffix, muxer in (("mkv", {}), ("ts", {}), ("mp4", {"movflags": "faststart"})):
    odd(
        f"cut in the middle, {suffix}", suffix, even(60), lambda p, m=muxer: cut(p, 0.5, muxer=m, gop=12),
        lossy=True, fps=2.5,
    )  # fmt: skip
odd("fragments", "mp4", gap(4), muxer={"movflags": "frag_keyframe+empty_moov+default_base_moof"})
odd("mkv without a length", "mkv", gap(4), muxer={"live": "1"})

# Other coats.
odd("gif", "gif", [0, 0.1, 0.2, 4.2, 4.3], codec="gif", pixels="rgb8", base=Fraction(1, 100))
odd("apng", "apng", even(12), codec="apng", pixels="rgb24", base=Fraction(1, 10), fps=5)
odd("webm, vp8", "webm", gap(2.5), codec="libvpx", options={"deadline": "realtime", "cpu-used": "16"})
odd("webm, vp9", "webm", gap(2.5), codec="libvpx-vp9", options={"deadline": "realtime", "cpu-used": "8"})
odd("flv", "flv", gap(4), codec="flv", bframes=0)
odd("wmv", "wmv", even(30), codec="wmv2")
odd("quarter turn", "mp4", even(20), lambda p: set_matrix(write(p, even(20)), 0, 1, -1, 0), turned=1)
odd("ten bits", "mkv", even(20), codec="ffv1", pixels="yuv420p10le")
odd("prores", "mov", even(20), codec="prores_ks", pixels="yuv422p10le")
odd("alpha", "mov", even(20), codec="qtrle", pixels="argb")
odd("odd sizes", "mkv", even(20), codec="ffv1", pixels="yuv444p", size=(47, 113))


def interlaced(context: Any) -> None:
    context.flags |= av.codec.context.Flags.interlaced_dct | av.codec.context.Flags.interlaced_me


odd(
    "interlaced", "ts", even(30, 25), codec="mpeg2video", rate=25, base=Fraction(1, 25), flags=interlaced, fps=5, end=1.2,
)  # fmt: skip


def sounding(path: Path, cover: bool) -> None:
    """Sound, alone or with a picture of its cover."""
    with av.open(str(path), "w") as container:
        sound: Any = container.add_stream("aac", rate=16000, layout="mono")
        if cover:
            picture: Any = container.add_stream("mjpeg", rate=1)
            picture.width, picture.height, picture.pix_fmt = WIDTH, HEIGHT, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic.value
            container.mux(picture.encode(av.VideoFrame.from_ndarray(card(1, HEIGHT, WIDTH), format="rgb24")))
        for number in range(4):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, number * 1024
            container.mux(sound.encode(frame))
        container.mux(itertools.chain(sound.encode(None), picture.encode(None) if cover else ()))


for name, shown in (("sound with a cover", True), ("sound alone", False)):
    CASES[name] = Odd("mp4", partial(sounding, cover=shown), fails="has no video: it holds only audio.")
