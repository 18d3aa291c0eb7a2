"""From a decoded frame to an upright RGB tensor of the asked size."""

from __future__ import annotations

import math
import struct
from typing import Any

import av
import torch
from torch import Tensor


class Picture:
    """Turns frames into uint8 `[3, H, W]`: rotated and mirrored as the file says, all of one size.

    `size` (height, width) of the result; without it frames keep their own, shrunk so that no side exceeds
    `max_side`. Frames are scaled by swscale, by area. Without scaling the conversion is FFmpeg's default one
    to rgb24.
    """

    def __init__(self, size: tuple[int, int] | None, max_side: int | None) -> None:
        self.size = size
        self.max_side = max_side
        self.shrunk_from: tuple[int, int] | None = None

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) that a frame of this size is given."""
        if self.size is not None:
            return self.size
        if self.max_side is None or max(height, width) <= self.max_side:
            return height, width
        scale = self.max_side / max(height, width)
        return max(1, round(height * scale)), max(1, round(width * scale))

    def draw(self, frame: av.VideoFrame) -> Tensor:
        swapped, flip_x, flip_y = orientation(frame)
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


def orientation(frame: av.VideoFrame) -> tuple[bool, bool, bool]:
    """(swap rows and columns, then mirror left-right, then mirror top-bottom) that set the frame upright.

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
