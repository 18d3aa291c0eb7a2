"""Visual-token pruning of the target model: tokens of the prompt are dropped before the language model or between its
layers.

A dropped token leaves hidden states, RoPE angles, layout and KV cache of every later layer, so the rest costs as much as a
shorter prompt. Callers still see all tokens: outputs have a zero row for each dropped token, and the length of a
`PrunedKVState` includes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.backends.ops.dense_attend import mean_attention_weights
from mmaccel.core.adapter import Geometry
from mmaccel.core.errors import ModelError, RecipeError, warn
from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.memory.thinned import PrunedKVState
from mmaccel.core.prefill.attention import PASS, ForwardPass
from mmaccel.core.prefill.prune import (
    KeptTokens,
    Signals,
    Stage,
    TokenPruner,
    check_kept_columns,
    kept_layout,
    observation_columns,
)
from mmaccel.core.prefill.recalled import warn_idle_pruner
from mmaccel.models import deepstack
from mmaccel.models.install import Hooks, PrefillHook
from mmaccel.models.prompt_layout import slice_inputs
from mmaccel.models.signals import VisionAttentionProbe, reads_vision_tower

Go = Callable[[ForwardPass, dict[str, Any]], Any]

DEEPSTACK = "_deepstack_process"
"""The method of a text model that adds DeepStack's features to the visual tokens behind a layer."""
LATER = "prune {name!r} left the images and videos of this turn whole: it acts on the first prompt of a cache"


@dataclass(eq=False)
class _Work:
    """The state of one pruned pass, of a prompt or of a decoded token: the signals caught for the next cut, and the layers'
    arguments since the last.

    layout  of the columns that the cuts have left so far
    total   candidates that the prompt had before any cut; 0 for a token
    """

    run: ForwardPass
    state: PrunedKVState
    layout: TokenLayout
    total: int
    hidden: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class LayerInputHook(PrefillHook):
    """Forward pre-hook of decoder layer `index`: while a prompt is pruned, replaces the layer's inputs by `enter(...)`."""

    index: int
    enter: Callable[..., Any]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = kwargs.get(PASS)
        if not isinstance(run, ForwardPass) or run.pruning is None:
            return None
        return self.enter(self.index, module, args, kwargs, run.pruning)


