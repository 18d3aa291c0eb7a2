"""The meaning of `mmaccel.backends.words`, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def mean(rows: Tensor, count: Tensor | None) -> Tensor:
    """[..., D] float32 of rows [..., n, D]."""
    if count is None:
        return rows.float().mean(-2)
    inside = torch.arange(rows.shape[-2], device=rows.device)[:, None] < count
    return torch.where(inside, rows.float(), 0.0).sum(-2) / count


def folded(rows: Tensor, count: Tensor | None, groups: int) -> Tensor:
    return mean(rows, count).view(groups, -1, rows.shape[2]).sum(1).flatten()


def moved(words: Tensor, count: Tensor, known: Tensor, before: Tensor, seen: Tensor | None) -> Tensor:
    now = mean(words, count)
    if seen is not None:
        torch.sub(now, before, out=seen)
    before.copy_(now)
    return words + known.to(words.dtype)


def foretold(table: Tensor, entries: Tensor, slots: Tensor, begin: Tensor) -> Tensor:
    found = table[entries]
    host = (found >= 0) & (found < slots)
    place = begin + torch.arange(len(entries), device=found.device)
    table.scatter_(0, torch.where(host, entries, len(table) - 1), place)
    return torch.where(host, found, -1)
