"""A prompt on its way to another process: a table of names, types and shapes, then the bytes of each tensor as they lie.

The pixels of a long video are hundreds of megabytes. Those on the host are copied by the wire alone, which takes a fifth of
the time that they take by `torch.save` (`bench/wire.py`), and still a quarter of a second: the target goes on meanwhile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.outbox import Blob

ALIGN = 64
"""Bytes that every tensor begins at a multiple of."""
SMALL = 1 << 20
"""Bytes up to which a tensor is copied out, so that it does not hold the whole prompt."""
SLAB = 16 << 20
"""Bytes that leave a CUDA device at a time."""


def packing(inputs: Mapping[str, Any], more: bytes = b"") -> Callable[[], list[Blob]]:
    """`pack` for another thread: it waits for what makes these tensors on their device, and for nothing that comes later."""
    made = {}
    for device in {x.device for x in inputs.values() if isinstance(x, Tensor) and x.is_cuda}:
        made[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made[device].record(torch.cuda.current_stream(device))

    def run() -> list[Blob]:
        with ExitStack() as streams:
            for device, event in made.items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                event.wait(stream)
                streams.enter_context(torch.cuda.stream(stream))
            return pack(inputs, more)

    return run


def pack(inputs: Mapping[str, Any], more: bytes = b"") -> list[Blob]:
    """What to send of `inputs`, tensors and lists of numbers, and `more`; the tensors may be on any device."""
    table: list[Any] = []
    parts: list[Blob] = []
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            table.append([name, None, list(x)])
            continue
        host = _on_host(x.detach().contiguous())
        table.append([name, str(host.dtype).removeprefix("torch."), list(host.shape)])
        if host.numel():
            data = host.view(-1).view(torch.uint8).numpy().data
            parts += [data, bytes(-data.nbytes % ALIGN)]
    head = json.dumps([table, len(more)]).encode()
    first = len(head).to_bytes(8, "little") + head + more
    return [first, bytes(-len(first) % ALIGN), *parts]


def _on_host(x: Tensor) -> Tensor:
    """`x`, contiguous, on the host. A copy into memory that is not pinned could hold up what other threads launch, and to
    pin room for a whole video takes as long as the copy: it goes through pinned slabs, on the current stream."""
    if not x.is_cuda:
        return x.cpu()
    host = torch.empty(x.shape, dtype=x.dtype)
    whole, there = (t.view(-1).view(torch.uint8) for t in (host, x))
    slab = torch.empty(min(SLAB, len(there)), dtype=torch.uint8, pin_memory=True)
    left = torch.cuda.current_stream(x.device)
    for some, piece in zip(torch.split(whole, SLAB), torch.split(there, SLAB), strict=True):
        slab[: len(piece)].copy_(piece, non_blocking=True)
        left.synchronize()
        some.copy_(slab[: len(piece)])
    return host


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
