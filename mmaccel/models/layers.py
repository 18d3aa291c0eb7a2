"""Few rows through the layers of a Qwen2-like family without their modules: four products a layer beside attention.

The modules of a layer launch some thirty small kernels and take a host about a millisecond; for few rows that is most of
the time. Weights are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mmaccel.backends import fused, ops
from mmaccel.core.attention import StreamRun
from mmaccel.core.kv import Seat
from mmaccel.core.modules import home_of
from mmaccel.core.replay import Replays
from mmaccel.models.pointwise import normed
from mmaccel.models.watched import Watched

if TYPE_CHECKING:
    from mmaccel.models.family import Family

LAYERS = {"Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer"}
"""Classes of decoder layers that are known here."""

DEVICES = ("cuda",)
"""Where it is worth it."""


WIDTHS = (1, 2, 4, *range(8, 65, 8))
"""Numbers of rows that are computed so, filled up to the next of these: more is work for the modules."""


class Weighed(NamedTuple):
    """Rows [R, E] that a product left, and what the norm after them needs of it; see `fused.pass_rows`."""

    rows: Tensor
    gained: Tensor
    squares: Tensor


class FewRows:
    """Questions and answers on the memory of a stream: between two layers' attention all is one replayed function."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        self._model, self._family = model, family
        self._shape = family.geometry(model)
        self._watched: Watched | None = None
        self._told: Any = None
        self._known = False
        self._replays = Replays(home_of(model))
        self._angles: tuple[Tensor, Tensor] | None = None
        self._starts: dict[int, tuple[Tensor, int]] = {}

    def serves(self, rows: Tensor) -> bool:
        """Whether the layers are `known`, where rows [n, E] are, and nobody listens to them; and rows are few."""
        if len(rows) > WIDTHS[-1] or rows.device.type not in DEVICES:
            return False
        layers: list[Any] = list(self._family.layers(self._model))
        if next(layers[0].parameters()).device != rows.device:
            return False
        activation = getattr(self._family.text(self._model).config, "hidden_act", "")
        told = (
            activation,
            [getattr(getattr(layer, "self_attn", None), "sliding_window", None) for layer in layers],
        )
        if self._watched is None or told != self._told or not self._watched.same(layers):
            self._watched, self._told, self._known = Watched(layers), told, known(layers, activation)
        return self._known and not self._watched.heard()

    def run(self, run: StreamRun, embeds: Tensor, hidden: bool) -> Tensor:
        """See `StreamSeam.run`."""
        shape, state, n = self._shape, run.state, len(embeds)
        layers: list[Any] = list(self._family.layers(self._model))
        heads, groups, size = shape.heads, shape.kv_heads, shape.head_dim
        width = next(rows for rows in WIDTHS if rows >= n)
        assert self._watched is not None
        self._replays.under(self._watched.places)
        x = pad(embeds, (0, 0, 0, width - n))
        rows = entering(layers[0], x)
        self._angles = None
        for number in range(len(layers)):
            if hidden:
                state.ahead(number, x[None, :n])
            columns = rows[None, :n].view(1, n, -1, size).transpose(1, 2)
            query, key, value = columns.split([heads, groups, groups], 1)
            state.append(number, key, value)
            two, seat = layers[number : number + 2], state.seat(number, query)
            if seat is None:
                out = run.attend(number, query, key, value, size**-0.5)
                out = pad(out.transpose(1, 2).reshape(n, -1), (0, 0, 0, width - n))
                x, *some = self._replays((number, width), between(two), x, out)
            else:
                x, *some = self._seated(number, two, seat, x, rows)
            rows = some[0] if some else rows
        return normed(self._family.text(self._model).norm, x[:n])

    def _seated(
        self, number: int, two: Sequence[Any], seat: Seat, x: Tensor, rows: Tensor
    ) -> tuple[Tensor, ...]:
        """A layer over rows that have a seat: from what enters it, and its projections, to what enters the next."""
        size, room = self._shape.head_dim, self._replays.room
        turn = room("turn", (2, 1, len(x), size), rows.dtype)
        # Most layers turn rows alike, and rows stand behind as many columns as at the question before. Those that fill up
        # are turned by something, too: their keys are hidden, but have to be numbers.
        if seat.angles is not self._angles:
            self._angles = seat.angles
            for place, angle in zip(turn, seat.angles, strict=True):
                place[:, : angle.shape[2]] = angle[0]
        start = room(("start", number), (1, 1), torch.long)
        told, column = self._starts.get(number, (None, None))
        # Another room may have come to lie where the last one lay.
        if told is not start or column != seat.column:
            start.fill_(seat.column)
            self._starts[number] = start, seat.column
        given = [x, rows] if seat.bias is None else [x, rows, seat.bias]
        key, value = seat.key, seat.value
        lies = key.data_ptr(), value.data_ptr(), key.shape, key.stride(), value.stride()
        at = lies, tuple(one.shape for one in given)
        return self._replays((number, len(x), "seat"), seated(two, seat, turn, start), *given, at=at)


