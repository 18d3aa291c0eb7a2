"""One decoder layer on a few new rows with five operators.

The modules of a layer launch some thirty small kernels and take a host about a millisecond; for few rows that is most of
the time. Weights are the model's own. `models/decode.py` runs all layers of a sequence as one captured step, and
`models/step.py` those of a question to a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmaccel.backends.ops import layer_ops
from mmaccel.backends.ops.layer_ops import Caches
from mmaccel.models.fingerprint import products

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
    `pass_rows`, `project_rows` and `pass_rows` again. With norms of queries and keys, or a rotation of the family's own,
    `project_rows`, these and `rope_rows` are in the place of `enter_rows`. A block whose output is normed before it is added
    ends with `project_rows` and that norm.

    follows  the norm after the layer; None: whoever reads its rows needs no norm, or computes it
    """

    def __init__(self, layer: Any, family: Any, follows: Any = None) -> None:
        own = layer.self_attn
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.follows = follows
        self.ends = [
            getattr(layer, name, None) for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
        ]
        self.qkv, self.out, self.gate_up, self.down = (weights(*some) for some in products(layer))
        if len(self.gate_up[0]) == 1:  # both in one product, the gate's outputs first
            weight, bias = ([x for one in some for x in one.detach().chunk(2)] for some in self.gate_up)
            self.gate_up = weight, bias
        self.turn = None if family.rotate_function else family.apply_rope
        self.norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(own, name, None)) is not None]
        self.sizes = [own.q_proj.out_features, own.k_proj.out_features, own.v_proj.out_features]
        self.size = own.head_dim
        self.line = torch.arange(layer_ops.WINDOW, device=self.before.weight.device)[None]

    def __call__(self, x: Rows, *given: Any) -> tuple[Rows, Tensor]:
        """What leaves the layer for its input x, and the queries [B, H, n, D], with RoPE; `given` as of `attend`."""
        out, query = self.attend(x, *given)
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
        """The attention [B * n, H * D] of the rows, and their queries.

        x        what enters the layer, B * n rows; not read where `qkv` is given
        rope     [2, B, n, D], the cosines and sines of the rows
        columns  [B, n] long, the columns of `key` and `value` [B, G, capacity, D] that the rows are written to; where each
                 sequence has a cache of its own, `key` is all of these and `value` is not used
        sees, bias  those of `decode_attend`
        qkv      `project` of x, where a memory had to see it first; None: it is computed here
        """
        if qkv is None and (self.norms or self.turn):
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
            if self.turn is not None:
                rows, rope = self._turned(rows, rope)
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

    def _turned(self, rows: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """`rows` [B, n, (H + 2 G) * D] with queries and keys turned by the family, and angles that turn no more."""
        *both, values = rows.split(self.sizes, 2)
        heads = torch.cat(both, 2).unflatten(2, (-1, self.size)).transpose(1, 2)
        assert self.turn is not None
        heads = self.turn(heads, (rope[0][:, None], rope[1][:, None])).transpose(1, 2)
        still = rows.new_zeros(2, *rows.shape[:2], self.size)
        still[0] = 1
        return torch.cat([heads.flatten(2), values], 2), still

    def finish(self, x: Rows, attended: Tensor) -> Rows:
        """The layer's output for its input rows x [R, E] and their attention [R, H * D]."""
        x = _added(attended, self.out, x.rows, self.between, self.ends[0])
        inner = project(x, self.between, self.gate_up, gated=True)
        return _added(inner, self.down, x.rows, self.follows, self.ends[1])


def layer_steps(layers: Sequence[Any], family: Any, follows: Any = None) -> list[LayerStep]:
    """`layers` one after the other, and the norm after them, if any."""
    norms = [*(layer.input_layernorm for layer in layers[1:]), follows]
    return [LayerStep(layer, family, norm) for layer, norm in zip(layers, norms, strict=False)]


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


def _added(x: Tensor, by: Weights, residual: Tensor, norm: Any, end: Any = None) -> Rows:
    """`residual` and rows x through a product, and through the norm `end`, if any; ready for `norm`, if one follows."""
    if end is not None:
        out = layer_ops.project_rows(x, *by)
        return Rows(residual + layer_ops.rms_norm(out, end.weight, end.variance_epsilon))
    # In float16 the rows times the gain, not normed yet, might be too large.
    if norm is None or x.dtype == torch.float16:
        return Rows(layer_ops.project_rows(x, by[0], by[1], None, 0.0, residual))
    return Rows(*layer_ops.pass_rows(x, by[0][0], by[1], residual, norm.weight))
