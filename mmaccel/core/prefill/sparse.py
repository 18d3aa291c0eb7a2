"""The interface of sparse prefill patterns; runs their plans by a backend's operator; also attention of token trees."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.backends import measure, select
from mmaccel.backends.ops.block_attend import Part, empty_output, memoize, prepare_part
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.adapter import ModelView, TokenTree
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill.merge_heads import Share, adjacent_head_ranges, merge_plan_parts
from mmaccel.core.prefill.plan import (
    FAR,
    AttentionPlan,
    HeadRun,
    head_indices,
    head_runs,
    pad_rows,
    span_by_range,
)
from mmaccel.core.registry import Policy

BLOCK = 256
"""The largest block: kernels hold a block's places at once."""
MOST = 2**31 - 1
"""The largest number of a field: kernels count places in 32 bits."""
MERGED = 1 << 26
"""Elements merged at a time: in full precision those of all heads would fill the device at a million tokens."""
TILE = 128
"""Rows and keys of a block of a window's plan: a tile of the kernel for Hopper, and blocks too many at either end of a
window are few."""

FRAME = 196
"""Tokens of a frame of the prompts on which a pattern's planning is timed."""

BlockAttend = Callable[..., tuple[Tensor, Tensor]]
"""A backend's operator; its arguments are those of `ops.block_attend.register_block_attend`."""


