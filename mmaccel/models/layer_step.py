"""Computes one decoder layer for a few new rows (tokens) by five fused operators.

A layer's own modules launch some thirty small kernels and cost a millisecond of host time, which dominates for few rows.
The fused steps use the model's own weights. `models/decode.py` captures all layers of a sequence as one CUDA graph, and
`models/step.py` those of a question to a stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmaccel.backends.ops import layer_ops
from mmaccel.backends.ops.delta import deltanet_rows
from mmaccel.backends.ops.experts import expert_mlp
from mmaccel.backends.ops.layer_ops import SeparateKVCaches
from mmaccel.models import recurrent
from mmaccel.models.fingerprint import fusable_linear_groups, has_experts

Weights = tuple[list[Tensor], list[Tensor]]
"""Weights of products that are made together, and their biases, if any."""


class HiddenRows(NamedTuple):
    """Hidden states `rows` [R, E] of R new tokens between two fused operators. `gained` [R, E] (rows times the weight of the
    next RMSNorm) and `squares` [R, P] (partial sums of squares) are set if `residual_linear` computed them already."""

    rows: Tensor
    gained: Tensor | None = None
    squares: Tensor | None = None


class StepStates(NamedTuple):
    """The recurrent states that a decode step of B sequences reads and writes, in slots (`recurrent.StateSlots`).

    bounds  [B, 4] long, for each sequence (start, base, upto, slot): its first new column, the number of columns that its
            state contains before and after the step, and its slot
    layers  for each recurrent layer, a journal of rows [S, R, W] and states [S, H, K, V] of S slots (see `deltanet_rows`)
    """

    bounds: Tensor
    layers: Sequence[tuple[Tensor, Tensor]]


class _Step:
    """Base of the fused steps of both kinds of layers: their norms, and what follows attention (output projection and MLP).

    follows  the norm after the layer; None: whoever reads its rows needs no norm, or computes it
    norms    all of the layer's, for `refresh_gains`
    """

    def __init__(self, layer: Any, family: Any, follows: Any) -> None:
        norms = layer.input_layernorm, layer.post_attention_layernorm, follows
        self.norms = [as_standard_rms_norm(norm, family) for norm in norms]
        self.before, self.between, self.follows = self.norms
        self.ends = [
            getattr(layer, name, None) for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
        ]
        self.mixed = _Mixture(layer.mlp) if has_experts(layer) else None
        self.enters, self.out, *rest = (gather_linear_weights(*some) for some in fusable_linear_groups(layer))
        if self.mixed is not None:
            return
        *_, self.gate_up, self.down = rest
        if len(self.gate_up[0]) == 1:  # both in one product, the gate's outputs first
            weight, bias = ([x for one in some for x in one.detach().chunk(2)] for some in self.gate_up)
            self.gate_up = weight, bias

    @staticmethod
    def refresh_gains(steps: Iterable[_Step], *norms: Any) -> None:
        """Compute the gains of norms that scale by ``1 + weight``, those of `steps` and `norms`, from what their weights are
        now, with two launches for all. Every captured pass begins with it."""
        every = (*(norm for one in steps for norm in one.norms), *norms)
        if some := [one for one in every if isinstance(one, _Centred)]:
            gains = [one.weight for one in some]
            torch._foreach_copy_(gains, [one.norm.weight.detach() for one in some])
            torch._foreach_add_(gains, 1.0)

    def finish(self, x: HiddenRows, attended: Tensor) -> HiddenRows:
        """Output projection and MLP of a decoder layer, from input rows x [R, E] and attention output [R, H * D]."""
        if self.mixed is not None:
            rows = _added(attended, self.out, x.rows, None, self.ends[0]).rows
            normed = layer_ops.rms_norm(rows, self.between.weight, self.between.variance_epsilon)
            return HiddenRows(rows + self.mixed(normed))
        x = _added(attended, self.out, x.rows, self.between, self.ends[0])
        inner = norm_and_project(x, self.between, self.gate_up, gated=True)
        return _added(inner, self.down, x.rows, self.follows, self.ends[1])


class FusedDeltaNetStep(_Step):
    """Fused step of a Gated DeltaNet layer on a few new rows: `project_rows` twice, `deltanet_rows`, then as `LayerStep`."""

    def __init__(self, layer: Any, family: Any, follows: Any, number: int) -> None:
        """`number`: which of the layers with a state it is."""
        super().__init__(layer, family, follows)
        self.number, self.own = number, layer.linear_attn
        self.gate = gather_linear_weights(self.own.in_proj_z)

    def __call__(self, x: HiddenRows, carried: StepStates) -> HiddenRows:
        """What leaves the layer for its input x, B * n rows."""
        made, gate = (norm_and_project(x, self.before, some) for some in (self.enters, self.gate))
        journal, state = carried.layers[self.number]
        conv, decay, shift, gain, eps = recurrent.deltanet_weights(self.own)
        out = deltanet_rows(made, gate, conv, decay, shift, gain, eps, carried.bounds, journal, state)
        return self.finish(x, out)


class LayerStep(_Step):
    """Fused step of a Qwen2-like decoder layer on a few new rows: `qkv_rope_rows` (projects q, k, v, applies RoPE, writes
    the cache), `decode_attend`, and for output projection and MLP `residual_linear`, `project_rows`, `residual_linear`.
    Layers with QK norms or their own RoPE use `project_rows`, the norms and `rope_rows` in place of `qkv_rope_rows`. Where a
    block's output is normed before the residual add, it ends with `project_rows` and that norm. A mixture of experts runs
    `rms_norm`, the model's router and `expert_mlp`."""

    def __init__(self, layer: Any, family: Any, follows: Any = None) -> None:
        super().__init__(layer, family, follows)
        own = layer.self_attn
        whole = family.rotate_function and not family.partial_rotary
        self.turn = None if whole else family.apply_rope
        found = [getattr(own, name, None) for name in ("q_norm", "k_norm")]
        self.qk_norms = [as_standard_rms_norm(norm, family) for norm in found if norm is not None]
        self.norms += self.qk_norms
        self.size, heads = own.head_dim, own.o_proj.in_features
        # Of each head of queries its gate stands behind it.
        self.gated = own.q_proj.out_features == 2 * heads
        self.sizes = [heads, own.k_proj.out_features, own.v_proj.out_features]
        self.row_indices = torch.arange(layer_ops.WINDOW, device=layer.input_layernorm.weight.device)[None]

    def __call__(self, x: HiddenRows, *given: Any) -> tuple[HiddenRows, Tensor]:
        """What leaves the layer for its input x, and the queries [B, H, n, D], with RoPE; `given` as of `attend`."""
        out, query = self.attend(x, *given)
        return self.finish(x, out), query

    def attend(
        self,
        x: HiddenRows | None,
        rope: Tensor,
        columns: Tensor,
        key: Tensor | SeparateKVCaches,
        value: Tensor,
        sees: Tensor | None = None,
        bias: Tensor | None = None,
        qkv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Write the new rows' keys and values to the cache; return their attention output [B * n, H * D] and queries.

        x        hidden states of B * n rows; unused if `qkv` is given
        rope     cosines and sines [2, B, n, D] of the rows
        columns  [B, n] long, cache slots of `key` and `value` [B, G, capacity, D] that the rows are written to; where each
                 sequence has its own cache, `key` is the `SeparateKVCaches` of all and `value` is unused
        sees, bias  tree mask and score bias, as in `decode_attend` (one cache) or `decode_attend_each`
        qkv      what `project` returned for x, if a KV policy had to read it first; None: computed here
        """
        if qkv is None and (self.qk_norms or self.turn or self.gated):
            assert x is not None
            qkv = self.project(x)
        if qkv is None:
            assert x is not None
            rows, gain, squares = _normed_by(x, self.before)
            eps = self.before.variance_epsilon
            entered = rows, *self.enters, gain, squares, eps, rope, columns
            if isinstance(key, SeparateKVCaches):
                query = layer_ops.qkv_rope_rows_each(*entered, key)
            else:
                query = layer_ops.qkv_rope_rows(*entered, key, value)
        else:
            rows = qkv.view(*columns.shape, -1)
            indices = self.row_indices[:, : columns.shape[1]].expand_as(columns)
            rows = rows[..., : sum(self.sizes)]
            if self.turn is not None:
                rows, rope = self._turned(rows, rope)
            turned = rows, rope[0], rope[1], indices, columns
            if isinstance(key, SeparateKVCaches):
                query = layer_ops.rope_rows_each(*turned, key)
            else:
                query = layer_ops.rope_rows(*turned, key, value)
        scale = query.shape[-1] ** -0.5
        if isinstance(key, SeparateKVCaches):
            out = layer_ops.decode_attend_each(query, key, columns, scale, bias)
        else:
            out = layer_ops.decode_attend(query, key, value, columns, scale, sees, bias)
        return self.apply_attention_gates(out.transpose(1, 2).reshape(columns.numel(), -1), qkv), query

    def project(self, x: HiddenRows) -> Tensor:
        """Compute queries, keys and values of the rows before RoPE, side by side: [R, (H + 2 G) * D]; for gated attention
        with H * D more columns, the gates."""
        rows = norm_and_project(x, self.before, self.enters)
        if not self.qk_norms:
            return rows
        first = self.sizes[0] * (2 if self.gated else 1)
        queries, keys, values = rows.split([first, *self.sizes[1:]], 1)
        queries, *gate = queries.unflatten(1, (-1, first // self.sizes[0] * self.size)).split(self.size, 2)
        heads = [queries, keys.unflatten(1, (-1, self.size))]
        heads = [
            layer_ops.rms_norm(some, norm.weight, norm.variance_epsilon)
            for norm, some in zip(self.qk_norms, heads, strict=True)
        ]
        return torch.cat([*(some.flatten(1) for some in heads), values, *(one.flatten(1) for one in gate)], 1)

    def apply_attention_gates(self, attended: Tensor, qkv: Tensor | None) -> Tensor:
        """Return attention output [R, H * D] times the sigmoid of the gates in `qkv`; unchanged without gated attention."""
        return attended * qkv[:, -self.sizes[0] :].sigmoid() if self.gated and qkv is not None else attended

    def _turned(self, rows: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """`rows` [B, n, (H + 2 G) * D] with queries and keys turned by the family, and angles that turn no more."""
        *both, values = rows.split(self.sizes, 2)
        heads = torch.cat(both, 2).unflatten(2, (-1, self.size)).transpose(1, 2)
        assert self.turn is not None
        heads = self.turn(heads, (rope[0][:, None], rope[1][:, None])).transpose(1, 2)
        still = rows.new_zeros(2, *rows.shape[:2], self.size)
        still[0] = 1
        return torch.cat([heads.flatten(2), values], 2), still


class _Mixture:
    """A mixture of experts whose routing is the model's own code, and whose experts are `expert_mlp`."""

    def __init__(self, block: Any) -> None:
        experts = block.experts

        class Experts(nn.Module):
            def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
                return expert_mlp(x, chosen, share, experts.gate_up_proj, experts.down_proj)

        self._block = object.__new__(type(block))
        self._block.__dict__.update(block.__dict__, _modules={**block._modules, "experts": Experts()})

    def __call__(self, rows: Tensor) -> Tensor:
        # By the class: what wraps the module's own forward would go on to its experts.
        return type(self._block).forward(self._block, rows[None])[0]  # type: ignore[no-any-return]


class _Centred:
    """A norm whose gain is one more than its weight: `weight` holds it in float32, as of `LayerStep.refresh_gains`."""

    @torch.inference_mode(False)
    def __init__(self, norm: Any) -> None:
        self.norm, self.variance_epsilon = norm, norm.eps
        self.weight = norm.weight.detach().float() + 1.0


def as_standard_rms_norm(norm: Any, family: Any) -> Any:
    """Return the norm as a module with `weight` and `variance_epsilon`; one that scales by ``1 + weight`` is wrapped."""
    return _Centred(norm) if type(norm).__name__ in family.centred_norms else norm


def build_layer_steps(
    layers: Sequence[Any], family: Any, follows: Any = None, states: int = 0
) -> list[LayerStep | FusedDeltaNetStep]:
    """Build the fused steps of consecutive `layers`. `follows`: the norm after the last of them, or None; `states`: the
    number of recurrent layers before the first of them."""
    norms, steps = (
        [*(layer.input_layernorm for layer in layers[1:]), follows],
        list[LayerStep | FusedDeltaNetStep](),
    )
    for layer, norm in zip(layers, norms, strict=False):
        if hasattr(layer, "linear_attn"):
            steps.append(FusedDeltaNetStep(layer, family, norm, states))
            states += 1
        else:
            steps.append(LayerStep(layer, family, norm))
    return steps


def gather_linear_weights(*linear: nn.Linear) -> Weights:
    """Return the weights and the biases of linear modules that one kernel computes together."""
    return [one.weight for one in linear], [one.bias for one in linear if one.bias is not None]


def norm_and_project(x: HiddenRows, norm: Any, by: Weights, gated: bool = False) -> Tensor:
    """Apply RMSNorm `norm`, then weights `by`, in one operator (`project_rows`); `gated`: `by` is gate and up of SwiGLU."""
    rows, gain, squares = _normed_by(x, norm)
    return layer_ops.project_rows(rows, *by, gain, norm.variance_epsilon, None, gated, squares)


def _normed_by(x: HiddenRows, norm: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What a product after `norm` is given of x: rows, and the norm's gain or the squares, whichever is still to be used."""
    return (x.rows, norm.weight, None) if x.gained is None else (x.gained, None, x.squares)


def _added(x: Tensor, by: Weights, residual: Tensor, norm: Any, end: Any = None) -> HiddenRows:
    """`residual` and rows x through a product, and through the norm `end`, if any; ready for `norm`, if one follows."""
    if end is not None:
        out = layer_ops.project_rows(x, *by)
        return HiddenRows(residual + layer_ops.rms_norm(out, end.weight, end.variance_epsilon))
    # In float16 the rows times the gain, not normed yet, might be too large.
    if norm is None or x.dtype == torch.float16:
        return HiddenRows(layer_ops.project_rows(x, by[0], by[1], None, 0.0, residual))
    return HiddenRows(*layer_ops.residual_linear(x, by[0][0], by[1], residual, norm.weight))
