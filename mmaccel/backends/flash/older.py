"""Dense causal attention, whole or within a window, by flash-attn 3 or 2: where flash-attn 4 does not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends import architectures
from mmaccel.backends.flash import causal

LARGEST = 256
"""The largest head size that is served, in steps of 8."""


class Kernel(NamedTuple):
    """The function of one release, and whether it computes a square (as many queries as keys) faster than PyTorch's own."""

    release: int
    call: Callable[..., Any]
    square: bool


def serves(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> bool:
    """Whether a kernel is there for the device of query [B, H, n, D], and takes its type and size, its heads over those of
    key [B, G, N, D], and `window`; not where PyTorch's own kernel was measured to be faster."""
    n, size = query.shape[2:]
    fits = (
        query.dtype in (torch.float16, torch.bfloat16)
        and key.dtype == value.dtype == query.dtype
        and size <= LARGEST
        and size % 8 == 0
        and value.shape[-1] == size
    )
    found = kernel(query.device) if fits else None
    if found is None:
        return False
    return found.square or window is not None or n != key.shape[2]


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
    """query [B, H, n, D] over key and value [B, G, N, D], the last rows of both at one column: [B, H, n, D]. With `window` a
    query sees that many columns, its own the last of them."""
    found = kernel(query.device)
    assert found is not None
    sides = (-1, -1) if window is None else (window - 1, 0)
    turned = (t.transpose(1, 2) for t in (query, key, value))
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        told = found.call(*turned, softmax_scale=scale, causal=True, window_size=sides)
    out: Tensor = told[0] if isinstance(told, tuple) else told
    return out.transpose(1, 2)


def kernel(device: torch.device) -> Kernel | None:
    """What serves `device`; None where neither is installed for it, or flash-attn 4 serves it."""
    if causal.usable(device):
        return None
    for release in (3, 2):
        call = installed(release) if architectures.why_not(f"flash_{release}", device) is None else None
        if call is not None:
            return Kernel(release, call, square=release == 3 or not architectures.of(device).cudnn)
    return None


@cache
def installed(release: int) -> Callable[..., Any] | None:
    """`flash_attn_func` of flash-attn 3 or 2, or None."""
    module = {3: "flash_attn_interface", 2: "flash_attn"}[release]
    try:
        # One that was built for another PyTorch cannot be imported; flash-attn 4 alone has the name of 2, and no function.
        return getattr(import_module(module), "flash_attn_func", None)
    except (ImportError, OSError):
        return None
