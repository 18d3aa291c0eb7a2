"""Runs a question to a stream, and its answer, by fused layer steps (`layer_step.py`) in CUDA graphs; has what the streams'
captured passes of frames share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import home_device
from mmaccel.core.attach import Passes
from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.core.memory.buffers import on_device
from mmaccel.core.memory.kv import CacheSlot, StreamPass, StreamState
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.core.streams.fair_lock import fair_lock_of
from mmaccel.models.cache_table import CacheTable, can_read_cache_table, padded_count
from mmaccel.models.captured_tower import CapturedVisionTower
from mmaccel.models.fingerprint import ModuleFingerprint, ModuleGraphBuffers, can_fuse_layers
from mmaccel.models.layer_step import FusedDeltaNetStep, HiddenRows, LayerStep, StepStates, build_layer_steps
from mmaccel.models.modules import fused_norm
from mmaccel.models.packed import collect_error
from mmaccel.models.recurrent import RecurrentCacheLayer, StateSlots, copy_tensors, restore_states_on_error

DEVICES = ("cuda",)
"""Types of devices on which steps are captured."""

WIDTHS = (1, 2, 4, *range(8, 65, 8))
"""Numbers of rows of a question's step: fewer are filled up to the next of these, more go through the modules."""


def _filled(rows: int) -> int:
    """The number of rows of a question, or of one answer, that is captured for so many."""
    return next(width for width in WIDTHS if width >= rows)


def shared_captured_steps(stream: Any) -> CapturedStreamSteps:
    """Return the one `CapturedStreamSteps` that all streams of a model share, made at the first call: their answers can be
    decoded in one step, and its CUDA graphs outlive a stream."""
    turns = stream.turns
    stream.each = found = turns.steps() or CapturedStreamSteps(stream.model, stream.family)
    turns.steps = ref(found)
    return found  # type: ignore[no-any-return]


def capture_answer_step(stream: Any, state: StreamState, running: Any) -> None:
    """Warm up before the first token: run an answer's step on `state` until it is captured as a CUDA graph."""
    word = stream.embed_tokens(torch.zeros(1, dtype=torch.long, device=stream.device))
    steps, length = stream._few, state.length()
    for _ in range(3):
        state.begin_pass(StreamPass(kind="answer", rows=1))
        new = steps.can_run_fused(word) and not steps.is_captured(state.new_kv_slots())
        if new:
            stream.run_layers(state, word, few=True, running=running)
            if running is not None:
                running.undo_rows(-1)
        state.end_pass()
        state.truncate(length)
        if not new:
            break


