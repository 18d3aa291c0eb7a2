"""A few rows through the layers of a Qwen2-like family without their modules: four kernels a layer beside attention.

The modules of a layer launch some thirty small kernels and take a host about a millisecond; for few rows that is most of
the time. Weights are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from mmaccel.backends import ops

LAYERS = {"Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer"}
"""Classes of decoder layers that are known here."""

DEVICES = ("cuda",)
"""Where it is worth it."""


def entering(layer: Any, x: Tensor) -> Tensor:
    """[R, (H + 2 G) * D]: queries, keys and values before rotation, side by side, of rows x [R, E] that enter a layer."""
    own = layer.self_attn
    return project(x, [own.q_proj, own.k_proj, own.v_proj], layer.input_layernorm)


def leaving(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    """[R, E]: what leaves a layer that rows x [R, E] entered, by their attention [R, H * D]."""
    mlp = layer.mlp
    x = project(attended, [layer.self_attn.o_proj], residual=x)
    wide = project(x, [mlp.gate_proj, mlp.up_proj], layer.post_attention_layernorm, gated=True)
    return project(wide, [mlp.down_proj], residual=x)


def project(
    x: Tensor,
    linear: Sequence[nn.Linear],
    norm: Any = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """See `ops.project_rows`."""
    weight = [one.weight for one in linear]
    bias = [one.bias for one in linear if one.bias is not None]
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
    return ops.project_rows(x, weight, bias, gain, eps, residual, gated)  # type: ignore[no-any-return]


def known(layers: Iterable[Any], activation: str) -> bool:
    """Whether `entering` and `leaving` compute what `layers` do: of classes known here, each on one device, with weights as
    they come."""
    layers = list(layers)
    return activation == "silu" and all(
        type(layer).__name__ in LAYERS
        and layer.self_attn.sliding_window is None
        and all(type(linear) is nn.Linear for linear in linears(layer))
        and len({p.device for p in layer.parameters()}) == 1
        for layer in layers
    )


def linears(layer: Any) -> list[nn.Module]:
    """The seven products of a layer."""
    own, mlp = layer.self_attn, layer.mlp
    return [own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
