"""The buffer that memories grow in: a tensor with room ahead of need along one axis."""

from __future__ import annotations

import torch
from torch import Tensor

# Places beyond what is needed: an eighth, within these bounds, for doubling would waste half the device at 1M tokens; and at
# least `LEAST` where the caller gives the share.
ROOM_MIN, ROOM_MAX, LEAST = 256, 8192, 64


def grow_buffer(
    buffer: Tensor | None,
    axis: int,
    length: int,
    *,
    like: Tensor | None = None,
    used: int | None = None,
    fill: float | None = None,
    share: float | None = None,
    pinned: bool = False,
) -> Tensor:
    """Return `buffer` if it has room for `length` along `axis`, else a larger copy of its first `used` entries (None:
    all).

    like    gives shape, type and device where there is no buffer yet
    fill    the value of the new places; None leaves them uninitialised
    share   room beyond `length`, as a share of it; None: an eighth, between `ROOM_MIN` and `ROOM_MAX` places
    pinned  the copy is in host memory that a device can read
    """
    if buffer is not None and buffer.shape[axis] >= length:
        return buffer
    source = like if buffer is None else buffer
    assert source is not None
    shape = list(source.shape)
    room = min(max(length // 8, ROOM_MIN), ROOM_MAX) if share is None else max(int(length * share), LEAST)
    shape[axis] = length + room
    # A buffer born in inference mode could not be written outside of it, and a stream may outlive the mode.
    with torch.inference_mode(False):
        out = torch.empty(shape, dtype=source.dtype, device=source.device, pin_memory=pinned)
        if fill is not None:
            out.fill_(fill)
    if buffer is not None:
        count = min(buffer.shape[axis], buffer.shape[axis] if used is None else used)
        out.narrow(axis, 0, count).copy_(buffer.narrow(axis, 0, count))
    return out