@dataclass(frozen=True, kw_only=True)
class SparsePattern(Policy, ABC, kind="sparse"):
    """Which key blocks each query block attends to in prefill.

    Subclasses are frozen keyword dataclasses: parameters are fields, ranges are checked at creation, no device tensors are
    kept. `block` is the block size in tokens, for queries and keys alike.

    adaptive  the plan depends on queries and keys, not only on the layout
    rounded   the plan may compute pairs outside the paper's mask, but only in blocks that this mask touches
    dense     it plans nothing: prefill stays dense
    reads_values  the plan depends on values too, as pooled keys need pooled values: `plan` is given `value`
    compiles  inductor may compile `plan` as one graph; a plan that reads the device cannot be compiled
    note    a sentence for the report, beginning with "sparse: ", on what `for_model` could not do as asked; "": nothing
    """

    adaptive: ClassVar[bool] = False
    rounded: ClassVar[bool] = False
    dense: ClassVar[bool] = False
    reads_values: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    note: ClassVar[str] = ""

    block: int = 64

    def __init_subclass__(cls) -> None:
        """One that says anew what its plan is has not said how some heads of a layer are planned: its parent's way of that
        would pass it by."""
        super().__init_subclass__()
        heads, plan = (
            next(i for i, one in enumerate(cls.__mro__) if name in vars(one))
            for name in ("plan_heads", "plan")
        )
        if plan < heads:  # by itself or by a class beside its parent
            cls.plan_heads = SparsePattern.plan_heads  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 16 <= self.block <= BLOCK or self.block & (self.block - 1):
            raise RecipeError(f"{self.name}: block is {self.block}; give a power of two from 16 to {BLOCK}.")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value > MOST:
                raise RecipeError(f"{self.name}: {each.name} is {value}; give at most {MOST}.")

    @abstractmethod
    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        """Return the plan of one layer; None means dense attention.

        query [B, H, n_query, D] and key [B, G, n_key, D] after RoPE, H a multiple of G; layouts of the same lengths, whose
        `position`s count from the same token. Queries may be the last rows of a longer sequence. A row for which no key is
        listed gets zeros; `check_policy` warns of it.
        """

    def plan_heads(
        self,
        runs: Sequence[HeadRun],
        query: Tensor,
        key: Tensor,
        q_layout: TokenLayout,
        k_layout: TokenLayout,
    ) -> list[Share]:
        """Plan only the heads of `runs` (see `plan`) of a layer's query [B, H, n_query, D] and key [B, G, n_key, D].

        Returns pairs of heads and their plan. Override it in a pattern that plans several runs at once, or that reads few
        query rows: the default may copy all rows.
        """
        return [
            (run.heads, self.plan(run.select_queries(query), key[:, run.groups], q_layout, k_layout))
            for run in runs
        ]

    def plan_layer(
        self, query: Tensor, key: Tensor, value: Tensor | None, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        """Return `plan` of one layer, with the values [B, G, n_key, D] for a pattern that reads them."""
        more = {} if value is None or not self.reads_values else {"value": value}
        return self.plan(query, key, q_layout, k_layout, **more)

    def for_model(self, model: ModelView) -> SparsePattern:
        """Return this pattern adapted to `model`; called once at attach. Raises `RecipeError` if it cannot be."""
        return self

    @property
    def searched_prompt_length(self) -> int | None:
        """The prompt length, in tokens, for which this pattern's budgets were chosen; None: any."""
        return None

    @property
    def searched_table(self) -> str:
        """Return the words by which messages name the searched settings: the pattern's name, or its table of heads."""
        return self.name

    def for_layer(self, layer: int) -> SparsePattern:
        """Return the pattern of one layer: itself, unless it differs between layers."""
        return self

    @abstractmethod
    def max_blocks_total(self, n_query: int, n_key: int) -> int:
        """Return an upper bound of the number of key blocks listed for one head of `n_query` rows and `n_key` keys."""

    def expected_blocks(
        self, n_query: int, n_key: int, layouts: tuple[TokenLayout, TokenLayout] | None = None
    ) -> float:
        """Estimate how many key blocks will be listed for one head, `n_query` rows and `n_key` keys, before any query is
        known. What depends on queries counts with its least value. `layouts`, of queries and keys, are read once to refine
        the estimate. Backend "auto" decides by it whether a prompt is planned or dense."""
        return self.max_blocks_total(n_query, n_key)

    def head_pattern_names(self, heads: int) -> tuple[str, ...]:
        """Return the name of each head's pattern in a layer, for the report. A boundary, which runs another pattern
        between tokens of given modalities, has the name "boundary(pattern)", such as "boundary_2d(grid)"."""
        return (self.name,) * heads


def attend_plan(
    plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, scale: float, backend: BlockAttend
) -> tuple[Tensor, Tensor]:
    """Run a plan: return attention [B, H, n_query, D] of one layer in the query's type, and its lse [B, H, n_query].

    Rows that are in no part, or that see no key, are zero with lse = -inf. Parts that share rows are merged exactly by their
    log-sum-exps. Heads that the plan leaves dense use the dense operator, which gives no log-sum-exp: theirs is NaN.
    """
    n, all_heads = query.shape[2], tuple(range(query.shape[1]))
    group, blocks = len(all_heads) // key.shape[1], (plan.block_q, plan.block_k)
    out, lse = None, None
    written: set[int] = set()
    for part in parts_to_launch(plan):
        own = part.for_heads(len(all_heads))
        groups = slice(own.start // group, (own.stop - 1) // group + 1)
        q, k, v = query[:, own], key[:, groups], value[:, groups]
        op = select.with_extended_support(backend, query.device) if part.needs_extensions else backend
        prepared = prepare_part(op, part, q, k, *blocks, n)
        other, other_lse = op(q, k, v, *part.pack(), *blocks, scale, n, *prepared)
        heads = all_heads if part.head_range is None else part.head_range.heads
        if out is None and len(other[0]) == len(all_heads):
            out, lse = other, other_lse
        else:
            if out is None:
                out, lse = empty_output(query, value, n, n)
            assert lse is not None
            for begin, end in adjacent_head_ranges([head for head in heads if head not in written]):
                here = slice(begin - own.start, end - own.start)
                out[:, begin:end], lse[:, begin:end] = other[:, here], other_lse[:, here]
            again = [head for head in heads if head in written]
            for begin, end in adjacent_head_ranges(again, max(1, MERGED // other[:, 0].numel())):
                here = slice(begin - own.start, end - own.start)
                both, total = merge_by_lse(
                    out[:, begin:end], lse[:, begin:end], other[:, here], other_lse[:, here]
                )
                out[:, begin:end], lse[:, begin:end] = both.to(out.dtype), total
        written.update(heads)
    if out is None or lse is None:
        out, lse = empty_output(query, value, n, n)
    if (dense := plan.dense) is not None and dense.rows:
        rows, start = dense.rows, key.shape[2] - n
        seen = slice(0, start + rows)
        valid = dense.keys.valid[:, seen] if dense.keys.has_padding else None
        for run in head_runs(dense.heads, query.shape[1] // key.shape[1]):
            k, v = key[:, run.groups, seen], value[:, run.groups, seen]
            q, at = run.select_queries(query)[:, :, :rows], head_indices(run.heads, query.device)
            out[:, at, :rows] = dense_attend(q, k, v, scale, start, valid, dense.sinks, dense.window)
            # An index and a number would send the number to the device, which a capture cannot.
            lse[:, :, :rows].index_fill_(1, at, torch.nan)
    return out, lse


def parts_to_launch(plan: AttentionPlan) -> list[Part]:
    """Return the parts of a plan to launch; those parts of a merge group that are for all heads are joined into one.
    Cached."""

    def made() -> list[Part]:
        groups: dict[int, list[Part]] = {}
        for part in plan.parts:
            if part.head_range is None:
                groups.setdefault(part.merge_group, []).append(part)
        blocks = plan.block_q, plan.block_k
        whole = [
            parts[0] if len(parts) == 1 else merge_plan_parts(parts, plan.heads, blocks)
            for parts in (groups[number] for number in sorted(groups))
        ]
        alone = whole + [part for part in plan.parts if part.head_range is not None]
        # The fact is about all parts of a group; a launch of one of several must not rely on it.
        return [
            replace(one, all_rows=None) if any(_same_rows(one, other) for other in alone) else one
            for one in alone
        ]

    return memoize(plan.memo, "launches", made)


def _same_rows(one: Part, other: Part) -> bool:
    """Whether two parts divide the rows of a head between them."""
    if one is other or one.merge_group != other.merge_group:
        return False
    if one.head_range is None or other.head_range is None:
        return True
    return bool({*one.head_range.heads} & {*other.head_range.heads})


def merge_by_lse(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint key sets exactly, by log-sum-exp: out [..., D] and lse [...] of each. The result has
    the dtype of the lse."""
    total = torch.logaddexp(lse, other_lse)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    mine, theirs = (lse - safe).exp()[..., None], (other_lse - safe).exp()[..., None]
    return out * mine + other_out * theirs, total


def sliding_window_kernel(
    device: torch.device, dtype: torch.dtype
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the attention operator (schema of `ops.block_attend`) that computes many rows of a sliding window without a
    mask in memory; None if `device` or `dtype` has none, and masked attention serves."""
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    try:
        return select.get_op("triton", device)
    except RecipeError:
        return None


def choose_backend(recipe: Any, view: ModelView) -> select.BackendChoice:
    """Choose the attention backend for a recipe on a model; "auto" may measure costs, including the planning time."""
    device, sizes = view.device, view.geometry
    if recipe.sparse.dense and recipe.backend == "auto":
        return select.BackendChoice(select.default_backend(device), "the recipe is dense and lists no block")
    dtype = next(view.model.parameters()).dtype
    pattern = recipe.sparse.for_layer(0)
    label = f"{recipe.sparse.name} {hashlib.sha256(repr(pattern).encode()).hexdigest()[:12]}"
    shape = measure.AttentionShape(sizes.heads, sizes.kv_heads, sizes.head_dim, dtype)
    plan = planning_benchmark(pattern, shape, device)
    return select.resolve_backend(recipe.backend, device, shape, plan=plan, label=label, block=pattern.block)


def planning_benchmark(
    pattern: Any, shape: measure.AttentionShape, device: torch.device
) -> Callable[[int], Callable[[], object]]:
    """Return a benchmark of planning for `measure_costs`: a function of a token count n that returns a callable, which
    plans one layer of n tokens."""

    def plan(n: int) -> Callable[[], object]:
        place = torch.arange(n, device=device)[None]
        layout = TokenLayout.build(torch.full_like(place, VIDEO), frame=place // FRAME)
        query = torch.randn(1, shape.heads, n, shape.size, device=device).to(shape.dtype)
        return lambda: pattern.plan(query, query[:, : shape.groups], layout, layout)

    return plan


def _cached_for_graphs(make: Callable[..., AttentionPlan]) -> Callable[..., AttentionPlan]:
    """`make`, which keeps the last plans, and for good those of which a CUDA graph is captured, as that reads them. None is
    made under a capture, which raises `RuntimeError`: it would hold no values, for whoever reads it before a replay."""
    captured = dict[Any, AttentionPlan]()

    def capturing() -> bool:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]

    @lru_cache(64)
    def last(*sizes: Any) -> AttentionPlan:
        if capturing():
            raise RuntimeError("a plan is made before what reads it is captured")
        return make(*sizes)

    @wraps(make)
    def call(*sizes: Any) -> AttentionPlan:
        plan = captured.get(sizes) or last(*sizes)
        if capturing():
            captured[sizes] = plan
        return plan

    return call


@_cached_for_graphs
@torch.inference_mode(False)
@torch.no_grad()
def window_plan(
    rows: int, keys: int, sinks: int, window: int, heads: int, device: torch.device
) -> AttentionPlan:
    """Return the plan of what `dense_attend` computes for `keys` columns, the last `rows` of which are queries, with
    `window` and `sinks`, for one sequence.

    It depends on sizes alone: one plan serves all layers of a pass, and all passes of a full window. No host read.
    """
    start, sinks = keys - rows, min(sinks, keys)
    columns = torch.arange(keys + -keys % TILE, dtype=torch.int32, device=device)
    k_row, k_pos = torch.where(columns < keys, columns, -1)[None, None], columns[None, None]
    q_pos = pad_rows(columns[start:keys], TILE)[None, None]
    q_row = torch.where(q_pos >= 0, q_pos - start, -1)
    known: dict[str, Any] = dict(ranks=True, q_first=start)
    spans = [span_by_range(q_row, k_row, q_pos, k_pos, 0, window, TILE, TILE, ordered=keys, **known)]
    if sinks:
        # Those out of the window alone: what both held would count twice.
        width = sinks + -sinks % TILE
        k_row, k_pos = torch.where(columns < sinks, columns, -1)[None, None, :width], k_pos[..., :width]
        spans.append(
            span_by_range(q_row, k_row, q_pos, k_pos, window, FAR, TILE, TILE, ordered=sinks, **known)
        )
    part = Part(q_row, tuple(spans), ordered=rows, all_rows=rows)
    return AttentionPlan((part,), TILE, TILE, 1, heads, rows, keys)


def attend_token_tree(
    branches: TokenTree, view: KVView, query: Tensor, key: Tensor, value: Tensor, scale: float, end: int
) -> Tensor:
    """Compute attention [B, H, n, D] of the rows of a token tree: each sees all earlier columns and its own branch; the last
    row is column `end` - 1."""
    device = query.device
    sees, depth = branches.sees.to(device), branches.depth.to(device)
    first = end - sees.shape[1]
    column = view.column
    column = torch.arange(key.shape[2], device=device) if column is None else column.to(device)
    inside = column >= first
    mask = torch.where(inside, sees[:, (column - first).clamp(min=0)], True)
    if view.window is not None:
        near = (first + depth)[:, None] - column < view.window
        mask = mask & (inside | near | (column < view.sinks))
    if view.bias is not None:
        added = torch.nn.functional.pad(view.bias, (0, key.shape[2] - len(view.bias)))
        mask = added.masked_fill(~mask, -torch.inf).to(query.dtype)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def start_host_copy(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start copying scalar `value` [] to the host; return it and the event of its arrival (None: it has arrived)."""
    if not value.is_cuda:
        return value, None
    host = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # Layers of a model spread over devices are not on the current one.
    event.record(torch.cuda.current_stream(value.device))
    return host, event
