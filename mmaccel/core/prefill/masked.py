"""Bidirectional attention within images, beside causal attention.

In models such as Gemma 3 a token of an image also sees later tokens of the same image. In a dense layer, the rows of an
image see all keys up to its end. In a sparse layer, the plan covers the keys before each row; the later keys are a plan of
their own, and both results are merged by log-sum-exp, exactly, as they share no pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel.backends.ops.block_attend import Part, memoize
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.kv import KVView
from mmaccel.core.prefill.plan import FAR, AttentionPlan, head_runs, span_from_table
from mmaccel.core.prefill.sparse import BlockAttend, attend_plan, merge_by_lse

BLOCK = 64
Span = tuple[int, int, int]
"""An image: its sequence, its first column, the column past its last."""


@dataclass(frozen=True, eq=False)
class BidirectionalImages:
    """Images whose tokens attend to each other in both directions, in the given `layers`."""

    spans: tuple[Span, ...]
    layers: frozenset[int]

    def find_new_images(self, layer: int, start: int, layout: TokenLayout) -> NewImageSpans | None:
        """Return the images among the new columns, those of `layout` from `start` on; None if there are none, or if `layer`
        has causal attention within images."""
        if layer not in self.layers:
            return None
        spans = tuple(one for one in self.spans if start <= one[1] and one[2] <= layout.length)
        return NewImageSpans(spans, start, layout) if spans else None

    def next_chunk_boundary(self, end: int) -> int:
        """Return the first column, from `end` on, before which a cut of a prompt into chunks splits no image."""
        while (
            later := max((past for _, begin, past in self.spans if begin < end < past), default=end)
        ) > end:
            end = later
        return end

    def select_sequence(self, sequence: int, begin: int, end: int) -> BidirectionalImages:
        """Return the images within columns ``begin .. end`` of one sequence of a batch, counted from `begin`."""
        inside = (one for one in self.spans if one[0] == sequence and begin <= one[1] and one[2] <= end)
        own = ((0, b - begin, past - begin) for _, b, past in inside)
        return replace(self, spans=tuple(own))


@dataclass(frozen=True, eq=False)
class NewImageSpans:
    """The images with bidirectional attention among a pass's new columns, which are those of `layout` from `start` on."""

    spans: tuple[Span, ...]
    start: int
    layout: TokenLayout

    def count_pairs(self, batch: int) -> Tensor:
        """Count, for each sequence, the pairs of an image token and a later token of the same image: [batch, 1] float64."""
        counts = [[0.0] for _ in range(batch)]
        for b, begin, past in self.spans:
            counts[b][0] += (past - begin) * (past - begin - 1) / 2
        return torch.tensor(counts, dtype=torch.float64)

    def unmask_image_pairs(self, unseen: Tensor, columns: Tensor) -> Tensor:
        """Unhide pairs within one image in the mask `unseen` [B, 1, n, N], which is True where a new column may not see the
        key at `columns` [N]; return the new mask."""
        rows = torch.arange(self.start, self.layout.length, device=columns.device)[:, None]
        open_ = torch.zeros_like(unseen)
        for b, begin, past in self.spans:
            open_[b] |= (begin <= rows) & (rows < columns) & (columns < past)
        return unseen & ~open_

    def anticausal_plan(self, query: Tensor, key: Tensor) -> AttentionPlan:
        """Return the plan of the pairs that causal attention leaves out: an image token and a later one of its image. Cached
        for all layers."""
        sizes = len(query), query.shape[1], query.shape[2], key.shape[2], self.layout.length
        memo, name = self.layout.memo, ("later", self.spans, sizes)
        return memoize(memo, name, lambda: plan_later_image_tokens(self.spans, *sizes, key.device))

    def attend(
        self,
        plan: AttentionPlan | None,
        tails: Sequence[tuple[slice, int, int]],
        view: KVView,
        valid: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        backend: BlockAttend | None,
    ) -> Tensor:
        """Compute attention [B, H, n, D] of the new columns: `plan` gives the causal pairs (None: all of them), and pairs
        within images are added. Rows in `tails`, (sequences, begin, end) each, see all causal keys despite the plan."""

        def dense(some: slice, begin: int, end: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = v.new_empty(len(q[some]), q.shape[1], end - begin, v.shape[-1])
            for place, b in enumerate(range(len(q))[some]):
                own = slice(b, b + 1)
                held = None if valid is None else valid[own]
                self._rows(b, begin, end, view, held, q[own], k[own], v[own], scale, out[place : place + 1])
            return out

        if plan is None:
            return dense(slice(None), 0, query.shape[2], query, key, value)
        assert backend is not None
        one = attend_plan(plan, query, key, value, scale, backend)
        other = attend_plan(self.anticausal_plan(query, key), query, key, value, scale, backend)
        out = merge_by_lse(*one, *other)[0].to(value.dtype)
        # Heads that the plan leaves dense have no log-sum-exp.
        for run in head_runs(() if plan.dense is None else plan.dense.heads, query.shape[1] // key.shape[1]):
            q, k, v = run.select_queries(query), key[:, run.groups], value[:, run.groups]
            out[:, list(run.heads)] = dense(slice(None), 0, q.shape[2], q, k, v)
        for some, begin, end in tails:
            if begin < end:
                out[some, :, begin:end] = dense(some, begin, end, query, key, value)
        return out

    def _rows(
        self,
        sequence: int,
        begin: int,
        end: int,
        view: KVView,
        valid: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        out: Tensor,
    ) -> None:
        """Dense attention of the new columns ``begin .. end`` of one sequence, into `out` [1, H, end - begin, D]."""
        at, last, first = self.start + begin, self.start + end, self.start + begin
        own = sorted((b, past) for n, b, past in self.spans if n == sequence)
        for b, past in [*((max(b, at), past) for b, past in own if past > at), (last, last)]:
            if at < min(b, last):
                rows = slice(at - self.start, min(b, last) - self.start)
                shown = scale, at, valid, view.sinks, view.window, view.column
                out[:, :, at - first : min(b, last) - first] = dense_attend(
                    query[:, :, rows], key, value, *shown
                )
            if b < min(past, last):
                q = query[:, :, b - self.start : min(past, last) - self.start]
                out[:, :, b - first : min(past, last) - first] = _image(
                    view, q, key, value, scale, b, past, self.layout.length, valid
                )
            at = max(at, past)


def _image(
    view: KVView,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    begin: int,
    past: int,
    total: int,
    valid: Tensor | None,
) -> Tensor:
    """[1, H, n, D]: rows from column `begin` on of an image that ends before column `past`."""
    keys = key.shape[2]
    stop = keys - (total - past)
    near = 0 if view.window is None or view.sinks else max(0, keys - (total - begin) - view.window + 1)
    mask: Tensor | None = None
    if view.window is not None:
        columns = torch.arange(total - keys, total, device=key.device) if view.column is None else view.column
        columns = columns[near:stop]
        rows = torch.arange(begin, begin + query.shape[2], device=key.device)
        padded = view.sinks and valid is not None and view.column is None
        first = valid[0].long().argmax() if padded and valid is not None else 0
        mask = ((rows[:, None] - columns < view.window) | (columns < first + view.sinks))[None, None]
    if valid is not None:
        held = valid[:, None, None, near:stop]
        mask = held if mask is None else mask & held
    grouped = query.shape[1] != key.shape[1]
    k, v = key[:, :, near:stop], value[:, :, near:stop]
    return F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def plan_later_image_tokens(
    spans: Sequence[Span], batch: int, heads: int, rows: int, keys: int, total: int, device: torch.device
) -> AttentionPlan:
    """Return the plan of pairs of an image token and a later one of the same image, for `total` columns of which the last
    `rows` are queries and the last `keys` are held. Blocks never span two images."""
    columns: list[list[int]] = [[] for _ in range(batch)]
    numbers: list[list[int]] = [[] for _ in range(batch)]
    for number, (b, begin, end) in enumerate(spans):
        columns[b] += [*range(begin, end), *[-1] * (-(end - begin) % BLOCK)]
        numbers[b] += [number] * (-(-(end - begin) // BLOCK))
    width = max(len(one) for one in numbers)
    padded = [one + [-1] * (width * BLOCK - len(one)) for one in columns]
    column = torch.tensor(padded, dtype=torch.int32, device=device)[:, None]
    image = torch.tensor([one + [-1] * (width - len(one)) for one in numbers], device=device)[:, None]
    absent = column < 0
    q_row = (column - (total - rows)).masked_fill(absent, -1)
    k_row = (column - (total - keys)).masked_fill(absent, -1)
    # Counted from the end, a key behind a row is one or more before it.
    place = torch.arange(width * BLOCK - 1, -1, -1, dtype=torch.int32, device=device).expand_as(column)
    table = (image[..., None] == image[..., None, :]) & (image[..., None] >= 0)
    q_pos = place.masked_fill(absent, -1)
    span = span_from_table(q_row, k_row, q_pos, place, 1, FAR, table, BLOCK, BLOCK)
    return AttentionPlan((Part(q_row, (span,)),), BLOCK, BLOCK, batch, heads, rows, keys)
