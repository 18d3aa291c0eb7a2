"""Decode steps of static shapes, bound by memory bandwidth: each reads the weights and the KV cache once.

Whatever depends on the sequence's length is in a tensor: `columns` holds the cache slots that keys are written to, and a row
attends to the slots up to its own. So on CUDA a step is captured as one graph for each number of rows and replayed at every
length, without Python launching kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.backends.ops.layer_ops import WINDOW, SeparateKVCaches
from mmaccel.core.adapter import TokenTree
from mmaccel.core.attach import attached
from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.core.errors import ModelError
from mmaccel.core.memory.kv import KVState
from mmaccel.core.memory.thinned import PrunedKVState
from mmaccel.models import loading, step
from mmaccel.models.fingerprint import can_fuse_layers, has_foreign_hooks
from mmaccel.models.layer_step import (
    FusedDeltaNetStep,
    HiddenRows,
    LayerStep,
    StepStates,
    Weights,
    as_standard_rms_norm,
    build_layer_steps,
    gather_linear_weights,
    norm_and_project,
)
from mmaccel.models.modules import is_plain_linear
from mmaccel.models.recurrent import RecurrentCacheLayer, StateSlots, restore_states_on_error

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows a step is captured for; what lies between is padded, which costs next to nothing."""

Buffers = list[tuple[Tensor, Tensor]]


def can_capture_decode(model: nn.Module, family: Any, cache: Any, also: Sequence[str] = ()) -> bool:
    """Whether decode steps of `model` on `cache` can be captured as CUDA graphs. Needed are: CUDA devices (or device types
    in `also`), one for each layer and one for embedding and head; layers that `fingerprint.can_fuse_layers` accepts, without
    foreign modules or hooks; and a KV cache written in place."""
    from transformers import DynamicCache

    kinds = {(p.device.type, p.dtype) for p in model.parameters()}
    if any(device not in (*step.DEVICES, *also) for device, _ in kinds):
        return False
    carries = bool(family.recurrent_layers(model))
    if carries and (not getattr(cache, "states", None) or len({p.device for p in model.parameters()}) > 1):
        return False
    owner, state = attached(model), getattr(cache, "state", None)
    # Under autocast products have another type than weights: a plain cache holds keys of one and values of the other.
    casts = [(on, dtype) for on, dtype in kinds if torch.is_autocast_enabled(on)]
    mixed = any(torch.get_autocast_dtype(on) != dtype for on, dtype in casts)
    if state is None and (type(cache) is not DynamicCache or mixed):
        return False
    if state is not None and (not state.in_place or owner is None):
        return False
    layers: list[Any] = list(getattr(family.text_model(model), "layers", ()))
    activation = getattr(family.text_model(model).config, "hidden_act", "")
    if not layers or not can_fuse_layers(layers, activation, family):
        return False
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    ends: list[Any] = [model.get_input_embeddings(), family.text_model(model).norm, head]  # type: ignore[operator]
    inner = [module for part in (*layers, *ends) for module in part.modules()]
    return (
        is_plain_linear(head)
        and len({p.device for end in ends for p in end.parameters()}) == 1
        and not has_foreign_hooks(inner)
    )


@dataclass(frozen=True, eq=False)
class CachedSequenceInfo:
    """How the decoder layers of one device cache the tokens of a sequence.

    lacks  number of prompt tokens that a pruner dropped before these layers: the token at column c has cache index c - lacks
    rope   RoPE cosines and sines [2, B, capacity, D] for the positions of the cached tokens
    bias   [m] float32, added to the attention scores of the first m cached tokens, or None
    """

    lacks: int
    rope: Tensor
    bias: Tensor | None = None


