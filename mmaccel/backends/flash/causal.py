"""Dense causal attention by flash-attn 4: the fastest there is on Hopper, and made for Blackwell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.backends import architectures, flash

SIZES = (64, 96, 128)
"""Head sizes that are served."""


def serves(query: Tensor, value: Tensor) -> bool:
    """Whether flash-attn 4 is there for the device of query [B, H, n, D], and computes in its type and with its size."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] in SIZES
        and value.shape[-1] == query.shape[-1]
        and usable(query.device)
    )


def usable(device: torch.device) -> bool:
    """Whether flash-attn 4 computes dense attention on `device`."""
    return architectures.why_not("flash_4", device) is None and flash.installed()


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query [B, H, n, D] over key and value [B, G, N, D], the last rows of both at one column: [B, H, n, D]."""
    from flash_attn.cute import flash_attn_func

    turned = (t.transpose(1, 2) for t in (query, key, value))
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        found: Any = flash_attn_func(*turned, softmax_scale=scale, causal=True)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out.transpose(1, 2)
