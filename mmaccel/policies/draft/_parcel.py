"""A prompt on its way to another process: a table of names, types and shapes, then the bytes of each tensor as they lie.

Nothing is copied on the way but by the wire itself: the pixels of a long video are hundreds of megabytes, and the target
waits until they are gone, which takes some five times as long by `torch.save` (`bench/wire.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.worker import Blob

ALIGN = 64
"""Bytes that every tensor begins at a multiple of."""
SMALL = 1 << 20
"""Bytes up to which a tensor is copied out, so that it does not hold the whole prompt."""


def pack(inputs: Mapping[str, Any], more: bytes = b"") -> list[Blob]:
    """What to send of `inputs`, tensors and lists of numbers, and `more`; the tensors may be on any device."""
    table: list[Any] = []
    parts: list[Blob] = []
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            table.append([name, None, list(x)])
            continue
        host = x.detach().cpu().contiguous()
        table.append([name, str(host.dtype).removeprefix("torch."), list(host.shape)])
        if host.numel():
            data = host.view(-1).view(torch.uint8).numpy().data
            parts += [data, bytes(-data.nbytes % ALIGN)]
    head = json.dumps([table, len(more)]).encode()
    first = len(head).to_bytes(8, "little") + head + more
    return [first, bytes(-len(first) % ALIGN), *parts]


def unpack(blob: bytearray) -> tuple[dict[str, Any], bytes]:
    """The inputs and `more` that `pack` was given."""
    at = 8 + int.from_bytes(blob[:8], "little")
    table, size = json.loads(blob[8:at])
    more = bytes(blob[at : at + size])
    at += size
    inputs: dict[str, Any] = {}
    for name, kind, told in table:
        if kind is None:
            inputs[name] = told
            continue
        dtype = getattr(torch, kind)
        count = math.prod(told) * dtype.itemsize
        if not count:
            inputs[name] = torch.empty(told, dtype=dtype)
            continue
        at += -at % ALIGN
        data = torch.frombuffer(blob, dtype=torch.uint8, count=count, offset=at).view(dtype).view(told)
        inputs[name] = data.clone() if count <= SMALL else data
        at += count
    return inputs, more
