"""From a plan to the operator of a backend, and back to rows of the query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends import select
from mmaccel.backends.ops.block_attend import empty_output, prepare, remember
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.errors import RecipeError
from mmaccel.core.merge_heads import adjacent, joined
from mmaccel.core.plan import (
    FAR,
    AttentionPlan,
    Part,
    head_runs,
    numbered,
    pad_rows,
    span_by_range,
)

MERGED = 1 << 26
"""Elements merged at a time: in full precision those of all heads would fill the device at a million tokens."""

BLOCK = 128
"""Rows and keys of a block of a window's plan: a tile of the kernel for Hopper, and blocks too many at either end of a
window are few."""

BlockAttend = Callable[..., tuple[Tensor, Tensor]]
"""A backend's operator; its arguments are those of `ops.block_attend.define`."""


def attend_plan(
    plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, scale: float, backend: BlockAttend
) -> tuple[Tensor, Tensor]:
    """Attention of one layer: out [B, H, n_query, D] in the type of the query, and its lse [B, H, n_query].

    Rows that no part serves, or that see no key, are zero with lse = -inf. Parts that share rows are merged exactly by
    their log-sum-exps. Heads that the plan leaves dense go through the dense operator, which knows no log-sum-exp: theirs
    is NaN.
    """
    n, all_heads = query.shape[2], tuple(range(query.shape[1]))
    group, blocks = len(all_heads) // key.shape[1], (plan.block_q, plan.block_k)
    out, lse = None, None
    written: set[int] = set()
    for part in launches(plan):
        own = part.of(len(all_heads))
        groups = slice(own.start // group, (own.stop - 1) // group + 1)
        q, k, v = query[:, own], key[:, groups], value[:, groups]
        op = select.serving_extra(backend, query.device) if part.extra else backend
        prepared = prepare(op, part, q, k, *blocks, n)
        other, other_lse = op(q, k, v, *part.pack(), *blocks, scale, n, *prepared)
        heads = all_heads if part.head_range is None else part.head_range.heads
        if out is None and len(other[0]) == len(all_heads):
            out, lse = other, other_lse
        else:
            if out is None:
                out, lse = empty_output(query, value, n, n)
            assert lse is not None
            for begin, end in adjacent([head for head in heads if head not in written]):
                here = slice(begin - own.start, end - own.start)
                out[:, begin:end], lse[:, begin:end] = other[:, here], other_lse[:, here]
            again = [head for head in heads if head in written]
            for begin, end in adjacent(again, max(1, MERGED // other[:, 0].numel())):
                here = slice(begin - own.start, end - own.start)
                both, total = merge(out[:, begin:end], lse[:, begin:end], other[:, here], other_lse[:, here])
                out[:, begin:end], lse[:, begin:end] = both.to(out.dtype), total
        written.update(heads)
    if out is None or lse is None:
        out, lse = empty_output(query, value, n, n)
    if (dense := plan.dense) is not None:
        rows, start = dense.rows, key.shape[2] - n
        seen = slice(0, start + rows)
        valid = dense.keys.valid[:, seen] if dense.keys.padded else None
        for run in head_runs(dense.heads, query.shape[1] // key.shape[1]):
            k, v = key[:, run.groups, seen], value[:, run.groups, seen]
            q, at = run.of(query)[:, :, :rows], numbered(run.heads, query.device)
            out[:, at, :rows], lse[:, at, :rows] = dense_attend(q, k, v, scale, start, valid), torch.nan
    return out, lse


def launches(plan: AttentionPlan) -> list[Part]:
    """The parts of a plan, those of a merge group that are for all heads as one; made once for a plan."""

    def made() -> list[Part]:
        groups: dict[int, list[Part]] = {}
        for part in plan.parts:
            if part.head_range is None:
                groups.setdefault(part.merge_group, []).append(part)
        blocks = plan.block_q, plan.block_k
        whole = [
            parts[0] if len(parts) == 1 else joined(parts, plan.heads, blocks)
            for parts in (groups[number] for number in sorted(groups))
        ]
        alone = whole + [part for part in plan.parts if part.head_range is not None]
        # The fact is about all parts of a group; a launch of one of several must not rely on it.
        return [
            replace(one, all_rows=None) if any(_same_rows(one, other) for other in alone) else one
            for one in alone
        ]

    return remember(plan.memo, "launches", made)


def _same_rows(one: Part, other: Part) -> bool:
    """Whether two parts divide the rows of a head between them."""
    if one is other or one.merge_group != other.merge_group:
        return False
    if one.head_range is None or other.head_range is None:
        return True
    return bool({*one.head_range.heads} & {*other.head_range.heads})


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two disjoint sets of keys from that over each: out [..., D], lse [...]; in the type of the lse."""
    total = torch.logaddexp(lse, other_lse)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    mine, theirs = (lse - safe).exp()[..., None], (other_lse - safe).exp()[..., None]
    return out * mine + other_out * theirs, total


def kernel_for(device: torch.device, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """What computes windows of many rows without a mask, where there is something better than masks."""
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    try:
        return select.get("triton", device)
    except RecipeError:
        return None


@lru_cache(64)
@torch.inference_mode(False)
@torch.no_grad()
def window_plan(
    rows: int, keys: int, sinks: int, window: int, heads: int, device: torch.device
) -> AttentionPlan:
    """What `dense_attend` computes for one sequence of `keys` columns whose last `rows` ask, under `window` and `sinks`.

    From sizes alone, so that one plan serves all layers of a pass, and all passes of a full window. No host read.
    """
    start, sinks = keys - rows, min(sinks, keys)
    columns = torch.arange(keys + -keys % BLOCK, dtype=torch.int32, device=device)
    k_row, k_pos = torch.where(columns < keys, columns, -1)[None, None], columns[None, None]
    q_pos = pad_rows(columns[start:keys], BLOCK)[None, None]
    q_row = torch.where(q_pos >= 0, q_pos - start, -1)
    known: dict[str, Any] = dict(ranks=True, q_first=start)
    spans = [span_by_range(q_row, k_row, q_pos, k_pos, 0, window, BLOCK, BLOCK, ordered=keys, **known)]
    if sinks:
        # Those out of the window alone: what both held would count twice.
        width = sinks + -sinks % BLOCK
        k_row, k_pos = torch.where(columns < sinks, columns, -1)[None, None, :width], k_pos[..., :width]
        spans.append(
            span_by_range(q_row, k_row, q_pos, k_pos, window, FAR, BLOCK, BLOCK, ordered=sinks, **known)
        )
    part = Part(q_row, tuple(spans), ordered=rows, all_rows=rows)
    return AttentionPlan((part,), BLOCK, BLOCK, 1, heads, rows, keys)
