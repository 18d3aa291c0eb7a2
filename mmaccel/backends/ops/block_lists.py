"""Lists of key blocks: what they look like, which blocks a range of places reaches, and how many pairs they hold."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import ABSENT, FULL
from mmaccel.backends.ops.operator import operator

ENTRIES = 1 << 24
"""Most entries of lists looked at at a time, where they are counted."""

BEYOND = 1 << 60
"""More than any place: wide places exceed 32 bits."""


def packed(chosen: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """index int32, of each row of `chosen` [..., n] the values [n] of what is chosen; [..., n + 1] how many before each."""
    n = chosen.shape[-1]
    upto = torch.nn.functional.pad(chosen.long().cumsum(-1), (1, 0))
    slot = torch.where(chosen, upto[..., :-1], n)
    index = torch.zeros(*chosen.shape[:-1], n + 1, dtype=torch.int32, device=chosen.device)
    index.scatter_(-1, slot, value.to(torch.int32).expand_as(slot))
    return index[..., :n].flatten(), upto


def present(row: Tensor, block: int) -> Tensor:
    """[..., n / block] int32: how many of the rows [..., n] of each block are there."""
    return (row >= 0).view(*row.shape[:-1], -1, block).sum(-1, dtype=torch.int32)


def _reach_shapes(
    q_row: Tensor, k_row: Tensor, q_place: Tensor, k_place: Tensor, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    key_b, key_h = (max(x, y) for x, y in zip(k_row.shape[:2], k_place.shape[:2], strict=True))
    b, h = (max(*of) for of in zip(q_row.shape[:2], q_place.shape[:2], (key_b, key_h), strict=True))
    row = q_row.new_empty(b, h, q_row.shape[-1] // block_q, 5, dtype=torch.int64)
    return row, k_row.new_empty(key_b, key_h, k_row.shape[-1] // block_k, dtype=torch.int8)


@operator("prefill.lists.reach", fake=_reach_shapes)
def reach(
    q_row: Tensor,
    k_row: Tensor,
    q_place: Tensor,
    k_place: Tensor,
    lo: int,
    hi: int,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, Tensor]:
    """The run of key blocks that a range of places reaches from each block of queries; few launches where Triton runs.

    q_row [b, h, P], k_row [b, h, N], q_place [b, h, P], k_place [b, h, N], b and h each 1 or all there are; the places
    of keys that are there (k_row >= 0) ascend. Gives row [b, h, P / block_q, 5] and kind [b, h, N / block_k] as
    `BlockLists` has them, without an index: from the first block in which a pair may pass ``lo <= q_place - k_place <
    hi`` to the last.
    """
    q_min, q_max, _ = _edges(q_row, q_place, block_q)
    k_min, k_max, kind = _edges(k_row, k_place, block_k)
    # A block without a key lies where its neighbours do.
    k_max, k_min = k_max.cummax(-1).values, k_min.flip(-1).cummin(-1).values.flip(-1)
    b, h = (max(x, y) for x, y in zip(q_min.shape[:2], k_min.shape[:2], strict=True))
    n = k_min.shape[-1]
    k_min, k_max = (t.expand(b, h, n).contiguous() for t in (k_min, k_max))
    q_min, q_max = (t.expand(b, h, -1).contiguous() for t in (q_min, q_max))
    first = torch.searchsorted(k_max, q_min - hi, right=True)
    count = (torch.searchsorted(k_min, q_max - lo, right=True) - first).clamp(min=0)
    head = torch.searchsorted(k_min, q_max - hi, right=True) - first
    tail = torch.searchsorted(k_max, q_min - lo, right=True) - first
    head, tail = (torch.minimum(t.clamp(min=0), count) for t in (head, tail))
    row = torch.stack([first.clamp(max=n - 1), count, head, tail, torch.zeros_like(first)], -1)
    return row, kind


def _area_shape(row: Tensor, q_row: Tensor, k_row: Tensor) -> Tensor:
    b, h = (max(*of) for of in zip(row.shape[:2], q_row.shape[:2], k_row.shape[:2], strict=True))
    return row.new_empty(b, h)


@operator("prefill.lists.listed_area", fake=_area_shape)
def listed_area(
    row: Tensor, index: Tensor, q_row: Tensor, k_row: Tensor, block_q: int, block_k: int
) -> Tensor:
    """[b, h] int64: over lists of `BlockLists`, row [b, h, M, 5] and index, the sum of how many rows of q_row
    [b, h, P] there are in each block of queries, times how many of k_row [b, h, N] there are in the key blocks that it
    lists.
    """
    nq, nk = present(q_row, block_q), present(k_row, block_k)
    b, h = (max(x, y) for x, y in zip(row.shape[:2], nk.shape[:2], strict=True))
    b, h, m = max(b, nq.shape[0]), max(h, nq.shape[1]), row.shape[2]
    begin, count, _, _, shift = row.expand(b, h, m, 5).unbind(-1)
    nk = nk.expand(b, h, nk.shape[-1]).long()
    if not index.shape[0]:
        upto = torch.nn.functional.pad(nk.cumsum(-1), (1, 0))
        first = begin + shift
        keys = upto.gather(-1, first + count) - upto.gather(-1, first)
        return (nq.expand(b, h, m) * keys).sum(-1)
    keys = torch.zeros(b, h, m, dtype=torch.int64, device=nk.device)
    # No list names a block twice.
    most, step = min(index.shape[0], nk.shape[-1]), max(1, ENTRIES // (b * h * m))
    for entry in range(0, most, step):
        e = torch.arange(entry, min(entry + step, most), device=nk.device)
        there = e < count[..., None]
        block = index[(begin[..., None] + e).clamp(max=index.shape[0] - 1)] + shift[..., None]
        block = torch.where(there, block, 0).flatten(2)
        keys += (nk.gather(-1, block).view(there.shape) * there).sum(-1)
    return (nq.expand(b, h, m) * keys).sum(-1)


def _edges(row: Tensor, place: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """[b, h, blocks] int64, twice: the least and the greatest place of what is there in each block; of nothing, the least
    is beyond all places and the greatest before them. And int8 FULL where all is there, ABSENT elsewhere."""
    place = place.long()
    has = (row >= 0) & torch.ones_like(place, dtype=torch.bool)
    cut = (*has.shape[:-1], has.shape[-1] // block, block)
    least = torch.where(has, place, BEYOND).view(cut).amin(-1)
    most = torch.where(has, place, -BEYOND).view(cut).amax(-1)
    return least, most, torch.where(has.view(cut).all(-1), FULL, ABSENT).to(torch.int8)
