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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight.to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide, rest = x.float(), x[..., cos.shape[-1] :]
    wide = wide[..., : cos.shape[-1]]
    first, second = wide.chunk(2, -1)
    turned = (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _text_before(
    x: Tensor,
    norm: Tensor,
    wq: Tensor,
    bq: Tensor,
    wk: Tensor,
    bk: Tensor,
    wv: Tensor,
    bv: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T, E] -> queries [T, H, D], keys and values [T, G, D], rotated by cos and sin [T, D]."""
    y = rms(x, norm)
    query = linear(y, wq, bq).unflatten(-1, (-1, HEAD))
    key = linear(y, wk, bk).unflatten(-1, (-1, HEAD))
    value = linear(y, wv, bv).unflatten(-1, (-1, HEAD))
    return turn(query, cos[:, None], sin[:, None]), turn(key, cos[:, None], sin[:, None]), value


def _normed_before(
    x: Tensor,
    norm: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    nq: Tensor,
    nk: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_text_before`, with norms of queries and keys; then what is left [T, H, rows - D] of the `rows` of `wq` of a head:
    its gate, or nothing."""
    y = rms(x, norm)
    query = linear(y, wq).unflatten(-1, (-1, rows))
    key = linear(y, wk).unflatten(-1, (-1, HEAD))
    value = linear(y, wv).unflatten(-1, (-1, HEAD))
    cos, sin = cos[:, None], sin[:, None]
    gate = query[..., HEAD:]
    return turn(rms(query[..., :HEAD], nq), cos, sin), turn(rms(key, nk), cos, sin), value, gate


def _delta_before(
    x: Tensor, norm: Tensor, wqkv: Tensor, wz: Tensor, wb: Tensor, wa: Tensor, rate: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows [T, E] -> what is convolved [T, C], gates [T, H * D], logarithms of decay and strengths of writing [T, H]."""
    y = rms(x, norm)
    decay = -rate.float().exp() * F.softplus(linear(y, wa).float() + shift)
    return linear(y, wqkv), linear(y, wz), decay, linear(y, wb).float().sigmoid()


def _delta_gate(seen: Tensor, norm: Tensor, gate: Tensor) -> Tensor:
    """What is read [T, H, D] in float32, normed and gated [T, H * D]."""
    return (rms(seen, norm.float()).flatten(1) * F.silu(gate.float())).to(gate.dtype)


def _text_after(
    x: Tensor, seen: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    x = x + linear(seen, wo)
    y = rms(x, norm)
    return x + linear(F.silu(linear(y, gate)) * linear(y, up), down)


def _siglip_before(
    x: Tensor,
    norm: Tensor,
    shift: Tensor,
    wq: Tensor,
    bq: Tensor,
    wk: Tensor,
    bk: Tensor,
    wv: Tensor,
    bv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    y = F.layer_norm(x.float(), norm.shape, norm, shift, EPS).to(x.dtype)
    return linear(y, wq, bq), linear(y, wk, bk), linear(y, wv, bv)


def _siglip_after(
    x: Tensor,
    seen: Tensor,
    wo: Tensor,
    bo: Tensor,
    norm: Tensor,
    shift: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
) -> Tensor:
    x = x + linear(seen, wo, bo)
    y = F.layer_norm(x.float(), norm.shape, norm, shift, EPS).to(x.dtype)
    return x + linear(F.gelu(linear(y, w1, b1), approximate="tanh"), w2, b2)


def _qwen_before(
    x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Patches [F, P, C] -> [F, P, heads, D] each, rotated by cos and sin [P, 1, D]."""
    query, key, value = linear(rms(x, norm), weight, bias).unflatten(-1, (3, -1, cos.shape[-1])).unbind(2)
    return turn(query, cos, sin), turn(key, cos, sin), value


def _qwen3_before(
    x: Tensor, norm: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    y = F.layer_norm(x.float(), norm.shape, norm, shift, EPS).to(x.dtype)
    query, key, value = linear(y, weight, bias).unflatten(-1, (3, -1, cos.shape[-1])).unbind(2)
    return turn(query, cos, sin), turn(key, cos, sin), value


def _qwen_after(
    x: Tensor,
    seen: Tensor,
    wo: Tensor,
    bo: Tensor,
    norm: Tensor,
    wg: Tensor,
    bg: Tensor,
    wu: Tensor,
    bu: Tensor,
    wd: Tensor,
    bd: Tensor,
) -> Tensor:
    x = x + linear(seen, wo, bo)
    y = rms(x, norm)
    return x + linear(F.silu(linear(y, wg, bg)) * linear(y, wu, bu), wd, bd)


HALVES: dict[str, Callable[..., Any]] = {
    half.__name__: half
    for half in (
        _text_before, _normed_before, _delta_before, _delta_gate, _text_after,
        _siglip_before, _siglip_after, _qwen_before, _qwen3_before, _qwen_after,
    )
}  # fmt: skip


def compile_layers() -> None:
    """Compile the halves of a layer, once for all layers, lengths and frame counts."""
    for name, half in HALVES.items():
        HALVES[name] = torch.compile(half, dynamic=True)


def both(module: Any) -> tuple[Tensor, Tensor]:
    return module.weight, module.bias
