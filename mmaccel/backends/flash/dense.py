"""Dense causal attention by flash-attn, whole or within a window: by release 4, the fastest on Hopper, made for Blackwell,
and by 3 or 2 where 4 does not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends import flash
from mmaccel.backends.ops import operator as operators

SIZES = (64, 96, 128)
"""Head sizes that flash-attn 4 serves."""

LARGEST = 256
"""The largest head size that 3 and 2 serve, in steps of 8."""


class Kernel(NamedTuple):
    """The function of one release, and whether it computes a square (as many queries as keys) faster than PyTorch's own."""

    release: int
    call: Callable[..., Any]
    square: bool


def serving(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, four: bool = True
) -> Kernel | None:
    """What is there for the device of query [B, H, n, D], and takes its type and size, its heads over those of key
    [B, G, N, D], and `window`; None also where PyTorch's own kernel was measured to be faster. With `four` release 4
    may serve."""
    n, size = query.shape[2:]
    if query.dtype not in (torch.float16, torch.bfloat16) or value.shape[-1] != size:
        return None
    if four and window is None and size in SIZES and usable(query.device):
        from flash_attn.cute import flash_attn_func

        return Kernel(4, flash_attn_func, square=True)
    if size > LARGEST or size % 8 or not key.dtype == value.dtype == query.dtype:
        return None
    found = kernel(query.device)
    return found if found and (found.square or window is not None or n != key.shape[2]) else None


def attend(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """query [B, H, n, D] over key and value [B, G, N, D], the last rows of both at one column: [B, H, n, D]. With `window` a
    query sees that many columns, its own the last of them."""
    sides = (-1, -1) if window is None else (window - 1, 0)
    how = {} if kernel.release == 4 else {"window_size": sides}
    rows_first = (t.transpose(1, 2) for t in (query, key, value))
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        result = kernel.call(*rows_first, softmax_scale=scale, causal=True, **how)
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


def usable(device: torch.device) -> bool:
    """Whether flash-attn 4 computes dense attention on `device`."""
    return operators.why_not("flash_4", device) is None and flash.installed()


def kernel(device: torch.device) -> Kernel | None:
    """What serves `device` of 3 and 2; None where neither is installed for it, or flash-attn 4 serves it."""
    if usable(device):
        return None
    for release in (3, 2):
        call = installed(release) if operators.why_not(f"flash_{release}", device) is None else None
        if call is not None:
            return Kernel(release, call, square=release == 3 or not operators.row_of(device).cudnn)
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
