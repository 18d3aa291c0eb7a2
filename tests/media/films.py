"""Small films for the tests: every frame carries its number as a bar code."""

import http.server
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from tests.spies import beside, finish

BITS = 12
Film = Callable[..., Path]


def card(number: int, height: int, width: int) -> np.ndarray:
    """A grey frame with the number in black and white columns and a red top left corner."""
    picture = np.full((height, width, 3), 110, np.uint8)
    edges = np.linspace(width // 4, width, BITS + 1).astype(int)
    for bit in range(BITS):
        picture[:, edges[bit] : edges[bit + 1]] = 235 if number >> bit & 1 else 20
    picture[: height // 4, : width // 4] = (255, 0, 0)
    return picture


def numbers(frames: torch.Tensor) -> list[int]:
    """The numbers that frames carry."""
    width = frames.shape[-1]
    edges = np.linspace(width // 4, width, BITS + 1).astype(int)
    middle = torch.tensor([(edges[bit] + edges[bit + 1]) // 2 for bit in range(BITS)])
    bits = frames[:, 1, frames.shape[2] // 2].index_select(1, middle) > 127
    return [int(value) for value in (bits.long() * 2 ** torch.arange(BITS)).sum(1)]


def png(width: int, height: int) -> bytes:
    """A PNG whose header tells so many pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


Stamp = Callable[[int, Any], None]


def write(
    path: Path,
    times: Sequence[float],
    *,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    rate: int = 10,
    base: Fraction = Fraction(1, 1000),
    gop: int = 6,
    bframes: int = 0,
    first: int = 0,
    size: tuple[int, int] = (48, 112),
    muxer: dict[str, str] | None = None,
    options: dict[str, str] | None = None,
    format: str | None = None,
    shift: int = 0,
    stamp: Stamp | None = None,
    flags: Callable[[Any], None] | None = None,
) -> Path:
    """A film of numbered frames, from `first` on, at `times` seconds; `shift` ticks of `base` are added to each packet, and
    `stamp(number, packet)` may change what a packet says of its time."""
    with av.open(str(path), "w", format=format, options=muxer or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = pixels
        stream.codec_context.time_base = stream.time_base = base
        quick = {"preset": "ultrafast"} if codec in ("libx264", "libx265") else {}
        stream.options = quick | (options or {})
        if codec == "libx264":
            stream.codec_context.max_b_frames = bframes
        stream.gop_size = gop
        if flags is not None:
            flags(stream.codec_context)
        container.start_encoding()
        packets = []
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(card(first + number, *size), format="rgb24")
            frame.pts, frame.time_base = round(time / base), base
            packets += stream.encode(frame)
        packets += stream.encode(None)
        for number, packet in enumerate(packets):
            if shift and packet.pts is not None:
                packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
            if stamp is not None:
                stamp(number, packet)
            container.mux(packet)
    return path


def write_film(
    path: Path,
    frames: int = 60,
    *,
    height: int = 64,
    width: int = 128,
    fps: int = 10,
    gop: int = 12,
    times: Sequence[float] | None = None,
    **how: Any,
) -> Path:
    """Write a film; `times` (seconds, to the millisecond) instead of a constant rate."""
    base = Fraction(1, 1000) if times is not None else Fraction(1, fps)
    when = [Fraction(number, fps) for number in range(frames)] if times is None else times
    return write(path, when[:frames], size=(height, width), rate=fps, base=base, gop=gop, bframes=2, **how)


@contextmanager
def answering(answer: Callable[[Any], None]) -> Iterator[str]:
    """The address of a server that gives the handler of each request to `answer`."""

    class Quiet(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        beside(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def send(request: Any, data: bytes, share: int = 1) -> None:
    """Answer a request by `data`, or break off after its first part of so many."""
    request.send_response(200)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data[: len(data) // share])


@contextmanager
def halting(data: bytes, path: Path, pieces: int = 2, pause: float = 20.0) -> Iterator[threading.Event]:
    """Write `data` to `path` in pieces, with a pause after each until the event or the end; the file stays open."""
    go = threading.Event()

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for piece in range(pieces):
                file.write(data[len(data) * piece // pieces : len(data) * (piece + 1) // pieces])
                go.wait(pause)
        go.set()

    path.touch()
    writer = beside(write)
    try:
        yield go
    finally:
        go.set()
        finish(writer)


@contextmanager
def silent_pipe(path: Path, data: bytes) -> Iterator[None]:
    """A pipe that has `data` and stays open."""
    os.mkfifo(path)
    with halting(data, path, pieces=1):
        yield


def set_matrix(path: Path, a: int, b: int, c: int, d: int) -> Path:
    """Write the display matrix of an mp4 as a camera does: (x, y) is shown at (a x + c y, b x + d y)."""
    data = bytearray(path.read_bytes())
    # In a track header of version 0 the matrix stands 44 bytes after the name of the box.
    place = data.index(b"tkhd") + 44
    one = 1 << 16
    data[place : place + 36] = struct.pack(">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path
