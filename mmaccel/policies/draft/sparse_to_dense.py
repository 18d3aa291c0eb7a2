"""The `sparse_to_dense` draft: the target drafts for itself, with attention to a part of its KV cache."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView, Runner
from mmaccel.core.attach import adapter_for
from mmaccel.core.decoding.draft import DraftState, DraftStrategy, Prompt, Proposal
from mmaccel.core.errors import DraftError, ModelError
from mmaccel.core.layout import VIDEO
from mmaccel.core.memory.kv import KVState, KVView
from mmaccel.core.memory.thinned import PrunedKVState
from mmaccel.core.prefill.prune import (
    ForwardProbe,
    PrefillPass,
    observation_columns,
    share_token_count,
    top_indices,
)
from mmaccel.core.registry import SHARE, FieldLimit, at_least, limited, register
from mmaccel.policies.kv.full import FullState


@register("draft", "sparse_to_dense")
@dataclass(frozen=True, kw_only=True)
class SparseToDense(DraftStrategy):
    """The target drafts for itself: its own weights draft over a sparse copy of its KV cache, and verify over all of it.

    During prefill each key/value head of each layer chooses the video columns to which the question attends most; all text
    stays. After each verification the draft continues from the target's own keys and values, and those of its drafted tokens
    are dropped. After Sparse-to-Dense (arXiv 2505.19155), which does not say how columns are scored; we use the question
    rows' attention, averaged for each head. Needs no second model. A layer can choose only columns that it still holds: a
    pruner or a memory's window may have removed some before the first token.

    window     tokens drafted a round
    retention  share of the video's columns that each head keeps
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rollback", "memory"})

    window: int = limited(9, at_least(1))
    retention: float = limited(
        0.1, FieldLimit(lambda share: share > 0 and SHARE.fits(share), "a share above 0, at most 1")
    )

    @property
    def max_rollback(self) -> int:
        return self.window + 1

    def open(self, target: ModelView) -> DraftState:
        return _Sparse(target, self)


def view_key_columns(view: KVView) -> Tensor:
    """Return the column (KV position in the sequence) of each of the N keys of a view, [N]."""
    return torch.arange(view.key.shape[2], device=view.key.device) if view.column is None else view.column


def visible_columns_mask(view: KVView, columns: Tensor, row: Tensor | int) -> Tensor:
    """Return which `columns` [N] of `view` a query at column `row` sees: bool [N] for a number, [n, N] for [n, 1]."""
    seen = columns <= row
    return seen if view.window is None else seen & ((columns < view.sinks) | (columns > row - view.window))


class _Memory(FullState):
    """The KV memory of the draft: for each layer the chosen columns of a dense memory, its columns since the prompt, and
    drafted ones.

    Its length counts columns as the dense memory does, of which `_gone` were not chosen, or are held no more. Only single
    rows are asked for, which see everything here.
    """

    in_place = False
    follows = True

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self._prompt = self._gone = 0
        self._chosen = [0] * layers

    def take(self, dense: KVState, chosen: list[Tensor], length: int) -> None:
        """Copy the columns `chosen` [G, n] of each layer, of those it holds of the first `length` of `dense`."""
        buffers: list[tuple[Tensor, Tensor] | None] = []
        for layer, columns in enumerate(chosen):
            view = dense.view(layer, torch.empty(0))
            at = columns.to(view.key.device)[None, :, :, None].expand(1, -1, -1, view.key.shape[-1])
            buffers.append((view.key.gather(2, at), view.value.gather(2, at)))
        # All layers or none: a gather may run out of memory.
        self._buffers, self._prompt, self._gone = buffers, length, length - chosen[0].shape[1]
        self._chosen = [columns.shape[1] for columns in chosen]
        self._counts = list(self._chosen)

    def follow(self, dense: KVState, length: int) -> None:
        """After verification, replace the drafted columns by those of `dense` state from the prompt's end to `length`, and
        what layers carry along by what they carry there."""
        for layer in range(len(self._buffers)):
            view, lacks = dense.view(layer, torch.empty(0)), dense.count_dropped(layer)
            columns = view_key_columns(view)
            new = (columns >= self._prompt - lacks) & (columns < length - lacks)
            self._counts[layer] = self._chosen[layer]
            self.append(layer, view.key[:, :, new], view.value[:, :, new])
        for own, one in zip(self.running, dense.running, strict=True):
            own.restore(one.checkpoint())
        self._gone = length - super().length()

    def view(self, layer: int, query: Tensor) -> KVView:
        if query.shape[2] != 1:
            raise ModelError("sparse_to_dense: the sparse memory shows one row at a time.")
        return super().view(layer, query)

    def accept(self, keep: int | Tensor) -> None:
        raise ModelError("sparse_to_dense: the sparse memory follows the dense one; accept there.")

    def truncate(self, length: int) -> None:
        if length != self.length():
            raise ModelError("sparse_to_dense: the sparse memory follows the dense one; truncate there.")

    def length(self) -> int:
        return super().length() + self._gone

    def select_sequences(self, rows: Tensor) -> None:
        raise ModelError("sparse_to_dense: the sparse memory is of one sequence.")


