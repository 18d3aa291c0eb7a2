"""Contract tests of sparse patterns (their plans) and token pruners (the columns they keep), on random prompts.

Prompts have mixed modalities, frames of unequal size, and segments of one token. Letters as in `mmaccel.core.prefill.plan`:
B batch, H query heads, P rows of a part, N keys of a span, M query blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random

import torch
from torch import Tensor

from mmaccel.backends.ops.block_attend import ABSENT, FULL, KeySpan, Part
from mmaccel.core.errors import RecipeError, warn
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.plan import AttentionPlan, check_plan_sizes
from mmaccel.core.prefill.prune import (
    Signals,
    Stage,
    TokenPruner,
    check_kept_columns,
    check_pruning_stages,
    kept_layout,
    observation_columns,
)
from mmaccel.core.prefill.sparse import SparsePattern

LENGTHS = (20, 60, 100, 150, 300, 600)
DEPTH = 32
FIELDS = ("modality", "segment", "frame", "row", "column")


def raise_unless(kept: object, sentence: str) -> None:
    """Raise `RecipeError` with the message `sentence` unless `kept` is true."""
    if not kept:
        raise RecipeError(sentence)


def check_counters_are_floats(who: str, counters: Mapping[str, object]) -> None:
    """Raise `RecipeError` unless all figures for the report are floats."""
    floats = all(isinstance(value, float) for value in counters.values())
    raise_unless(floats, f"{who}: counters gives {counters}; give a float for each name.")


def random_layout(rng: Random, length: int, batch: int = 1) -> TokenLayout:
    """Return a random layout of about `length` tokens in the longest of `batch` sequences; shorter ones are left-padded."""
    sequences = [_sequence(rng, length if b == 0 else rng.randint(length // 2, length)) for b in range(batch)]
    width = max(map(len, sequences))
    blank = (TEXT, -1, -1, -1, -1)
    fields = torch.tensor([[blank] * (width - len(one)) + one for one in sequences])
    valid = torch.tensor([[False] * (width - len(one)) + [True] * len(one) for one in sequences])
    tensors = dict(zip(FIELDS, fields.unbind(-1), strict=True))
    return TokenLayout.build(tensors.pop("modality"), **tensors, valid=valid)


def _sequence(rng: Random, length: int) -> list[tuple[int, ...]]:
    tokens: list[tuple[int, ...]] = []
    frame = segment = 0
    while len(tokens) < length:
        kind = rng.choice((TEXT, IMAGE, VIDEO, VIDEO))
        if kind == TEXT:
            tokens += [(TEXT, segment, -1, -1, -1)] * rng.choice((1, 1, 2, 5, 12))
        for _ in range(0 if kind == TEXT else 1 if kind == IMAGE else rng.randint(1, 1 + length // 20)):
            rows, columns = rng.randint(1, 3), rng.choice((1, 2, 2, 2, 4))
            cells = [(i // columns, i % columns) for i in range(rows * columns)]
            tokens += [(kind, segment, frame, *cell) for cell in cells]
            frame += 1
        segment += 1
    return [*tokens, *[(TEXT, segment, -1, -1, -1)] * rng.choice((0, 1, 6))]


def random_pruner_inputs(
    layout: TokenLayout, stage: Stage, seed: int = 0, asked: int | None = None
) -> Signals:
    """Return random `Signals` with which a pruner's `stage` is tested on a prompt of this layout.

    The attention has `asked` rows, one per question token (None: as many as `observation_columns`); each sums to one.
    """
    g = torch.Generator().manual_seed(seed)
    S, asked = layout.length, observation_columns(layout).numel() if asked is None else asked
    tensors: dict[str, Tensor] = {
        "hidden": torch.randn(max(len(stage.hidden), 1), S, 8, generator=g),
        "attention": torch.rand(max(len(stage.attention), 1), asked, S, generator=g).softmax(-1),
        "vision_attention": torch.rand(S, generator=g),
        "vision_key": torch.randn(S, 5, generator=g),
    }
    return Signals(tensors)


def check_pattern(pattern: SparsePattern, rounds: int, seed: int) -> None:
    """Test the plans of a sparse pattern on `rounds` random prompts; raises `RecipeError` for the first violation. Warns if
    a row sees no key, and if no plan leaves anything out."""
    dense = pattern.dense or set(pattern.head_pattern_names(1)) == {"dense"}
    planned, whole, unseen = dense, not dense, ""
    for n in range(rounds):
        rng, g = Random(seed * 1000 + n), torch.Generator().manual_seed(seed * 1000 + n)
        keys = random_layout(rng, LENGTHS[n % len(LENGTHS)], batch=1 + n % 2)
        start = int(keys.length * rng.choice((0, 0, 0.2, 0.43, 0.98)))
        heads, groups = rng.choice(((4, 2), (2, 2), (3, 1)))
        query, key = (torch.randn(keys.batch, h, keys.length, 16, generator=g) for h in (heads, groups))
        plan = check_plan(pattern, query[:, :, start:], key, keys.select_tokens(slice(start, None)), keys)
        planned = planned or plan is not None
        if plan is not None:
            seen = _seen(plan, keys.select_tokens(slice(start, None)), keys)
            whole, unseen = whole and seen[0], unseen or seen[1]
        raise_unless(
            len(pattern.head_pattern_names(heads)) == heads,
            f"sparse {pattern.name!r}: per_head({heads}) names not {heads} patterns; name one a head.",
        )
        if not pattern.adaptive and plan is not None:
            query, key = (torch.randn(x.shape, generator=g) for x in (query, key))
            anew = keys.select_tokens(slice(None))  # without what was derived of the layout before
            late = anew.select_tokens(slice(start, None))
            other = pattern.plan_layer(query[:, :, start:], key, key, late, anew)
            raise_unless(
                other is not None and torch.equal(plan.to_mask(), other.to_mask()),
                f"sparse {pattern.name!r}: other queries and keys give another plan; set the class field adaptive = True, "
                "or a plan may serve all layers.",
            )
    raise_unless(
        planned,
        f"sparse {pattern.name!r}: plan gives None, which means dense, for each of {rounds} prompts of 20 to 600 tokens; "
        "return an AttentionPlan, or give fields that plan for prompts so short.",
    )
    if unseen:
        warn(
            f"sparse {pattern.name!r}: {unseen} sees no key, so its attention is zero; list a block for each row, such as "
            "its own, unless you mean that."
        )
    if whole:
        warn(
            f"sparse {pattern.name!r}: it leaves nothing out of these prompts, of 20 to 600 tokens, which tests little; "
            "give fields that leave something out."
        )


def _seen(plan: AttentionPlan, queries: TokenLayout, keys: TokenLayout) -> tuple[bool, str]:
    """Return whether a plan computes all pairs of causal attention, and a sentence on a row that sees no key ("": none)."""
    heads = [head for head in range(plan.heads) if plan.dense is None or head not in plan.dense.heads]
    seen = plan.to_mask()[:, heads]
    causal = (keys.position[:, None] <= queries.position[:, :, None]) & keys.valid[:, None]
    left = causal[:, None] & queries.valid[:, None, :, None] & ~seen[..., : plan.n_key]
    for b, h, row in (queries.valid[:, None] & ~seen.any(-1)).nonzero()[:1].tolist():
        return False, f"query row {row} of head {heads[h]} (sequence {b} of a made-up prompt)"
    return not bool(left.any()), ""


def check_plan(
    pattern: SparsePattern, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
) -> AttentionPlan | None:
    """Check the plan of `pattern` for small inputs, and return it; raises `RecipeError` if it violates the contract."""
    who = f"sparse {pattern.name!r}"
    plan = pattern.plan_layer(query, key, key, q_layout, k_layout)
    if plan is None:
        return None
    check_plan_sizes(plan, pattern.name, query, key, whole=not k_layout.has_padding)
    _rows(plan, who, q_layout)
    listed = torch.zeros(plan.batch, plan.heads, dtype=torch.long)
    for part in plan.parts:
        for span in part.spans:
            _lists(plan, who, part, span)
            listed[:, part.for_heads(plan.heads)] += span.lists.list_lengths.sum(-1)
    _pairs(plan, who, q_layout, k_layout)
    bound, most = pattern.max_blocks_total(plan.n_query, plan.n_key), int(listed.max())
    raise_unless(
        most <= bound,
        f"{who}: max_blocks_total is {bound} blocks for {plan.n_query} rows over {plan.n_key} keys, and {most} are listed; "
        "give the most there can be.",
    )
    for layouts in (None, (q_layout, k_layout)):
        expected = pattern.expected_blocks(plan.n_query, plan.n_key, layouts)
        raise_unless(
            isinstance(expected, int | float) and 0 <= expected < math.inf,
            f"{who}: expected_blocks is {expected!r} for {plan.n_query} rows over {plan.n_key} keys; give 0 or more.",
        )
    return plan


def _rows(plan: AttentionPlan, who: str, queries: TokenLayout) -> None:
    """Check that each row is in one part, unless parts are declared to overlap, and that padding is in none."""
    served = torch.zeros(plan.batch, plan.heads, plan.n_query + 1, dtype=torch.long)
    for part in plan.parts:
        own = served[:, part.for_heads(plan.heads)]
        q_row = part.q_row.expand(*own.shape[:2], -1).long()
        raise_unless(
            int(q_row.max()) < plan.n_query and int(q_row.min()) >= -1,
            f"{who}: q_row holds {int(q_row.max())} of {plan.n_query} rows; give rows, and -1 for none.",
        )
        own.scatter_add_(2, torch.where(q_row >= 0, q_row, plan.n_query), torch.ones_like(q_row))
    served = served[..., :-1]
    raise_unless(
        not bool((served * ~queries.valid[:, None]).any()),
        f"{who}: q_row holds a row that is padding; put -1 in its place (`sequence_order` does).",
    )
    raise_unless(
        plan.may_share_rows or int(served.max()) <= 1,
        f"{who}: a row stands in two parts; give the second another merge_group, or each row one part.",
    )


def _lists(plan: AttentionPlan, who: str, part: Part, span: KeySpan) -> None:
    """Check that lists hold each block once, and that the kind of each block is true."""
    h = len(range(plan.heads)[part.for_heads(plan.heads)])
    bq, bk, n = plan.block_q, plan.block_k, span.k_row.shape[-1] // plan.block_k
    keys = plan.n_key if span.key is None else span.key.shape[2]
    raise_unless(
        int(span.k_row.max()) < keys and int(span.k_row.min()) >= -1,
        f"{who}: k_row holds {int(span.k_row.max())} of {keys} keys; give rows, and -1 for none.",
    )
    b, t = span.lists.row.shape[:2]
    raise_unless(
        b in (1, plan.batch) and t in (1, h) and not bool((span.lists.list_lengths < 0).any()),
        f"{who}: row of lists is {list(span.lists.row.shape)} or counts below 0; give [1 or B, 1 or H, M, 5].",
    )
    try:
        offset, index, _ = span.lists.flatten()
        row = torch.repeat_interleave(torch.arange(offset[..., 1:].numel()), offset.diff().reshape(-1))
        kinds = torch.isin(span.lists.kind, torch.tensor([FULL, ABSENT]))
        known = bool(((index >= 0) & (index < n)).all()) and bool(kinds.all())
    except IndexError:
        known = False
    raise_unless(
        known, f"{who}: a list holds a block that is not there, or of no kind; give blocks below {n}."
    )
    raise_unless(
        len(torch.unique(row * n + index)) == len(row),
        f"{who}: a list holds a block twice; list each key block once for a block of queries.",
    )
    q_row, q_pos = (x.expand(plan.batch, h, -1)[..., :, None] for x in (part.q_row, span.q_pos))
    k_row, k_pos = (x.expand(plan.batch, h, -1)[..., None, :] for x in (span.k_row, span.k_pos))
    kind = span.lists.to_dense_table().repeat_interleave(bq, 2).repeat_interleave(bk, 3)
    gap = q_pos - k_pos
    outside = ((gap < span.lo) | (gap >= span.hi)) & (q_row >= 0)
    absent = (k_row < 0).expand_as(outside)
    wrong = ((kind == FULL) & (absent | outside)) | ((kind == ABSENT) & outside & ~absent)
    raise_unless(
        not bool(wrong.any()),
        f"{who}: a listed block is told to need no test, and a pair of it is out of range or a key of it absent; "
        "let `span_from_table` or `span_by_range` tell the kinds.",
    )


def _pairs(plan: AttentionPlan, who: str, queries: TokenLayout, keys: TokenLayout) -> None:
    """Check that no pair is of a later key or of padding, and that none is computed twice."""
    count = plan.spans_per_pair()
    # Keys of a span's own have no place in the sequence.
    own = (0, count.shape[-1] - plan.n_key)
    ahead = torch.nn.functional.pad(keys.position[:, None] > queries.position[:, :, None], own)
    nothing = torch.nn.functional.pad(~keys.valid[:, None], own) | ~queries.valid[:, :, None]
    for wrong, fault in (
        (count * (nothing[:, None]), "one of them padding; put -1 in its place (`sequence_order` does)"),
        (
            count * (ahead[:, None]),
            "which comes after it; let a query's place be that of the last key not after it, and lo 0",
        ),
        (torch.where(count > 1, count, 0), "twice; list each pair in one span of one part"),
    ):
        for b, h, q, k in wrong.nonzero()[:1].tolist():
            place = f"query row {q} of head {h} sees key row {k}"
            raise_unless(False, f"{who}: {place}, {fault} (sequence {b} of a made-up prompt).")


def check_pruner(pruner: TokenPruner, rounds: int, seed: int) -> None:
    """Test a token pruner on `rounds` random prompts; raises `RecipeError` for the first violation."""
    for n in range(rounds):
        check_pruner_stages(
            pruner, random_layout(Random(seed * 1000 + n), (20, 60, 150)[n % 3]), seed * 1000 + n
        )


def check_pruner_stages(pruner: TokenPruner, layout: TokenLayout, seed: int) -> None:
    """Test the stages of a pruner on one prompt; raises `RecipeError` for a violation."""
    who, total, left = f"prune {pruner.name!r}", pruner.candidates(layout).numel(), layout
    for stage in check_pruning_stages(pruner, DEPTH):
        if not total and pruner.stage != "draft":
            return
        signals = random_pruner_inputs(left, stage, seed)
        for name in signals.keys() - pruner.needs:
            del signals[name]
        kept = pruner.prune(signals, left, stage, total)
        columns = check_kept_columns(pruner, kept.columns, left)
        raise_unless(
            torch.equal(columns, pruner.keep(signals, left, stage, total)),
            f"{who}: keep and cut keep different columns, or differ from call to call; let them agree.",
        )
        if kept.states is not None:
            raise_unless(
                kept.states.shape == (len(columns), signals["hidden"].shape[-1]),
                f"{who}: cut gives states {list(kept.states.shape)}; give a row for each of {len(columns)} columns.",
            )
        left = kept_layout(left, columns)
    at = pruner.candidates(left)
    if pruner.scoring_layer is not None and at.numel():
        shown = pruner.recalled_columns(torch.rand(at.numel()).softmax(0), at, None)
        raise_unless(
            shown is None or (bool(torch.isin(shown, at).all()) and bool((shown[1:] > shown[:-1]).all())),
            f"{who}: recall gives columns that are none of `columns`, or do not ascend; choose out of these.",
        )
