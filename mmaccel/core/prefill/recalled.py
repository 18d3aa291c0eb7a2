"""Token pruning for a question on a stream: of what each layer retrieves, the question and its answer see only a part.

The video was prefilled before the question came: its hidden states are gone, its keys and values stay. What a pruner drops
between two layers is hidden from later layers. Letters: H query heads, N columns that a layer shows, n rows of a question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops.dense_attend import mean_attention_weights
from mmaccel.core.errors import ModelError, warn
from mmaccel.core.layout import MODALITIES, TEXT, VIDEO, TokenLayout
from mmaccel.core.memory.kv import (
    CacheSlot,
    KVView,
    Stream,
    StreamPass,
    StreamState,
    UnitEvidence,
    grow_buffer,
)
from mmaccel.core.memory.relay import make_delegate
from mmaccel.core.prefill.prune import Signals, Stage, TokenPruner, check_kept_columns, kept_layout
from mmaccel.core.report import Meter


def _own(around: WrappedMemory, name: str, *given: Any, **named: Any) -> Any:
    return getattr(around.state, name)(*given, **named)


class WrappedMemory(StreamState):
    """Wraps the stream memory `state` for one question and its answer; methods not overridden call those of `state`."""

    def __init__(self, state: StreamState) -> None:
        self.state = state
        self._pass: StreamPass | None = None
        self._start = self._tail = 0
        # Of each layer the columns before the question that it shows, if not all, and these in buffers of their own.
        self._columns: dict[int, Tensor] = {}
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def recalls_alike(self) -> bool:  # type: ignore[override]
        return self.state.recalls_alike

    def begin_pass(self, stream_pass: StreamPass) -> None:
        if stream_pass.kind == "question":
            self._start = self.state.length()
        self._pass, self._tail = stream_pass, self.state.length() - self._start + stream_pass.rows
        self.state.begin_pass(stream_pass)

    view = new_kv_slot = count_summary_columns = seen_tokens = record_shown_columns = record_sparse_rows = (
        append
    ) = receive_hidden = end_pass = make_delegate(_own)
    accept = truncate = length = held_columns = units = reset = checkpoint = restore = make_delegate(_own)

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        with self.state.question_scope():
            yield

    def _shown(self, layer: int, view: KVView, base: int) -> KVView:
        """Of a view the columns that `layer` shows, and the rows of question and answer as the memory has them now."""
        columns = self._columns.get(layer)
        if columns is None:
            return view
        count, parts = len(columns), (view.key, view.value)
        held = self._held.get(layer) or tuple(part.index_select(2, columns) for part in parts)
        key, value = (grow_buffer(one, 2, count + self._tail, used=count) for one in held)
        for side, part in zip((key, value), parts, strict=True):
            side[:, :, count : count + self._tail] = part[:, :, base:]
        self._held[layer], end = (key, value), count + self._tail
        layout = view.layout
        if layout is not None:
            tail = torch.arange(base, layout.length, device=layout.device)
            layout = kept_layout(layout, torch.cat([columns, tail]))
        return replace(view, key=key[:, :, :end], value=value[:, :, :end], layout=layout)


def warn_idle_pruner(pruner: TokenPruner, meter: Meter) -> None:
    """Warn, and note in the report, that `pruner` had nothing to do: the prompt has no tokens of a kind that it prunes."""
    what = " or ".join(sorted(f"{MODALITIES[kind]} tokens" for kind in pruner.prunes))
    meter.add_note(sentence := f"prune {pruner.name!r} did nothing: the prompt has no {what}")
    warn(f"{sentence}.")


class TimeRangeMemory(WrappedMemory):
    """Wraps the stream memory `state` so that a question sees only the head and the units (frames) `first` to `end` - 1.

    Summary tokens are hidden, as they stand for other units too. `count`: unit tokens in the layer that shows most of them.
    """

    def __init__(self, state: StreamState, stream: Stream, first: int, end: int) -> None:
        super().__init__(state)
        self._stream, self._first, self._end, self.count = stream, first, end, 0

    def new_kv_slot(self, layer: int, query: Tensor) -> CacheSlot | None:
        return None

    def count_summary_columns(self, layer: int) -> int:
        return 0

    def evidence(self) -> dict[int, UnitEvidence]:
        """Return the evidence of the units (frames) of the time range alone."""
        found = self.state.evidence().items()
        return {number: seen for number, seen in found if self._first <= number < self._end}

    def seen_tokens(self, layer: int) -> Tensor | None:
        tokens = self.state.seen_tokens(layer)
        return None if tokens is None else tokens[self._inside(tokens)]

    def _inside(self, tokens: Tensor) -> Tensor:
        units = tokens // self._stream.tokens_per_unit
        return (units >= self._first) & (units < self._end)

    def view(self, layer: int, query: Tensor) -> KVView:
        view = self.state.view(layer, query)
        base, head = view.key.shape[2] - self._tail, self._stream.head
        if self._pass is not None and self._pass.kind == "question":
            tokens, first = self.state.seen_tokens(layer), head + self.state.count_summary_columns(layer)
            tokens = torch.zeros(0, dtype=torch.long) if tokens is None else tokens
            if len(tokens) != base - first:
                raise ModelError(
                    "between: this memory does not tell which frames it shows; choose another kv."
                )
            inside = self._inside(tokens).nonzero()[:, 0].to(view.key.device)
            self._columns[layer] = torch.cat([torch.arange(head, device=inside.device), first + inside])
            self.count = max(self.count, len(inside))
            self.state.record_shown_columns(layer, self._columns[layer])
        return replace(self._shown(layer, view, base), bias=None)


class RetrievedTokenPruning(WrappedMemory):
    """Wraps the stream memory `state` so that a question and its answer see only the visual tokens that `pruner` keeps.

    The head, summary tokens and all rows of the question stay, including images, other videos and an incomplete unit (frame)
    in it. If all layers show the same columns, a stage drops tokens by the attention of the layers it names, for all later
    layers. If layers retrieve different units (`StreamState.recalls_alike`), each layer from a stage on drops to the stage's
    share by its own attention. The same holds for what a decoded token sees (`TokenPruner.scoring_layer`). The memory keeps
    what is dropped.

    counts  figures for the report: "visual", the number of visual tokens retrieved, and the number left after each stage;
            of layers that differ, that of the layer with most
    """

    def __init__(
        self, state: StreamState, pruner: TokenPruner, stream: Stream, depth: int, before: int
    ) -> None:
        """The first `before` rows of the question are no words: they stand for frames and pictures."""
        super().__init__(state)
        self.pruner, self._stream, self._depth, self._before = pruner, stream, depth, before
        self._stages = {s.layer: s for s in (pruner.pruning_stages(depth) if pruner.stage == "layer" else ())}
        scoring = depth if pruner.scoring_layer is None else pruner.scoring_layer
        self._scoring, self._first = scoring, min([scoring, *(layer - 1 for layer in self._stages)])
        self._layouts: dict[tuple[int, int, torch.device], TokenLayout] = {}
        # Of layers that show the same: the columns that cuts have left, and what was paid to them.
        self._left: Tensor | None = None
        self._paid: dict[int, Tensor] = {}
        # Of each layer by which a decoded token's view is chosen: what the last token paid, and what was chosen.
        self._glanced: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.counts = dict.fromkeys(["visual", *map(_name, self._stages)], 0.0)

    def new_kv_slot(self, layer: int, query: Tensor) -> CacheSlot | None:
        return self.state.new_kv_slot(layer, query) if layer < self._first else None

    def view(self, layer: int, query: Tensor) -> KVView:
        view, stream_pass = self.state.view(layer, query), self._pass
        assert stream_pass is not None
        base = view.key.shape[2] - self._tail
        first = self._stream.head + self.state.count_summary_columns(layer)
        alike = self.state.recalls_alike or base - first == self.state.units() * self._stream.tokens_per_unit
        query = query if view.query is None else view.query
        if stream_pass.kind == "question":
            if base > first and VIDEO in self.pruner.prunes:
                self._count("visual", base - first)
                self._drop(layer, view, query, self._layout(first, base, view.key.device), alike)
                self._tell(layer, first)
        elif stream_pass.rows == 1 and layer >= self._scoring and base > first:
            return self._glancing(layer, view, query, first, base, alike)
        return self._shown(layer, view, base)

    def limit_evidence(
        self, found: Mapping[int, UnitEvidence], numbers: Sequence[int]
    ) -> dict[int, UnitEvidence]:
        """Return the memory's evidence of units (frames) without the layers that see no token of them that is left.
        `numbers`: those by which `found` names the memory's units, in their order."""
        lost = Counter[int]()
        for layer, columns in self._columns.items():
            if (tokens := self.state.seen_tokens(layer)) is None:
                continue
            seen = tokens // self._stream.tokens_per_unit
            first = self._stream.head + self.state.count_summary_columns(layer)
            left = seen[(columns[columns >= first] - first).to(seen.device)]
            lost.update(
                numbers[unit] for unit in {*torch.unique(seen).tolist()} - {*torch.unique(left).tolist()}
            )
        layers, made = max(1, self._depth), dict[int, UnitEvidence]()
        for unit, one in found.items():
            share = max(0.0, one.share - lost[unit] / layers)
            if share or not one.share:
                part = share / one.share if one.share else 0.0
                made[unit] = replace(one, share=share, retrieved=one.retrieved * part)
        return made

    def _drop(self, layer: int, view: KVView, query: Tensor, layout: TokenLayout, alike: bool) -> None:
        """Note which columns `layer` shows to the question."""
        stage, coming, home = self._stages.get(layer), self._stages.get(layer + 1), view.key.device
        # Of a layer before that may lie on another device.
        self._left = None if self._left is None else self._left.to(home)
        self._paid = {number: one.to(home) for number, one in self._paid.items()}
        if not alike:
            if reached := [at for at in self._stages if at <= layer]:
                stage = self._stages[reached[-1]]
                means = [self._looks(view, query, None)] * len(stage.attention)
                self._columns[layer] = self._cut(stage, means, layout, None)
            return
        if stage is not None:
            self._read(stage, layer, view, query)
            means = [torch.stack([self._paid[n] for n in group]).mean(0) for group in stage.attention]
            self._left = self._cut(stage, means, layout, self._left)
            self._paid.clear()
        self._read(coming, layer, view, query)
        if self._left is not None:
            self._columns[layer] = self._left

    def _read(self, stage: Stage | None, layer: int, view: KVView, query: Tensor) -> None:
        if stage is not None and any(layer in group for group in stage.attention):
            self._paid[layer] = self._looks(view, query, self._left)

    def _looks(self, view: KVView, query: Tensor, left: Tensor | None) -> Tensor:
        """[n, N]: what the words of the question pay to the columns of a view, of those before it to `left` alone."""
        rows = self._tail - self._before
        key, base = view.key[0], view.key.shape[2] - self._tail
        if left is not None:
            key = key[:, torch.cat([left, torch.arange(base, key.shape[1], device=key.device)])]
        at = torch.arange(key.shape[1] - rows, key.shape[1], device=key.device)
        return mean_attention_weights(query[0, :, -rows:], key, at, key.shape[-1] ** -0.5, view.bias)

    def _cut(self, stage: Stage, attention: list[Tensor], layout: TokenLayout, left: Tensor | None) -> Tensor:
        """[k] the columns before the question that stay at `stage`, of those that are `left` (None: all)."""
        base, total = layout.length - self._tail, self.pruner.candidates(layout).numel()
        columns = torch.arange(layout.length, device=layout.device)
        if left is not None:
            columns = torch.cat([left, columns[base:]])
            layout = kept_layout(layout, columns)
        if self.pruner.candidates(layout).numel():
            signals = self._signals(attention)
            kept = self.pruner.keep(signals, layout, stage, total)
            columns = columns[check_kept_columns(self.pruner, kept, layout)]
        return columns[: len(columns) - self._tail]

    def _signals(self, attention: list[Tensor]) -> Signals:
        return Signals(attention=torch.stack(attention)) if attention else Signals()

    def _tell(self, layer: int, first: int) -> None:
        """Count what `layer` shows, and tell the memory, whose evidence weighs that alone."""
        if (columns := self._columns.get(layer)) is not None:
            self._count(_name(max(at for at in self._stages if at <= layer)), len(columns) - first)
            self.state.record_shown_columns(layer, columns)

    def _count(self, name: str, count: int) -> None:
        self.counts[name] = max(self.counts[name], float(count))

    def _glancing(
        self, layer: int, view: KVView, query: Tensor, first: int, base: int, alike: bool
    ) -> KVView:
        """What a decoded token sees at a layer from `TokenPruner.scoring_layer` on."""
        device = view.key.device
        held = self._columns.get(layer)
        at = torch.arange(first, base, device=device) if held is None else held[held >= first]
        by = self._scoring if alike else layer
        if layer == by and (alike or layer > self._scoring):
            column = torch.tensor([view.key.shape[2] - 1], device=device)
            scale = view.key.shape[-1] ** -0.5
            looks = mean_attention_weights(query[0], view.key[0], column, scale, view.bias)[0, at]
            before, chosen = self._glanced.get(layer, (None, None))
            new = self.pruner.recalled_columns(looks, at, before)
            self._glanced[layer] = looks, chosen if new is None else new
        chosen = self._glanced[by][1] if layer > self._scoring else None
        if chosen is None:
            return self._shown(layer, view, base)
        chosen = chosen.to(device)
        chosen = chosen if held is None else chosen[torch.isin(chosen, held)]
        self.counts["visual seen decoding"] = float(len(chosen))
        ends = torch.arange(first, device=device), torch.arange(base, view.key.shape[2], device=device)
        columns = torch.cat([ends[0], chosen, ends[1]])
        key, value = (side.index_select(2, columns) for side in (view.key, view.value))
        return replace(view, key=key, value=value)

    def _layout(self, first: int, base: int, device: torch.device) -> TokenLayout:
        """What the columns of a question's view are, of which those from `first` to `base` are units; one for all layers
        that show as many."""
        if (first, base, device) not in self._layouts:
            place = torch.arange(base + self._tail, device=device)[None]
            inside = (place >= first) & (place < base)
            unit, (ahead, behind) = self._stream.tokens_per_unit, self._stream.words
            if (base - first) % unit == 0:  # else what is shown are single tokens, of which it is not known
                at = (place - first) % unit
                inside &= (at >= ahead) & (at < unit - behind)
            frame = torch.where(inside, (place - first) // unit, -1)
            words = ~inside & (place >= first) & (place < base)
            text = words | (place < self._stream.head) | (place >= base + self._before)
            self._layouts[first, base, device] = TokenLayout.build(
                torch.where(text, TEXT, VIDEO), frame=frame
            )
        return self._layouts[first, base, device]


def _name(layer: int) -> str:
    return f"visual from layer {layer}"
