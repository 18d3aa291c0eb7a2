"""What a sparse pattern promises of its plans.

Letters as in `mmaccel.core.plan`: B batch, H query heads, P rows of a part, N keys of a span, M query blocks.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from mmaccel.contract.prompts import layout
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.plan import ABSENT, FULL, AttentionPlan, KeySpan, Part, check_sizes
from mmaccel.core.sparse import SparsePattern

LENGTHS = (20, 60, 100, 150, 300, 600)


def check_pattern(pattern: SparsePattern, rounds: int, seed: int) -> None:
    """Raise `RecipeError` for the first plan that breaks the contract, of `rounds` prompts."""
    for n in range(rounds):
        rng, g = Random(seed * 1000 + n), torch.Generator().manual_seed(seed * 1000 + n)
        keys = layout(rng, LENGTHS[n % len(LENGTHS)], batch=1 + n % 2)
        start = int(keys.length * rng.choice((0, 0, 0.2, 0.43, 0.98)))
        heads, groups = rng.choice(((4, 2), (2, 2), (3, 1)))
        query, key = (torch.randn(keys.batch, h, keys.length, 16, generator=g) for h in (heads, groups))
        check_plan(pattern, query[:, :, start:], key, keys.take(slice(start, None)), keys)
        if len(pattern.per_head(heads)) != heads:
            raise RecipeError(
                f"sparse {pattern.name!r}: per_head({heads}) names not {heads} patterns; name one a head."
            )


def check_plan(
    pattern: SparsePattern, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
) -> AttentionPlan | None:
    """The plan of `pattern`; raises `RecipeError` where it breaks the contract. For small sizes."""
    who = f"sparse {pattern.name!r}"
    plan = pattern.plan_layer(query, key, key, q_layout, k_layout)
    if plan is None:
        return None
    check_sizes(plan, pattern.name, query, key, whole=not k_layout.padded)
    _rows(plan, who, q_layout)
    listed = torch.zeros(plan.batch, plan.heads, dtype=torch.long)
    for part in plan.parts:
        for span in part.spans:
            _lists(plan, who, part, span)
            listed[:, part.of(plan.heads)] += span.lists.count.sum(-1)
    _pairs(plan, who, q_layout, k_layout)
    bound = pattern.max_blocks_total(plan.n_query, plan.n_key)
    if int(listed.max()) > bound:
        raise RecipeError(
            f"{who}: max_blocks_total is {bound} blocks for {plan.n_query} rows over {plan.n_key} keys, and "
            f"{int(listed.max())} are listed; give the most there can be."
        )
    return plan


def _rows(plan: AttentionPlan, who: str, queries: TokenLayout) -> None:
    """Rows stand in one part, unless parts are declared to overlap; padding stands in none."""
    served = torch.zeros(plan.batch, plan.heads, plan.n_query + 1, dtype=torch.long)
    for part in plan.parts:
        own = served[:, part.of(plan.heads)]
        q_row = part.q_row.expand(*own.shape[:2], -1).long()
        if int(q_row.max()) >= plan.n_query or int(q_row.min()) < -1:
            raise RecipeError(
                f"{who}: q_row holds {int(q_row.max())} of {plan.n_query} rows; give rows, and -1 for none."
            )
        own.scatter_add_(2, torch.where(q_row >= 0, q_row, plan.n_query), torch.ones_like(q_row))
    served = served[..., :-1]
    if bool((served * ~queries.valid[:, None]).any()):
        raise RecipeError(f"{who}: q_row holds a row that is padding; put -1 in its place (`natural` does).")
    if not plan.overlap and int(served.max()) > 1:
        raise RecipeError(
            f"{who}: a row stands in two parts; give the second another merge_group, or each row one part."
        )


def _lists(plan: AttentionPlan, who: str, part: Part, span: KeySpan) -> None:
    """Lists hold each block once, and a kind promises no more than is true of its block."""
    h = len(range(plan.heads)[part.of(plan.heads)])
    bq, bk, n = plan.block_q, plan.block_k, span.k_row.shape[-1] // plan.block_k
    keys = plan.n_key if span.key is None else span.key.shape[2]
    if int(span.k_row.max()) >= keys or int(span.k_row.min()) < -1:
        raise RecipeError(
            f"{who}: k_row holds {int(span.k_row.max())} of {keys} keys; give rows, and -1 for none."
        )
    b, t = span.lists.row.shape[:2]
    if b not in (1, plan.batch) or t not in (1, h) or bool((span.lists.count < 0).any()):
        raise RecipeError(
            f"{who}: row of lists is {list(span.lists.row.shape)} or counts below 0; give [1 or B, 1 or H, M, 5]."
        )
    try:
        offset, index, _ = span.lists.flat()
        row = torch.repeat_interleave(torch.arange(offset[..., 1:].numel()), offset.diff().reshape(-1))
        kinds = torch.isin(span.lists.kind, torch.tensor([FULL, ABSENT]))
        known = bool(((index >= 0) & (index < n)).all()) and bool(kinds.all())
    except IndexError:
        known = False
    if not known:
        raise RecipeError(
            f"{who}: a list holds a block that is not there, or of no kind; give blocks below {n}."
        )
    if len(torch.unique(row * n + index)) < len(row):
        raise RecipeError(
            f"{who}: a list holds a block twice; list each key block once for a block of queries."
        )
    q_row, q_pos = (x.expand(plan.batch, h, -1)[..., :, None] for x in (part.q_row, span.q_pos))
    k_row, k_pos = (x.expand(plan.batch, h, -1)[..., None, :] for x in (span.k_row, span.k_pos))
    told = span.lists.table().repeat_interleave(bq, 2).repeat_interleave(bk, 3)
    gap = q_pos - k_pos
    outside = ((gap < span.lo) | (gap >= span.hi)) & (q_row >= 0)
    absent = (k_row < 0).expand_as(outside)
    wrong = ((told == FULL) & (absent | outside)) | ((told == ABSENT) & outside & ~absent)
    if bool(wrong.any()):
        raise RecipeError(
            f"{who}: a listed block is told to need no test, and a pair of it is out of range or a key of it absent; "
            "let `span_from_table` or `span_by_range` tell the kinds."
        )


def _pairs(plan: AttentionPlan, who: str, queries: TokenLayout, keys: TokenLayout) -> None:
    """No pair of the future or of padding, and none twice."""
    count = plan.count_mask()
    # Keys of a span's own have no place in the sequence.
    own = (0, count.shape[-1] - plan.n_key)
    ahead = torch.nn.functional.pad(keys.position[:, None] > queries.position[:, :, None], own)
    nothing = torch.nn.functional.pad(~keys.valid[:, None], own) | ~queries.valid[:, :, None]
    for wrong, told in (
        (count * (nothing[:, None]), "one of them padding; put -1 in its place (`natural` does)"),
        (
            count * (ahead[:, None]),
            "which comes after it; let a query's place be that of the last key not after it, and lo 0",
        ),
        (torch.where(count > 1, count, 0), "twice; list each pair in one span of one part"),
    ):
        found = wrong.nonzero()
        if len(found):
            b, h, q, k = found[0].tolist()
            raise RecipeError(
                f"{who}: query row {q} of head {h} sees key row {k}, {told} (sequence {b} of a made-up prompt)."
            )
