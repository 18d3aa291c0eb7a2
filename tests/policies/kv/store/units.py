"""Stores of small units whose numbers tell layer, unit, head, token and place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.policies.kv.store import HostStore, Shape

LAYERS, GROUPS, TOKENS, SIZE = 3, 2, 5, 4
UNIT_BYTES = 2 * GROUPS * TOKENS * SIZE * 4


def open_store(slots: int = 16, **fields: Any) -> HostStore:
    """A store whose slabs hold `slots` units of a layer."""
    shape = dict(layers=LAYERS, groups=GROUPS, tokens=TOKENS, size=SIZE, dtype=torch.float32)
    shape |= {name: fields.pop(name) for name in list(fields) if name in shape}
    return HostStore(Shape(**shape), **{"device": "cpu", "slab_bytes": slots * UNIT_BYTES, **fields})  # type: ignore[arg-type]


def contents(layer: int, units: list[int], salt: int = 0, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Keys and values [G, n * P, D]; no two numbers of a store are the same."""
    rows = torch.arange(tokens) + tokens * torch.tensor(units, dtype=torch.long)[:, None]
    base = rows.reshape(-1)[None, :, None] * 64.0 + layer * 16 + salt / 16
    key = base + 8 * torch.arange(GROUPS)[:, None, None] + torch.arange(SIZE) / 64
    return key, -key - 0.5


REAL_EMPTY = torch.empty


def poisoned(*sizes: Any, **named: Any) -> Tensor:
    """`torch.empty` whose memory holds what no test expects: old memory may hold the very numbers that are wanted."""
    made = REAL_EMPTY(*sizes, **named)
    return made.fill_(torch.nan if made.is_floating_point() else 77)


def check(store: HostStore, layer: int, units: list[int], salt: int = 0, out: Tensor | None = None) -> None:
    found = store.fetch(layer, units, out)
    for ours, theirs in zip(found, contents(layer, units, salt), strict=True):
        assert torch.equal(ours, theirs)


def fill(store: HostStore, units: list[int]) -> None:
    for layer in range(LAYERS):
        store.put(layer, units, *contents(layer, units))
