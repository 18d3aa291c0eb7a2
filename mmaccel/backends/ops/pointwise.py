"""What a transformer layer does to each row alone, beside its products: one read and one write of memory each.

In PyTorch a norm reads and writes its rows some seven times over, in full precision. Each operator rounds where the
modules of transformers round, so that its results are theirs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel.backends.ops.operator import operator, runs_triton

HALVES = (torch.float16, torch.bfloat16)


def fusible(x: Tensor, *rest: object) -> bool:
    """Whether the operators are one kernel each on `x`; elsewhere they are what the modules do themselves."""
    return x.dtype in HALVES and runs_triton(x)


@operator(
    "pointwise", serves=fusible, fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., E]: the rows of x over their root mean square in float32, rounded, times weight [E]."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@operator("pointwise", serves=fusible, mutates=("gate",), fake=lambda: None)
def silu_times_(gate: Tensor, up: Tensor) -> None:
    """gate [..., I], in place: its SiLU, rounded, times up [..., I]; both contiguous."""
    gate.copy_(F.silu(gate) * up)


@operator("pointwise", serves=fusible, mutates=("x",), fake=lambda: None)
def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x [B, H, n, D], in place: turned by cos and sin [B or 1, n, D], the halves of a head paired (RoPE, arXiv 2104.09864).

    Angles in the type of x round each product, as decoder layers do; angles in float32 round x once, as vision towers do.
    """
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    x.copy_(x * cos[:, None] + turned * sin[:, None])


@operator("pointwise", serves=lambda places, pace, scale, dtype: dtype in HALVES and runs_triton(places))
def angles(places: Tensor, pace: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n, D] of `places` [n] long turning at `pace` [D / 2] float32, once for each half of a head, times
    `scale`: in one kernel on a device, as rotary embeddings of transformers make them."""
    angle = (places[:, None].float() * pace).repeat(1, 2)
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)
