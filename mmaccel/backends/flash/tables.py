"""Tables of kinds of blocks, without reading a size: lists as flash-attn 4 takes them, each with room for all blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import FULL
from mmaccel.backends.ops.block_lists import packed


def tiled(kinds: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Which tiles of `queries` by `keys` blocks hold a listed block, and which of those are FULL in all their blocks.

    kinds [b, h, M, N]; both [b, h, tiles of queries, tiles of keys] bool. Queries past the last block do not count, keys
    past it are absent.
    """
    listed, full = kinds >= 0, kinds == FULL
    if queries == keys == 1:
        return listed, full
    b, h, m, n = kinds.shape
    more = (0, -n % keys, 0, -m % queries)
    rows, columns = -(-m // queries), -(-n // keys)
    shape = (b, h, rows, queries, columns, keys)
    some = torch.nn.functional.pad(listed, more).view(shape).any(-1).any(3)
    # What is padded on the side of the queries is full, on the side of the keys it is not.
    full = torch.nn.functional.pad(full, (0, more[1]))
    full = torch.nn.functional.pad(full, (0, 0, 0, more[3]), value=True)
    return some, full.view(shape).all(-1).all(3)


def finer(kinds: Tensor, queries: int, keys: int) -> Tensor:
    """The same table of blocks cut into `queries` by `keys` parts, each of the kind of the whole."""
    if queries == keys == 1:
        return kinds
    b, h, m, n = kinds.shape
    whole = kinds[:, :, :, None, :, None].expand(b, h, m, queries, n, keys)
    return whole.reshape(b, h, m * queries, n * keys)


def rooms(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """count [b, h, M] and index [b, h, M, N], int32: in each row of `chosen` [b, h, M, N] how many are, and which, side by
    side; what follows them is 0."""
    number = torch.arange(chosen.shape[-1], device=chosen.device)
    index, upto = packed(chosen, number)
    # Of one row, or one column, both are views with the strides of what is longer.
    dense = torch.contiguous_format
    return upto[..., -1].to(torch.int32, memory_format=dense), index.contiguous().view(chosen.shape)
