"""One decode step for several sequences on one model, each with its own KV buffers.

Projections run on all rows at once; each sequence attends to its own cache. Buffer addresses, lengths and positions are
numbers in device tensors. So on CUDA a step is captured once for each number of sequences and rows, and the same graph
serves sequences that come and go.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from mmaccel.backends.ops.layer_ops import MOST, WINDOW, SeparateKVCaches
from mmaccel.core.adapter import home_device
from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.core.memory.kv import KVState
from mmaccel.core.memory.thinned import PrunedKVState
from mmaccel.models import decode, loading
from mmaccel.models.cache_table import can_read_cache_table, padded_count
from mmaccel.models.decode import Buffers, CachedSequenceInfo, DeviceDecodeStep
from mmaccel.models.layer_step import StepStates
from mmaccel.models.recurrent import RecurrentCacheLayer, StateSlots, restore_states_on_error
from mmaccel.models.runner import HFRunner

PLACES = 4096
"""Positions of which angles are made at first; twice as many where more are needed."""


def why_not_batchable(model: nn.Module, family: Any, cache: Any) -> str | None:
    """Return as a phrase why decode steps of `model` on `cache` cannot be batched with other sequences'; None: they can."""
    state = getattr(cache, "state", None)
    if isinstance(state, PrunedKVState):
        return "its prompt is pruned, and each layer has columns of its own"
    if state is not None and not state.in_place:
        return "its memory is not written in place"
    if not decode.can_capture_decode(model, family, cache, also=("cpu",)):
        return "its layers are not of a kind that a shared step computes"
    kind = next(model.parameters()).dtype
    if not can_read_cache_table(home_device(model), kind, family.geometry(model).head_dim):
        return "the kernels of a shared step do not run on this device, or in this type"
    return None


@dataclass(frozen=True, eq=False)
class SequenceBuffers:
    """The KV buffers of one sequence, whose memory is `state`. `pairs`: keys and values of each layer, `capacity` tokens
    each."""

    state: KVState
    pairs: Buffers
    capacity: int

    @staticmethod
    def from_kv_state(state: KVState, room: int) -> SequenceBuffers:
        """Return the KV buffers of `state`, with room for `room` more tokens."""
        pairs = state.layer_buffers(room)
        return SequenceBuffers(state, pairs, min(key.shape[2] for key, _ in pairs))