class PrefillTokenPruning:
    """Applies the recipe's token pruner in the prefill of one accelerated model."""

    def __init__(self, hooks: Hooks, model: nn.Module, family: Any, pruner: TokenPruner, depth: int) -> None:
        self.pruner, self.family, self.model = pruner, family, model
        self.stages = {stage.layer: stage for stage in pruner.pruning_stages(depth)}
        self.vision = VisionAttentionProbe(hooks, model, family) if reads_vision_tower(pruner) else None
        self._here = threading.local()
        if hasattr(text := family.text_model(model), DEEPSTACK):
            hooks.wrap(text, DEEPSTACK, self._add_features)
        if pruner.stage == "layer":
            first = min(min([*stage.hidden, stage.layer - 1]) for stage in self.stages.values())
            for index, layer in enumerate(family.attended_layers(model)):
                if index >= first:
                    hooks.add_pre_hook(layer, LayerInputHook(index, self._enter))

    def forward(self, run: ForwardPass, kwargs: dict[str, Any], go: Go) -> Any:
        """Run the text model on new tokens and drop those that the pruner rejects. `go(run, kwargs)`: its forward."""
        state = run.state
        if state is not None and state.follows and run.start:
            return go(run, kwargs)
        if not isinstance(state, PrunedKVState):
            raise ModelError(
                f"past_key_values: prune {self.pruner.name!r} keeps a cache of its own; leave past_key_values and kv out."
            )
        if run.layout.batch > 1:
            raise ModelError(
                f"prune {self.pruner.name!r} takes one sequence; set batch, num_beams and num_return_sequences to 1."
            )
        count = run.layout.length - run.start
        prompt = run.start == 0 and run.prefill
        if prompt and (kwargs.get("output_hidden_states") or kwargs.get("output_attentions")):
            raise ModelError(
                "output_hidden_states and output_attentions: the layers of a pruned prompt differ in length; leave them out."
            )
        state.expect_new_columns(count)
        total = 0
        if prompt:
            state.begin_prompt(run.layout)
            total = self.pruner.candidates(run.layout).numel()
            if not total:
                warn_idle_pruner(self.pruner, run.config.meter)
        elif run.prefill and self.pruner.candidates(run.layout.select_tokens(slice(run.start, None))).numel():
            run.config.meter.add_note(sentence := LATER.format(name=self.pruner.name))
            warn(f"{sentence}.")
        work = _Work(run, state, run.layout, total)
        self._here.kept = state.kept
        if 0 in self.stages:
            out = go(*self._before(work, prompt, kwargs))
        else:
            out = go(replace(run, pruning=work), kwargs)
        columns = state.held_indices(len(state.kept) - 1, count) if prompt else None
        if columns is not None:
            for one in kwargs["past_key_values"].states.values():
                one.set_prompt_length(count)
            short = out.last_hidden_state
            whole = short.new_zeros(1, count, short.shape[-1])
            out.last_hidden_state = whole.index_copy(1, columns, short)
        return out

    def _add_features(self, add: Callable[..., Any], hidden: Tensor, where: Tensor, features: Tensor) -> Any:
        """Add to what the cuts have left its DeepStack features, of those of the whole prompt."""
        if hidden.shape[1] < where.shape[1]:
            given = {deepstack.WHERE: where, deepstack.FEATURES: [features]}
            left = deepstack.slice_features(given, self._here.kept[-1].to(where.device))
            where, (features,) = left.values()
        return add(hidden, where, features)

    def _before(
        self, work: _Work, prompt: bool, kwargs: dict[str, Any]
    ) -> tuple[ForwardPass, dict[str, Any]]:
        """The cut before the language model."""
        run, state, kwargs = work.run, work.state, dict(kwargs)
        if prompt:
            embeds = kwargs.get("inputs_embeds")
            if embeds is None:
                embeds = self.model.get_input_embeddings()(kwargs["input_ids"])  # type: ignore[operator]
            kwargs["input_ids"] = None
            signals = Signals(hidden=embeds)
            if self.vision is not None:
                signals.update(self.vision.pop_signals(run.layout))
            kept = self._cut(work, self.stages[0], signals, embeds[0])
            if kept is not None:
                kwargs = slice_inputs(kwargs, kept.columns)
            kwargs["inputs_embeds"] = embeds if kept is None else self._left(embeds, kept)
        if state.kept[0] is None:
            return run, kwargs
        run, old = self._thin(run, state, 0), kwargs.get("position_ids")
        if self.pruner.compact and old is not None:
            kwargs["position_ids"] = _numbered(run).to(old.device).expand_as(old)
        return run, kwargs

    def _enter(
        self, index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], work: _Work
    ) -> Any:
        """Before a layer: catch what a cut will read, cut, and give the layer what is left."""
        kwargs = {**kwargs, **work.given}
        hidden: Tensor = args[0]
        stage, coming = self.stages.get(index), self.stages.get(index + 1)

        def catch(reader: Stage | None) -> None:
            if reader is not None and any(index in group for group in reader.attention):
                angles, rows = kwargs["position_embeddings"], observation_columns(work.layout)
                work.attention[index] = self._peek(index, module, hidden, angles, rows)

        if work.total:
            if any(index in other.hidden for other in self.stages.values()):
                work.hidden[index] = hidden[0]
            if stage is not None:
                catch(stage)
                hidden, kwargs = self._between(index, stage, hidden, kwargs, work)
            catch(coming)
        elif stage is not None:
            kwargs = self._go_on(index, kwargs, work)
        return (hidden, *args[1:]), kwargs

    def _peek(
        self, index: int, layer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor], at: Tensor
    ) -> Tensor:
        """[n, S]: the attention that rows `at` [n] of `hidden` [1, S, E] will pay in `layer`, a mean over heads.

        angles  cosines and sines [1, S, D] of all columns
        """
        x, family = layer.input_layernorm(hidden), self.family
        cos, sin = (angle[:, None] for angle in angles)
        key = family.apply_rope(family.project_key(self.model, index, x), (cos, sin))
        query = family.project_query(self.model, index, x[:, at])
        query = family.apply_rope(query, (cos[:, :, at], sin[:, :, at]))
        return mean_attention_weights(query[0], key[0], at, query.shape[-1] ** -0.5)

    def _between(
        self, index: int, stage: Stage, hidden: Tensor, kwargs: dict[str, Any], work: _Work
    ) -> tuple[Tensor, dict[str, Any]]:
        signals = Signals()
        if stage.attention:
            means = [torch.stack([work.attention[n] for n in group]).mean(0) for group in stage.attention]
            signals["attention"] = torch.stack(means)
        if stage.hidden:
            signals["hidden"] = torch.stack([work.hidden[layer] for layer in stage.hidden])
        kept = self._cut(work, stage, signals, hidden[0])
        if kept is None:
            return hidden, kwargs
        work.hidden = {layer: states[kept.columns] for layer, states in work.hidden.items()}
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = cos[..., kept.columns, :], sin[..., kept.columns, :]
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][..., kept.columns]
        return self._left(hidden, kept), self._go_on(index, kwargs, work)

    def _go_on(self, index: int, kwargs: dict[str, Any], work: _Work) -> dict[str, Any]:
        """From here to the next cut the layers get the thinned run, and their angles."""
        part = work.state.part_index_of_layer(index)
        if work.state.kept[part] is None:
            return kwargs
        run, angles = self._thin(work.run, work.state, part), kwargs["position_embeddings"]
        if self.pruner.compact:
            flat = _numbered(run)[None]
            flat = flat.expand(3, -1, -1) if self.family.mrope else flat
            angles = self.family.rotary_module(self.model)(angles[0], flat)
        # The work travels on in the run, so that the next cut finds it.
        work.given = {
            PASS: replace(run, pruning=work),
            "position_embeddings": angles,
            "position_ids": kwargs.get("position_ids"),
        }
        return {**kwargs, **work.given}

    def _cut(self, work: _Work, stage: Stage, signals: Signals, states: Tensor) -> KeptTokens | None:
        """Ask the pruner, and write down what it keeps; None when that is everything, as it was."""
        layout, part, kept = work.layout, work.state.part_index_of_layer(stage.layer), None
        if work.total:
            kept = self.pruner.prune(signals, layout, stage, work.total)
            check_kept_columns(self.pruner, kept.columns, layout)
        if kept is None or (kept.columns.numel() == layout.length and kept.states is None):
            work.state.keep_columns(part, None, layout)
            return None
        if int(kept.columns[-1]) != layout.length - 1:
            # The last column is the one that answers.
            end = kept.columns.new_tensor([layout.length - 1])
            kept_states = None if kept.states is None else torch.cat([kept.states, states[-1:]])
            kept = KeptTokens(torch.cat([kept.columns, end]), kept_states)
        work.layout = kept_layout(layout, kept.columns)
        work.state.keep_columns(part, kept.columns, work.layout)
        return kept

    @staticmethod
    def _left(states: Tensor, kept: KeptTokens) -> Tensor:
        """[1, n, E] of states [1, S, E]."""
        return states[:, kept.columns] if kept.states is None else kept.states[None]

    @staticmethod
    def _thin(run: ForwardPass, state: PrunedKVState, part: int) -> ForwardPass:
        return replace(
            run, layout=state.layout_of(part, run.layout), start=state.count_held_columns(part, run.start)
        )


