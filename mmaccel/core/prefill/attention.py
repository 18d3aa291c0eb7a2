"""The attention of one layer in a forward pass: the KV memory gives a view, the pattern a plan, a backend runs it.

An `AttentionConfig` is fixed when a recipe is attached or a session opened; a `ForwardPass` is one pass of the language
model over new columns, of a call or of a stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmaccel.backends import select
from mmaccel.backends.ops.dense_attend import LONG, attend_by_heads, attend_in_slices, dense_attend
from mmaccel.backends.ops.layer_ops import decode_attend
from mmaccel.core.adapter import TokenTree
from mmaccel.core.decoding.replay import COMPILE, LazilyCompiled
from mmaccel.core.errors import warn
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import KVView, StreamState
from mmaccel.core.prefill import masked
from mmaccel.core.prefill.plan import AttentionPlan, check_plan_sizes, head_indices
from mmaccel.core.prefill.prune import ForwardProbe, PrefillPass
from mmaccel.core.prefill.sparse import attend_plan, attend_token_tree, start_host_copy, window_plan
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Meter

T = TypeVar("T")
ELSEWHERE = 2
"""A prompt this many times longer or shorter than the searched one gives a warning: budgets are numbers of tokens."""
PLANNER_S, SAVED = 32.0, 0.5
"""Seconds that inductor takes to compile a plan, and the share of a plan's time it saves, as of block_topk (lab/LOG.md)."""
MIN_ROWS = 64
"""A shorter prompt, or last piece of one, is dense; so is, under "auto", a later turn of so few before the dense tail."""
BIASED = "sparse: {} planned no pass whose memory adds a bias to the scores of its keys; these are dense"


@dataclass(eq=False)
class AttentionConfig:
    """The recipe's attention settings, shared by all layers.

    kernel  the backend's operator, with the schema of `ops.block_attend`; None: plans cannot be run
    sliding_kernel  the operator for streams' sliding windows under a sparse recipe (a dense one uses `kernel`); None: a mask
    sliding  layer -> window size of layers with sliding-window attention, which are dense
    """

    recipe: Recipe
    backend: str
    kernel: Callable[..., tuple[Tensor, Tensor]] | None
    meter: Meter = field(default_factory=Meter)
    choice: select.BackendChoice | None = None
    sliding_kernel: Callable[..., tuple[Tensor, Tensor]] | None = None
    sliding: Mapping[int, int] = field(default_factory=dict)
    _warned: bool = False
    _compiled: dict[int, LazilyCompiled] = field(default_factory=dict)

    def plan(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, queries: TokenLayout, keys: TokenLayout
    ) -> AttentionPlan | None:
        """Return the plan of a layer by its pattern (see `SparsePattern.plan_layer`). Where it pays, planning is compiled,
        from a prompt's second layer on: by then the facts that the host reads of the layouts are cached."""
        pattern = self.recipe.sparse.for_layer(layer)
        plan = pattern.plan_layer
        if not pattern.compiles or not (query.is_cuda or COMPILE in os.environ):
            return plan(query, key, value, queries, keys)
        name = "planned", id(pattern)
        if name not in queries.memo:
            queries.memo[name] = pattern
            return plan(query, key, value, queries, keys)
        costs = None if self.choice is None else self.choice.costs
        gain = 0.0 if costs is None else SAVED * costs.planning(key.shape[0] * key.shape[2])
        compiled = self._compiled.setdefault(id(pattern), LazilyCompiled(plan, PLANNER_S))
        sizes = query.shape, key.shape, query.dtype, query.device
        return compiled(sizes, gain, query, key, value, queries, keys)  # type: ignore[no-any-return]

    def warn_prompt_length_mismatch(self, tokens: int | None) -> None:
        """Warn, once per attached recipe, if a prompt of `tokens` (None: unknown) is far longer or shorter than that on
        which the patterns were searched. The pattern's own `note`, if any, goes into the report."""
        sparse, context = self.recipe.sparse, self.recipe.sparse.searched_prompt_length
        if sparse.note:
            self.meter.add_note(sparse.note)
        if tokens is None or context is None or context / ELSEWHERE <= tokens <= context * ELSEWHERE:
            return
        told = f"{sparse.searched_table} was searched on {context} tokens, and this prompt has {tokens}"
        self.meter.add_note(f"sparse: {told}")
        if not self._warned:
            warn(f"sparse: {told}; `mmaccel search` at this length makes one that fits it.")
        self._warned = True


