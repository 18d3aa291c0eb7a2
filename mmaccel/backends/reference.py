"""Backend "reference": runs one part of an attention plan in plain PyTorch.

A *task* is one query block of one key/value head (with all its query heads if they share lists): its rows stacked, its
listed key blocks of all spans gathered. Tasks with lists of similar length share one matrix product; lists over the memory
budget are computed in slices, merged by log-sum-exp. Key blocks that neighbouring tasks all list and fully see are computed
first, for all of them at once; then those that one task fully sees; then the rest, masked. Sums are in float32 (float64 for
float64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import (
    FULL,
    TEST,
    BlockAttendCall,
    Part,
    append_span_keys,
    lse_dtype,
    register_block_attend,
    scatter_to_query_order,
    with_unpacked_args,
)

# Most scores held at a time: small enough for a processor's cache to matter, large enough to hide Python.
BUDGET = 1 << 19
TILE = 4  # neighbouring tasks that share what they all list
# What is added to the score of a pair that is not seen: beside a seen one its weight is zero.
UNSEEN = -1e30


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class _Layout:
    """Where the rows of keys lie, and the positions of keys and queries.

    k_row, k_pos [B * heads, blocks of all spans, block_k]; q_pos [B * heads, spans, M, block_q]; lo, hi [spans];
    bias as k_row, None where no span has one; q_row [B * heads, M, block_q]; sinks, edge: as of a `Part`.
    """

    k_row: Tensor
    k_pos: Tensor
    q_pos: Tensor
    lo: Tensor
    hi: Tensor
    bias: Tensor | None
    q_row: Tensor
    sinks: int
    edge: int | None

    @classmethod
    def of(cls, part: Part, rows: list[Tensor], B: int, heads: int, M: int, block_k: int) -> _Layout:
        """Concatenate the keys of all spans, whose rows in the key tensor are `rows`."""
        lead, spans = B * heads, part.spans

        def laid(tensors: list[Tensor]) -> Tensor:
            return torch.cat([t.expand(B, heads, -1) for t in tensors], -1).reshape(lead, -1, block_k)

        k_row, k_pos, bias = laid(rows), laid([s.k_pos for s in spans]), None
        if any(s.bias is not None for s in spans):
            none = torch.zeros((), device=k_row.device)
            bias = laid([none.expand_as(s.k_row) if s.bias is None else s.bias for s in spans])
        q_pos = torch.stack([s.q_pos.expand(B, heads, -1) for s in spans], 2)
        lo, hi = torch.tensor([(s.lo, s.hi) for s in spans], device=k_row.device).unbind(1)
        q_row = part.q_row.expand(B, heads, -1).reshape(lead, M, -1)
        q_pos = q_pos.reshape(lead, len(spans), M, -1)
        return cls(k_row, k_pos, q_pos, lo, hi, bias, q_row, part.sinks, part.edge)

    def seen(self, head: Tensor, m: Tensor, blocks: Tensor, span: Tensor, kind: Tensor) -> Tensor:
        """Mask [T, block_q or 1, E, block_k] of query blocks m [T] with their listed key blocks [T, E], -1 for none."""
        h, m = head[:, None], m[:, None]
        here = (self.k_row[h, blocks] >= 0) | (kind == FULL)[..., None]
        seen = (here & (blocks >= 0)[..., None])[:, None]
        tested = (kind == TEST)[:, None, :, None]
        if not bool(tested.any()):
            return seen
        lo, hi = (bound[span][:, None, :, None] for bound in (self.lo, self.hi))
        # By bounds of each query, not by the gap of each pair: a comparison moves less than a difference.
        at, there = self.q_pos[h, span, m].transpose(1, 2)[..., None], self.k_pos[h, blocks][:, None]
        inside = (there <= at - lo) & (there > at - hi)
        if self.edge is not None:
            row = self.k_row[h, blocks][:, None]
            inside &= (row < self.sinks) | (row > self.q_row[h, m].transpose(1, 2)[..., None] + self.edge)
        return (inside | ~tested) & seen


@dataclass(frozen=True)
class _Lists:
    """The key blocks listed by tiles of `tile` tasks. Tile t has the entries offset[t] .. offset[t + 1] - 1 of block
    (numbered through all spans), span (its number) and kind (FULL, ABSENT or TEST)."""

    tile: int
    offset: Tensor
    block: Tensor
    span: Tensor
    kind: Tensor

    def of(self, tiles: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """List entries ``first .. first + count - 1`` of tiles [T]: block (-1 past the end), span, kind, each [T, count]."""
        entry = first + torch.arange(count, device=tiles.device)
        where = self.offset[tiles][:, None] + entry
        inside = where < self.offset[tiles + 1][:, None]
        where = where.masked_fill(~inside, 0)
        return self.block[where].masked_fill(~inside, -1), self.span[where], self.kind[where]


@with_unpacked_args
def block_attend(call: BlockAttendCall) -> tuple[Tensor, Tensor]:
    """The operator of `ops.block_attend` in plain PyTorch. Reads list lengths on the host."""
    query, key, value, part, block_q, block_k, scale, rows, _ = call
    B, H, n_query, D = query.shape
    key, value, k_row = append_span_keys(key, value, part.spans)
    G, n_key = key.shape[1:3]
    P = part.q_row.shape[-1]
    M = P // block_q
    high = lse_dtype(query.dtype)
    spans, q_row = part.spans, part.q_row
    lists = [span.lists.flatten() for span in spans]
    own = [t for s in spans for t in (s.k_row, s.q_pos, s.k_pos, s.bias) if t is not None]
    shared = all(t.shape[1] == 1 for t in (q_row, *own, *(offset for offset, _, _ in lists)))
    heads = G if shared else H
    group = H // heads
    layout = _Layout.of(part, k_row, B, heads, M, block_k)
    widths = [span.k_row.shape[-1] // block_k for span in spans]

    q_row = q_row.expand(B, heads, P).long()
    first_row = torch.arange(B * H, device=query.device).view(B, heads, group, 1) * n_query
    address = first_row + q_row.clamp(min=0)[:, :, None]
    asked = query.reshape(B * H * n_query, D).index_select(0, address.reshape(-1))
    asked = asked.view(B * heads, group, M, block_q, D).transpose(1, 2)
    width, padded = group * block_q, -(-M // TILE) * TILE
    asked = torch.nn.functional.pad(asked, (0, 0) * 3 + (0, padded - M))

    # A key and its value lie together: one gather, of longer rows.
    pairs = torch.cat([key, value], -1).reshape(B * G * n_key, -1)
    tasks = B * heads * padded
    out = torch.zeros(tasks, width, value.shape[-1], dtype=high, device=query.device)
    lse = torch.full((tasks, width), -torch.inf, dtype=high, device=query.device)
    for number, entries in enumerate(_in_turn(lists, widths, B, heads, M, padded)):
        high_rows = entries.tile * width
        tiles, norms = asked.reshape(-1, high_rows, D), lse.view(-1, high_rows)
        to = out.view(-1, high_rows, out.shape[-1])
        for first, some, count in _batches(entries.offset.diff(), max(1, BUDGET // (high_rows * block_k))):
            blocks, span, kinds = entries.of(some, first, count)
            b_h, m = some * entries.tile // padded, some * entries.tile % padded
            kv_head = b_h if shared else (b_h // heads) * G + b_h % heads // (H // G)
            k_rows = layout.k_row[b_h[:, None], blocks].clamp(min=0)
            where = (kv_head[:, None, None] * n_key + k_rows).reshape(-1)
            both = pairs.index_select(0, where).view(len(some), count * block_k, -1).to(high)
            seen = None
            if bool(((blocks < 0) | (kinds != FULL)).any()):
                seen = layout.seen(b_h, m, blocks, span, kinds).flatten(2)
            bias = None if layout.bias is None else layout.bias[b_h[:, None], blocks].flatten(1)
            keys, values = both[..., :D], both[..., D:]
            found, norm = _attended(tiles[some].to(high), keys, values, seen, bias, group, scale)
            if not number and not first:
                to[some], norms[some] = found, norm
                continue
            before = norms[some]
            joint = torch.logaddexp(before, norm)
            floor = joint.masked_fill(joint == -torch.inf, 0.0)
            least, more = ((one - floor).exp_()[..., None] for one in (before, norm))
            to[some] = to[some].mul_(least).add_(found.mul_(more))
            norms[some] = joint

    present = (q_row >= 0)[:, :, None]
    lse = lse.view(B, heads, padded, group, block_q)[:, :, :M].transpose(2, 3).reshape(B, heads, group, P)
    lse = lse.masked_fill(~present, -torch.inf).reshape(B, H, P).contiguous()
    out = out.view(B, heads, padded, group, block_q, -1)[:, :, :M].transpose(2, 3)
    out = out.reshape(B, heads, group, P, -1)
    out = out.masked_fill_(~present[..., None], 0.0).reshape(B, H, P, -1).contiguous()
    row = q_row[:, :, None].expand(B, heads, group, P).reshape(B, H, P)
    return scatter_to_query_order(out.to(query.dtype), lse, row, rows)


op = register_block_attend("block_attend", block_attend)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, bias: Tensor | None, group: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Of queries [T, W, D], `group` heads of W / group rows, and keys and values [T, N, D]: attention, zero where nothing is
    seen, and its log-sum-exp [T, W]. `seen` [T, W / group or 1, N]: which pairs are, of all heads alike; None: all.
    `bias` [T, N]: what is added to the logits of each key."""
    T, W, D = q.shape
    q = q.view(T, group, W // group, D)
    if q.device.type == "cpu" and v.shape[-1] == D:
        # One pass over each tile of scores, which stay in the cache.
        wide = [t[:, None].expand(T, group, *t.shape[1:]) for t in (k, v)]
        mask = None if seen is None else torch.where(seen, 0.0, UNSEEN).to(q.dtype)[:, None]
        if bias is not None:
            mask = bias.to(q.dtype)[:, None, None] + (0.0 if mask is None else mask)
        out, lse = FLASH(q, *wide, 0.0, False, attn_mask=mask, scale=scale)
        if seen is not None:
            none = lse <= UNSEEN / 2
            out, lse = out.masked_fill(none[..., None], 0.0), lse.masked_fill(none, -torch.inf)
        return out.reshape(T, W, -1), lse.reshape(T, W)
    scores = (q.reshape(T, W, D) * scale) @ k.transpose(1, 2)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)[:, None]
    if seen is not None:
        scores.view(*q.shape[:3], -1).masked_fill_(~seen[:, None], -torch.inf)
    top = scores.amax(-1)
    scores.sub_(top.masked_fill(top == -torch.inf, 0.0)[..., None]).exp_()
    total = scores.sum(-1)
    out = (scores @ v).div_(total.clamp_min(torch.finfo(q.dtype).tiny)[..., None])
    return out, top + total.log()


