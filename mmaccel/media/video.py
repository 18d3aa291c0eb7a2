"""`Video` (frames with their times), and decoding of frames and image files to tensors."""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import av
import torch
from torch import Tensor

from mmaccel.core.errors import VideoError
from mmaccel.media.address import is_file

Progress = Callable[[int, int | None], None]
"""`progress(done, total)`: called after each kept frame; `total` is None while it is not known."""

Gaps = Literal["hold", "skip", "mark"]
"""What a tick gives when the source shows the same frame as at the tick before:

- "hold": that frame again;
- "skip": no frame;
- "mark": as "hold", and `Video.events` lists gaps and irregular times.
"""

EventKind = Literal["gap", "repeat", "restart", "untimed", "stall"]

FORMATS = {
    *("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO"),
    *("PCX", "PNG", "PPM", "QOI", "SGI", "TGA", "TIFF", "WEBP"),
}
"""Kinds of image, by Pillow's names, that it decodes by itself."""
PIXELS = 1 << 26
"""Most pixels of an image file."""


@dataclass(frozen=True)
class Event:
    """A gap or irregularity in the times of a source, at `time` seconds of `Video.clock`, lasting `seconds`.

    - "gap": ticks from `time` on, for `seconds`, repeat the frame of the tick before. A gap over several clips has an
      event in each.
    - "repeat": a frame came with the presentation time of the frame before it, or an earlier one.
    - "restart": presentation times jumped by `seconds` (negative: back; or more than a day ahead). `Video.times`
      continues without the jump.
    - "untimed": frames came without presentation times for `seconds`; one frame's length was added for each.
    - "stall": no frame came for `seconds`.
    """

    kind: EventKind
    time: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of a video and their times.

    frames      uint8 [T, 3, H, W]: RGB, upright
    times       float64 [T]: presentation time of each frame, in seconds from the start of the source; a frame taken twice
                has its time twice
    fps         rate of the kept frames; `source_fps` the mean rate of the source (0.0 if unknown)
    duration    seconds that the source, or this clip of it, covers
    clock       float64 [T]: seconds at which each frame was sampled, strictly rising: ticks ``start + k / fps`` if there
                is a rate, else the presentation times, with equal ones spread evenly. Default: `times`
    events      gaps and irregular times, in order of time; filled only with ``gaps="mark"``

    Raises `VideoError` unless `clock` and `times` have one time for each frame.
    """

    frames: Tensor
    times: Tensor
    fps: float
    source_fps: float
    duration: float
    clock: Tensor = None  # type: ignore[assignment]  # never None once made
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        if self.clock is None:
            object.__setattr__(self, "clock", self.times)
        for name, given in (("times", self.times), ("clock", self.clock)):
            if len(given) != len(self.frames):
                raise VideoError(
                    f"{name}: there are {len(given)} for {len(self.frames)} frames; give one for each frame."
                )

    def __len__(self) -> int:
        return int(self.frames.shape[0])

    def select_frames(self, which: slice | Sequence[int] | Tensor) -> Video:
        """Select frames of the video by a slice or list of numbers, with their times; other fields are unchanged."""
        chosen = which if isinstance(which, slice) else torch.as_tensor(which)
        return replace(self, frames=self.frames[chosen], times=self.times[chosen], clock=self.clock[chosen])

    def slice_frames(self, start: int, stop: int) -> Video:
        """Frames `start` up to `stop` of the video; the video itself if these are all."""
        return self if start == 0 and stop == len(self) else self.select_frames(slice(start, stop))


class FrameConverter:
    """Converts decoded frames to uint8 `[3, H, W]`: rotated and mirrored as the file says, all of one size.

    `size` (height, width) of the result; if None, frames keep their size, shrunk so that no side exceeds `max_side`. Frames
    are scaled by swscale's area method; without scaling the conversion is FFmpeg's default to rgb24.
    """

    def __init__(self, size: tuple[int, int] | None, max_side: int | None) -> None:
        self.size = size
        self.max_side = max_side
        self.shrunk_from: tuple[int, int] | None = None

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) that a frame of `height` x `width` pixels is scaled to."""
        if self.size is not None:
            return self.size
        if self.max_side is None or max(height, width) <= self.max_side:
            return height, width
        scale = self.max_side / max(height, width)
        return max(1, round(height * scale)), max(1, round(width * scale))

    def convert(self, frame: av.VideoFrame) -> Tensor:
        """Convert one frame to RGB, uint8 [3, H, W]; without `size` the first frame decides the size of all."""
        swapped, flip_x, flip_y = orientation_flips(frame)
        height, width = (frame.width, frame.height) if swapped else (frame.height, frame.width)
        size = self.shape(height, width)
        if size != (height, width):
            if self.size is None:
                self.shrunk_from = height, width
            stored = (size[1], size[0]) if swapped else size
            frame = frame.reformat(width=stored[1], height=stored[0], format="rgb24", interpolation="AREA")
        # A stream may change its size on the way; the first frame decides.
        self.size = size
        picture = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
        if swapped:
            picture = picture.transpose(1, 2)
        axes = [axis for axis, flip in ((1, flip_y), (2, flip_x)) if flip]
        return picture.flip(axes) if axes else picture


