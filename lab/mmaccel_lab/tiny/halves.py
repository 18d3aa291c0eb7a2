"""The halves of a layer before and after its attention: functions of tensors alone, which `compile_layers` compiles once.

Activations are in the dtype of the frames (bf16 in training), weights are cast where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel_lab.tiny.configs import HEAD

EPS = 1e-6
Tensors = tuple[Tensor, ...]
Pair = tuple[Tensor, Tensor | None]
"""The weight of a layer, and its bias if it has one."""


def both(module: Any) -> Pair:
    """Weight and bias of a module."""
    return module.weight, getattr(module, "bias", None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight.to(x.dtype)


def normed(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """The layer norm of x where there is a shift, otherwise its RMS norm."""
    if shift is None:
        return rms(x, weight)
    return F.layer_norm(x.float(), weight.shape, weight, shift, EPS).to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide, rest = x.float(), x[..., cos.shape[-1] :]
    wide = wide[..., : cos.shape[-1]]
    first, second = wide.chunk(2, -1)
    turned = (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _text_before(
    x: Tensor, norm: Tensor, q: Pair, k: Pair, v: Pair, scales: Tensors, cos: Tensor, sin: Tensor, rows: int
) -> Tensors:
    """Rows [T, E] -> queries [T, H, D], keys and values [T, G, D], the first two rotated by cos and sin [T, D], and normed
    before where there are two `scales`; then what is left [T, H, rows - D] of the `rows` of `q` of a head: its gate, or
    nothing."""
    y = rms(x, norm)
    query = linear(y, *q).unflatten(-1, (-1, rows))
    key = linear(y, *k).unflatten(-1, (-1, HEAD))
    value = linear(y, *v).unflatten(-1, (-1, HEAD))
    query, gate = query[..., :HEAD], query[..., HEAD:]
    if scales:
        query, key = rms(query, scales[0]), rms(key, scales[1])
    return turn(query, cos[:, None], sin[:, None]), turn(key, cos[:, None], sin[:, None]), value, gate


def _delta_before(
    x: Tensor, norm: Tensor, wqkv: Tensor, wz: Tensor, wb: Tensor, wa: Tensor, rate: Tensor, shift: Tensor
) -> Tensors:
    """Rows [T, E] -> what is convolved [T, C], gates [T, H * D], logarithms of decay and strengths of writing [T, H]."""
    y = rms(x, norm)
    decay = -rate.float().exp() * F.softplus(linear(y, wa).float() + shift)
    return linear(y, wqkv), linear(y, wz), decay, linear(y, wb).float().sigmoid()


def _delta_gate(seen: Tensor, norm: Tensor, gate: Tensor) -> Tensor:
    """What is read [T, H, D] in float32, normed and gated [T, H * D]."""
    return (rms(seen, norm.float()).flatten(1) * F.silu(gate.float())).to(gate.dtype)


def _gated_after(
    x: Tensor, seen: Tensor, out: Pair, norm: Tensor, gate: Pair, up: Pair, down: Pair
) -> Tensor:
    """Rows and what their heads see -> rows, through a gated MLP."""
    x = x + linear(seen, *out)
    y = rms(x, norm)
    return x + linear(F.silu(linear(y, *gate)) * linear(y, *up), *down)


def _plain_after(x: Tensor, seen: Tensor, out: Pair, norm: Pair, first: Pair, second: Pair) -> Tensor:
    """Rows and what their heads see -> rows, through an MLP with GELU."""
    x = x + linear(seen, *out)
    return x + linear(F.gelu(linear(normed(x, *norm), *first), approximate="tanh"), *second)


def _siglip_before(x: Tensor, norm: Pair, q: Pair, k: Pair, v: Pair) -> Tensors:
    """Patches [F, P, C] -> queries, keys and values [F, P, C]."""
    y = normed(x, *norm)
    return linear(y, *q), linear(y, *k), linear(y, *v)


def _qwen_before(x: Tensor, norm: Pair, qkv: Pair, cos: Tensor, sin: Tensor) -> Tensors:
    """Patches [F, P, C] -> [F, P, heads, D] each, rotated by cos and sin [P, 1, D]."""
    query, key, value = linear(normed(x, *norm), *qkv).unflatten(-1, (3, -1, cos.shape[-1])).unbind(2)
    return turn(query, cos, sin), turn(key, cos, sin), value


HALVES: dict[str, Callable[..., Any]] = {
    half.__name__: half
    for half in (
        _text_before, _delta_before, _delta_gate, _gated_after, _plain_after, _siglip_before, _qwen_before,
    )
}  # fmt: skip


def compile_layers() -> None:
    """Compile the halves of a layer, once for all layers, lengths and frame counts."""
    # One half may serve text and frames, with gradients and without: each is a graph of its own.
    torch.compiler.config.recompile_limit = 16
    for name, half in HALVES.items():
        HALVES[name] = torch.compile(half, dynamic=True)
