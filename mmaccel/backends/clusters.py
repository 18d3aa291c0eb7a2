"""What a question retrieves by the representatives of clusters, in few launches: for code that nobody compiles.

Each function has a plain form, in `mmaccel.backends.reference.clusters`, and a kernel, where Triton runs and there are at
most `MOST` clusters: an order is made by comparing each with all.

Letters: R layers, C clusters, V visual clusters, N entries, d size of a key. One cluster comes before another whose score is
lower, or as high if it has the lower number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST = 8192
"""Clusters of a layer that are compared with each other: 4 ** 13 pairs take a device some ten microseconds."""


class Lists(NamedTuple):
    """The entries of clusters: owner [R, N] the cluster of each entry, C or more: none; within [R, N] its place in its
    cluster; flat [R, N] entries, cluster by cluster, ascending, those of one from first [R, C] on; size [R, C] of each.
    `largest`: a bound of all sizes. All but that are long."""

    owner: Tensor
    within: Tensor
    flat: Tensor
    first: Tensor
    size: Tensor
    largest: int


class Own(NamedTuple):
    """The entries' own keys: `keys` [M, L, d] where the device can read them, those of `layer`; `read` gives rows [n, d] in
    float32 of entries [n]; `query` [d] float32 to compare them with, by the angle if `cosine`."""

    keys: Tensor
    layer: int
    read: Callable[[Tensor], Tensor]
    query: Tensor
    cosine: bool


class Late(NamedTuple):
    """The last `entries` entries of a stream of `units` [1] units, on the device, of `parts` each."""

    units: Tensor
    parts: int
    entries: int

    def numbers(self) -> Tensor:
        """[entries], ascending."""
        return self.units * self.parts - self.entries + torch.arange(self.entries, device=self.units.device)


def scored(key: Tensor, query: Tensor, cosine: bool) -> Tensor:
    """[R, C] float32: keys [R, C, d] times queries [R, d] float32; if `cosine` of both at length one."""
    return _of(key.device, key.shape[1]).scored(key, query, cosine)  # type: ignore[no-any-return]


def outside(score: Tensor, size: Tensor, limit: int, fewest: int) -> Tensor:
    """[R, V] whether `limit` entries or more are in the clusters before one, by score [R, V]; never of the first `fewest`.
    size [V]; clusters without entries come last."""
    return _of(score.device, score.shape[1]).outside(score, size, limit, fewest)  # type: ignore[no-any-return]


def ordered(
    score: Tensor, size: Tensor, parent: Tensor | None, without: Tensor | None
) -> tuple[Tensor, Tensor]:
    """score [R, C], -inf where a cluster's parent [R, C], V for none, is in `without` [R, V], or, if there are no parents,
    where its size is 0; and [R, C] long, how many entries are in the clusters before each. size [R, C]."""
    found: tuple[Tensor, Tensor] = _of(score.device, score.shape[1]).ordered(score, size, parent, without)
    return found


def selected(
    before: Tensor, lists: Lists, budget: int, ahead: int, own: Own, late: Late | None
) -> tuple[Tensor, Tensor | None]:
    """[budget] ascending: the entries of the first of R = 1 or 2 layers, cluster by cluster until there are `budget`, and
    there must be as many; of the last cluster those of the largest score of their own. `late` follow them. And of the
    second layer, if there is one, `ahead` entries: of the last cluster the oldest; -1 where there are no more.

    before [R, C]: see `ordered`."""
    found: tuple[Tensor, Tensor | None] = _of(before.device, before.shape[1]).selected(
        before, lists, budget, ahead, own, late
    )
    return found


def stand_ins(
    score: Tensor,
    picked: Tensor,
    size: Tensor,
    rows: tuple[Tensor, Tensor],
    time: Tensor,
    out: Tensor,
    head: int,
    left: Tensor | None,
    tokens: int,
) -> tuple[Tensor, Tensor]:
    """The clusters of the largest score [C], as many as `out` [2, G, m, D] has room for, which is filled with their rows,
    [C, G * D] each, keys and values; their `time` [m] of [C]; and [head + m] float32, what is added to scores of the head
    and of these: 0, or for tokens not 0 the logarithm of as many for each entry, as if there were none in those `picked`
    [C]. -inf from place `left` [1] on, if that is told.

    Those that were picked come last, before them those of score -inf; and after them all those of size [C] 0."""
    found: tuple[Tensor, Tensor] = _of(score.device, len(score)).stand_ins(
        score, picked, size, rows, time, out, head, left, tokens
    )
    return found


def stand_in_order(score: Tensor, picked: Tensor, size: Tensor) -> Tensor:
    """[C] clusters in the order in which `stand_ins` has them. In plain PyTorch."""
    # Finite, so that clusters outside the first stage's choice still come before those that are no candidates.
    lowest = torch.finfo(torch.float32).min / 2
    rank = score.clamp_min(lowest).masked_fill(picked, 1.5 * lowest).masked_fill(size == 0, -torch.inf)
    return rank.sort(descending=True, stable=True).indices


def preceding(score: Tensor, size: Tensor) -> Tensor:
    """[R, C] long: how many entries are in the clusters before each, by score [R, C] and size [R, C]. In plain PyTorch."""
    order = score.sort(dim=1, descending=True, stable=True).indices
    held = size.gather(1, order)
    return torch.empty_like(held).scatter_(1, order, held.cumsum(1) - held)


def lined_up(before: Tensor, lists: Lists, width: int) -> Tensor:
    """[R, width] entries of clusters one after the other, of which `before` [R, C] come before each; -1 where there are no
    more. In plain PyTorch."""
    line = before.gather(1, lists.owner.clamp(max=before.shape[1] - 1)) + lists.within
    line = line.masked_fill(lists.owner >= before.shape[1], width).clamp(max=width)
    entry = torch.arange(line.shape[1], device=line.device).expand_as(line)
    found = torch.full((len(line), width + 1), -1, dtype=torch.long, device=line.device)
    return found.scatter_(1, line, entry)[:, :width]


def _of(device: torch.device, clusters: int) -> Any:
    from mmaccel.backends import triton

    if clusters <= MOST and triton.usable(device) is None:
        from mmaccel.backends.triton.stream import clusters as kernels

        return kernels
    from mmaccel.backends.reference import clusters as plain

    return plain
