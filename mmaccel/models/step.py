"""One decoder layer over a few new rows, in five operators; and questions to a stream, whose layers go one by one.

The modules of a layer launch some thirty small kernels and take a host about a millisecond; for few rows that is most of
the time. Weights are the model's own. `models/decode.py` runs all layers of a sequence as one captured step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmaccel.backends.ops import layer_ops
from mmaccel.core.adapter import home_of
from mmaccel.core.decoding.replay import Replays
from mmaccel.core.memory.kv import CacheSlot, StreamState
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.models.install import PromptHook
from mmaccel.models.modules import normed
from mmaccel.models.prompt_layout import windowed

DEVICES = ("cuda",)
"""Types of devices on which steps are captured."""

WIDTHS = (1, 2, 4, *range(8, 65, 8))
"""Numbers of rows of a question's step: fewer are filled up to the next of these, more go through the modules."""

Weights = tuple[list[Tensor], list[Tensor]]
"""Weights of products that are made together, and their biases, if any."""


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
        key: Tensor,
        value: Tensor,
        sees: Tensor | None = None,
        bias: Tensor | None = None,
        qkv: Tensor | None = None,
    ) -> tuple[Rows, Tensor]:
        """What leaves the layer, and the queries [B, H, n, D], with RoPE, that it looked with.

        x        what enters it, B * n rows
        rope     [2, B, n, D], the cosines and sines of the rows
        columns  [B, n] long, the columns of `key` and `value` [B, G, capacity, D] that the rows are written to
        sees, bias  those of `decode_attend`
        qkv      `project` of x, where a memory had to see it first; None: it is computed here
        """
        if qkv is None and self.norms:
            qkv = self.project(x)
        if qkv is None:
            rows, gain, squares = _normed_by(x, self.before)
            eps = self.before.variance_epsilon
            query = layer_ops.enter_rows(rows, *self.qkv, gain, squares, eps, rope, columns, key, value)
        else:
            rows, line = qkv.view(*columns.shape, -1), self.line[:, : columns.shape[1]].expand_as(columns)
            query = layer_ops.rope_rows(rows, rope[0], rope[1], line, columns, key, value)
        out = layer_ops.decode_attend(query, key, value, columns, key.shape[-1] ** -0.5, sees, bias)
        return self.finish(x, out.transpose(1, 2).reshape(columns.numel(), -1)), query

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
        """What leaves the layer, of rows x [R, E] that entered it, by their attention [R, H * D]."""
        x = _added(attended, self.out, x.rows, self.between)
        return _added(project(x, self.between, self.gate_up, gated=True), self.down, x.rows, self.follows)


def layer_steps(layers: Sequence[Any], follows: Any = None) -> list[LayerStep]:
    """`layers` one after the other, and the norm after them, if any."""
    norms = [*(layer.input_layernorm for layer in layers[1:]), follows]
    return [LayerStep(layer, norm) for layer, norm in zip(layers, norms, strict=False)]


def weights(*linear: nn.Linear) -> Weights:
    """Of products that are made together."""
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


def known(layers: Iterable[Any], activation: str, family: Any) -> bool:
    """Whether `LayerStep` computes what `layers` do: `decoder_layers` of the family, each on one device, with plain
    linear modules; of products that are made together all have a bias, or none."""
    return activation == "silu" and all(
        type(layer).__name__ in family.decoder_layers
        and getattr(layer.self_attn, "sliding_window", None) is None
        and not windowed(layer.self_attn.config)
        and all(type(linear) is nn.Linear for some in _together(layer) for linear in some)
        and len({p.device for p in layer.parameters()}) == 1
        and all(len({one.bias is None for one in some}) == 1 for some in _together(layer))
        for layer in layers
    )


