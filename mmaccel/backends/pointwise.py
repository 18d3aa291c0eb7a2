"""What a transformer layer does to each row alone, beside its products: one read and one write of memory each.

In PyTorch a norm reads and writes its rows some seven times over, in full precision. Each operator rounds where the
modules of transformers round, so that its results are theirs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel.backends import triton


def fusible(x: Tensor) -> bool:
    """Whether the operators are one kernel each on `x`; elsewhere they are what the modules do themselves."""
    return _compiled(x)


HALVES = (torch.float16, torch.bfloat16)


def _compiled(x: Tensor) -> bool:
    return x.dtype in HALVES and triton.usable(x.device) is None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if _compiled(x):
        from mmaccel.backends.triton.pointwise import rms_norm as launch

        return launch(x, weight, eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _silu_times_(gate: Tensor, up: Tensor) -> None:
    if _compiled(gate):
        from mmaccel.backends.triton.pointwise import silu_times_ as launch

        launch(gate, up)
    else:
        gate.copy_(F.silu(gate) * up)


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if _compiled(x):
        from mmaccel.backends.triton.pointwise import rotate_ as launch

        launch(x, cos, sin)
    else:
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        x.copy_(x * cos[:, None] + turned * sin[:, None])


def angles(places: Tensor, pace: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n, D] of `places` [n] long turning at `pace` [D / 2] float32, once for each half of a head, times
    `scale`: in one kernel on a device, as rotary embeddings of transformers make them. For code that nobody compiles."""
    if dtype in HALVES and triton.usable(places.device) is None:
        from mmaccel.backends.triton.pointwise import angles as launch

        return launch(places, pace, scale, dtype)
    angle = (places[:, None].float() * pace).repeat(1, 2)
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


rms_norm = torch.library.custom_op(
    "mmaccel::rms_norm", _rms_norm, mutates_args=(), schema="(Tensor x, Tensor weight, float eps) -> Tensor"
)
"""[..., E]: the rows of x over their root mean square in float32, rounded, times weight [E]."""

silu_times_ = torch.library.custom_op(
    "mmaccel::silu_times_", _silu_times_, mutates_args=("gate",), schema="(Tensor(a!) gate, Tensor up) -> ()"
)
"""gate [..., I], in place: its SiLU, rounded, times up [..., I]; both contiguous."""

rotate_ = torch.library.custom_op(
    "mmaccel::rotate_", _rotate_, mutates_args=("x",), schema="(Tensor(a!) x, Tensor cos, Tensor sin) -> ()"
)
"""x [B, H, n, D], in place: turned by cos and sin [B or 1, n, D], the halves of a head paired (RoPE, arXiv 2104.09864).

Angles in the type of x round each product, as decoder layers do; angles in float32 round x once, as vision towers do.
"""


rms_norm_now, rotate_now_ = _rms_norm, _rotate_
"""What is behind `rms_norm` and `rotate_`, for code that nobody compiles: a call through torch.library takes the host some
40 us more."""


@rms_norm.register_fake
def _rms_norm_shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@silu_times_.register_fake
def _silu_times_shape(gate: Tensor, up: Tensor) -> None:
    return None


@rotate_.register_fake
def _rotate_shape(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    return None
