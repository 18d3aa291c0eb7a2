"""Block lists as tables of kinds, without reading a size: for backends that take each list in a room of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops import FULL, TEST, packed


def table(offset: Tensor, index: Tensor, kind: Tensor, blocks: int) -> Tensor:
    """[b, h, M, blocks] int8: the kind of each listed block, -1 elsewhere; lists of either form (`ops.ragged`).

    Of lists that lie one after another, `offset` may hold those of some of the heads alone.
    """
    if offset.dim() == 3:
        return _one_after_another(offset, index, kind, blocks)
    b, h = (max(x, y) for x, y in zip(offset.shape[:2], kind.shape[:2], strict=True))
    begin, count, head, tail, shift = (t[..., None] for t in offset.expand(b, h, -1, 5).unbind(-1))
    entry = torch.arange(blocks, device=offset.device)
    kinds = kind[:, :, None].expand(b, h, offset.shape[2], -1)
    if not index.shape[0]:
        block = entry - (begin + shift)
        listed, untested = (block >= 0) & (block < count), (block >= head) & (block < tail)
        return torch.where(listed, torch.where(untested, kinds, TEST), -1)
    block = index[(begin + entry).clamp(max=index.shape[0] - 1)] + shift
    block = torch.where(entry < count, block, blocks)
    untested = (entry >= head) & (entry < tail)
    told = torch.where(untested, kinds.gather(-1, block.clamp(max=blocks - 1)), TEST).to(torch.int8)
    found = torch.full((b, h, offset.shape[2], blocks + 1), -1, dtype=torch.int8, device=offset.device)
    # What is no entry falls into a last column that is cut off.
    return found.scatter_(-1, block, told)[..., :-1]


def _one_after_another(offset: Tensor, index: Tensor, kind: Tensor, blocks: int) -> Tensor:
    b, h, m1 = offset.shape
    begin, end = offset[..., :-1].reshape(-1), offset[..., 1:].reshape(-1)
    entry = torch.arange(index.shape[0], device=index.device)
    row = torch.searchsorted(end.contiguous(), entry, right=True)
    # What lies before the first list, and the slack behind the last, fall into a row that is cut off.
    last = len(begin)
    row = torch.where((row < last) & (entry >= begin[row.clamp(max=last - 1)]), row, last)
    found = torch.full((last + 1, blocks), -1, dtype=torch.int8, device=index.device)
    found[row, index.long()] = kind
    return found[:-1].view(b, h, m1 - 1, blocks)


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
