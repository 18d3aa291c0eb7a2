"""Thumbnails of single frames for an HTML page: read from a file again, or taken from frames in memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction

import av
import torch
from torch import Tensor

from mmaccel.core.errors import VideoError
from mmaccel.media.address import is_file
from mmaccel.media.reader import read
from mmaccel.media.video import FrameConverter, Video

SIDE = 208
"""The longer side of a thumbnail, in pixels."""


def thumbnails(video: str | os.PathLike[str] | Video) -> Callable[[float], bytes | None]:
    """Return a function from seconds to the frame shown then, as JPEG bytes; `Report.save_html` takes such a function.

    video  a file, from which each call reads one frame, or frames in memory, of which it takes the nearest

    The function returns None if there is no such frame: for a URL or device, which cannot be read a second time, and for a
    file that is gone or ends earlier.
    """

    def frame(seconds: float) -> Tensor | None:
        if isinstance(video, Video):
            return video.frames[int((video.clock - seconds).abs().argmin())] if len(video) else None
        with warnings.catch_warnings(), suppress(VideoError):
            warnings.simplefilter("ignore")
            if is_file(os.fspath(video)):
                return read(video, fps=1.0, start=seconds, stop=seconds + 0.5, max_side=SIDE).frames[0]
        return None

    def thumbnail(seconds: float) -> bytes | None:
        found = frame(seconds)
        return None if found is None else encode_jpeg(found)

    return thumbnail


def encode_jpeg(frame: Tensor) -> bytes:
    """Encode a frame [3, H, W] uint8 as JPEG, no side longer than `SIDE`."""
    rows = frame.to("cpu", torch.uint8).permute(1, 2, 0).contiguous().numpy()
    picture = av.VideoFrame.from_ndarray(rows, format="rgb24")
    height, width = FrameConverter(None, SIDE).shape(picture.height, picture.width)
    codec = av.CodecContext.create("mjpeg", "w")
    codec.width, codec.height, codec.pix_fmt, codec.time_base = width, height, "yuvj420p", Fraction(1)
    small = picture.reformat(width=width, height=height, format="yuvj420p")
    return b"".join(bytes(packet) for packet in (*codec.encode(small), *codec.encode(None)))
