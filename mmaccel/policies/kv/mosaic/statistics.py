"""The centroid and the variance of a cluster, kept up to date without going back to its points.

Letters: c centroid [..., d], s2 population variance [...] (the mean squared distance to c), n size [...]. For points of unit
length s2 = 1 - |c|^2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def summary(x: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(c, s2, n) of the points `x` [..., m, d] that are `present` [..., m], from all of them; zeros for none."""
    n = present.sum(-1)
    weight = present.to(x.dtype)[..., None]
    some = n.clamp_min(1).to(x.dtype)
    c = (x * weight).sum(-2) / some[..., None]
    s2 = ((x - c[..., None, :]).square() * weight).sum((-2, -1)) / some
    return c, s2, n


def insert(c: Tensor, s2: Tensor, n: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """(c, s2) after the point `u` [..., d] has joined: Mosaic's equations 3 and 4, in Welford's form."""
    size = n.to(c.dtype)
    away = u - c
    new = c + away / (size + 1)[..., None]
    return new, (size * s2 + (away * (u - new)).sum(-1)) / (size + 1)


def merge(
    c_a: Tensor, s2_a: Tensor, n_a: Tensor, c_b: Tensor, s2_b: Tensor, n_b: Tensor
) -> tuple[Tensor, Tensor]:
    """(c, s2) of two clusters taken together, neither empty (Chan, Golub and LeVeque 1983)."""
    a, b = n_a.to(c_a.dtype), n_b.to(c_a.dtype)
    n = a + b
    share = b / n
    apart = c_b - c_a
    c = c_a + share[..., None] * apart
    return c, (a * s2_a + b * s2_b) / n + (a / n) * share * apart.square().sum(-1)


def pooled(s2_a: Tensor, n_a: Tensor, s2_b: Tensor, n_b: Tensor) -> Tensor:
    """The variance within the two parts of a split; what is missing of the whole's lies between their centroids."""
    a, b = n_a.to(s2_a.dtype), n_b.to(s2_a.dtype)
    return (a * s2_a + b * s2_b) / (a + b).clamp_min(torch.finfo(s2_a.dtype).tiny)
