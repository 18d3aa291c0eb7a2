"""Runs one decoder layer on a few new rows with five operators, and the layers of a question to a stream.

The modules of a layer launch some thirty small kernels and take a host about a millisecond; for few rows that is most of
the time. Weights are the model's own. `models/decode.py` runs all layers of a sequence as one captured step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from mmaccel.backends.ops import layer_ops
from mmaccel.backends.ops.layer_ops import Caches
from mmaccel.core.adapter import home_of
from mmaccel.core.decoding.replay import Replays
from mmaccel.core.memory.kv import CacheSlot, StreamPass, StreamState
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.models.fingerprint import ModuleFingerprint, known
from mmaccel.models.modules import normed

DEVICES = ("cuda",)
"""Types of devices on which steps are captured."""

WIDTHS = (1, 2, 4, *range(8, 65, 8))
"""Numbers of rows of a question's step: fewer are filled up to the next of these, more go through the modules."""

Weights = tuple[list[Tensor], list[Tensor]]
"""Weights of products that are made together, and their biases, if any."""


Passes = Sequence[tuple[ForwardPass, int, bool]]


class Rows(NamedTuple):
    """Rows [R, E] between two layers or the halves of one. `gained` [R, E] and `squares` [R, P] are what the norm after them
    needs, where the product that made them computed it too (`pass_rows`)."""

    rows: Tensor
    gained: Tensor | None = None
    squares: Tensor | None = None