def _together(layer: Any) -> list[list[Any]]:
    """The seven products of a layer, each with those that are made with it."""
    own, mlp = layer.self_attn, layer.mlp
    return [[own.q_proj, own.k_proj, own.v_proj], [own.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]


class ModuleFingerprint:
    """Modules and all in them, as they are now: which they are, of which classes, their weights, and where these lie. Asked
    at every pass: the host takes a tenth of the time of a walk through the modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        roots = list(modules)
        self._all = [one for module in roots for one in module.modules()]
        # Held, so that no other object comes by the identity of one of them.
        self._held, self._mark = self._look(roots)

    def same(self, modules: Sequence[nn.Module]) -> bool:
        """Whether `modules` and all in them are those, unchanged; values of weights may have changed in place."""
        return self._look(modules)[1] == self._mark

    def hooked(self) -> bool:
        """Whether a hook of a forward pass acts on any of them."""
        return hooked(self._all)

    def _look(self, roots: Sequence[nn.Module]) -> tuple[list[Any], list[int]]:
        """The roots, their children, classes and weights; and the identity of each, and where the weights lie."""
        children, weights = zip(*map(_TABLES, self._all), strict=True)
        tensors = [one for one in chain.from_iterable(map(dict.values, weights)) if one is not None]
        held = [*roots, *chain.from_iterable(map(dict.values, children)), *map(type, self._all), *tensors]
        return held, [*map(id, held), *map(Tensor.data_ptr, tensors)]


def hooked(modules: Iterable[nn.Module]) -> bool:
    """Whether a forward hook on any of `modules` has to run in a step. Ours for prompts need not (`PromptHook`), nor those
    that transformers installs when `output_attentions` or `output_hidden_states` is first asked for, and never removes: a
    step asks for neither."""
    return any(
        not isinstance(hook, PromptHook) and getattr(hook, "__module__", "") != _OUTPUT_HOOKS
        for tables in filter(any, map(_HOOKS, modules))
        for table in tables
        for hook in table.values()
    )


_TABLES: Callable[[Any], tuple[dict[Any, Any], ...]] = attrgetter("_modules", "_parameters")
_HOOKS: Callable[[Any], tuple[dict[Any, Any], ...]] = attrgetter("_forward_hooks", "_forward_pre_hooks")
_OUTPUT_HOOKS = "transformers.utils.output_capturing"


class StreamSteps:
    """Questions and answers on the memory of a stream: what is between two layers' retrieval is one captured function, and
    all layers of a pass of an answer, which retrieves nothing, are one."""

    def __init__(self, model: nn.Module, family: Any) -> None:
        self._model, self._family = model, family
        self._shape = family.geometry(model)
        self._watched: ModuleFingerprint | None = None
        self._choices: Any = None
        self._known = False
        self._layers: list[LayerStep] = []
        self._replays = Replays(home_of(model))
        self._angles: tuple[Tensor, Tensor] | None = None
        self._starts: dict[int, tuple[Tensor, int]] = {}
        self._sure = False
        self._sides, self._lie = list[Tensor](), tuple[Any, ...]()

    def serves(self, rows: Tensor, again: bool = False) -> bool:
        """Whether rows [n, E] are few, and the layers `known`, where the rows are, and without hooks. `again`: the rows are
        of an answer, in which the layers are looked at once."""
        if not (again and self._sure):
            fits = len(rows) <= WIDTHS[-1] and self._look(rows)
            self._sure = fits and again
            return fits
        return len(rows) <= WIDTHS[-1]

    def _look(self, rows: Tensor) -> bool:
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
        return self._known and not self._watched.hooked()

    def run(
        self, run: ForwardPass, embeds: Tensor, hidden: bool, slots: list[CacheSlot] | None = None
    ) -> Tensor:
        """See `StreamModel.run`; `slots` are those of all layers, where they are known."""
        shape, state, n, dtype = self._shape, run.state, len(embeds), embeds.dtype
        assert isinstance(state, StreamState)
        heads, groups, size, room = shape.heads, shape.kv_heads, shape.head_dim, self._replays.room
        width = next(rows for rows in WIDTHS if rows >= n)
        assert self._watched is not None
        # Captures read what the layers' weights and steps are now: all of that is made anew with what watches them.
        self._replays.under(self._watched)
        x = room("x", (width, embeds.shape[1]), dtype)
        x[:n], x[n:] = embeds, 0.0
        if slots is not None:
            self._answer(slots, x)
            return normed(self._family.text(self._model).norm, x[:n], self._family)
        # One of each layer: memories read the queries of all layers when the pass is over.
        wide = width, (heads + 2 * groups) * size
        qkv = [room(("qkv", number), wide, dtype) for number in range(len(self._layers))]
        first = self._layers[0]
        self._replays(("enter", width), lambda: (qkv[0].copy_(first.project(Rows(x))),), lasting=False)
        self._angles = None
        for number in range(len(self._layers)):
            if hidden:
                state.ahead(number, x[None, :n])
            columns = qkv[number][None, :n].view(1, n, -1, size).transpose(1, 2)
            query, key, value = columns.split([heads, groups, groups], 1)
            state.append(number, key, value)
            slot = state.write_slot(number, query)
            if slot is None:
                attended = room("attended", (width, heads * size), dtype)
                out = run.attend(number, query, key, value, size**-0.5)
                attended[:n] = out.transpose(1, 2).reshape(n, -1)
                self._replays((number, width), partial(self._rest, number, x, attended, qkv))
            else:
                self._whole(number, slot, x, qkv)
        return normed(self._family.text(self._model).norm, x[:n], self._family)

    def _answer(self, slots: list[CacheSlot], x: Tensor) -> None:
        """All layers, on rows x. What they share, angles and the column that rows are written to, is sent once."""
        layers, count, room = self._layers, len(x), self._replays.room
        angles = {id(slot.angles): slot.angles for slot in slots}
        begins = {slot.column: n for n, slot in enumerate({slot.column: slot for slot in slots}.values())}
        turned = [list(angles).index(id(slot.angles)) for slot in slots]
        wrote = [begins[slot.column] for slot in slots]
        sizes = (2, 1, count, self._shape.head_dim)
        ropes = [room(("rope", n), sizes, x.dtype) for n in range(len(angles))]
        for rope, pair in zip(ropes, angles.values(), strict=True):
            for place, angle in zip(rope, pair, strict=True):
                place[:, : angle.shape[2]] = angle[0]
        starts = room("starts", (len(begins), 1, 1), torch.long)
        if len(begins) == 1:
            starts.fill_(slots[0].column)
        else:
            starts.copy_(torch.tensor(list(begins)).view(-1, 1, 1), non_blocking=True)
        known = [(n, slot.bias) for n, slot in enumerate(slots) if slot.bias is not None]
        biases = {n: room(("bias", n), tuple(one.shape), one.dtype) for n, one in known}
        if biases:
            torch._foreach_copy_(list(biases.values()), [one for _, one in known])
        sides = [side for slot in slots for side in (slot.key, slot.value)]
        if len(self._sides) != len(sides) or any(map(is_not, self._sides, sides)):
            self._sides, self._lie = sides, tuple((x.data_ptr(), x.shape, x.stride()) for x in sides)

        def work() -> tuple[Tensor, ...]:
            rows, line = Rows(x), layers[0].line[:, :count]
            columns = [start + line for start in starts]
            for n, (layer, slot) in enumerate(zip(layers, slots, strict=True)):
                where = ropes[turned[n]], columns[wrote[n]]
                rows, _ = layer(rows, *where, slot.key, slot.value, None, biases.get(n))
            x.copy_(rows.rows)
            return ()

        shapes = tuple((n, one.shape) for n, one in biases.items())
        self._replays(("answer", count, tuple(turned), tuple(wrote), shapes), work, at=self._lie)

    def _rest(self, number: int, x: Tensor, attended: Tensor, qkv: list[Tensor]) -> tuple[Tensor, ...]:
        return self._leave(number, self._layers[number].finish(Rows(x), attended), x, qkv)

    def _whole(self, number: int, slot: CacheSlot, x: Tensor, qkv: list[Tensor]) -> None:
        layer, count, room = self._layers[number], len(x), self._replays.room
        rope = room("rope", (2, 1, count, self._shape.head_dim), x.dtype)
        # Most layers turn rows alike, and rows stand behind as many columns as at the question before. Those that fill up
        # are turned by something, too: their keys are hidden, but have to be numbers.
        if slot.angles is not self._angles:
            self._angles = slot.angles
            for place, angle in zip(rope, slot.angles, strict=True):
                place[:, : angle.shape[2]] = angle[0]
        start = room(("start", number), (1, 1), torch.long)
        last, column = self._starts.get(number, (None, None))
        # Another room may have come to lie where the last one lay.
        if last is not start or column != slot.column:
            start.fill_(slot.column)
            self._starts[number] = start, slot.column
        key, value, bias = slot.key, slot.value, slot.bias
        lies = key.data_ptr(), value.data_ptr(), key.shape, key.stride(), value.stride()
        if bias is not None:
            bias = room("bias", tuple(bias.shape), bias.dtype).copy_(bias)

        def work() -> tuple[Tensor, ...]:
            columns = start + layer.line[:, :count]
            left, _ = layer(Rows(x), rope, columns, key, value, None, bias, qkv[number])
            return self._leave(number, left, x, qkv)

        self._replays((number, count, "slot"), work, at=(lies, None if bias is None else bias.shape))

    def _leave(self, number: int, left: Rows, x: Tensor, qkv: list[Tensor]) -> tuple[Tensor, ...]:
        """The rows that leave layer `number` go to x, and their projections to where the next layer's memory sees them."""
        if number + 1 == len(qkv):
            x.copy_(left.rows)
        else:
            torch._foreach_copy_([x, qkv[number + 1]], [left.rows, self._layers[number + 1].project(left)])
        return ()
