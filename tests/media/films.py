"""Small films for the tests: every frame carries its number as a bar code."""

from __future__ import annotations

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


def write_film(
    path: Path,
    frames: int = 60,
    *,
    height: int = 64,
    width: int = 128,
    fps: int = 10,
    times: Sequence[float] | None = None,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    gop: int = 12,
    muxer: dict[str, str] | None = None,
    options: dict[str, str] | None = None,
    format: str | None = None,
) -> Path:
    """Write a film; `times` (seconds, to the millisecond) instead of a constant rate."""
    base = Fraction(1, 1000) if times is not None else Fraction(1, fps)
    with av.open(str(path), "w", format=format, options=muxer or {}) as container:
        stream: Any = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        stream.codec_context.time_base = stream.time_base = base
        stream.options = options or ({"preset": "ultrafast"} if codec == "libx264" else {})
        if codec == "libx264":
            stream.codec_context.max_b_frames = 2
        stream.gop_size = gop
        container.start_encoding()
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(card(number, height, width), format="rgb24")
            frame.pts = round(times[number] * 1000) if times is not None else number
            frame.time_base = base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@contextmanager
def answering(answer: Callable[[Any], None]) -> Iterator[str]:
    """The address of a server that gives the handler of each request to `answer`."""

    class Quiet(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
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
def silent_pipe(path: Path, data: bytes) -> Iterator[None]:
    """A pipe that has `data` and stays open."""
    os.mkfifo(path)
    over = threading.Event()

    def feed() -> None:
        with path.open("wb", buffering=0) as file:
            file.write(data)
            over.wait(20)

    writer = threading.Thread(target=feed)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def set_matrix(path: Path, a: int, b: int, c: int, d: int) -> Path:
    """Write the display matrix of an mp4 as a camera does: (x, y) is shown at (a x + c y, b x + d y)."""
    data = bytearray(path.read_bytes())
    # In a track header of version 0 the matrix stands 44 bytes after the name of the box.
    place = data.index(b"tkhd") + 44
    one = 1 << 16
    data[place : place + 36] = struct.pack(">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path
