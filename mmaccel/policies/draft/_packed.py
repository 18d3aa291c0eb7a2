"""How a prompt is sent to another process: a table of names, types and shapes, then the bytes of each tensor.

The pixels of a long video are hundreds of megabytes. They are copied on the host only by the socket, in a fifth of the time
of `torch.save`, while the target runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.decoding.worker import Blob

ALIGN = 64
"""Bytes that every tensor begins at a multiple of."""
SMALL = 1 << 20
"""Bytes up to which a tensor is copied out, so that it does not hold the whole prompt."""
SLAB = 16 << 20
"""Bytes that leave a CUDA device at a time."""


def make_packer(inputs: Mapping[str, Any], more: bytes = b"") -> Callable[[], list[Blob]]:
    """Return a function that packs `inputs` and `more` (see `pack`) and may be called in another thread: on CUDA it waits
    for the work that computes `inputs`, as launched so far."""
    streams = []
    for device in {x.device for x in inputs.values() if isinstance(x, Tensor) and x.is_cuda}:
        streams.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        streams[-1].wait_stream(torch.cuda.current_stream(device))

    def run() -> list[Blob]:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            return pack(inputs, more)

    return run


def pack(inputs: Mapping[str, Any], more: bytes = b"") -> list[Blob]:
    """Pack `inputs` (name -> tensor on any device, or list of numbers) and the bytes `more` into a message: buffers."""
    table: list[Any] = []
    parts: list[Blob] = []
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            # Lists too, which some processors give for seconds of frames; what is neither is no input of a model.
            if isinstance(x, list | tuple) and all(isinstance(one, int | float) for one in x):
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
    to, source = (t.view(-1).view(torch.uint8) for t in (host, x))
    slab = torch.empty(min(SLAB, len(source)), dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.current_stream(x.device)
    for target, piece in zip(torch.split(to, SLAB), torch.split(source, SLAB), strict=True):
        slab[: len(piece)].copy_(piece, non_blocking=True)
        stream.synchronize()
        target.copy_(slab[: len(piece)])
    return host


def unpack(blob: bytearray | memoryview) -> tuple[dict[str, Any], bytes]:
    """Return the inputs and the bytes `more` that `pack` was given; tensors share the memory of `blob`."""
    at = 8 + int.from_bytes(blob[:8], "little")
    table, size = json.loads(bytes(blob[8:at]))
    more = bytes(blob[at : at + size])
    at += size
    inputs: dict[str, Any] = {}
    for name, kind, value in table:
        if kind is None:
            inputs[name] = value
            continue
        # The value is the tensor's shape.
        dtype = getattr(torch, kind)
        count = math.prod(value) * dtype.itemsize
        if not count:
            inputs[name] = torch.empty(value, dtype=dtype)
            continue
        at += -at % ALIGN
        data = torch.frombuffer(blob, dtype=torch.uint8, count=count, offset=at).view(dtype).view(value)
        inputs[name] = data.clone() if count <= SMALL else data
        at += count
    return inputs, more
