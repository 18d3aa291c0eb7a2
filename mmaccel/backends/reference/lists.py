"""Lists of key blocks in plain PyTorch: which blocks a range of places reaches, and what lists hold."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops import ABSENT, FULL, present

ENTRIES = 1 << 24
"""Most entries of lists looked at at a time, where they are counted."""

BEYOND = 1 << 60
"""More than any place: wide places exceed 32 bits."""


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
    """See `mmaccel.backends.ops.reach`."""
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


def listed_area(
    row: Tensor, index: Tensor, q_row: Tensor, k_row: Tensor, block_q: int, block_k: int
) -> Tensor:
    """See `mmaccel.backends.ops.listed_area`."""
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
