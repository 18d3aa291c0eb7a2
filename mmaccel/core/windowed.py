"""A window over the columns of a stream as a plan: what passes of many rows see, without a mask written out."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from mmaccel.backends import select
from mmaccel.core.errors import RecipeError
from mmaccel.core.plan import FAR, AttentionPlan, Part, pad_rows, span_by_range

BLOCK = 128
"""Rows and keys of a block: a tile of the kernel for Hopper, and blocks too many at either end of a window are few."""


def kernel_for(device: torch.device, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """What computes windows of many rows without a mask, where there is something better than masks."""
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    try:
        return select.get("triton", device)
    except RecipeError:
        return None


@lru_cache(64)
@torch.inference_mode(False)
@torch.no_grad()
def window_plan(
    rows: int, keys: int, sinks: int, window: int, heads: int, device: torch.device
) -> AttentionPlan:
    """What `dense_attend` computes for one sequence of `keys` columns whose last `rows` ask, under `window` and `sinks`.

    From sizes alone, so that one plan serves all layers of a pass, and all passes of a full window. No host read.
    """
    column = torch.arange(keys, dtype=torch.int32, device=device)
    at = pad_rows(column[keys - rows :], BLOCK)[None, None]
    q_row = torch.where(at >= 0, at - (keys - rows), -1)
    k_row, k_place = pad_rows(column, BLOCK)[None, None], pad_rows(column, BLOCK, keys)[None, None]
    spans = [span_by_range(q_row, k_row, at, k_place, 0, window, BLOCK, BLOCK)]
    if sinks:
        # Those out of the window alone: what both held would count twice.
        first = pad_rows(column[:sinks], BLOCK)[None, None]
        place = pad_rows(column[:sinks], BLOCK, keys)[None, None]
        spans.append(span_by_range(q_row, first, at, place, window, FAR, BLOCK, BLOCK))
    return AttentionPlan((Part(q_row, tuple(spans)),), BLOCK, BLOCK, 1, heads, rows, keys)