class BatchedDecodeSteps:
    """Decode steps shared by runners whose models share their weights; see `Runner.together`.

    Sequences with fewer rows, and missing sequences, are padded to a captured size; padding rows write to cache slots that
    are never read.
    """

    def __init__(self, runner: HFRunner) -> None:
        self.model, self.family = runner.model, runner.family
        self.weights = _addresses(runner.model)
        self._parts: list[DeviceDecodeStep] = []
        self._layers: list[list[int]] = []
        self._replays: dict[torch.device, CudaGraphCache] = {}
        self._places, self._shown = 0, list[ref[SequenceBuffers]]()
        states = [*runner.family.recurrent_layers(runner.model).values()]
        self._state_slots = StateSlots(states) if states else None
        self._nobody = [RecurrentCacheLayer(one) for one in states]
        self.warm = True
        """Whether the last step was of a shape that steps are captured for, and was captured by then."""

    @staticmethod
    def find_or_create(runner: Any, known: Sequence[BatchedDecodeSteps] = ()) -> BatchedDecodeSteps | None:
        """Return shared steps for `runner`: those in `known` with the same weights, or new ones; None if it cannot share."""
        if not isinstance(runner, HFRunner) or why_not_batchable(runner.model, runner.family, runner.cache):
            return None
        weights = _addresses(runner.model)
        return next((one for one in known if one.weights == weights), None) or BatchedDecodeSteps(runner)

    @torch.no_grad()
    def __call__(self, runners: Sequence[HFRunner], ids: Sequence[Tensor]) -> list[Tensor]:
        """Logits [1, n, V] of each runner's `ids` [1, n], which may be of unlike lengths."""
        most = max(one.shape[1] for one in ids)
        if max(most, len(runners)) > MOST or padded_count(len(runners)) * padded_count(most) > MOST:
            if len(runners) == 1:
                self.warm = False
                return [runners[0].step(ids[0])]
            half = len(runners) // 2
            first, warm = self(runners[:half], ids[:half]), self.warm
            second = self(runners[half:], ids[half:])
            self.warm &= warm
            return first + second
        laid = [self._laid(runner, most) for runner in runners]
        starts = [(one.memory().length(), one.delta) for one in runners]
        self._lay(laid[0].pairs, max(map(sum, starts)) + WINDOW)
        count, width = len(runners), most
        if self._parts[0].replays.works:
            count, width = padded_count(count), padded_count(width)
        self._show(laid, count)
        out = torch.cat([nn.functional.pad(one, (0, width - one.shape[1])) for one in ids])
        self.warm, states = True, self._state_slots and [one for runner in runners for one in _states(runner)]
        with restore_states_on_error(states or ()):
            told = self._told(runners, ids, count)
            for part in self._parts:
                out = self._run(part, out, starts, told, count, width)
                self.warm &= part.replays.warm
        made = out[: len(runners)].clone()
        if not self._parts[0].replays.works:
            self._hide()
        for runner, own in zip(runners, ids, strict=True):
            runner.count_decoded_tokens(own.shape[1])
        return [made[b : b + 1, : own.shape[1]] for b, own in enumerate(ids)]

    def _laid(self, runner: HFRunner, count: int) -> SequenceBuffers:
        state, room = runner.memory(), padded_count(count)  # padding is written, too
        laid: SequenceBuffers | None = runner.laid
        if laid is None or laid.state is not state or state.length() + room > laid.capacity:
            laid = runner.laid = SequenceBuffers.from_kv_state(state, room)
        return laid

    def _lay(self, like: Buffers, places: int) -> None:
        """The parts, device after device, with angles of so many positions."""
        if places <= self._places:
            return
        self._places = max(PLACES, 1 << (places - 1).bit_length())
        family, model = self.family, self.model
        words: Any = model.get_input_embeddings()  # type: ignore[operator]
        home = words.weight.device
        line = torch.arange(self._places, device=home)
        angles = family.rope_angles(model, line.expand(3, -1) if family.mrope else line, like[0][0].dtype)
        rope = torch.stack([angle[0] for angle in angles])
        cuts = loading.group_layers_by_device([key.device for key, _ in like], home)
        for device in {device for device, _ in cuts}:
            self._replays.setdefault(device, CudaGraphCache(device)).drop_if_moved(self._places)
        self._parts, self._layers, self._shown = [], [numbers for _, numbers in cuts], []
        for number, (device, numbers) in enumerate(cuts):
            ends = decode.final_norm_and_lm_head(model, family) if number == len(cuts) - 1 else None
            steps = decode.build_device_layer_steps(model, family, numbers, ends is not None)
            held = [CachedSequenceInfo(0, rope.to(device))] * len(numbers)
            short = torch.arange(WINDOW, device=device)[None]
            first = words if number == 0 else None
            self._parts.append(
                DeviceDecodeStep(number, self._replays[device], short, steps, [], held, first, ends, None)
            )

    def _show(self, laid: Sequence[SequenceBuffers], count: int) -> None:
        """Tell the parts where the memories lie, of `count` sequences with those that are not there."""
        if [id(one()) for one in self._shown] == [id(one) for one in laid]:
            return
        for part, numbers in zip(self._parts, self._layers, strict=True):
            room = part.replays.get_buffer
            like = [laid[0].pairs[n][0] for n in numbers]
            if not like:
                continue
            shape, kind = (1, like[0].shape[1], 1, like[0].shape[3]), like[0].dtype
            home = room("home", shape, kind)
            table = room(("table", part.number), (len(numbers), MOST, 4), torch.long)
            if part.replays.works:
                spare = room("spare", (1, shape[1], WINDOW, shape[3]), kind)
                spares = [(spare, spare)] * (count - len(laid))
                each = [[*(one.pairs[n] for one in laid), *spares] for n in numbers]
                told = [[SeparateKVCaches.addresses(home, *pair) for pair in some] for some in each]
                table[:, :count] = torch.tensor(told).to(table.device)
            # What is captured reads the table alone; memories are not kept here.
            pairs = [[] if part.replays.works else [one.pairs[n] for one in laid] for n in numbers]
            part.buffers = [
                (SeparateKVCaches(some, home, table[at, :count]), home) for at, some in enumerate(pairs)
            ]
        self._shown = [ref(one) for one in laid]

    def _hide(self) -> None:
        for part in self._parts:
            part.buffers = []
        self._shown = []

    def _told(self, runners: Sequence[HFRunner], ids: Sequence[Tensor], count: int) -> StepStates | None:
        """Where running states are, of `count` sequences with those that are not there; None: there are none."""
        if self._state_slots is None:
            return None
        some = [
            self._state_slots.begin_step(_states(runner), own.shape[1])
            for runner, own in zip(runners, ids, strict=True)
        ]
        if count > len(some):
            some += [self._state_slots.begin_step(self._nobody, 0)] * (count - len(some))
        room = self._parts[0].replays.get_buffer("told", (MOST, 4), torch.long)[:count]
        return StepStates(room.copy_(torch.tensor(some)), self._state_slots.journals_and_states())

    def _run(
        self,
        part: DeviceDecodeStep,
        given: Tensor,
        starts: list[tuple[int, int]],
        told: StepStates | None,
        count: int,
        width: int,
    ) -> Tensor:
        """What a part makes of `given`, ids [B, width] or hidden states [count * width, E]: hidden states or logits [count,
        width, V], in a tensor that the next call writes over. `starts`: columns of each sequence, and how far positions are
        from these."""
        room = part.replays.get_buffer
        shape = (count, width) if given.dtype == torch.long else tuple(given.shape)
        place, at = room("given", shape, given.dtype), room("starts", (MOST, 2), torch.long)[:count]
        # From another device: its stream is waited for, and the host is not.
        place[: len(given)].copy_(given)
        at.copy_(torch.tensor(starts + [(0, 0)] * (count - len(starts))))

        def work() -> tuple[Tensor, ...]:
            columns = at[:, :1] + part.row_indices[:, :width]
            return (part(place, columns, columns + at[:, 1:], carried=told),)

        slots = 0 if self._state_slots is None else len(self._state_slots.owners)
        return part.replays((part.number, count, width, slots), work, lasting=False)[0]


def _states(runner: HFRunner) -> list[RecurrentCacheLayer]:
    return [*runner.cache.states.values()]


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Return a copy of `model` whose modules are new and whose weights are shared."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def _addresses(model: nn.Module) -> tuple[int, ...]:
    """Where the weights of `model` lie: copies of its modules over the same weights have the same."""
    return tuple(one.data_ptr() for one in model.parameters())
