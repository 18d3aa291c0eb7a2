"""K-means by direction, for many small sets at once; deterministic."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """The last axis scaled to length one; a row of zeros stays zero."""
    scaled: Tensor = x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return scaled


def kmeans(
    x: Tensor,
    k: int,
    *,
    present: Tensor | None = None,
    seeds: Tensor | None = None,
    iterations: int = 10,
    tolerance: float = 1e-4,
) -> Tensor:
    """Labels [B, n] in 0 .. k-1 of the points `x` [B, n, d], those of each of `B` sets among themselves; -1 where absent.

    A point belongs to the centre of the largest cosine, ties to the lowest label; a centre is the direction of its points'
    mean. The first centres are points at equal steps in the given order (of time), unless `seeds` [B, k, d] are given. No
    label is left empty: it takes the point that lies farthest from its own centre, of a label that keeps another. A set
    must have at least `k` points. Points are expected to be of unit length, or zero.

    Mosaic (arXiv 2604.10060), section V-B, names k-means with cosine similarity and no more; equal steps after RetroInfer.
    """
    B, n, _ = x.shape
    here = torch.ones(B, n, dtype=torch.bool, device=x.device) if present is None else present
    count = here.sum(1)
    if seeds is None:
        step = torch.arange(k, device=x.device)
        rank = (2 * step + 1) * count[:, None] // (2 * k)
        order = torch.argsort(here.logical_not().to(torch.int8), dim=1, stable=True)
        seeds = x.gather(1, order.gather(1, rank)[:, :, None].expand(-1, -1, x.shape[2]))
    centre, label = unit(seeds), torch.zeros(B, n, dtype=torch.long, device=x.device)
    rows = torch.arange(B, device=x.device)
    for _ in range(iterations):
        near = x @ centre.mT
        label = near.argmax(2)
        member, size = _members(label, here, k, x.dtype)
        for _ in range(k):
            empty = (size == 0).any(1)
            if not bool(empty.any()):
                break
            own = near.gather(2, label[:, :, None])[:, :, 0]
            free = here & (size.gather(1, label) > 1)
            point = own.masked_fill(~free, torch.inf).argmin(1)
            lowest = (size == 0).to(torch.int8).argmax(1)
            label[rows, point] = torch.where(empty, lowest, label[rows, point])
            near[rows[empty], point[empty], lowest[empty]] = torch.inf
            member, size = _members(label, here, k, x.dtype)
        new = unit(member.mT @ x)
        moved = (new - centre).norm(dim=-1).amax() if B else new.new_zeros(())
        centre = new
        if bool(moved <= tolerance):
            break
    return label.masked_fill(~here, -1)


def bisect(x: Tensor, present: Tensor, iterations: int = 10) -> Tensor:
    """`kmeans` of two, from the pair of points of the smallest cosine (of equal ones the earliest); [B, n] of 0, 1, -1."""
    n = x.shape[1]
    pair = present[:, :, None] & present[:, None, :]
    pair = pair & torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    far = (x @ x.mT).masked_fill(~pair, torch.inf).flatten(1).argmin(1)
    ends = torch.stack([far // n, far % n], 1)
    seeds = x.gather(1, ends[:, :, None].expand(-1, -1, x.shape[2]))
    return kmeans(x, 2, present=present, seeds=seeds, iterations=iterations)


def halve(present: Tensor) -> Tensor:
    """Labels [B, n] that cut each set in two by its order; -1 where absent."""
    rank = present.cumsum(1) - 1
    half = (present.sum(1, keepdim=True) + 1) // 2
    return (rank >= half).long().masked_fill(~present, -1)


def _members(label: Tensor, here: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Membership [B, n, k] of 0 and 1, and the sizes [B, k]."""
    member = (label[:, :, None] == torch.arange(k, device=label.device)) & here[:, :, None]
    return member.to(dtype), member.sum(1)
