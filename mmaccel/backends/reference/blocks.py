"""One part of an attention plan in plain PyTorch.

A *task* is one block of queries of one key/value head (with every query head of its group, where they share the order):
its rows stacked, its listed key blocks of all spans gathered side by side. Tasks with lists of like length go through one
batched matrix product; lists too long for the budget go in slices under a running softmax. Sums are kept in float32
(float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.backends.ops import FULL, TEST, placed, ragged

BUDGET = 1 << 19
"""Most scores held at a time: small enough for a processor's cache to matter, large enough to hide Python."""


def usable(device: torch.device) -> str | None:
    """Why this backend cannot run on `device`; None when it can, which is always."""
    return None


@dataclass(frozen=True)
class _Lists:
    """The lists of all spans side by side; a task is ``(b * G + g) * M + m``.

    begin, count [tasks, spans]; index counts blocks across spans, as `k_row` and `k_place` [B, G, N of all spans] do;
    q_place [B, G, spans, P]; owner [blocks] span of each key block.
    """

    begin: Tensor
    count: Tensor
    index: Tensor
    kind: Tensor
    k_row: Tensor
    k_place: Tensor
    q_place: Tensor
    owner: Tensor
    lo: Tensor
    hi: Tensor


def block_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_row: Tensor,
    k_row: Sequence[Tensor],
    q_place: Sequence[Tensor],
    k_place: Sequence[Tensor],
    lo: Sequence[int],
    hi: Sequence[int],
    offset: Sequence[Tensor],
    index: Sequence[Tensor],
    kind: Sequence[Tensor],
    block_q: int,
    block_k: int,
    scale: float,
    rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `mmaccel.backends.ops.block_attend`. Reads list lengths on the host."""
    B, H, n_query, D = query.shape
    G, n_key = key.shape[1:3]
    P = q_row.shape[-1]
    M = P // block_q
    high = torch.float64 if query.dtype == torch.float64 else torch.float32
    told = [ragged(*lists) for lists in zip(offset, index, kind, strict=True)]
    offset, index, kind = ([one[i] for one in told] for i in range(3))
    shared = all(t.shape[1] == 1 for t in (q_row, *k_row, *q_place, *k_place, *offset))
    heads = G if shared else H
    group = H // heads
    lists = _side_by_side(k_row, q_place, k_place, lo, hi, offset, index, kind, B, heads, M, block_k)

    q_row = q_row.expand(B, heads, P).long()
    first_row = torch.arange(B * H, device=query.device).view(B, heads, group, 1) * n_query
    address = first_row + q_row.clamp(min=0)[:, :, None]
    asked = query.reshape(B * H * n_query, D).index_select(0, address.reshape(-1))
    asked = asked.view(B * heads, group, M, block_q, D).transpose(1, 2).reshape(-1, group * block_q, D)

    keys, values = key.reshape(-1, D), value.reshape(B * G * n_key, value.shape[-1])
    tasks = asked.shape[0]
    width = group * block_q
    out = torch.zeros(tasks, width, value.shape[-1], dtype=high, device=query.device)
    top = torch.full((tasks, width), -torch.inf, dtype=high, device=query.device)
    total = torch.zeros(tasks, width, dtype=high, device=query.device)
    lengths = lists.count.sum(1)
    cap = max(1, BUDGET // (width * block_k))
    for first, batch, span in _batches(lengths, cap):
        entry = first + torch.arange(span, device=query.device)
        blocks, flags, origin = _entries(lists, batch, entry, lengths)
        b_h = batch // M
        kv_head = b_h if shared else (b_h // heads) * G + b_h % heads // (H // G)
        k_rows = lists.k_row.reshape(B * heads, -1, block_k)[b_h[:, None], blocks]
        where = (kv_head[:, None, None] * n_key + k_rows.clamp(min=0)).reshape(-1)
        k = keys.index_select(0, where).view(len(batch), span * block_k, D).to(high)
        v = values.index_select(0, where).view(len(batch), span * block_k, -1).to(high)
        scores = (asked[batch].to(high) * scale) @ k.transpose(1, 2)
        _hide(scores, lists, batch, blocks, flags, origin, k_rows, M, block_q, group)
        new = torch.maximum(top[batch], scores.amax(-1))
        floor = new.masked_fill(new == -torch.inf, 0.0)
        scores.sub_(floor[..., None]).exp_()
        if first == 0:
            total[batch] = scores.sum(-1)
            out[batch] = scores @ v
        else:
            fade = (top[batch] - floor).exp_()
            total[batch] = total[batch] * fade + scores.sum(-1)
            out[batch] = torch.baddbmm(out[batch] * fade[..., None], scores, v)
        top[batch] = new

    present = (q_row >= 0)[:, :, None]
    lse = (top + total.log()).view(B, heads, M, group, block_q).transpose(2, 3).reshape(B, heads, group, P)
    lse = lse.masked_fill(~present, -torch.inf).reshape(B, H, P)
    out.div_(total.clamp_(min=torch.finfo(high).tiny)[..., None])
    out = out.view(B, heads, M, group, block_q, -1).transpose(2, 3).reshape(B, heads, group, P, -1)
    out = out.masked_fill_(~present[..., None], 0.0).reshape(B, H, P, -1)
    return placed(
        out.to(query.dtype), lse, q_row[:, :, None].expand(B, heads, group, P).reshape(B, H, P), rows
    )


def _side_by_side(
    k_row: Sequence[Tensor],
    q_place: Sequence[Tensor],
    k_place: Sequence[Tensor],
    lo: Sequence[int],
    hi: Sequence[int],
    offset: Sequence[Tensor],
    index: Sequence[Tensor],
    kind: Sequence[Tensor],
    B: int,
    heads: int,
    M: int,
    block_k: int,
) -> _Lists:
    device = k_row[0].device

    def wide(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.expand(B, heads, t.shape[-1]) for t in tensors]

    def tail(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), -1)

    begin, count, shifted, owner = [], [], [], []
    entries = blocks = 0
    for s, (o, i, rows) in enumerate(zip(offset, index, k_row, strict=True)):
        o = o.expand(B, heads, M + 1)
        begin.append((o[..., :-1] + entries).reshape(-1))
        count.append((o[..., 1:] - o[..., :-1]).reshape(-1))
        shifted.append(i.long() + blocks)
        n = rows.shape[-1] // block_k
        owner.append(torch.full((n,), s, device=device))
        entries += i.shape[0]
        blocks += n
    return _Lists(
        begin=torch.stack(begin, 1),
        count=torch.stack(count, 1),
        index=torch.cat(shifted),
        kind=torch.cat([k.to(torch.int8) for k in kind]),
        k_row=tail(wide(k_row)),
        k_place=tail(wide(k_place)),
        q_place=torch.stack(wide(q_place), 2),
        owner=torch.cat(owner),
        lo=torch.tensor(list(lo), device=device),
        hi=torch.tensor(list(hi), device=device),
    )


def _batches(lengths: Tensor, cap: int) -> list[tuple[int, Tensor, int]]:
    """(first entry, tasks, entries) so that no batch holds more than `cap` blocks and little of it is padding."""
    order = torch.argsort(lengths, descending=True)
    sorted_lengths = lengths[order].tolist()
    batches, n = [], len(sorted_lengths)
    longest = sorted_lengths[0] if n else 0
    for first in range(0, longest, cap):
        t = 0
        while t < n and sorted_lengths[t] > first:
            span = min(sorted_lengths[t] - first, cap)
            end = min(n, t + max(1, cap // span))
            while sorted_lengths[end - 1] <= max(first, first + span // 2):
                end -= 1
            batches.append((first, order[t:end], span))
            t = end
    return batches


def _entries(lists: _Lists, batch: Tensor, entry: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Block number, kind (-1 past the list) and span of list entries `entry` [E] of tasks `batch` [T]; each [T, E]."""
    ends = lists.count[batch].cumsum(1)
    entry = entry.expand(len(batch), -1)
    inside = entry < lengths[batch][:, None]
    origin = (entry[..., None] >= ends[:, None, :-1]).sum(-1)
    begin = lists.begin[batch] - (ends - lists.count[batch])
    where = (begin.gather(1, origin) + entry).masked_fill_(~inside, 0)
    return lists.index[where], lists.kind[where].masked_fill(~inside, -1), origin