class CapturedStreamSteps:
    """Runs questions to a stream, and answers, by CUDA graphs. A question has one graph for the layers between two
    retrievals of its KV memory; an answer retrieves nothing and has one graph for all layers."""

    def __init__(self, model: nn.Module, family: Any) -> None:
        self.model, self._family = model, family
        self._turns = fair_lock_of(family.text_model(model))
        self._shape, self._known, self._sure = family.geometry(model), False, False
        self._watched: ModuleFingerprint | None = None
        self._choices: Any = None
        self._steps, self._layers = list[LayerStep | FusedDeltaNetStep](), list[LayerStep]()
        # Before each layer of attention, and behind the last.
        self._leads: list[list[FusedDeltaNetStep]] = [[]]
        self._state_slots: StateSlots | None = None
        self._device = home_device(model)
        self._graphs = CudaGraphCache(self._device), CudaGraphCache(self._device)
        self.tower = CapturedVisionTower(model, family)
        self.unit_buffers = ModuleGraphBuffers(family.text_model(model))
        self._angles, self._starts = dict[int, Any](), dict[tuple[int, int], tuple[Tensor, int]]()
        self._caches = CacheTable()

    def close(self) -> None:
        """Free the captured CUDA graphs."""
        self._graphs = CudaGraphCache(self._device), CudaGraphCache(self._device)
        self.tower = CapturedVisionTower(self.model, self._family)
        self.unit_buffers = ModuleGraphBuffers(self._family.text_model(self.model))

    @property
    def _replays(self) -> CudaGraphCache:
        """The graphs and buffers of questions; or of answers, whose tokens may come between two layers of a question."""
        return self._graphs[self._turns.is_answering]

    def can_run_fused(self, rows: Tensor, again: bool = False) -> bool:
        """Whether fused steps can run `rows` [n, E]: at most 64 rows, and unhooked layers on their device that
        `fingerprint.can_fuse_layers` accepts. `again`: the rows continue an answer, whose first step checked the layers."""
        self._sure = self._sure and again
        if len(rows) > WIDTHS[-1] or self._sure:
            return len(rows) <= WIDTHS[-1]
        layers: list[Any] = list(self._family.layers(self.model))
        if (weight := next(layers[0].parameters())).device != rows.device:
            return False
        activation = getattr(self._family.text_model(self.model).config, "hidden_act", "")
        windows = [getattr(getattr(one, "self_attn", None), "sliding_window", None) for one in layers]
        choices = activation, windows
        if self._watched is None or choices != self._choices or not self._watched.is_unchanged(layers):
            self._watched, self._choices = ModuleFingerprint(layers), choices
            readable = can_read_cache_table(weight.device, weight.dtype, self._shape.head_dim)
            self._known = readable and can_fuse_layers(layers, activation, self._family)
            self._lay(layers if self._known else [])
        self._sure = (fits := self._known and not self._watched.has_hooks()) and again
        return fits

    def _lay(self, layers: list[Any]) -> None:
        self._steps, self._layers, self._leads = build_layer_steps(layers, self._family), [], [[]]
        for one in self._steps:
            if isinstance(one, LayerStep):
                self._layers.append(one)
                self._leads.append([])
            else:
                self._leads[-1].append(one)
        states = [one.own for some in self._leads for one in some]
        self._state_slots = StateSlots(states) if states else None

    def invalidate_layer_check(self) -> None:
        """Mark the layers as unchecked, before a pass that is no answer's step; `can_run_fused` then checks them again."""
        self._sure = False

    def run_step(
        self,
        run: ForwardPass,
        embeds: Tensor,
        hidden: bool,
        slots: list[CacheSlot] | None = None,
        running: Any = None,
    ) -> Tensor:
        """Return final hidden states [n, E] of `embeds` [n, E], as `StreamModel.run_layers`. `slots`: the `CacheSlot` of
        each layer, if one graph can run all layers (an answer); None: a graph for each part of the layers (a question)."""
        if slots is None and run.check is not None:
            run.check()
            run = replace(run, check=None)
        self._replays.drop_if_moved(self._watched)
        states: list[RecurrentCacheLayer] = [] if running is None else [*running.states.values()]
        with restore_states_on_error(states):
            carried = self._carried(states, len(embeds)) if states else None
            if slots is not None:
                return self._answer([slots], embeds, [len(embeds)], carried)
            out, errors = self._run([(run, len(embeds), hidden)], embeds, carried)
            for error in errors.values():
                raise error
        return out

    def _carried(self, layers: list[RecurrentCacheLayer], count: int) -> StepStates:
        assert self._state_slots is not None
        told = torch.tensor([self._state_slots.begin_step(layers, count)])
        place = self._replays.get_buffer("told", (1, 4), torch.long).copy_(told)
        return StepStates(place, self._state_slots.journals_and_states())

    def _slot_count(self) -> int | None:
        """Slots of recurrent states, which lie elsewhere when there are more of them: graphs are named by it."""
        return None if self._state_slots is None else len(self._state_slots.owners)

    def run_batched_answers(self, passes: Passes, embeds: Tensor) -> tuple[Tensor, dict[int, Exception]]:
        """Return final hidden states [n, E] of several streams' answers, run as one step, and the errors of failed ones."""
        counts = [count for _, count, _ in passes]
        errors, slots = dict[int, Exception](), dict[int, list[CacheSlot] | None]()
        for seat, (run, count, _) in enumerate(passes):
            with collect_error(errors, seat):
                run.state.begin_pass(StreamPass(kind="answer", rows=count))  # type: ignore[union-attr]
                slots[seat] = run.state.new_kv_slots()  # type: ignore[union-attr]
        self._replays.drop_if_moved(self._watched)
        ready = {seat: own for seat, own in slots.items() if own is not None}
        rows, rest = dict(enumerate(embeds.split(counts))), [seat for seat in slots if seat not in ready]
        if ready:
            own = [counts[seat] for seat in ready]
            made = self._answer([*ready.values()], torch.cat([rows[seat] for seat in ready]), own, None)
            rows |= zip(ready, made.split(own), strict=True)
        if rest:
            some = torch.cat([rows[seat] for seat in rest])
            made, failed = self._run([passes[seat] for seat in rest], some)
            errors |= {rest[n]: error for n, error in failed.items()}
            rows |= zip(rest, made.split([counts[seat] for seat in rest]), strict=True)
        for seat in {*rows} - {*errors}:
            with collect_error(errors, seat):
                passes[seat][0].state.end_pass()  # type: ignore[union-attr]
        return torch.cat([*rows.values()]), errors

    def _run(
        self, passes: Passes, embeds: Tensor, carried: StepStates | None = None
    ) -> tuple[Tensor, dict[int, Exception]]:
        # Of running states there is one table, which the step of another stream may make anew.
        errors, yields = dict[int, Exception](), carried is None and not self._turns.is_answering
        shape, n, dtype, x = self._shape, len(embeds), embeds.dtype, self._entered(embeds)
        heads, groups, size, room = shape.heads, shape.kv_heads, shape.head_dim, self._replays.get_buffer
        width, first = len(x), self._layers[0]
        wide = width, (heads + 2 * groups + first.gated * heads) * size
        qkv = [room(("qkv", number), wide, dtype) for number in range(len(self._layers))]
        lies, enter = self._slot_count(), partial(self._leave, -1, HiddenRows(x), x, qkv, carried)
        self._replays(("enter", width), enter, lies, lasting=False)
        self._angles.clear()
        for number in range(len(self._layers)):
            if yields:
                self._turns.yield_to_answers()
            end, whole = 0, False
            attended = room("attended", (width, heads * size), dtype)
            for seat, (run, count, hidden) in enumerate(passes):
                rows = slice(end, end := end + count)
                if seat in errors:
                    continue
                with collect_error(errors, seat):
                    state = run.state
                    assert isinstance(state, StreamState)
                    if hidden:
                        state.receive_hidden(number, x[None, rows])
                    columns = qkv[number][None, rows].unflatten(2, (-1, size)).transpose(1, 2)
                    query, key, value, *_ = columns.split([heads, groups, groups, *[heads] * first.gated], 1)
                    state.append(number, key, value)
                    slot = state.new_kv_slot(number, query)
                    if slot is None:
                        out = run.attend(number, query, key, value, size**-0.5)
                        out = out.transpose(1, 2).reshape(count, -1)
                        attended[rows] = first.apply_attention_gates(out, qkv[number][rows])
                    elif len(passes) == 1:
                        self._whole(number, slot, x, qkv, carried)
                        whole = True
                    else:
                        self._look(number, seat, slot, rows, qkv[number], attended)
            if len(errors) == len(passes):
                break
            if not whole:
                self._replays((number, width), partial(self._rest, number, x, attended, qkv, carried), lies)
        return fused_norm(self._family.text_model(self.model).norm, x[:n], self._family), errors

    def _entered(self, embeds: Tensor) -> Tensor:
        """[width, E] what enters the first layer: `embeds` [n, E], filled up."""
        n, width = len(embeds), _filled(len(embeds))
        x = self._replays.get_buffer("x", (width, embeds.shape[1]), embeds.dtype)
        x[:n], x[n:] = embeds, 0.0
        return x

    def _answer(
        self, slots: list[list[CacheSlot]], embeds: Tensor, counts: list[int], carried: StepStates | None
    ) -> Tensor:
        """Run all layers for answers whose rows `embeds` [n, E] are `counts` each; `slots`: of each answer, those of its
        layers. Streams and rows are filled up to numbers that are captured."""
        layers, room = [*zip(*slots, strict=True)], self._replays.get_buffer
        seats, width, turns, wide = self._answer_sizes(slots, max(counts))
        x = room("x", (seats * width, embeds.shape[1]), embeds.dtype).zero_()
        seated = [x[seat * width :][:count] for seat, count in enumerate(counts)]
        torch._foreach_copy_(seated, [*embeds.split(counts)])
        sizes = (2, seats, width, slots[0][0].angles[0].shape[-1])
        ropes = [room(("rope", n), sizes, x.dtype) for n in range(1 + max(turns))]
        told = [
            (rope[side, seat, : angle.shape[2]], angle[0, 0])
            for n, rope in enumerate(ropes)
            for seat, slot in enumerate(layers[turns.index(n)])
            for side, angle in enumerate(slot.angles)
        ]
        bias = None if not wide else room("biases", (len(layers), seats, wide), torch.float32).zero_()
        for n, some in enumerate(layers if bias is not None else ()):
            held = ((seat, slot.bias) for seat, slot in enumerate(some))
            told += [(bias[n, seat, : len(one)], one) for seat, one in held if one is not None]  # type: ignore[index]
        copy_tensors(told)
        spare = [0] * (seats - len(slots))
        begins = torch.tensor([[slot.column for slot in some] + spare for some in layers])
        starts = room("from", (len(layers), seats), torch.long).copy_(on_device(begins, x.device))
        with self._caches.write_addresses(self._replays, "answer", layers, seats) as caches:

            def work() -> tuple[Tensor, ...]:
                LayerStep.refresh_gains(self._steps)
                rows, columns = HiddenRows(x), starts[..., None] + self._layers[0].row_indices[:, :width]
                for n, layer in enumerate(self._layers):
                    rows = self._led(n, rows, carried)
                    where = ropes[turns[n]], columns[n], caches[n], caches[n].home
                    rows, _ = layer(rows, *where, None, None if bias is None else bias[n])
                rows = self._led(len(layers), rows, carried)
                x.copy_(rows.rows)
                return ()

            self._replays(("answer", seats, width, turns, wide), work, at=self._slot_count())
        out = seated[0] if len(seated) == 1 else torch.cat(seated)
        return fused_norm(self._family.text_model(self.model).norm, out, self._family)

    def _answer_sizes(
        self, slots: list[list[CacheSlot]], count: int
    ) -> tuple[int, int, tuple[int, ...], int]:
        """Of a step of answers: streams and rows of each, filled up if steps are captured; which of the kinds of angles each
        layer takes; and the width of the biases, 0 if there are none."""
        kinds: dict[tuple[int, ...], int] = {}
        turns = tuple(
            kinds.setdefault(tuple(id(slot.angles) for slot in some), len(kinds))
            for some in zip(*slots, strict=True)
        )
        longest = max((len(slot.bias) for own in slots for slot in own if slot.bias is not None), default=0)
        seats = len(slots)
        if self._replays.works:
            seats, count = padded_count(seats), padded_count(count) if seats > 1 else _filled(count)
        return seats, count, turns, longest and padded_count(longest)

    def is_captured(self, slots: list[CacheSlot] | None) -> bool:
        """Whether an answer's step of one row is captured as a CUDA graph already; `slots` as in `run_step`."""
        self._replays.drop_if_moved(self._watched)
        lies, ready = self._slot_count(), self._replays.is_captured
        if slots is not None:
            return ready(("answer", *self._answer_sizes([slots], 1)), lies)
        # A layer with a slot, below those that a pruner cuts, is captured by another name.
        each = (ready((n, 1), lies) or ready((n, 1, "slot"), ...) for n in range(len(self._layers)))
        return ready(("enter", 1), lies) and all(each)

    def _led(self, number: int, rows: HiddenRows, carried: StepStates | None) -> HiddenRows:
        """`rows` through the layers with a running state before layer `number` of attention."""
        for one in self._leads[number]:
            assert carried is not None
            rows = one(rows, carried)
        return rows

    def _rest(
        self, number: int, x: Tensor, attended: Tensor, qkv: list[Tensor], carried: StepStates | None
    ) -> tuple[Tensor, ...]:
        return self._leave(number, self._layers[number].finish(HiddenRows(x), attended), x, qkv, carried)

    def _whole(
        self, number: int, slot: CacheSlot, x: Tensor, qkv: list[Tensor], carried: StepStates | None
    ) -> None:
        layer, count = self._layers[number], len(x)
        rope, start, bias = self._looking(number, 0, slot, count, x.dtype)
        with self._caches.write_addresses(self._replays, ("question", number), [[slot]], 1) as (cache,):

            def work() -> tuple[Tensor, ...]:
                columns = start + layer.row_indices[:, :count]
                given = rope, columns, cache, cache.home, None, bias, qkv[number]
                left, _ = layer(HiddenRows(x), *given)
                return self._leave(number, left, x, qkv, carried)

            at = None if bias is None else bias.shape, self._slot_count()
            self._replays((number, count, "slot"), work, at=at)

    def _look(
        self, number: int, seat: int, slot: CacheSlot, rows: slice, qkv: Tensor, attended: Tensor
    ) -> None:
        """The attention of the rows of one question of several, to its rows of `attended`."""
        layer, count = self._layers[number], rows.stop - rows.start
        rope, start, bias = self._looking(number, seat, slot, count, qkv.dtype)
        with self._caches.write_addresses(self._replays, ("question", number, seat), [[slot]], 1) as (cache,):

            def work() -> tuple[Tensor, ...]:
                columns = start + layer.row_indices[:, :count]
                given = rope, columns, cache, cache.home, None, bias, qkv[rows]
                attended[rows] = layer.attend(None, *given)[0]
                return ()

            at = None if bias is None else bias.shape, self._slot_count()
            self._replays((number, seat, len(qkv), rows.start, count, "look"), work, at=at)

    def _looking(
        self, number: int, seat: int, slot: CacheSlot, count: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Angles, first column and bias [1, m] of the rows of a question, in rooms that captures read."""
        room = self._replays.get_buffer
        rope = room(("rope", seat), (2, 1, count, slot.angles[0].shape[-1]), dtype)
        # Most layers turn rows alike, and rows stand behind as many columns as at the question before. Those that fill up
        # are turned by something, too: their keys are hidden, but have to be numbers.
        room_of, angles = self._angles.get(seat, (None, None))
        if room_of is not rope or angles is not slot.angles:
            self._angles[seat] = rope, slot.angles
            for place, angle in zip(rope, slot.angles, strict=True):
                place[:, : angle.shape[2]] = angle[0]
        start = room(("start", number, seat), (1, 1), torch.long)
        last, column = self._starts.get((number, seat), (None, None))
        if last is not start or column != slot.column:
            start.fill_(slot.column)
            self._starts[number, seat] = start, slot.column
        bias = None if slot.bias is None else self._bias(seat, slot.bias).copy_(slot.bias)[None]
        return rope, start, bias

    def _bias(self, number: int, like: Tensor) -> Tensor:
        """A room of the size of `like` [m], one of all that share a power of two: summary tokens come and go."""
        whole = 1 << len(like).bit_length()
        return self._replays.get_buffer(("bias", number), (whole,), like.dtype)[: len(like)]

    def _leave(
        self, number: int, left: HiddenRows, x: Tensor, qkv: list[Tensor], carried: StepStates | None
    ) -> tuple[Tensor, ...]:
        """The rows that leave layer `number` go, through what is before the next one, to x, and their projections to where
        the next layer's memory sees them."""
        if number < 0:
            LayerStep.refresh_gains(self._steps)
        left = self._led(number + 1, left, carried)
        if number + 1 == len(qkv):
            x.copy_(left.rows)
        elif left.rows is x:
            qkv[0].copy_(self._layers[0].project(left))
        else:
            torch._foreach_copy_([x, qkv[number + 1]], [left.rows, self._layers[number + 1].project(left)])
        return ()