@dataclass(eq=False)
class DeviceDecodeStep:
    """The part of a model that lies on one device, as a function of tensors of fixed shapes, for one decode step.

    number   index of this part in the model
    replays  the CUDA graphs of all parts on its device
    row_indices  [1, WINDOW] long, 0 to WINDOW - 1: the numbers of a step's rows
    layers   the fused steps of its layers, in order
    buffers  keys and values [B, G, capacity, D] of each attention layer, written in place; or `SeparateKVCaches` of each
    held     the `CachedSequenceInfo` of each of these attention layers
    words    the input embedding module in the first part; None in later parts, which get hidden states
    ends     the final norm and the LM head's weights in the last part; None in earlier parts, which return hidden states
    looks    buffer that gets the last layer's queries [B, H, 1, D] of the first row, which a token pruner reads; or None
    """

    number: int
    replays: CudaGraphCache
    row_indices: Tensor
    layers: list[LayerStep | FusedDeltaNetStep]
    buffers: Sequence[tuple[Tensor | SeparateKVCaches, Tensor]]
    held: list[CachedSequenceInfo]
    words: Any
    ends: tuple[Any, Weights] | None
    looks: Tensor | None

    def __call__(
        self,
        given: Tensor,
        columns: Tensor,
        positions: Tensor,
        sees: Tensor | None = None,
        carried: StepStates | None = None,
    ) -> Tensor:
        """Logits [B, n, V], or hidden states [B * n, E], of `given`, which are ids [B, n] or hidden states.

        The rows are the columns `columns` [B, n] of the sequence, and are rotated as its columns `positions` [B, n] are;
        `sees` [n] is that of `decode_attend`; `carried` what layers with a running state are given.
        """
        LayerStep.refresh_gains(self.layers, self.ends and self.ends[0])
        x = HiddenRows(given if self.words is None else self.words(given).flatten(0, 1))
        held: CachedSequenceInfo | None = None
        attended = iter(zip(self.buffers, self.held, strict=True))
        for layer in self.layers:
            if isinstance(layer, FusedDeltaNetStep):
                assert carried is not None
                x = layer(x, carried)
                continue
            (key, value), now = next(attended)
            if now is not held:
                held, lacks = now, now.lacks
                own, at = (one - lacks if lacks else one for one in (columns, positions))
                rope = held.rope.take_along_dim(at[None, ..., None], 2)
            x, query = layer(x, rope, own, key, value, sees, held.bias)
        if self.looks is not None:
            self.looks.copy_(query[:, :, :1])
        if self.ends is None:
            return x.rows
        return norm_and_project(x, *self.ends).view(*columns.shape, -1)

    def run_layers(
        self,
        given: Tensor,
        held: int,
        count: int,
        width: int,
        branches: TokenTree | None,
        carried: tuple[StateSlots, tuple[int, ...]] | None = None,
    ) -> Tensor:
        """Run these layers on `count` rows, padded to `width`, after `held` cached tokens; `given` holds ids [1, count] or
        hidden states [width, E]. Returns logits [1, width, V], or hidden states [width, E], in a buffer that the next call
        overwrites. `branches`: the draft tree of the rows, or None. `carried`: slots of the recurrent states, and the
        sequence's row (start, base, upto, slot) of `StepStates.bounds`."""
        room, tree, sees = self.replays.get_buffer, branches is not None, None
        shape = (1, width) if given.dtype == torch.long else tuple(given.shape)
        place, start = room("given", shape, given.dtype), room("start", (1, 1), torch.long)
        # From another device: its stream is waited for, and the host is not.
        (place[:, :count] if given.dtype == torch.long else place).copy_(given)
        start.fill_(held)
        carries = None
        if carried is not None:
            told = room("told", (1, 4), torch.long).copy_(torch.tensor([carried[1]]))
            carries = StepStates(told, carried[0].journals_and_states())
        depth = room("depth", (1, width), torch.long)
        if branches is not None:
            sees = room("sees", (width,), torch.long)
            depth[0, :count] = branches.depth.to(depth.device) - (branches.sees.shape[1] - count)
            sees.copy_(_words(branches, width))

        def work() -> tuple[Tensor, ...]:
            columns = start + self.row_indices[:, :width]
            return (self(place, columns, start + depth if tree else columns, sees, carries),)

        lies = None if carried is None else len(carried[0].owners)
        return self.replays((self.number, width, tree, lies), work, lasting=False)[0]


