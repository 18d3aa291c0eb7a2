"""From a plan to the flat operator of a backend, and back to rows of the query."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmaccel.backends import ops
from mmaccel.core.mix import runs
from mmaccel.core.plan import AttentionPlan, DenseHeads, Part

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
) -> tuple[Tensor, Tensor]:
    """out [B, H, P, D] and lse [B, H, P] of one part, in the part's order."""
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
        [s.lists.offset for s in spans],
        [s.lists.index for s in spans],
        [s.lists.kind for s in spans],
        plan.block_q,
        plan.block_k,
        scale,
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
    out: Tensor | None = None
    lse: Tensor | None = None
    for part in plan.parts:
        part_out, part_lse = attend_part(part, plan, query, key, value, scale, backend)
        out_new, lse_new = _scatter(part, part_out, part_lse, n, None if plan.overlap else (out, lse))
        if plan.overlap and out is not None and lse is not None:
            out, lse = merge(out, lse, out_new, lse_new)
        else:
            out, lse = out_new, lse_new
    if out is None or lse is None:
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        return value.new_zeros(B, H, n, value.shape[-1]), query.new_full((B, H, n), -torch.inf, dtype=kind)
    out, lse = out[:, :, :n].to(query.dtype), lse[:, :, :n]
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
        q, heads = run.of(query)[:, :, :n], list(run.heads)
        out[:, heads, :n] = ops.dense_attend(q, k, v, scale, start=start, valid=valid)
        lse[:, heads, :n] = torch.nan


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two disjoint sets of keys from that over each: out [..., D], lse [...]; in the type of the lse."""
    total = torch.logaddexp(lse, other_lse)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    mine, theirs = (lse - safe).exp()[..., None], (other_lse - safe).exp()[..., None]
    return out * mine + other_out * theirs, total


def _scatter(
    part: Part, part_out: Tensor, part_lse: Tensor, n: int, into: tuple[Tensor | None, Tensor | None] | None
) -> tuple[Tensor, Tensor]:
    """Rows of a part put at their places in [B, H, n + 1, ...]; the last row takes what is padding."""
    B, H, P, D = part_out.shape
    row = part.q_row.long()
    row = torch.where(row >= 0, row, n).expand(B, H, P)
    out, lse = into or (None, None)
    if out is None or lse is None:
        out, lse = part_out.new_zeros(B, H, n + 1, D), part_lse.new_full((B, H, n + 1), -torch.inf)
    out.scatter_(2, row[..., None].expand(B, H, P, D), part_out)
    lse.scatter_(2, row, part_lse)
    return out, lse
