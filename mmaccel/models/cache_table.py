"""`CacheTable`: a table on the device by which captured CUDA graphs find the KV caches of several streams."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_not
from weakref import ref

import torch
from torch import Tensor

from mmaccel.backends.ops import operator
from mmaccel.backends.ops.layer_ops import WINDOW, SeparateKVCaches
from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.core.memory.buffers import on_device
from mmaccel.core.memory.kv import CacheSlot


def can_read_cache_table(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether attention on `device` can find KV caches by a table; on CUDA, if Triton kernels take type and size."""
    even = head_dim % SeparateKVCaches.aligned == 0
    return device.type != "cuda" or (
        even and dtype != torch.float64 and not operator.why_triton_unusable(device)
    )


def padded_count(count: int) -> int:
    """Round `count`, the sequences of a step or the rows of each, up to a power of two: only such sizes are captured."""
    return 1 << (count - 1).bit_length()


class CacheTable:
    """Keeps tables of the addresses of KV caches, in buffers of a `CudaGraphCache`. A CUDA graph that finds its caches by a
    table serves any stream: the host writes other addresses into the table, and no graph is captured again."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, tuple[Tensor, list[SeparateKVCaches]]] = {}
        self._written: dict[Hashable, list[ref[Tensor]]] = {}

    @contextmanager
    def write_addresses(
        self, replays: CudaGraphCache, name: Hashable, layers: Sequence[Sequence[CacheSlot]], seats: int
    ) -> Iterator[list[SeparateKVCaches]]:
        """Context: write the addresses of KV caches into the table `name`, and yield for each layer the `SeparateKVCaches`
        that finds that layer's caches by the table. At its end the table drops its references to the caches.
        layers  for each layer the caches of B streams
        seats   rows of the table for each layer, at least B; those left over get a spare buffer's address, never read"""
        like, room = layers[0][0].key, replays.get_buffer
        groups, size = like.shape[1], like.shape[3]
        home = room("home", (1, groups, 1, size), like.dtype)
        spare = room("spare", (1, groups, WINDOW, size), like.dtype)
        name = name, seats, like.dtype
        table = room(("table", name), (len(layers), seats, 4), torch.long)
        if name not in self._tables or self._tables[name][0] is not table:
            self._tables[name] = table, [SeparateKVCaches([], home, rows) for rows in table]
            self._written.pop(name, None)
        caches, spares = self._tables[name][1], [(spare, spare)] * (seats - len(layers[0]))
        pairs = [[*((slot.key, slot.value) for slot in some), *spares] for some in layers]
        sides, known = [side for some in pairs for pair in some for side in pair], self._written.get(name, [])
        if len(known) != len(sides) or any(map(is_not, (one() for one in known), sides)):
            lie = [[SeparateKVCaches.addresses(home, *pair) for pair in some] for some in pairs]
            table.copy_(on_device(torch.tensor(lie), table.device))
            self._written[name] = [*map(ref, sides)]  # a stream that is gone is not to stay here
        for cache, some in zip(caches, pairs, strict=True):
            cache.pairs[:] = some
        try:
            yield caches
        finally:
            for cache in caches:
                cache.pairs.clear()