def _hide(
    scores: Tensor,
    lists: _Lists,
    batch: Tensor,
    blocks: Tensor,
    flags: Tensor,
    origin: Tensor,
    k_rows: Tensor,
    M: int,
    block_q: int,
    group: int,
) -> None:
    """Set to -inf, in place, the scores [T, group * block_q, E * block_k] of pairs that are not seen."""
    T, E, block_k = k_rows.shape
    hidden = (k_rows < 0) & (flags != FULL)[..., None] | (flags < 0)[..., None]
    if bool(hidden.any()):
        scores.masked_fill_(hidden.view(T, 1, E * block_k), -torch.inf)
    t, e = (flags == TEST).nonzero(as_tuple=True)
    if not len(t):
        return
    b_h, m = batch[t] // M, batch[t] % M
    s = origin[t, e]
    heads = lists.k_place.shape[0] * lists.k_place.shape[1]
    k_place = lists.k_place.reshape(heads, -1, block_k)[b_h, blocks[t, e]]
    q_place = lists.q_place.reshape(heads, lists.lo.shape[0], M, block_q)[b_h, s, m]
    gap = q_place[:, :, None] - k_place[:, None, :]
    seen = (gap >= lists.lo[s][:, None, None]) & (gap < lists.hi[s][:, None, None])
    view = scores.view(T, group, block_q, E, block_k)
    tested = view[t, :, :, e]
    view[t, :, :, e] = tested.masked_fill_(~seen[:, None], -torch.inf)
