"""What the words of a question say in the mean, in few launches.

Of n rows the first are words, as many as `count` [1] long on the device says; the others may be anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.backends.ops.operator import operator, runs_triton_in_float32


def mean(rows: Tensor, count: Tensor | None) -> Tensor:
    """[..., D] float32 of rows [..., n, D]."""
    if count is None:
        return rows.float().mean(-2)
    inside = torch.arange(rows.shape[-2], device=rows.device)[:, None] < count
    return torch.where(inside, rows.float(), 0.0).sum(-2) / count


@operator("stream.clusters.folded", serves=runs_triton_in_float32)
def folded(rows: Tensor, count: Tensor | None, groups: int) -> Tensor:
    """[G * D] float32: the mean of rows [H, n, D] over the words (None: over all), the H / G heads of a group summed."""
    return mean(rows, count).view(groups, -1, rows.shape[2]).sum(1).flatten()


@operator("stream.clusters.moved", serves=runs_triton_in_float32)
def moved(words: Tensor, count: Tensor, known: Tensor, before: Tensor, seen: Tensor | None) -> Tensor:
    """[n, E]: rows `words` plus `known` [E] float32, rounded first. The mean of the words goes into `before` [E]; what it is
    more than what was there, into `seen` [E]."""
    now = mean(words, count)
    if seen is not None:
        torch.sub(now, before, out=seen)
    before.copy_(now)
    return words + known.to(words.dtype)


@operator("stream.clusters.foretold")
def foretold(table: Tensor, entries: Tensor, slots: Tensor, begin: Tensor) -> Tensor:
    """[n] `table` [m] at `entries` [n], different ones (-1: the last place), if that is below `slots` [1] and not negative;
    -1 otherwise. Where it is, the i-th is now at `begin` [1] + i, says the table. All long; the last place is anything."""
    found = table[entries]
    host = (found >= 0) & (found < slots)
    place = begin + torch.arange(len(entries), device=found.device)
    table.scatter_(0, torch.where(host, entries, len(table) - 1), place)
    return torch.where(host, found, -1)
