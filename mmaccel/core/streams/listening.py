"""Memory wrappers for a question: they record the target's attention, and prune a draft's retrieved tokens by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops.dense_attend import mean_attention_weights
from mmaccel.core.decoding.watching import QuestionAttention
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.memory.kv import CacheSlot, KVView, Stream, StreamPass, StreamState
from mmaccel.core.prefill.prune import Signals, Stage, TokenPruner
from mmaccel.core.prefill.recalled import RetrievedTokenPruning, WrappedMemory
from mmaccel.core.streams.parts import MemoryWrapper


class AttentionRecording(MemoryWrapper):
    """Wraps a target's memory (`depth` layers) for each question in an `AttentionRecordingMemory`, for a draft's `pruner`.

    For a pruner that reads hidden states, the input of its layers is kept on the host for each token of units (frames), in
    order: ``states[layer]``, pieces [n, E].
    """

    def __init__(self, pruner: TokenPruner, depth: int) -> None:
        (self._stage,), self._made = pruner.pruning_stages(depth), list[AttentionRecordingMemory]()
        self._pruner = pruner
        self.states: dict[int, list[Tensor]] = {layer: [] for layer in self._stage.hidden}
        self._asked: dict[int, Tensor] = {}

    def run_options(self, kind: str) -> dict[str, Any]:
        def note(layer: int, hidden: Tensor) -> None:
            if kind == "units":
                self.states[layer].append(hidden[0].detach().cpu())
            else:
                self._asked[layer] = hidden[0].detach()

        heard = self.states if kind in ("units", "question") else ()
        return {"input_hooks": {layer: partial(note, layer) for layer in heard}} if heard else {}

    def unit_hidden_states(self, layer: int) -> Tensor:
        """Return the recorded hidden states [n, E] that entered `layer`, for the tokens of all units (frames)."""
        if len(self.states[layer]) > 1:
            self.states[layer] = [torch.cat(self.states[layer])]
        return self.states[layer][0] if self.states[layer] else torch.zeros(0, 1)

    def forget_after(self, tokens: int) -> None:
        self.states = {
            layer: [self.unit_hidden_states(layer)[:tokens]] if tokens else [] for layer in self.states
        }

    def _score(self, unit: int, words: tuple[int, int] | None, tokens: Tensor) -> Tensor:
        """[1, n] what the pruner thinks of `tokens` [n] of units, by their states and those of the question's words."""
        if any(len(self.unit_hidden_states(layer)) <= int(tokens[-1]) for layer in self.states):
            raise ModelError(
                f"prune {self._pruner.name!r} did not hear the frames that were read before; watch them under this recipe."
            )
        first, end = words or (0, None)
        asked = [self._asked[layer][first:end].to(tokens.device) for layer in self._stage.hidden]
        shown = [
            self.unit_hidden_states(layer)[tokens.cpu()].to(tokens.device) for layer in self._stage.hidden
        ]
        hidden = torch.stack([torch.cat(pair) for pair in zip(shown, asked, strict=True)])
        count, home = len(tokens), tokens.device
        is_video = torch.arange(hidden.shape[1], device=home) < count
        frame = torch.nn.functional.pad(tokens // unit, (0, len(is_video) - count), value=-1)
        layout = TokenLayout.build(torch.where(is_video, VIDEO, TEXT)[None], frame=frame[None])
        at = torch.arange(count, device=home)
        score: Tensor = self._pruner.score_candidates(Signals(hidden=hidden), layout, at)  # type: ignore[attr-defined]
        return (score - score.amin() + 1)[None].float()

    def __call__(
        self, state: StreamState, stream: Stream, before: int, numbers: Sequence[int]
    ) -> StreamState:
        self._made = [AttentionRecordingMemory(state, self._stage, stream, before, numbers)]
        return self._made[0]

    def recorded_attention(self) -> QuestionAttention | None:
        """Return the attention of the last question to frames, or None; can be read once."""
        made, self._made = self._made, []
        return made[0].recorded_attention(self._score if self.states else None) if made else None


class AttentionRecordingMemory(WrappedMemory):
    """Wraps the memory `state` and records, for a draft's pruner, the question's attention to frames at the layers that
    `stage` reads; for a pruner that reads hidden states, which tokens of frames any layer sees.

    Layers that are read run without CUDA graphs during the question, and with them from the answer's first token on. A
    pruner of the target acts after the recording, so tokens that it drops are recorded too.
    """

    def __init__(
        self, state: StreamState, stage: Stage, stream: Stream, before: int, numbers: Sequence[int]
    ) -> None:
        super().__init__(state)
        self._stage, self._stream, self._before, self._numbers = stage, stream, before, numbers
        self._layers = {layer for group in stage.attention for layer in group}
        self._heard: dict[int, tuple[Tensor, Tensor]] = {}
        self._words: tuple[int, int] | None = None

    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        if stream_pass.kind == "question":
            self._words = stream_pass.words

    def _listens(self, layer: int) -> bool:
        return self._pass is not None and self._pass.kind == "question" and layer in self._layers

    def new_kv_slot(self, layer: int, query: Tensor) -> CacheSlot | None:
        return None if self._listens(layer) else self.state.new_kv_slot(layer, query)

    def new_kv_slots(self) -> list[CacheSlot] | None:
        return self.state.new_kv_slots()

    def view(self, layer: int, query: Tensor) -> KVView:
        view = self.state.view(layer, query)
        sees = bool(self._stage.hidden) and self._pass is not None and self._pass.kind == "question"
        if self._listens(layer) or sees:
            base = view.key.shape[2] - self._tail
            first = self._stream.head + self.state.count_summary_columns(layer)
            tokens, rows = self.state.seen_tokens(layer), self._tail - self._before
            if tokens is not None and len(tokens) == base - first > 0:
                if sees:
                    self._heard[layer] = (tokens.to(view.key.device),) * 2
                    return view
                key, turned = view.key[0], query if view.query is None else view.query
                at = torch.arange(key.shape[1] - rows, key.shape[1], device=key.device)
                looks = mean_attention_weights(
                    turned[0, :, -rows:], key, at, key.shape[-1] ** -0.5, view.bias
                )
                self._heard[layer] = tokens.to(key.device), looks.mean(0)[first:base]
        return view

    def recorded_attention(self, score: Callable[..., Tensor] | None = None) -> QuestionAttention:
        """Return the question's attention to each visual token that it saw, one row for each group of layers that the pruner
        reads. With `score`, for a pruner of hidden states, the one row is what `score` returns for these tokens."""
        groups, unit = self._stage.attention, self._stream.tokens_per_unit
        if not self._heard:
            none, rows = torch.zeros(0, dtype=torch.long), 1 if score else len(groups)
            return QuestionAttention(self._stage, unit, none, torch.zeros(rows, 0))
        home = next(iter(self._heard.values()))[0].device
        parts = {layer: (tokens.to(home), looks.to(home)) for layer, (tokens, looks) in self._heard.items()}
        tokens = torch.unique(torch.cat([one for one, _ in parts.values()]))
        out = torch.zeros(len(groups), len(tokens), device=home)
        if score is not None:
            out = score(unit, self._words, tokens)
        for n, group in enumerate(groups):
            for layer in group:
                if layer in parts:
                    one, looks = parts[layer]
                    out[n].index_add_(0, torch.searchsorted(tokens, one), looks / len(group))
        numbers = torch.tensor(self._numbers, dtype=torch.long, device=home)
        return QuestionAttention(self._stage, unit, numbers[tokens // unit] * unit + tokens % unit, out)


class GuidedRetrievalWrapper(MemoryWrapper):
    """Wraps a draft's memory in a `GuidedRetrieval` for one question.

    counts  numbers of visual tokens that it showed
    paid    unit (frame) number -> attention that the target's question paid to it
    """

    def __init__(self, pruner: TokenPruner, heard: QuestionAttention) -> None:
        self._pruner, self._heard = pruner, heard
        self.counts: dict[str, float] = {}
        units, paid = (heard.tokens // heard.tokens_per_unit).tolist(), heard.paid.sum(0).tolist()
        self.paid = dict.fromkeys(units, 0.0)
        for number, weight in zip(units, paid, strict=True):
            self.paid[number] += weight

    def __call__(
        self, state: StreamState, stream: Stream, before: int, numbers: Sequence[int]
    ) -> StreamState:
        made = GuidedRetrieval(state, self._pruner, stream, before, self._heard, numbers)
        self.counts = made.counts
        return made


class GuidedRetrieval(RetrievedTokenPruning):
    """A draft's stream memory during a question: each layer shows only those of its retrieved tokens that the draft's
    `pruner` keeps.

    The pruner's signal is the attention that the target's question paid to the same tokens (`QuestionAttention`), as one
    row; 0 for tokens that the target did not see. If a memory cannot tell which tokens it shows, all have equal scores, and
    the pruner by attention then chooses evenly spaced ones.
    """

    def __init__(
        self,
        state: StreamState,
        pruner: TokenPruner,
        stream: Stream,
        before: int,
        heard: QuestionAttention,
        numbers: Sequence[int],
    ) -> None:
        super().__init__(state, pruner, stream, 0, before)
        self._heard, self._numbers = heard, numbers
        self._stages, self._first = {0: heard.stage}, 0
        self.counts |= {"visual from layer 0": 0.0}

    def _signals(self, attention: list[Tensor]) -> Signals:
        return Signals(score=attention[0][0]) if self._heard.stage.hidden else super()._signals(attention)

    def _drop(self, layer: int, view: KVView, query: Tensor, layout: TokenLayout, alike: bool) -> None:
        tokens, unit = self.state.seen_tokens(layer), self._stream.tokens_per_unit
        first, base = self._stream.head + self.state.count_summary_columns(layer), layout.length - self._tail
        looks = torch.zeros(len(self._heard.paid), 1, layout.length, device=layout.device)
        if tokens is not None and len(tokens) == base - first:
            tokens = tokens.to(layout.device)
            numbers = torch.tensor(self._numbers, dtype=torch.long, device=layout.device)
            looks[:, 0, first:base] = self._heard.attention_to(numbers[tokens // unit], tokens % unit, unit)
        self._columns[layer] = self._cut(self._heard.stage, list(looks), layout, None)