def between(layers: Sequence[Any]) -> Callable[..., tuple[Tensor, ...]]:
    """From what entered a layer and its attention to what leaves it, and `entering` of the layer after it, if any."""

    def step(x: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        left = leaving(layers[0], x, attended, *(one.input_layernorm for one in layers[1:]))
        return bare(left), *(entering(one, left) for one in layers[1:])

    return step


def seated(
    layers: Sequence[Any], seat: Seat, turn: Tensor, start: Tensor
) -> Callable[..., tuple[Tensor, ...]]:
    """`between`, and attention before it: rows [R, (H + 2 G) * D] are turned by `turn` [2, 1, R, D], written to the columns
    from `start` [1, 1] on, and see all up to their own."""

    def step(x: Tensor, rows: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        key, value = seat.key, seat.value
        line = torch.arange(len(x), device=x.device)[None]
        query = ops.turn_rows(rows[None], turn[0], turn[1], line, start + line, key, value)
        out = ops.decode_attend(query, key, value, start + line, key.shape[3] ** -0.5, None, bias)
        return between(layers)(x, out.transpose(1, 2).reshape(len(x), -1))

    return step


def entering(layer: Any, x: Tensor | Weighed) -> Tensor:
    """[R, (H + 2 G) * D]: queries, keys and values before rotation, side by side, of rows x [R, E] that enter a layer."""
    own = layer.self_attn
    return project(x, [own.q_proj, own.k_proj, own.v_proj], layer.input_layernorm)


def entering_turned(
    layer: Any, x: Tensor | Weighed, turn: Tensor, columns: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """[B, H, n, D]: the queries of rows x [B * n, E] that enter a layer; keys and values go to the cache. See
    `fused.enter_rows`."""
    own, norm = layer.self_attn, layer.input_layernorm
    weight, bias = _weights([own.q_proj, own.k_proj, own.v_proj])
    gain, squares = (None, x.squares) if isinstance(x, Weighed) else (norm.weight, None)
    rows = x.gained if isinstance(x, Weighed) else x
    given = rows, weight, bias, gain, squares, norm.variance_epsilon, turn, columns, key, value
    return fused.enter_rows(*given)  # type: ignore[no-any-return]


def leaving(layer: Any, x: Tensor | Weighed, attended: Tensor, norm: Any = None) -> Tensor | Weighed:
    """[R, E]: what leaves a layer that rows x [R, E] entered, by their attention [R, H * D]; `norm`: the one after it."""
    mlp = layer.mlp
    x = passing(attended, layer.self_attn.o_proj, bare(x), layer.post_attention_layernorm)
    wide = project(x, [mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm, gated=True)
    return passing(wide, mlp.down_proj, bare(x), norm)


def bare(x: Tensor | Weighed) -> Tensor:
    """The rows alone."""
    return x.rows if isinstance(x, Weighed) else x


def project(
    x: Tensor | Weighed, linear: Sequence[nn.Linear], norm: Any = None, gated: bool = False
) -> Tensor:
    """See `ops.project_rows`; `norm` is that before it."""
    weight, bias = _weights(linear)
    eps = 0.0 if norm is None else norm.variance_epsilon
    if isinstance(x, Weighed):
        return ops.project_rows(x.gained, weight, bias, None, eps, None, gated, x.squares)  # type: ignore[no-any-return]
    gain = None if norm is None else norm.weight
    return ops.project_rows(x, weight, bias, gain, eps, None, gated)  # type: ignore[no-any-return]


def passing(x: Tensor, linear: nn.Linear, residual: Tensor, norm: Any) -> Tensor | Weighed:
    """`residual` and rows x through `linear`; ready for `norm`, if one follows."""
    weight, bias = _weights([linear])
    # In float16 the rows times the gain, not normed yet, might be too large.
    if norm is None or x.dtype == torch.float16:
        return ops.project_rows(x, weight, bias, None, 0.0, residual)  # type: ignore[no-any-return]
    return Weighed(*fused.pass_rows(x, *weight, bias, residual, norm.weight))


def _weights(linear: Sequence[nn.Linear]) -> tuple[list[Tensor], list[Tensor]]:
    return [one.weight for one in linear], [one.bias for one in linear if one.bias is not None]


def known(layers: Iterable[Any], activation: str) -> bool:
    """Whether `entering` and `leaving` compute what `layers` do: of classes known here, each on one device, with weights as
    they come; of products that are made together all have a bias, or none."""
    layers = list(layers)
    return activation == "silu" and all(
        type(layer).__name__ in LAYERS
        and layer.self_attn.sliding_window is None
        and all(type(linear) is nn.Linear for some in together(layer) for linear in some)
        and len({p.device for p in layer.parameters()}) == 1
        and all(len({one.bias is None for one in some}) == 1 for some in together(layer))
        for layer in layers
    )


def together(layer: Any) -> list[list[Any]]:
    """The seven products of a layer, each with those that are made with it."""
    own, mlp = layer.self_attn, layer.mlp
    return [[own.q_proj, own.k_proj, own.v_proj], [own.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
