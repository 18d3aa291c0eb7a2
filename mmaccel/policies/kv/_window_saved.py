"""The head and the window of a stream's memory on disk.

Letters: G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core import saving
from mmaccel.core.errors import ModelError
from mmaccel.core.kv import Stream
from mmaccel.policies.kv._window import Pair, Ring


def save_window(
    folder: Path, heads: Sequence[Pair | None], rings: Sequence[Ring | None], count: int, first: int
) -> None:
    """Write, layer by layer, the head and the units ``first .. count``, which the window holds; raises OSError."""
    tensors: dict[str, Tensor] = {}
    for layer, (head, ring) in enumerate(zip(heads, rings, strict=True)):
        if head is not None:
            tensors |= {f"head.{layer}.key": head[0], f"head.{layer}.value": head[1]}
        if ring is not None:
            tensors |= {f"window.{layer}.key": ring.key, f"window.{layer}.value": ring.value}
    saving.write_tensors(folder / "window.safetensors", tensors)
    saving.write_json(folder / "state.json", {"units": count, "first": first})


def load_window(
    folder: Path, stream: Stream, layers: int, sizes: tuple[int, int], window: int, device: torch.device
) -> tuple[list[Pair | None], list[Ring | None], int, int]:
    """What `save_window` wrote, for heads of `sizes` (G, D), with keys that are not turned; raises `ModelError` for what is
    damaged."""
    facts = saving.read_json(folder / "state.json", {"units": int, "first": int})
    count, first = facts["units"], facts["first"]
    if not 0 <= first <= count or count - first > window:
        raise ModelError(f"{folder}: the window holds units {first} to {count}; the file is damaged.")
    wanted: dict[str, Any] = {}
    for layer in range(layers):
        for name, rows in (("head", stream.head), ("window", (count - first) * stream.unit)):
            if rows or name == "head":
                size = (1, sizes[0], rows, sizes[1])
                wanted |= {f"{name}.{layer}.{side}": (size, stream.dtype) for side in ("key", "value")}
    found = saving.read_tensors(folder / "window.safetensors", wanted, device)
    heads: list[Pair | None] = [
        (found[f"head.{layer}.key"], found[f"head.{layer}.value"]) for layer in range(layers)
    ]
    rings: list[Ring | None] = []
    for layer in range(layers):
        key = found.get(f"window.{layer}.key")
        rings.append(None if key is None else Ring(key, key, found[f"window.{layer}.value"]))
    return heads, rings, count, first