PASS = "mmaccel_pass"
"""The keyword under which a pass travels from the text model to each layer's attention."""


@dataclass(frozen=True, eq=False)
class ForwardPass(PrefillPass):
    """New columns `start .. start + n` of a batch, on their way through the layers.

    config    attention settings of the layers
    prefill   whether this is part of a prompt, which may run sparse and is counted; all else is dense
    rest      number of columns of the prompt that come after this pass
    branches  the token tree formed by draft tokens to verify
    probes    read what the layers compute
    later     whether the new columns follow a conversation's earlier turn or the frames of a stream
    stream    whether the pass is of a stream: the KV memory decides what rows see, numbered 0 .. N - 1, the new ones last
    check     called at each layer; what it raises aborts the pass
    pruning   state of the target's pruner, for its stages between layers
    meter     counts query-key pairs; None: that of `config`
    images    images whose tokens attend to each other in both directions
    last_only  whether the caller reads the hidden state of the last row alone
    """

    config: AttentionConfig
    prefill: bool = True
    rest: int = 0
    branches: TokenTree | None = None
    probes: tuple[ForwardProbe, ...] = ()
    later: bool = False
    stream: bool = False
    check: Callable[[], None] | None = None
    pruning: object = None
    meter: Meter | None = None
    images: masked.BidirectionalImages | None = None
    last_only: bool = False
    ends: tuple[int, ...] | None = None
    """For a part of a padded prompt: for each sequence, the column past its last token in the whole prompt."""
    listed: dict[int, tuple[Tensor, torch.cuda.Event | None, float]] = field(default_factory=dict)
    """First column of a pass -> pairs that its last sparse layer listed, on their way to the host, and pairs expected."""
    _told: dict[int, ForwardPass] = field(default_factory=dict, init=False)
    """The pass over what a stream's memory shows, where it says what that is: by the layout's identity."""
    ticket: Tensor | None = field(default=None, init=False)
    """A tensor in place of this pass, for compiled layers, whose arguments are tensors; they look the pass up by it."""

    @cached_property
    def _before(self) -> dict[int, Any]:
        return {} if (before := getattr(self.state, "last_listed", None)) is None else before

    def beats_dense(self, layer: int, query: Tensor, n_key: int, view: KVView | None = None) -> bool:
        """Return whether `layer` should run its pattern because that is faster than dense attention over `view` (None: all
        columns). Measured costs decide. Without any, pair counts decide in a later turn with backend "auto", else True.
        The pattern's cost is taken for the most blocks that it may list; if that is no gain, for the expected number, which
        is scaled by what an earlier pass or the last sparse layer listed."""
        choice, (B, H, n, _) = self.config.choice, query.shape
        if choice is None or not (choice.costs or (self.later and self.config.recipe.backend == "auto")):
            return True
        most_seen = n_key if view is None or view.window is None else min(view.sinks + view.window, n_key)
        few = max(most_seen - (n_key - n), 0)
        dense = B * H * (few * (2 * (n_key - n) + few + 1) / 2 + (n - few) * most_seen)
        short = self.later and max(begin for _, begin, _ in self._tails) < MIN_ROWS
        if short or not choice.beats_dense(0, dense, B * n_key):
            return False  # making the plan alone costs more
        pattern = self.config.recipe.sparse.for_layer(layer)
        # Bounds know no causality; what is listed beyond it are the blocks on the diagonal, in each order of keys.
        most = n * (2 * n_key - n + 1) / 2 + n * pattern.block
        listed = min(pattern.max_blocks_total(n, n_key) * pattern.block**2, most)
        if choice.costs is not None and choice.beats_dense(B * H * listed, dense, B * n_key):
            return True
        expected = self._expected(layer, n, n_key, None if view is None else view.column)
        if told := self._before.get(layer, [self.listed.get(self.start)])[0]:
            value, ready, before = told
            if ready is not None:
                ready.synchronize()
            expected *= float(value) / max(before, 1.0)
        elif choice.costs is None and pattern.adaptive:
            return True  # its first layer tells
        if choice.costs is None:
            return B * H * min(expected, listed) < dense
        return choice.beats_dense(B * H * min(expected, listed), dense, B * n_key)

    def _expected(self, layer: int, n: int, n_key: int, column: Tensor | None) -> float:
        pattern = self.config.recipe.sparse.for_layer(layer)
        return pattern.expected_blocks(n, n_key, self._shown(column)) * pattern.block**2

    def _shown(self, column: Tensor | None) -> tuple[TokenLayout, TokenLayout]:
        """The layouts of the new columns and of those that a memory shows, `column` [N] (None: all), positions counted among
        them; one for all layers that are shown the same."""
        if column is None:
            return self.new_columns_layout, self.layout

        def ranked() -> tuple[TokenLayout, TokenLayout]:
            keys = self.layout.select_tokens(column.to(self.layout.device))
            keys = replace(keys, position=(keys.valid.long().cumsum(1) - 1).clamp(min=0))
            return keys.select_tokens(slice(keys.length - self.layout.length + self.start, None)), keys

        return self._once("shown", column, ranked)

    def _counts_ranks(self, view: KVView) -> bool:
        """Whether the window of `view` counts ranks among the columns that it shows: those are the first `sinks` and
        the last ones. Padding is in columns, and has no rank. Reads the device once for layers that are shown the same."""
        column, sinks = view.column, view.sinks
        if view.window is None or self.layout.has_padding or column is None:
            return view.window is None or not self.layout.has_padding

        def ends() -> bool:
            rank = torch.arange(len(column), device=column.device)
            gone = self.layout.length - len(column)
            return bool((column == torch.where(rank < sinks, rank, rank + gone)).all())

        return self._once("by rank", column, ends)

    def _once(self, name: str, column: Tensor, make: Callable[[], T]) -> T:
        """What `make` gives for the tensor `column`; made anew only where the layer before had another."""
        held = self.layout.memo.get(name)
        if held is None or held[0] is not column:
            held = self.layout.memo[name] = column, make()
        return held[1]

    @cached_property
    def new_columns_layout(self) -> TokenLayout:
        """Layout of the new columns. All layers share it, so that values derived from it are computed once."""
        return self.layout.select_tokens(slice(self.start, None))

    def slice_new_columns(self, begin: int, end: int) -> ForwardPass:
        """Return the forward pass over only the new columns ``begin .. end`` of this one."""
        layout, start = self.layout.select_tokens(slice(0, self.start + end)), self.start + begin
        rest = self.layout.length - layout.length + self.rest
        return replace(self, layout=layout, start=start, rest=rest, ends=self._ends)

    @cached_property
    def _ends(self) -> tuple[int, ...] | None:
        if self.ends is not None or not self.layout.has_padding:
            return self.ends
        past = torch.arange(1, self.layout.length + 1, device=self.layout.device)
        return tuple((past * self.layout.valid).amax(1).tolist())

    @cached_property
    def _tails(self) -> list[tuple[slice, int, int]]:
        """Sequences, and begin .. end among the new columns of those of the last rows of their prompt, which are dense: all
        in one, or, where there is padding behind some, one by one."""
        rows, tail = self.layout.length - self.start, self.config.recipe.dense_tail
        end = self.layout.length + self.rest
        ends = self._ends or (end,)
        even = all(past == end for past in ends)
        tails = []
        for b, own in enumerate(ends[:1] if even else ends):
            past = min(max(own - self.start, 0), rows)
            begin = min(max(own - tail - self.start, 0), past)
            tails.append((slice(None) if even else slice(b, b + 1), begin, past))
        return tails

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return attention [B, H, n, D] of query [B, H, n, D] to key, value [B, G, N, D], or to the stream memory's view."""
        if self.check is not None:
            self.check()
        rows = self.layout.length - self.start - query.shape[2]  # of layers that run the last rows alone
        if rows > 0 and not self.stream and self.pruning is None:
            return self.slice_new_columns(rows, rows + query.shape[2]).attend(layer, query, key, value, scale)
        window = self.config.sliding.get(layer)
        view = KVView(key, value, None, 0, window) if self.state is None else self.state.view(layer, query)
        key, value, query = view.key, view.value, query if view.query is None else view.query
        if query.dtype != value.dtype:
            # Under autocast queries and keys are turned in float32, and attention is in the type of the products.
            query, key = query.to(value.dtype), key.to(value.dtype)
        for probe in self.probes:
            probe.read_attention_inputs(self, layer, query, key, value, scale)
        if self.branches is not None:
            end = key.shape[2] if self.stream else self.layout.length
            return attend_token_tree(self.branches, view, query, key, value, scale, end)
        if view.layout is not None and not self.config.recipe.sparse.dense:
            return self._over(view.layout, query.shape[2])._attend(layer, view, query, key, value, scale)
        return self._attend(layer, view, query, key, value, scale)

    def _over(self, layout: TokenLayout, rows: int) -> ForwardPass:
        """This pass of a stream as one of a prompt over the columns of `layout`, of which the last `rows` are new."""
        if id(layout) not in self._told:
            self._told[id(layout)] = replace(self, layout=layout, start=layout.length - rows, prefill=True)
        return self._told[id(layout)]

    def _attend(
        self, layer: int, view: KVView, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """[B, H, n, D]: what the pattern lists of `view`, or all of it."""
        plan = self._plan(layer, view, query, key, value, scale)
        images = None if self.images is None else self.images.find_new_images(layer, self.start, self.layout)
        self._count(layer, plan, view, query, images)
        if images is not None:
            how = query, key, value, scale, self.config.kernel
            return images.attend(plan, self._tails, view, self._valid(view), *how)
        if plan is None:
            return self._dense(view, query, key, value, scale)
        if isinstance(self.state, StreamState):
            self.state.record_sparse_rows(layer, self._tails[0][1])
        assert self.config.kernel is not None
        out, _ = attend_plan(plan, query, key, value, scale, self.config.kernel)
        for some, begin, end in self._tails:
            if begin < end:
                q, start, valid = query[some, :, begin:end], self.start + begin, self._valid(view, some)
                shown = scale, start, valid, view.sinks, view.window, view.column
                out[some, :, begin:end] = dense_attend(q, key[some], value[some], *shown)
        return out

    def _dense(self, view: KVView, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[B, H, n, D]: exact attention to what `view` shows."""
        heads, rows, keys = query.shape[1], query.shape[2], key.shape[2]
        if view.bias is not None:
            columns = torch.arange(keys - rows, keys, device=key.device).expand(len(query), -1)
            return decode_attend(query, key, value, columns, scale, None, view.bias)
        config, window = self.config, view.window
        kernel = config.kernel if config.recipe.sparse.dense else config.sliding_kernel
        many = self.stream and len(query) == 1 and rows >= MIN_ROWS and view.column is None
        if many and kernel is not None and window is not None and window < keys:
            plan = window_plan(rows, keys, view.sinks, window, heads, query.device)
            return attend_plan(plan, query, key, value, scale, kernel)[0]
        start, valid = keys - rows if self.stream else self.start, self._valid(view)
        shown, asks = (scale, start, valid, view.sinks, window, view.column), self.stream and self.later
        by_rows = self.stream and window is None and (self.later or (view.column is None and start > 0))
        if self.check is None or query.device.type != "cpu" or not (rows >= LONG or (asks and by_rows)):
            return dense_attend(query, key, value, *shown)
        within = getattr(self.check, "within", self.check)
        if by_rows:
            return attend_in_slices(within, query, key, value, scale, start, asks)
        return attend_by_heads(within, query, key, value, *shown)

    def _valid(self, view: KVView, some: slice = slice(None)) -> Tensor | None:
        """[b, N] bool: which keys of a view are no padding, of some sequences; None where no token is padding."""
        if not self.layout.has_padding:
            return None
        return self.layout.valid[some] if view.column is None else self.layout.valid[some][:, view.column]

    def _why_dense(self, layer: int, view: KVView, rows: int) -> str:
        """Why the pattern plans nothing for `rows` new columns at `layer`, in a report's words; "" where it may."""
        if layer in self.config.recipe.dense_layers:
            return "layers named in dense_layers are dense"
        if layer in self.config.sliding:
            return "layers that see a window alone are dense"
        if rows < MIN_ROWS:
            return f"fewer than {MIN_ROWS} tokens at a time are dense"
        return "" if self._counts_ranks(view) else "a window that skips columns, or padding in one, is dense"

    def _plan(
        self, layer: int, view: KVView, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> AttentionPlan | None:
        """The pattern's plan over what `view` shows, without the tail's rows, narrowed by the view's window; None: dense."""
        recipe, meter = self.config.recipe, self.meter or self.config.meter
        if not self.prefill or recipe.sparse.dense:
            return None
        why = self._why_dense(layer, view, query.shape[2])
        if not why and view.bias is not None:
            meter.add_note(BIASED.format(recipe.sparse.name))
            return None
        if why or not self.beats_dense(layer, query, key.shape[2], view):
            meter.idle[why or "the pattern is expected to save nothing here"] = None
            return None
        even = scale * query.shape[3] ** 0.5  # estimates weigh scores by the size of a head
        query = query if abs(even - 1) < 1e-3 else query * even
        plan = self.config.plan(layer, query, key, value, *self._shown(view.column))
        if plan is None:
            meter.note_unplanned_layers(recipe.sparse.for_layer(layer), query.shape[1])
            return None
        # Of a stream a pass is a part, and nobody knows how long the whole will be.
        self.config.warn_prompt_length_mismatch(None if self.stream else self.layout.length + self.rest)
        check_plan_sizes(plan, recipe.sparse.name, query, key, whole=not self.layout.has_padding)
        plan = plan if view.window is None else plan.limit_to_window(view.sinks, view.window)
        if all(begin == end for _, begin, end in self._tails):
            return plan
        heads = [begin for _, begin, _ in self._tails]
        if len(heads) == 1:
            return plan.limit_to_first_rows(heads[0])
        first = torch.tensor(heads, dtype=torch.int32, device=query.device)[:, None, None]
        rows = (torch.where(part.q_row < first, part.q_row, -1) for part in plan.parts)
        both = zip(plan.parts, rows, strict=True)
        parts = tuple(replace(part, q_row=some, ordered=None, all_rows=None) for part, some in both)
        return replace(plan, parts=parts, dense=plan.dense and replace(plan.dense, rows=max(heads)))

    def _count(self, layer: int, plan: Any, view: KVView, query: Tensor, images: Any) -> None:
        if not self.prefill:
            return
        heads, new = query.shape[1], slice(self.start, self.start + query.shape[2])
        pairs = ((self.layout.position[:, new] + 1) * self.layout.valid[:, new]).double()
        causal = pairs.sum(1, keepdim=True)
        if view.window is not None:
            pairs = pairs.clamp(max=view.sinks + view.window)
        dense = pairs.sum(1, keepdim=True)
        if images is not None:
            more = images.count_pairs(len(query)).to(dense.device)
            dense, causal = dense + more, causal + more
        if plan is None:
            listed, names = dense.expand(-1, heads), ("dense",) * heads
        else:
            listed = plan.count_listed_pairs()
            tails = torch.cat([pairs[some, begin:end].sum(1) for some, begin, end in self._tails])
            listed = listed + tails[:, None]
            if (choice := self.config.choice) and (choice.costs or self.later):
                expected = self._expected(layer, query.shape[2], view.key.shape[2], view.column)
                own = self.listed[self.start] = (*start_host_copy(listed.mean()), expected)
                self._before[layer] = [*self._before.get(layer, [])[-1:], own]
            if images is not None:
                listed = listed + images.anticausal_plan(query, view.key).count_listed_pairs()
            names = self.config.recipe.sparse.for_layer(layer).head_pattern_names(heads)
            if plan.dense is not None:
                listed[:, head_indices(plan.dense.heads, listed.device)] = dense
                names = tuple("dense" if h in plan.dense.heads else name for h, name in enumerate(names))
        (self.meter or self.config.meter).count_attention(layer, names, listed, causal)