def _in_turn(
    flat: Sequence[tuple[Tensor, Tensor, Tensor]],
    widths: Sequence[int],
    B: int,
    heads: int,
    M: int,
    padded: int,
) -> Iterator[_Lists]:
    """Yield `_Lists` of the FULL entries that all tasks of a tile list, of each task's other FULL ones, and of those to
    mask. `flat`: `BlockLists.flatten` of each span. A task is ``(b * heads + h) * padded + m``."""
    begin, count, blocks, spans = [], [], [], []
    before = shift = 0
    for number, ((offset, index, _), width) in enumerate(zip(flat, widths, strict=True)):
        offset = offset.expand(B, heads, M + 1)
        begin.append((offset[..., :-1] + before).reshape(-1))
        count.append(offset.diff().reshape(-1))
        blocks.append(index.long() + shift)
        spans.append(torch.full_like(blocks[-1], number))
        before, shift = before + len(index), shift + width
    kinds = torch.cat([kind.to(torch.int8) for _, _, kind in flat])
    first, many = torch.stack(begin, 1).reshape(-1), torch.stack(count, 1).reshape(-1)
    # Of each task those of the first span, then those of the next.
    owner = torch.repeat_interleave(torch.arange(len(many), device=many.device), many)
    where = first[owner] + torch.arange(len(owner), device=many.device) - (many.cumsum(0) - many)[owner]
    task = owner // len(flat)
    task = task // M * padded + task % M
    block, span, kind = torch.cat(blocks)[where], torch.cat(spans)[where], kinds[where]

    def lists(at: Tensor, mine: Tensor, tile: int) -> _Lists:
        each = torch.bincount(at, minlength=B * heads * padded // tile)
        offset = torch.nn.functional.pad(each.cumsum(0), (1, 0))
        return _Lists(tile, offset, block[mine], span[mine], kind[mine])

    whole = (kind == FULL).nonzero()[:, 0]
    # Sorted by tile and block: where a block begins, and TILE entries on, it is the same in all of them.
    order = whole[(task[whole] // TILE * shift + block[whole]).sort(stable=True).indices]
    name = task[order] // TILE * shift + block[order]
    alike = name[TILE - 1 :] == name[: max(len(name) - TILE + 1, 0)]
    common = order[: len(alike)][alike]
    yield lists(task[common] // TILE, common, TILE)
    joined = torch.zeros(len(task), dtype=torch.bool, device=task.device)
    for n in range(TILE):
        joined[order[n : len(alike) + n][alike]] = True
    for mine in ((kind == FULL) & ~joined, kind != FULL):
        some = mine.nonzero()[:, 0]
        yield lists(task[some], some, 1)


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
