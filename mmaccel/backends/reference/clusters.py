"""The meaning of `mmaccel.backends.clusters`, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.clusters import Late, Lists, Own, lined_up, preceding, stand_in_order

APART = 1e30
"""Above any score."""


def scored(key: Tensor, query: Tensor, cosine: bool) -> Tensor:
    key = key.float()
    score = torch.bmm(key, query[:, :, None])[:, :, 0]
    if cosine:
        score = score / (key.norm(dim=-1) * query.norm(dim=-1, keepdim=True)).clamp_min(1e-12)
    return score


def outside(score: Tensor, size: Tensor, limit: int, fewest: int) -> Tensor:
    order = score.masked_fill(size == 0, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    held = size[order]
    before = held.cumsum(1) - held
    before[:, :fewest].zero_()
    found = torch.empty(score.shape, dtype=torch.bool, device=score.device)
    return found.scatter_(1, order, before >= limit)


def ordered(
    score: Tensor, size: Tensor, parent: Tensor | None, without: Tensor | None
) -> tuple[Tensor, Tensor]:
    hidden = (
        size == 0 if parent is None or without is None else pad(without, (0, 1), value=True).gather(1, parent)
    )
    score = score.masked_fill(hidden, -torch.inf)
    return score, preceding(score, size)


def selected(
    before: Tensor, lists: Lists, budget: int, ahead: int, own: Own, late: Late | None
) -> tuple[Tensor, Tensor | None]:
    width = budget + lists.largest - 1
    found = lined_up(before, lists, max(width, ahead))
    # What comes after the last entry is none, and is looked up as the first one.
    entries = found[0, :width].clamp_min(0)
    cluster = lists.owner[0][entries].clamp(max=before.shape[1] - 1)
    begin, end = before[0][cluster], (before[0] + lists.size[0])[cluster]
    apart = (end <= budget).long() - (begin >= budget).long()
    apart = apart.masked_fill(found[0, :width] < 0, -1)
    scores = scored(own.read(entries)[None], own.query[None], own.cosine)[0]
    best = scores.add(apart, alpha=APART).sort(descending=True, stable=True).indices[:budget]
    chosen = entries[best].sort().values
    if late is not None:
        chosen = torch.cat([chosen, late.numbers()])
    return chosen, found[1, :ahead] if len(found) > 1 else None


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
    count = out.shape[2]
    ids = stand_in_order(score, picked, size)[:count]
    for side, one in zip(out, rows, strict=True):
        side.copy_(one.index_select(0, ids).view(count, *side.shape[::2]).transpose(0, 1))
    added = torch.zeros(count, device=score.device)
    if tokens:
        # What stands for retrieved tokens adds nothing to them.
        added = (size.masked_fill(picked, 0)[ids] * tokens).float().clamp_min(1e-30).log()
    if left is not None:
        added = added.masked_fill(torch.arange(count, device=added.device) >= left, -torch.inf)
    return time[ids], pad(added, (head, 0))