class SequenceDecodeSteps:
    """Decode steps of one sequence; on CUDA one graph for each number of rows, replayed at every length.

    rows  the numbers of rows that graphs exist for: a shorter step is padded to the next one. Padding rows write behind the
          last token, where the next step overwrites them, and no other row sees them
    """

    def __init__(self, model: nn.Module, family: Any, rows: Sequence[int]) -> None:
        if not rows or min(rows) < 1 or max(rows) > WINDOW:
            raise ModelError(f"rows {list(rows)}: give numbers from 1 to {WINDOW}.")
        self.model, self.family, self.rows = model, family, sorted(set(rows))
        self.parts: list[DeviceDecodeStep] = []
        self._buffers: Buffers = []
        self._laid: Any = None
        self._state_slots: StateSlots | None = None

    def padded_row_count(self, count: int, branches: TokenTree | None) -> int | None:
        """Return the number of rows to which a step of `count` rows is padded; None if no graph is that wide, or if the
        draft tree does not fit the 64-bit mask of `decode_attend`."""
        width = next((rows for rows in self.rows if rows >= count), None)
        fits = width and (branches is None or width - count + branches.sees.shape[1] <= WINDOW)
        return width if fits else None

    def __call__(
        self,
        state: KVState,
        delta: int,
        ids: Tensor,
        width: int,
        branches: TokenTree | None = None,
        carried: Sequence[RecurrentCacheLayer] = (),
    ) -> Tensor:
        """Logits [1, n, V] of `ids` [1, n] after the columns of `state`, which are `delta` behind their positions, and of
        the running states `carried`."""
        held, count = state.length(), ids.shape[1]
        out, parts, own = ids, self.build_steps(state, delta, width), None
        with restore_states_on_error(carried):
            if carried:
                self._state_slots = self._state_slots or StateSlots([one.module for one in carried])
                own = self._state_slots, self._state_slots.begin_step(carried, count)
            for part in parts:
                out = part.run_layers(out, held, count, width, branches, own)
                if part.looks is not None:
                    assert isinstance(state, PrunedKVState)
                    self._look(state, part, part.looks, held, count)
        state.record_written(count)
        return out[:, :count].clone()

    def build_steps(self, state: KVState, delta: int, room: int) -> list[DeviceDecodeStep]:
        """Build the decode steps, device by device, over the KV buffers of `state` with room for `room` more tokens.
        `delta`: a token's position minus its column. Steps are kept for later calls; if buffers or `delta` change, they and
        their graphs are built anew."""
        buffers = state.layer_buffers(room)
        laid = delta, [state.count_dropped(layer) for layer in range(len(buffers))]
        same = self.parts and all(a[0] is b[0] for a, b in zip(buffers, self._buffers, strict=True))
        if same and laid == self._laid:
            return self.parts
        self.parts = []
        family, model = self.family, self.model
        words: Any = model.get_input_embeddings()  # type: ignore[operator]
        home = words.weight.device
        scoring = state.pruner.scoring_layer if isinstance(state, PrunedKVState) else None
        cuts: list[tuple[torch.device, list[int]]] = []
        for device, numbers in loading.group_layers_by_device([key.device for key, _ in buffers], home):
            after = numbers.index(scoring) + 1 if scoring in numbers[:-1] else len(numbers)  # type: ignore[arg-type]
            cuts += [(device, numbers[:after])]
            cuts += [(device, numbers[after:])] if after < len(numbers) else []
        # Of all captures on a device none is at work beside another, and what each gives is copied at once.
        shared = {
            device: (CudaGraphCache(device), torch.arange(WINDOW, device=device)[None]) for device, _ in cuts
        }
        held = self._holds(state, delta, buffers, scoring, home)
        sizes, parts = family.geometry(model), list[DeviceDecodeStep]()
        for number, (device, some) in enumerate(cuts):
            ends = final_norm_and_lm_head(model, family) if number == len(cuts) - 1 else None
            steps = build_device_layer_steps(model, family, some, ends is not None)
            own, holds = [buffers[n] for n in some], [held[n] for n in some]
            looks = own[-1][0].new_zeros(1, sizes.heads, 1, sizes.head_dim) if scoring in some[-1:] else None
            first = words if number == 0 else None
            parts.append(DeviceDecodeStep(number, *shared[device], steps, own, holds, first, ends, looks))
        self.parts, self._laid, self._buffers = parts, laid, list(buffers)
        return parts

    def _holds(
        self, state: KVState, delta: int, buffers: Buffers, scoring: int | None, home: torch.device
    ) -> list[CachedSequenceInfo]:
        """How each layer holds the sequence: one for all layers that hold it alike on one device."""
        family, known, layers = self.family, dict[Any, CachedSequenceInfo](), list[CachedSequenceInfo]()
        for layer, (like, _) in enumerate(buffers):
            lacks, after = state.count_dropped(layer), scoring is not None and layer > scoring
            anew = isinstance(state, PrunedKVState) and state.has_renumbered_positions(layer)
            name = like.device, like.shape[2], lacks, anew, after
            if name not in known:
                # Text after the prompt has the same position on every axis.
                positions = torch.arange(like.shape[2], device=home) + (0 if anew else lacks + delta)
                axes = positions.expand(3, -1) if family.mrope else positions
                rope = torch.stack([angle[0] for angle in family.rope_angles(self.model, axes, like.dtype)])
                bias = None
                if after:
                    assert isinstance(state, PrunedKVState)
                    bias = torch.zeros(state.prompt - lacks, device=like.device)
                known[name] = CachedSequenceInfo(lacks, rope.to(like.device), bias)
            layers.append(known[name])
        return layers

    def _look(
        self, state: PrunedKVState, part: DeviceDecodeStep, looks: Tensor, held: int, count: int
    ) -> None:
        """Between the layer at which a pruner glances and the next one: what a token sees of the video from there on."""
        last = part.buffers[-1][0]
        assert isinstance(last, Tensor)
        key = last[:, :, : held + 1 - part.held[-1].lacks]
        shown = state.choose_visible_columns(looks, key) if count == 1 else None
        # Layers that hold the sequence alike share one.
        for one in {id(one): one for part in self.parts for one in part.held}.values():
            if one.bias is not None:
                one.bias.fill_(0.0 if shown is None else -torch.inf)
                if shown is not None:
                    one.bias[shown.to(one.bias.device)] = 0.0