class _Sparse(DraftState, ForwardProbe):
    """Scores columns while the target reads the prompt; then drafts with its weights over `_Memory`."""

    def __init__(self, target: ModelView, choice: SparseToDense) -> None:
        self._target, self._choice = target, choice
        self._memory = _Memory(target.geometry.layers)
        self._scores: dict[int, Tensor] = {}
        self._runner: Runner | None = None
        self._dense: KVState | None = None
        self._fault: Exception | None = None
        self._steps = 0

    def begin(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._remaining = prompt.max_new_tokens or sys.maxsize
        layout = self._target.adapter.layout(self._target.model, prompt.inputs)
        self._layout = layout if prompt.past is None else prompt.past.append_turn(layout)
        self._asked = observation_columns(self._layout, layout.length)

    def target_prefill_probe(self) -> ForwardProbe:
        return self

    def read_attention_inputs(
        self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> None:
        self._dense = run.state
        if self._fault is None:
            try:
                assert run.state is not None
                self._score(run.start, layer, query, key, scale, run.state.view(layer, query))
            except Exception as error:  # the target's pass goes on; the draft is dropped after it
                self._fault = error

    def _score(self, start: int, layer: int, query: Tensor, key: Tensor, scale: float, view: KVView) -> None:
        held = self._held(layer)
        asked = self._asked if held is None else torch.searchsorted(held, self._asked)
        rows = asked[(asked >= start) & (asked < start + query.shape[2])]
        if not rows.numel():
            return
        rows = rows.to(key.device)
        group = query[0, :, rows - start].view(key.shape[1], -1, rows.numel(), query.shape[3]).float()
        columns = view_key_columns(view)
        seen = visible_columns_mask(view, columns, rows[:, None])
        weights = torch.einsum("ghnd,gmd->ghnm", group, key[0].float()) * scale
        paid = weights.masked_fill(~seen, -math.inf).softmax(-1).mean((1, 2))
        scores = paid.new_zeros(len(paid), int(columns[-1]) + 1).index_copy_(1, columns, paid)
        before = self._scores.get(layer)
        if before is not None:
            scores[:, : before.shape[1]] += before
        self._scores[layer] = scores

    def _held(self, layer: int) -> Tensor | None:
        """The columns of the prompt that a pruner has left `layer`; None: all."""
        dense = self._dense
        if not isinstance(dense, PrunedKVState):
            return None
        held = dense.held_indices(dense.part_index_of_layer(layer), self._layout.length)
        return None if held is None else held.to(self._asked.device)

    def observe_committed(self, committed: Tensor, kept: int) -> None:
        if self._runner is None:
            self._open()
        self._remaining -= committed.numel()
        self._last = committed[-1:]
        assert self._dense is not None
        self._memory.follow(self._dense, self._dense.length())

    def _open(self) -> None:
        """Choose columns, for each head of each layer, and let the target's weights run over them."""
        layers, dense = self._target.geometry.layers, self._dense
        if self._fault is not None:
            raise DraftError(f"sparse_to_dense: the prompt's columns were not scored: {self._fault}")
        if dense is None or len(self._scores) < layers:
            raise DraftError("sparse_to_dense: the target's prompt was not seen; give the whole prompt.")
        video = self._layout.modality[0] == VIDEO
        chosen = []
        for layer in range(layers):
            held, view = self._held(layer), dense.view(layer, torch.empty(0))
            columns = view_key_columns(view)
            shown = (video if held is None else video[held]).to(columns.device)
            there = visible_columns_mask(view, columns, int(columns[-1])) & (columns < len(shown))
            is_video = torch.zeros_like(there).masked_scatter(there, shown[columns[there]])
            at, rest = is_video.nonzero()[:, 0], (there & ~is_video).nonzero()[:, 0]
            count = max(share_token_count(self._choice.retention, at.numel()), min(1, at.numel()))
            scores = self._scores[layer].to(at.device)[:, columns[at]]
            heads = [torch.cat([rest, at[top_indices(score, count)]]).sort().values for score in scores]
            chosen.append(torch.stack(heads))
        self._scores = {}
        self._memory.take(dense, chosen, self._layout.length)
        model = self._target.model
        self._runner = adapter_for(model).runner(model, self._memory)
        self._runner.resume(self._prompt.inputs, self._prompt.past)

    def propose(self) -> Proposal:
        count = min(self._choice.window, self._remaining - 1)
        if count < 1 or self._runner is None:
            return Proposal.empty()
        feed = self._last
        ids: list[Tensor] = []
        before = self._prompt.ids[0]
        for _ in range(count):
            logits = self._runner.step(feed.to(self._target.device)[None])[0, -1]
            self._steps += 1
            if self._prompt.warp is not None:
                logits = self._prompt.warp(torch.cat([before, *ids]), logits)
            feed = logits.argmax(-1, keepdim=True).to(before.device)
            ids.append(feed)
        return Proposal(torch.cat(ids))

    def counters(self) -> dict[str, float]:
        return {"draft_steps": float(self._steps), "draft_held": float(self._memory.held_columns())}
