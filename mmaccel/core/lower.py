"""From a plan to the flat operator of a backend, and back to rows of the query."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmaccel.backends import ops
from mmaccel.core.lists import BlockLists
from mmaccel.core.mix import joined, runs
from mmaccel.core.plan import AttentionPlan, DenseHeads, Part, numbered

BlockAttend = Callable[..., tuple[Tensor, Tensor]]
"""A backend's operator; its arguments are those of `mmaccel.backends.ops.block_attend`."""


def attend_part(
    part: Part,
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    backend: BlockAttend,
    rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """out [B, H, P, D] and lse [B, H, P] of one part, in the part's order, or in that of a query of `rows` rows."""
    spans = part.spans
    return backend(
        query,
        key,
        value,
        part.q_row,
        [s.k_row for s in spans],
        [s.q_place for s in spans],
        [s.k_place for s in spans],
        [s.lo for s in spans],
        [s.hi for s in spans],
        [s.lists.offset if isinstance(s.lists, BlockLists) else s.lists.row for s in spans],
        [s.lists.index if isinstance(s.lists, BlockLists) else s.lists.entries for s in spans],
        [s.lists.kind for s in spans],
        plan.block_q,
        plan.block_k,
        scale,
        rows,
    )


def attend_plan(
    plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, scale: float, backend: BlockAttend
) -> tuple[Tensor, Tensor]:
    """Attention of one layer: out [B, H, n_query, D] in the type of the query, and its lse [B, H, n_query].

    Rows that no part serves, or that see no key, are zero with lse = -inf. Parts that share rows (`plan.overlap`) are
    merged exactly by their log-sum-exps. Heads that the plan leaves dense go through the dense operator, which knows no
    log-sum-exp: theirs is NaN.
    """
    B, H, n, _ = query.shape
    if not plan.parts:
        kind = ops.lse_dtype(query.dtype)
        return value.new_zeros(B, H, n, value.shape[-1]), query.new_full((B, H, n), -torch.inf, dtype=kind)
    parts = plan.parts if plan.overlap else (joined(plan.parts, plan.block_q),)
    out, lse = attend_part(parts[0], plan, query, key, value, scale, backend, n)
    for part in parts[1:]:
        other, other_lse = attend_part(part, plan, query, key, value, scale, backend, n)
        # Head by head: at a million tokens the sums of all of them, in full precision, would fill the device.
        for h in range(H):
            both, total = merge(out[:, h], lse[:, h], other[:, h], other_lse[:, h])
            out[:, h], lse[:, h] = both.to(out.dtype), total
    if plan.dense is not None:
        _attend_dense(plan.dense, query, key, value, scale, out, lse)
    return out, lse


def _attend_dense(
    dense: DenseHeads, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Write the rows of the dense heads into `out` and `lse`; keys are views of whole groups."""
    n, start = dense.rows, key.shape[2] - query.shape[2]
    seen = slice(0, start + n)
    valid = dense.keys.valid[:, seen] if dense.keys.padded else None
    for run in runs(dense.heads, query.shape[1] // key.shape[1]):
        k, v = key[:, run.groups, seen], value[:, run.groups, seen]
        q, heads = run.of(query)[:, :, :n], numbered(run.heads, query.device)
        out[:, heads, :n] = ops.dense_attend(q, k, v, scale, start=start, valid=valid)
        lse[:, heads, :n] = torch.nan


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two disjoint sets of keys from that over each: out [..., D], lse [...]; in the type of the lse."""
    total = torch.logaddexp(lse, other_lse)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    mine, theirs = (lse - safe).exp()[..., None], (other_lse - safe).exp()[..., None]
    return out * mine + other_out * theirs, total
