"""Context parallelism: the processes of a mesh each hold the whole model and a share of a prompt's rows.

Each process computes norms, products and RoPE of its own rows, and its KV memory holds their keys. For attention the
processes gather that layer's queries, keys and values, make the same plan, and each computes an equal share of the listed
blocks (`shard_plan_for_rank`); partial results of each row are merged by log-sum-exp in the process that holds it. A pass of
few rows, such as a decoded token, runs in every process; each attends to the keys it holds, and the results are merged
alike.

Letters: B batch, H query heads, G key/value heads, n rows of a pass, N keys, D head size, R processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmaccel.backends.ops.block_attend import BlockLists, lse_dtype, memoize
from mmaccel.backends.ops.layer_ops import merge_parts
from mmaccel.backends.select import BackendChoice
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.memory.kv import KVState, KVView
from mmaccel.core.memory.relay import make_delegate
from mmaccel.core.prefill.attention import MIN_ROWS, PASS, ForwardPass
from mmaccel.core.prefill.plan import AttentionPlan, head_indices, head_runs
from mmaccel.core.prefill.sparse import attend_plan, window_plan
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry

# Its name from torch 2.13 on, which warns of the former one.
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

T = TypeVar("T")

Sizes = tuple[int, ...]
"""Of each process, how many rows or columns it holds."""


class ContextGroup:
    """The processes of a one-dimensional mesh that share a model's rows (context parallelism) and make the same calls."""

    def __init__(self, mesh: DeviceMesh, recipe: Recipe, sliding: Mapping[int, int]) -> None:
        """Raises `RecipeError` for a recipe that does not run so, and `ModelError` for what is no such mesh."""
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise ModelError(
                "context_mesh: give a DeviceMesh of one dimension, such as init_device_mesh('cuda', (2,))."
            )
        if sliding:
            raise ModelError(
                "context_mesh: sliding-window layers cannot split a sequence over processes; leave it out for this model."
            )
        for kind, part, serves in (
            ("kv", recipe.kv, recipe.kv.shares_columns),
            ("prune", recipe.prune, recipe.prune is None),
            ("draft", recipe.draft, not recipe.draft.active),
        ):
            if not serves:
                able = registry("kv").matching_names_text(lambda cls: cls.shares_columns)
                raise RecipeError(
                    f"{kind} {part.name!r}: under context_mesh a process holds a share of the cache, which only kv {able} "  # type: ignore[union-attr]
                    f"without pruner and draft supports; leave {kind} out."
                )
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._runs = False  # its share of `run_sharded`

    def agree_on_backend(self, choice: BackendChoice) -> BackendChoice:
        """Return the backend `choice` of the first process in every process, as all have to plan alike."""
        found = [choice]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def rows_per_rank(self, rows: int) -> Sizes:
        """Return how many of `rows` rows each process takes, by rank: as even as possible."""
        ends = [rows * rank // self.size for rank in range(self.size + 1)]
        return tuple(end - begin for begin, end in pairwise(ends))

    def all_gather(self, x: Tensor, dim: int, sizes: Sizes) -> Tensor:
        """Gather `x` from every process (all-gather), concatenated along `dim` in order of rank. `sizes` are their lengths
        along `dim`; all other dimensions are equal. In memory the result has `dim` first."""
        most = max(sizes)
        rows = x.movedim(dim, 0)
        if len(rows) < most:
            rows = torch.cat([rows, rows.new_empty(most - len(rows), *rows.shape[1:])])
        whole = x.new_empty(self.size * most, *rows.shape[1:])
        gather(whole, rows.contiguous(), group=self.group)
        if min(sizes) < most:
            parts = zip(torch.split(whole, most), sizes, strict=True)
            whole = torch.cat([one[:count] for one, count in parts])
        return whole.movedim(0, dim)

    def patches_per_call(self, count: int, most: int) -> int:
        """Return the number of patches per call, at most `most`, with which to run the vision tower on `count` patches so
        that every process gets a call. It is `count` (one call) for few patches, and within one process's own share."""
        if self._runs or count < MIN_ROWS * self.size:
            return count
        return min(most, -(-count // self.size))

    def run_sharded(
        self, run: Callable[[T], Tensor | Sequence[Tensor]], items: Sequence[T]
    ) -> Iterator[Tensor | Sequence[Tensor]]:
        """Run `run` on an even share of `items` in each process, and yield the results [..., E] of all items in order,
        gathered from all processes. Where there are fewer items than processes, each runs them all."""
        if len(items) < self.size:
            yield from map(run, items)
            return
        sizes = self.rows_per_rank(len(items))
        begin = sum(sizes[: self.rank])
        self._runs = True
        try:
            found = [run(one) for one in items[begin : begin + sizes[self.rank]]]
        finally:
            self._runs = False
        mine = [[x] if isinstance(x, Tensor) else list(x) for x in found]
        shapes: list[list[list[torch.Size]]] = [[] for _ in sizes]
        dist.all_gather_object(shapes, [[x.shape for x in some] for some in mine], group=self.group)
        rows = tuple(sum(shape[:-1].numel() for some in each for shape in some) for each in shapes)
        whole = self.all_gather(torch.cat([x.flatten(0, -2) for some in mine for x in some]), 0, rows)
        single, begin = isinstance(found[0], Tensor), 0
        for some in (some for each in shapes for some in each):
            made = []
            for shape in some:
                end = begin + shape[:-1].numel()
                made.append(whole[begin:end].view(shape))
                begin = end
            yield made[0] if single else made

    def merge_attention(self, out: Tensor, lse: Tensor, sizes: Sizes) -> Tensor:
        """Return the attention [B, H, own rows, D] of this process's rows, merged from the partial results of all processes,
        out [B, H, n, D] with lse [B, H, n]."""
        own = sizes[self.rank]

        def swapped(x: Tensor) -> Tensor:
            rows = x.movedim(2, 0).contiguous()
            held = rows.new_empty(self.size * own, *rows.shape[1:])
            dist.all_to_all_single(held, rows, [own] * self.size, list(sizes), group=self.group)
            return held.view(self.size, own, *rows.shape[1:])

        return merge_parts(swapped(out), swapped(lse)).movedim(0, 2)

    def wrap_kv_state(self, memory: KVState) -> ContextParallelKVState:
        """Return a `ContextParallelKVState` around `memory`, which holds this process's columns of a sequence."""
        return ContextParallelKVState(memory, self)

    def wrap_forward(
        self, forward: Callable[..., Any], of_columns: Callable[..., dict[str, Any]], states: object
    ) -> Callable[..., Any]:
        """Wrap `forward` of the text model so that each process runs its own rows; the result has all rows. `of_columns`
        cuts forward's arguments to some columns. Raises `ModelError` if `states`, the recurrent states, is not empty."""
        if states:
            raise ModelError(
                "context_mesh: recurrent layers cannot split a sequence over processes; leave it out for this model."
            )

        @wraps(forward)
        def run(**kwargs: Any) -> Any:
            given: ForwardPass = kwargs.pop(PASS)
            if kwargs.get("output_attentions"):
                raise ModelError(
                    "output_attentions: under context_mesh no process has all attention weights; leave it out."
                )
            rows = given.layout.length - given.start
            sizes = self.rows_per_rank(rows) if given.prefill and rows >= MIN_ROWS else None
            assert isinstance(given.state, ContextParallelKVState)
            given.state.coming = sizes or (*[0] * (self.size - 1), rows)
            known = {f.name: getattr(given, f.name) for f in fields(given) if f.init}
            shared = ContextParallelPass(**known, context=self, sizes=sizes)
            if sizes is None:
                return forward(**{PASS: shared}, **kwargs)
            begin = sum(sizes[: self.rank])
            mine = of_columns(kwargs, slice(begin, begin + sizes[self.rank]), given.start)
            out = forward(**{PASS: shared}, **mine)
            out.last_hidden_state = self.all_gather(out.last_hidden_state, 1, sizes)
            if out.get("hidden_states") is not None:
                out.hidden_states = tuple(self.all_gather(x, 1, sizes) for x in out.hidden_states)
            return out

        return run


class ContextParallelKVState(KVState):
    """The KV memory of a sequence under context parallelism: `memory` holds this process's columns.

    pieces  for each pass, how many of its columns each process added, in order of rank
    coming  the same for the current pass
    """

    def __init__(self, memory: KVState, context: ContextGroup) -> None:
        self.memory, self.context = memory, context
        self.pieces: list[Sizes] = []
        self.coming: Sizes = ()

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Add this process's new columns. Of a pass of few rows, which each process runs whole, only the last one adds."""
        count = self.coming[self.context.rank]
        self.memory.append(layer, key[:, :, :count], value[:, :, :count])
        if layer == 0:
            self.pieces.append(self.coming)

    view = held_columns = nbytes = select_sequences = make_delegate(
        lambda self, name, *given, **named: getattr(self.memory, name)(*given, **named)
    )

    def gather_columns(self, layer: int, query: Tensor) -> KVView:
        """Return all columns of the sequence, in order, gathered from all processes."""
        held = self.memory.view(layer, query)
        sizes = tuple(sum(counts) for counts in zip(*self.pieces, strict=True))

        def whole(x: Tensor) -> Tensor:
            found = self.context.all_gather(x, 2, sizes)
            if len(self.pieces) == 1:
                return found.contiguous()
            counts = [piece[rank] for rank in range(len(sizes)) for piece in self.pieces]
            parts = torch.split(found, counts, 2)
            return torch.cat(
                [part for n in range(len(self.pieces)) for part in parts[n :: len(self.pieces)]], 2
            )

        return KVView(whole(held.key), whole(held.value))

    def length(self) -> int:
        return sum(map(sum, self.pieces))

    def accept(self, keep: int | Tensor) -> None:
        raise ModelError("context_mesh: a split KV cache cannot verify drafts; leave draft out.")

    def truncate(self, length: int) -> None:
        left, pieces = length, list[Sizes]()
        for piece in self.pieces:
            kept = []
            for count in piece:
                kept.append(min(count, left))
                left -= kept[-1]
            pieces.append(tuple(kept))
        self.memory.truncate(sum(piece[self.context.rank] for piece in pieces))
        self.pieces = [piece for piece in pieces if any(piece)]

    def reset(self) -> None:
        self.memory.reset()
        self.pieces = []


@dataclass(frozen=True, eq=False)
class ContextParallelPass(ForwardPass):
    """A forward pass under context parallelism in which process r computes ``sizes[r]`` rows; None: each computes all."""

    context: ContextGroup | None = None
    sizes: Sizes | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute attention of one layer, as `ForwardPass.attend` does, for the rows of this process."""
        context, state = self.context, self.state
        assert context is not None and isinstance(state, ContextParallelKVState)
        if self.sizes is None:
            view = state.view(layer, query)
            self._count(layer, None, view, query, None)
            return self._few(context, query.to(view.value.dtype), view, state.coming[context.rank], scale)
        view = state.gather_columns(layer, query)
        key, value = view.key.to(view.value.dtype), view.value
        query = context.all_gather(query.to(value.dtype), 2, self.sizes)
        plan = self._plan(layer, view, query, key, value, scale)
        self._count(layer, plan, view, query, None)
        return context.merge_attention(*self._part(context, plan, query, key, value, scale), self.sizes)

    def _part(
        self,
        context: ContextGroup,
        plan: AttentionPlan | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """out [B, H, n, D] and lse [B, H, n] of this process's share of `plan`, of its dense heads and of the dense rows
        after it."""
        kernel = self.config.kernel
        assert kernel is not None
        run = partial(_attended, context=context, scale=scale, kernel=kernel)
        if plan is None:
            return run(None, query, key, value)
        out, lse = run(replace(plan, dense=None), query, key, value)
        if plan.dense is not None:
            rows, end = plan.dense.rows, self.start + plan.dense.rows
            for some in head_runs(plan.dense.heads, query.shape[1] // key.shape[1]):
                at, seen = head_indices(some.heads, query.device), (slice(None), some.groups, slice(0, end))
                out[:, at, :rows], lse[:, at, :rows] = run(
                    None, some.select_queries(query)[:, :, :rows], key[seen], value[seen]
                )
        for _, begin, end in self._tails:
            if begin < end:
                seen = slice(None), slice(None), slice(0, self.start + end)
                out[:, :, begin:end], lse[:, :, begin:end] = run(
                    None, query[:, :, begin:end], key[seen], value[seen]
                )
        return out, lse

    def _few(self, context: ContextGroup, query: Tensor, view: KVView, new: int, scale: float) -> Tensor:
        """[B, H, n, D]: exact attention to the columns of all processes, of which this one holds `view`, its last `new`
        those of the rows themselves."""
        key, value, high = view.key, view.value, lse_dtype(query.dtype)
        grouped = query.reshape(*key.shape[:2], -1, query.shape[3])
        scores = (grouped @ key.mT).to(high) * scale
        if new:
            unseen = torch.ones(new, new, dtype=torch.bool, device=key.device).triu(1)
            scores.view(*scores.shape[:2], -1, new, scores.shape[3])[..., -new:].masked_fill_(
                unseen, -torch.inf
            )
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        one = (1,) * context.size
        out = (weights.to(value.dtype) @ value).reshape(query.shape)
        outs, sums = (context.all_gather(x[None], 0, one) for x in (out, lse.view(query.shape[:3])))
        return merge_parts(outs, sums).to(query.dtype)


def _attended(
    plan: AttentionPlan | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    context: ContextGroup,
    scale: float,
    kernel: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse of a process's share of `plan`; None: of dense attention of the queries, which are the last rows."""
    if plan is None:
        rows, keys = query.shape[2], key.shape[2]
        plan = window_plan(rows, keys, 0, keys, query.shape[1], query.device)
    return attend_plan(
        shard_plan_for_rank(plan, context.rank, context.size), query, key, value, scale, kernel
    )


def shard_plan_for_rank(plan: AttentionPlan, rank: int, size: int) -> AttentionPlan:
    """Return the listed blocks of `plan` that process `rank` of `size` computes; cached, without a host read.

    The lists of a head are concatenated, and each process takes one contiguous run of them. The runs of any two processes
    differ by at most one block in all (by one for each head where heads share lists).
    """

    def made() -> AttentionPlan:
        before, parts = torch.zeros((), dtype=torch.long, device=plan.parts[0].q_row.device), []
        for part in plan.parts:
            spans = []
            for span in part.spans:
                lists, before = _share(span.lists, before, rank, size)
                spans.append(replace(span, lists=lists, complete=False))
            parts.append(replace(part, spans=tuple(spans)))
        return replace(plan, parts=tuple(parts))

    return memoize(plan.memo, ("share", rank, size), made)


def _share(lists: BlockLists, before: Tensor, rank: int, size: int) -> tuple[BlockLists, Tensor]:
    """Process `rank`'s share of `lists`, and how many blocks the plan lists up to their end; `before`: up to their begin."""
    begin, count, head, tail, shift = lists.row.unbind(-1)
    upto = count.cumsum(-1)
    # [b, h]: blocks before each head's lists, and with them.
    ends = before + upto[..., -1].flatten().cumsum(0).view(upto.shape[:2])
    starts = ends - upto[..., -1]
    first, past = (
        (ends * edge // size - starts * edge // size)[..., None] - (upto - count) for edge in (rank, rank + 1)
    )
    first, past = (torch.minimum(edge.clamp(min=0), count) for edge in (first, past))
    length = past - first
    first = torch.where(length > 0, first, 0)
    head, tail = (torch.minimum((edge - first).clamp(min=0), length) for edge in (head, tail))
    index = lists.index
    if index is None:
        # Blocks between those that neighbouring lists name are no longer without a pair.
        index = torch.arange(lists.kind.shape[-1], dtype=torch.int32, device=begin.device)
        begin, shift = begin + shift, torch.zeros_like(shift)
    row = torch.stack([begin + first, length, head, tail, shift], -1)
    return BlockLists(row, index, lists.kind), ends[-1, -1]
