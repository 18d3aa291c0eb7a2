"""From a plan to the flat operator of a backend, and back to rows of the query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.backends import ops
from mmaccel.core.lists import BlockLists
from mmaccel.core.mix import Member, joined, runs
from mmaccel.core.plan import AttentionPlan, DenseHeads, Part, numbered

MERGED = 1 << 26
"""Elements merged at a time: in full precision those of all heads would fill the device at a million tokens."""

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
    """out [B, h, P, D] and lse [B, h, P] of the heads that one part covers, in the part's order, or in that of a query of
    `rows` rows."""
    spans, heads = part.spans, part.of(query.shape[1])
    group = query.shape[1] // key.shape[1]
    groups = slice(heads.start // group, (heads.stop - 1) // group + 1)
    return backend(
        query[:, heads],
        key[:, groups],
        value[:, groups],
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

    Rows that no part serves, or that see no key, are zero with lse = -inf. Parts that share rows are merged exactly by
    their log-sum-exps. Heads that the plan leaves dense go through the dense operator, which knows no log-sum-exp: theirs
    is NaN.
    """
    n, all_heads = query.shape[2], tuple(range(query.shape[1]))
    out, lse = None, None
    written: set[int] = set()
    for part in launches(plan):
        other, other_lse = attend_part(part, plan, query, key, value, scale, backend, n)
        heads = all_heads if part.cover is None else part.cover.heads
        if out is None and len(other[0]) == len(all_heads):
            out, lse = other, other_lse
        else:
            if out is None:
                out, lse = ops.room_for(query, value, n, n)
            assert lse is not None
            for begin, end in _adjacent([head for head in heads if head not in written]):
                here = slice(begin - part.of(0).start, end - part.of(0).start)
                out[:, begin:end], lse[:, begin:end] = other[:, here], other_lse[:, here]
            again = [head for head in heads if head in written]
            for begin, end in _adjacent(again, max(1, MERGED // other[:, 0].numel())):
                here = slice(begin - part.of(0).start, end - part.of(0).start)
                both, total = merge(out[:, begin:end], lse[:, begin:end], other[:, here], other_lse[:, here])
                out[:, begin:end], lse[:, begin:end] = both.to(out.dtype), total
        written.update(heads)
    if out is None or lse is None:
        out, lse = ops.room_for(query, value, n, n)
    if plan.dense is not None:
        _attend_dense(plan.dense, query, key, value, scale, out, lse)
    return out, lse


_LAUNCHES: WeakKeyDictionary[AttentionPlan, list[Part]] = WeakKeyDictionary()


def launches(plan: AttentionPlan) -> list[Part]:
    """The parts of a plan, those that are for all heads and share no row as one; made once for a plan that serves several
    layers."""
    known = _LAUNCHES.get(plan)
    if known is None:
        known = _joined(plan)
        # What is made while a graph is captured holds nothing until it is replayed.
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            _LAUNCHES[plan] = known
    return known


def _joined(plan: AttentionPlan) -> list[Part]:
    held: dict[int, list[Part]] = {}
    for part in plan.parts:
        if part.cover is None:
            held.setdefault(part.turn, []).append(part)
    every, blocks = tuple(range(plan.heads)), (plan.block_q, plan.block_k)
    whole = [
        held[turn][0] if len(held[turn]) == 1 else joined([Member(every, held[turn])], None, blocks, turn)
        for turn in sorted(held)
    ]
    return whole + [part for part in plan.parts if part.cover is not None]


def _adjacent(heads: Sequence[int], most: int = 1 << 30) -> Iterator[tuple[int, int]]:
    """Runs begin .. end of adjacent heads, of `most` at most."""
    begin = 0
    for at in range(1, len(heads) + 1):
        if at == len(heads) or heads[at] != heads[at - 1] + 1 or at - begin == most:
            yield heads[begin], heads[at - 1] + 1
            begin = at


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