def build_device_layer_steps(
    model: nn.Module, family: Any, numbers: Sequence[int], last: bool
) -> list[LayerStep | FusedDeltaNetStep]:
    """Build the fused steps of consecutive layers on one device. `numbers`: their attention layers' indices; recurrent
    layers before each are included. `last`: include all layers that follow, and the model's final norm."""
    if not numbers:  # a device of the embeddings or of the head alone
        return []
    layers: list[Any] = list(family.layers(model))
    states = family.recurrent_layers(model)
    ends = [0, *(n + 1 for n in range(len(layers)) if n not in states)]
    first = ends[numbers[0]]
    some = layers[first : None if last else ends[numbers[-1] + 1]]
    return build_layer_steps(
        some, family, family.text_model(model).norm if last else None, first - numbers[0]
    )


def final_norm_and_lm_head(model: nn.Module, family: Any) -> tuple[Any, Weights]:
    """Return the model's final norm and the weights of its LM head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return as_standard_rms_norm(family.text_model(model).norm, family), gather_linear_weights(head)


def _words(branches: TokenTree, width: int) -> Tensor:
    """[width] long, on the host: what each row sees of the last columns; rows of padding see all."""
    n, m = branches.sees.shape
    bits = torch.ones(width, WINDOW, dtype=torch.bool)
    end = WINDOW - (width - n)
    bits[:n, end:] = False
    bits[:n, end - m : end] = branches.sees.cpu()
    return (bits.long() << torch.arange(WINDOW)).sum(1)