def _numbered(run: ForwardPass) -> Tensor:
    """[n]: the positions of the new columns of a thinned run, its columns numbered anew; a tree's by their depth."""
    rows, device = run.layout.length - run.start, run.layout.device
    if run.branches is None:
        return torch.arange(run.start, run.start + rows, device=device)
    return run.branches.depth.to(device) + run.start - (run.branches.sees.shape[1] - rows)


def kept_tokens_per_frame(pruner: TokenPruner, tokens: int) -> int:
    """Return how many of a frame's `tokens` `pruner` keeps on a stream; raises `RecipeError` if none."""
    left = pruner.kept_token_count(tokens)
    if not left:
        raise RecipeError(
            f"prune {pruner.name!r} keeps none of the {tokens} tokens of a frame, and a stream needs some of each; give it "
            "a larger share."
        )
    return left


def prune_frames(
    pruner: TokenPruner,
    shape: Geometry,
    rows: Tensor,
    frames: int,
    tokens: int,
    vision: VisionAttentionProbe | None,
) -> tuple[Tensor, Tensor]:
    """Apply `pruner` to visual features `rows` [frames * tokens + m, E], the last m of separator tokens. Return the kept
    features [n, P, E], P tokens for each of n groups of frames that the pruner treats as one, and the separators [m, E]."""
    inside, left, each = frames * tokens, kept_tokens_per_frame(pruner, tokens), tokens * pruner.group
    place = torch.arange(len(rows), device=rows.device)[None]
    frame = torch.where(place < inside, place // tokens, -1)
    layout = TokenLayout.build(torch.full_like(place, VIDEO), frame=frame)
    signals = Signals(hidden=rows[None, :, : shape.hidden])
    if vision is not None:
        signals.update(vision.pop_signals(layout))
    kept = pruner.prune(signals, layout, pruner.pruning_stages(shape.layers)[0])
    columns = check_kept_columns(pruner, kept.columns, layout)
    counts = torch.bincount(columns[columns < inside] // each, minlength=inside // each)
    if bool((counts != left).any()):
        raise RecipeError(
            f"prune {pruner.name!r} does not leave {left} tokens of each unit, as it says, and a stream needs equally "
            "many of each; correct its method left."
        )
    states, end = rows[columns], left * len(counts)
    if kept.states is not None:  # what DeepStack adds to a token stays its own
        states = torch.cat([kept.states, states[:, shape.hidden :]], 1)
    return states[:end].view(len(counts), left, -1), states[end:]