class LayerStep:
    """A decoder layer of a Qwen2-like family over a few new rows: `enter_rows` (queries, keys and values, with RoPE,
    keys and values written to the cache), `decode_attend`, and for the output projection and the feed-forward block
    `pass_rows`, `project_rows` and `pass_rows` again. With norms of queries and keys `project_rows`, these and `rope_rows`
    are in the place of `enter_rows`.

    follows  the norm after the layer; None: whoever reads its rows needs no norm, or computes it
    """

    def __init__(self, layer: Any, follows: Any = None) -> None:
        own, mlp = layer.self_attn, layer.mlp
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.follows = follows
        self.qkv, self.out = weights(own.q_proj, own.k_proj, own.v_proj), weights(own.o_proj)
        self.gate_up, self.down = weights(mlp.gate_proj, mlp.up_proj), weights(mlp.down_proj)
        self.norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(own, name, None)) is not None]
        self.sizes = [own.q_proj.out_features, own.k_proj.out_features, own.v_proj.out_features]
        self.line = torch.arange(layer_ops.WINDOW, device=self.before.weight.device)[None]

    def __call__(
        self,
        x: Rows,
        rope: Tensor,
        columns: Tensor,
        key: Tensor | Caches,
        value: Tensor,
        sees: Tensor | None = None,
        bias: Tensor | None = None,
        qkv: Tensor | None = None,
    ) -> tuple[Rows, Tensor]:
        """What leaves the layer, and the queries [B, H, n, D], with RoPE, that it looked with.

        x        what enters it, B * n rows
        rope     [2, B, n, D], the cosines and sines of the rows
        columns  [B, n] long, the columns of `key` and `value` [B, G, capacity, D] that the rows are written to; where each
                 sequence has a cache of its own, `key` is all of these and `value` is not used
        sees, bias  those of `decode_attend`
        qkv      `project` of x, where a memory had to see it first; None: it is computed here
        """
        out, query = self.attend(x, rope, columns, key, value, sees, bias, qkv)
        return self.finish(x, out), query

    def attend(
        self,
        x: Rows | None,
        rope: Tensor,
        columns: Tensor,
        key: Tensor | Caches,
        value: Tensor,
        sees: Tensor | None = None,
        bias: Tensor | None = None,
        qkv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The attention [B * n, H * D] of the rows, and their queries; x is not read where `qkv` is given."""
        if qkv is None and self.norms:
            assert x is not None
            qkv = self.project(x)
        if qkv is None:
            assert x is not None
            rows, gain, squares = _normed_by(x, self.before)
            eps = self.before.variance_epsilon
            entered = rows, *self.qkv, gain, squares, eps, rope, columns
            if isinstance(key, Caches):
                query = layer_ops.enter_each(*entered, key)
            else:
                query = layer_ops.enter_rows(*entered, key, value)
        else:
            rows, line = qkv.view(*columns.shape, -1), self.line[:, : columns.shape[1]].expand_as(columns)
            turned = rows, rope[0], rope[1], line, columns
            if isinstance(key, Caches):
                query = layer_ops.rope_each(*turned, key)
            else:
                query = layer_ops.rope_rows(*turned, key, value)
        scale = query.shape[-1] ** -0.5
        if isinstance(key, Caches):
            out = layer_ops.attend_each(query, key, columns, scale)
        else:
            out = layer_ops.decode_attend(query, key, value, columns, scale, sees, bias)
        return out.transpose(1, 2).reshape(columns.numel(), -1), query

    def project(self, x: Rows) -> Tensor:
        """[R, (H + 2 G) * D]: queries, keys and values without RoPE, side by side, of rows that enter the layer."""
        rows = project(x, self.before, self.qkv)
        if not self.norms:
            return rows
        *both, values = rows.split(self.sizes, 1)
        heads = (
            norm(some.unflatten(1, (-1, norm.weight.numel())))
            for norm, some in zip(self.norms, both, strict=True)
        )
        return torch.cat([*(some.flatten(1) for some in heads), values], 1)

    def finish(self, x: Rows, attended: Tensor) -> Rows:
        """The layer's output for its input rows x [R, E] and their attention [R, H * D]."""
        x = _added(attended, self.out, x.rows, self.between)
        return _added(project(x, self.between, self.gate_up, gated=True), self.down, x.rows, self.follows)


def layer_steps(layers: Sequence[Any], follows: Any = None) -> list[LayerStep]:
    """`layers` one after the other, and the norm after them, if any."""
    norms = [*(layer.input_layernorm for layer in layers[1:]), follows]
    return [LayerStep(layer, norm) for layer, norm in zip(layers, norms, strict=False)]


def weights(*linear: nn.Linear) -> Weights:
    """Weights of products that one kernel computes together."""
    return [one.weight for one in linear], [one.bias for one in linear if one.bias is not None]


def project(x: Rows, norm: Any, by: Weights, gated: bool = False) -> Tensor:
    """`project_rows` of the normed rows."""
    rows, gain, squares = _normed_by(x, norm)
    return layer_ops.project_rows(rows, *by, gain, norm.variance_epsilon, None, gated, squares)


def _normed_by(x: Rows, norm: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What a product after `norm` is given of x: rows, and the norm's gain or the squares, whichever is still to be used."""
    return (x.rows, norm.weight, None) if x.gained is None else (x.gained, None, x.squares)


def _added(x: Tensor, by: Weights, residual: Tensor, norm: Any) -> Rows:
    """`residual` and rows x through a product; ready for `norm`, if one follows."""
    # In float16 the rows times the gain, not normed yet, might be too large.
    if norm is None or x.dtype == torch.float16:
        return Rows(layer_ops.project_rows(x, by[0], by[1], None, 0.0, residual))
    return Rows(*layer_ops.pass_rows(x, by[0][0], by[1], residual, norm.weight))


@contextmanager
def _noted(errors: dict[int, Exception], seat: int) -> Iterator[None]:
    """What fails in one memory leaves the others."""
    try:
        yield
    except Exception as error:
        errors[seat] = error


def steps_of(stream: Any) -> StreamSteps:
    """Steps of answers on several streams of a model, one for all, as long as a stream holds it: no pass of it stands still
    within, and what it captures outlasts a stream."""
    turns = stream.turns
    stream.each = found = turns.steps() or StreamSteps(stream.model, stream.family)
    turns.steps = ref(found)
    return found  # type: ignore[no-any-return]


class StreamSteps:
    """Questions and answers on a stream: what is between two layers' retrieval is one captured function, and all layers of
    a pass of an answer, which retrieves nothing."""

    def __init__(self, model: nn.Module, family: Any) -> None:
        self._model, self._family = model, family
        self._shape, self._known, self._sure = family.geometry(model), False, False
        self._watched: ModuleFingerprint | None = None
        self._choices: Any = None
        self._layers: list[LayerStep] = []
        self._replays = Replays(home_of(model))
        self._angles, self._starts = dict[int, Any](), dict[tuple[int, int], tuple[Tensor, int]]()
        self._sides, self._lie = list[Tensor](), tuple[Any, ...]()

    def serves(self, rows: Tensor, again: bool = False) -> bool:
        """Whether rows [n, E] are few, and the layers `known`, where the rows are, and without hooks. `again`: the rows are
        of an answer, in which the layers are looked at once."""
        self._sure = self._sure and again
        if len(rows) > WIDTHS[-1] or self._sure:
            return len(rows) <= WIDTHS[-1]
        layers: list[Any] = list(self._family.layers(self._model))
        if next(layers[0].parameters()).device != rows.device:
            return False
        activation = getattr(self._family.text(self._model).config, "hidden_act", "")
        windows = [getattr(getattr(one, "self_attn", None), "sliding_window", None) for one in layers]
        choices = activation, windows
        if self._watched is None or choices != self._choices or not self._watched.same(layers):
            self._watched, self._choices = ModuleFingerprint(layers), choices
            self._known = known(layers, activation, self._family)
            self._layers = layer_steps(layers) if self._known else []
        self._sure = (fits := self._known and not self._watched.hooked()) and again
        return fits

    def forget(self) -> None:
        """A pass comes that is of no answer: the next one looks at the layers anew."""
        self._sure, self._sides, self._lie = False, [], ()

    def run(
        self, run: ForwardPass, embeds: Tensor, hidden: bool, slots: list[CacheSlot] | None = None
    ) -> Tensor:
        """[n, E] final hidden states of columns `embeds` [n, E], as `StreamModel.run`; `slots`: of all layers, if known."""
        if slots is not None:
            return self._answer(slots, embeds)
        out, errors = self._run([(run, len(embeds), hidden)], embeds, {})
        for error in errors.values():
            raise error
        return out

    def answers(self, passes: Passes, embeds: Tensor) -> tuple[Tensor, dict[int, Exception]]:
        """[n, E] final hidden states of answers on several streams, run as one; errors of those that failed, by number."""
        errors = dict[int, Exception]()
        for seat, (run, count, _) in enumerate(passes):
            with _noted(errors, seat):
                run.state.begin_pass(StreamPass(kind="answer", rows=count))  # type: ignore[union-attr]
        out, errors = self._run(passes, embeds, errors)
        for seat, (run, _, _) in enumerate(passes):
            if seat not in errors:
                with _noted(errors, seat):
                    run.state.end_pass()  # type: ignore[union-attr]
        return out, errors

    def _run(
        self, passes: Passes, embeds: Tensor, errors: dict[int, Exception]
    ) -> tuple[Tensor, dict[int, Exception]]:
        shape, n, dtype, x = self._shape, len(embeds), embeds.dtype, self._entered(embeds)
        heads, groups, size, room = shape.heads, shape.kv_heads, shape.head_dim, self._replays.room
        width = len(x)
        wide = width, (heads + 2 * groups) * size
        qkv = [room(("qkv", number), wide, dtype) for number in range(len(self._layers))]
        first = self._layers[0]
        self._replays(("enter", width), lambda: (qkv[0].copy_(first.project(Rows(x))),), lasting=False)
        self._angles.clear()
        for number in range(len(self._layers)):
            end, whole = 0, False
            attended = room("attended", (width, heads * size), dtype)
            for seat, (run, count, hidden) in enumerate(passes):
                rows = slice(end, end := end + count)
                if seat in errors:
                    continue
                with _noted(errors, seat):
                    state = run.state
                    assert isinstance(state, StreamState)
                    if hidden:
                        state.ahead(number, x[None, rows])
                    columns = qkv[number][None, rows].view(1, count, -1, size).transpose(1, 2)
                    query, key, value = columns.split([heads, groups, groups], 1)
                    state.append(number, key, value)
                    slot = state.write_slot(number, query)
                    if slot is None:
                        out = run.attend(number, query, key, value, size**-0.5)
                        attended[rows] = out.transpose(1, 2).reshape(count, -1)
                    elif len(passes) == 1:
                        self._whole(number, slot, x, qkv)
                        whole = True
                    else:
                        self._look(number, seat, slot, rows, qkv[number], attended)
            if len(errors) == len(passes):
                break
            if not whole:
                self._replays((number, width), partial(self._rest, number, x, attended, qkv))
        return normed(self._family.text(self._model).norm, x[:n], self._family), errors

    def _entered(self, embeds: Tensor) -> Tensor:
        """[width, E] what enters the first layer: `embeds` [n, E], filled up."""
        assert self._watched is not None
        # Captures read what the layers' weights and steps are now: all of that is made anew with what watches them.
        self._replays.under(self._watched)
        n, width = len(embeds), next(rows for rows in WIDTHS if rows >= len(embeds))
        x = self._replays.room("x", (width, embeds.shape[1]), embeds.dtype)
        x[:n], x[n:] = embeds, 0.0
        return x

    def _answer(self, slots: list[CacheSlot], embeds: Tensor) -> Tensor:
        """All layers. What they share, angles and the column that rows are written to, is sent once."""
        x = self._entered(embeds)
        layers, count, room = self._layers, len(x), self._replays.room
        angles = {id(slot.angles): slot.angles for slot in slots}
        begins = list(dict.fromkeys(slot.column for slot in slots))
        turned = [list(angles).index(id(slot.angles)) for slot in slots]
        wrote = [begins.index(slot.column) for slot in slots]
        sizes = (2, 1, count, self._shape.head_dim)
        ropes = [room(("rope", n), sizes, x.dtype) for n in range(len(angles))]
        for rope, pair in zip(ropes, angles.values(), strict=True):
            for place, angle in zip(rope, pair, strict=True):
                place[:, : angle.shape[2]] = angle[0]
        starts = [room(("from", n), (1, 1), torch.long).fill_(column) for n, column in enumerate(begins)]
        biased = [(n, slot.bias) for n, slot in enumerate(slots) if slot.bias is not None]
        biases = {n: room(("bias", n), tuple(one.shape), one.dtype) for n, one in biased}
        if biases:
            torch._foreach_copy_(list(biases.values()), [one for _, one in biased])
        sides = [side for slot in slots for side in (slot.key, slot.value)]
        if len(self._sides) != len(sides) or any(map(is_not, self._sides, sides)):
            self._sides, self._lie = sides, tuple((x.data_ptr(), x.shape, x.stride()) for x in sides)

        def work() -> tuple[Tensor, ...]:
            rows, columns = Rows(x), [start + layers[0].line[:, :count] for start in starts]
            for n, (layer, slot) in enumerate(zip(layers, slots, strict=True)):
                where = ropes[turned[n]], columns[wrote[n]], slot.key, slot.value
                rows, _ = layer(rows, *where, None, biases.get(n))
            x.copy_(rows.rows)
            return ()

        shapes = tuple((n, one.shape) for n, one in biases.items())
        self._replays(("answer", count, tuple(turned), tuple(wrote), shapes), work, at=self._lie)
        return normed(self._family.text(self._model).norm, x[: len(embeds)], self._family)

    def _rest(self, number: int, x: Tensor, attended: Tensor, qkv: list[Tensor]) -> tuple[Tensor, ...]:
        return self._leave(number, self._layers[number].finish(Rows(x), attended), x, qkv)

    def _whole(self, number: int, slot: CacheSlot, x: Tensor, qkv: list[Tensor]) -> None:
        layer, count = self._layers[number], len(x)
        rope, start, bias, at = self._looking(number, 0, slot, count, x.dtype)
        key, value = slot.key, slot.value

        def work() -> tuple[Tensor, ...]:
            columns = start + layer.line[:, :count]
            left, _ = layer(Rows(x), rope, columns, key, value, None, bias, qkv[number])
            return self._leave(number, left, x, qkv)

        self._replays((number, count, "slot"), work, at=at)

    def _look(
        self, number: int, seat: int, slot: CacheSlot, rows: slice, qkv: Tensor, attended: Tensor
    ) -> None:
        """The attention of the rows of one question of several, to its rows of `attended`."""
        layer, count = self._layers[number], rows.stop - rows.start
        rope, start, bias, at = self._looking(number, seat, slot, count, qkv.dtype)
        key, value = slot.key, slot.value

        def work() -> tuple[Tensor, ...]:
            columns = start + layer.line[:, :count]
            attended[rows] = layer.attend(None, rope, columns, key, value, None, bias, qkv[rows])[0]
            return ()

        self._replays((number, len(qkv), rows.start, count, "look"), work, at=at)

    def _looking(
        self, number: int, seat: int, slot: CacheSlot, count: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """Angles, first column and bias of the rows of a question, in rooms that captures read; and where its cache lies."""
        room = self._replays.room
        rope = room(("rope", seat), (2, 1, count, self._shape.head_dim), dtype)
        # Most layers turn rows alike, and rows stand behind as many columns as at the question before. Those that fill up
        # are turned by something, too: their keys are hidden, but have to be numbers.
        if slot.angles is not self._angles.get(seat):
            self._angles[seat] = slot.angles
            for place, angle in zip(rope, slot.angles, strict=True):
                place[:, : angle.shape[2]] = angle[0]
        start = room(("start", number, seat), (1, 1), torch.long)
        last, column = self._starts.get((number, seat), (None, None))
        if last is not start or column != slot.column:
            start.fill_(slot.column)
            self._starts[number, seat] = start, slot.column
        key, value, bias = slot.key, slot.value, slot.bias
        lies = key.data_ptr(), value.data_ptr(), key.shape, key.stride(), value.stride()
        bias = None if bias is None else room(("bias", seat), tuple(bias.shape), bias.dtype).copy_(bias)
        return rope, start, bias, (lies, None if bias is None else bias.shape)

    def _leave(self, number: int, left: Rows, x: Tensor, qkv: list[Tensor]) -> tuple[Tensor, ...]:
        """The rows that leave layer `number` go to x, and their projections to where the next layer's memory sees them."""
        if number + 1 == len(qkv):
            x.copy_(left.rows)
        else:
            torch._foreach_copy_([x, qkv[number + 1]], [left.rows, self._layers[number + 1].project(left)])
        return ()
