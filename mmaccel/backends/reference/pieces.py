"""Pieces of tensors put together in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmaccel.backends.pieces import FIELDS, KINDS, ROW


def assembled(
    sources: Sequence[Tensor], table: Sequence[int], fills: int, sizes: Sequence[int]
) -> list[Tensor]:
    """See `mmaccel.backends.pieces.assembled`."""
    device = sources[0].device
    out = [torch.empty(n, dtype=kind, device=device) for n, kind in zip(sizes, KINDS, strict=True)]
    for first in range(0, len(table), len(FIELDS)):
        p = dict(zip(FIELDS, table[first : first + len(FIELDS)], strict=True))
        shape = p["batch"], p["heads"], p["size"]
        to = out[p["kind"]].as_strided(shape, (p["to_b"], p["to_h"], 1), p["to"])
        if p["source"] < 0:
            to.fill_(p["more"])
            continue
        source = sources[p["source"]]
        to.copy_(source.as_strided(shape, (p["from_b"], p["from_h"], 1), source.storage_offset()))
        if p["of_row"]:
            rows = to.as_strided((*shape[:2], p["size"] // ROW, ROW), (*to.stride()[:2], ROW, 1))
            rows[..., 0] += p["more"]
            rows[..., -1] += p["shift"]
        else:
            to += p["more"]
    return out