def orientation_flips(frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """Whether to swap rows and columns, then mirror left-right, then mirror top-bottom, to set the frame upright.

    From the display matrix, which maps a stored point (x, y) to (a x + c y, b x + d y).
    """
    try:
        data: Any = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:
        # PyAV does not know each kind that a frame may carry beside it, but tells the rotation without them.
        angle = math.radians(frame.rotation)
        a, b, c, d = math.cos(angle), -math.sin(angle), math.sin(angle), math.cos(angle)
    else:
        if data is None or len(bytes(data)) < 20:
            return False, False, False
        a, b, _, c, d = struct.unpack("=5i", bytes(data)[:20])
    swapped = abs(b) > abs(a)
    return (True, c < 0, b < 0) if swapped else (False, a < 0, d < 0)


def stack_frames(frames: list[Tensor]) -> Tensor:
    """Stack `[3, H, W]` frames to `[T, 3, H, W]`, freeing each one as it is copied."""
    whole = torch.empty((len(frames), *frames[0].shape), dtype=torch.uint8)
    for number in range(len(frames)):
        whole[number] = frames[number]
        frames[number] = whole[number]
    return whole


def read_image(image: Any, pixels: int = PIXELS) -> Tensor:
    """Read an image file (path or bytes) or a PIL image as uint8 `[3, H, W]`; transparency becomes white.

    Raises `VideoError` for a file that is no image, has a format other than `FORMATS`, or more than `pixels` pixels.
    """
    if isinstance(image, bytes):
        image = _open_image("the image", pixels, io.BytesIO(image))
    elif isinstance(image, (str, os.PathLike)):
        image = _open_image(os.fspath(image), pixels)
    import numpy
    import PIL.Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def image_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) in pixels of an encoded image, from its header; (0, 0) if the header cannot be read."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            return width, height
    except Exception:  # whatever a file that is none makes of the reader
        return 0, 0


def _open_image(path: str, pixels: int, data: io.BytesIO | None = None) -> Any:
    # Pillow reads a photo's own orientation, and its JPEG decoder is the one that models were trained with.
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise VideoError(f"{path} is an image file, and these need Pillow: install pillow.") from error
    try:
        if data is None and not is_file(path):
            raise VideoError(f"{path} is not a file: name an image file.")
        with PIL.Image.open(data or path) as image:
            if image.format not in FORMATS:
                # Some are run by other programs, such as PostScript.
                raise VideoError(
                    f"{path} is an image in a format that mmaccel does not read: {image.format}."
                )
            width, height = image.size
            if width * height > pixels:
                raise VideoError(
                    f"{path} has {width} x {height} pixels, more than {pixels}: make it smaller."
                )
            image.load()
            return PIL.ImageOps.exif_transpose(image)
    except PIL.Image.DecompressionBombError as error:
        raise VideoError(f"{path} has more than {PIXELS} pixels: make it smaller.") from error
    except VideoError:
        raise
    except Exception as error:
        # Pillow's plugins raise errors of many kinds for a damaged file.
        why = getattr(error, "strerror", None) or "no known format, or damaged"
        raise VideoError(f"{path} cannot be read as an image: {why}.") from error


def write_jpeg(frame: Tensor, side: int) -> bytes:
    """Encode a uint8 frame `[3, H, W]` as JPEG, shrunk so that no side exceeds `side`."""
    import PIL.Image

    image = PIL.Image.fromarray(frame.permute(1, 2, 0).contiguous().cpu().numpy())
    image.thumbnail((side, side))
    image.save(file := io.BytesIO(), "JPEG", quality=80)
    return file.getvalue()
