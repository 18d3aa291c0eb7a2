"""One part of an attention plan in Triton: gathered inside the kernel, one softmax over all spans, long rows split."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends import architectures
from mmaccel.backends.block_attend import define


@functools.cache
def usable(device: torch.device) -> str | None:
    """Why this backend cannot run on `device`; None when it can. Triton itself is not imported to tell."""
    return architectures.why_not("triton", device) or (None if find_spec("triton") else "it needs triton")


def reads_weights(x: Tensor) -> bool:
    """Whether the products of rows `x` [R, K] are a matter of reading weights, and there are kernels for these."""
    if x.dtype != torch.bfloat16 or usable(x.device) is not None:
        return False
    from mmaccel.backends.triton.decode import skinny_gemm as rows

    return x.shape[0] <= rows.MOST


def _block_attend(*args: Any) -> tuple[Tensor, Tensor]:
    from mmaccel.backends.triton.prefill.attend import block_attend

    return block_attend(*args)


op = define("block_attend_triton", _block_attend)
