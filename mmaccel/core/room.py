"""Buffers of columns that grow ahead of need."""

from __future__ import annotations

import torch
from torch import Tensor

# Columns of room beyond what is needed: an eighth, within these bounds. Doubling would waste half the device at 1M tokens.
ROOM_MIN, ROOM_MAX = 256, 8192


def with_room(buffer: Tensor | None, new: Tensor, used: int, needed: int) -> Tensor:
    """`buffer`, or a larger one with its first `used` columns, so that `needed` columns fit."""
    if buffer is not None and buffer.shape[2] >= needed:
        return buffer
    like = new if buffer is None else buffer
    shape = list(like.shape)
    shape[2] = needed + min(max(needed // 8, ROOM_MIN), ROOM_MAX)
    # A buffer born in inference mode could not be written outside of it, and a stream may outlive the mode.
    with torch.inference_mode(False):
        grown = torch.empty(shape, dtype=like.dtype, device=like.device)
    if buffer is not None:
        grown[:, :, :used] = buffer[:, :, :used]
    return grown
