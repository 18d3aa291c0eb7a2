"""The window under which a stream is encoded, and what a question sees, layer by layer.

Letters: G key/value heads, D head size, P tokens a unit. Keys are raw (before rotation) unless said.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mmaccel.core import checkpoint_io
from mmaccel.core.adapter import ModelView
from mmaccel.core.errors import ModelError, RecipeError, check_choice, check_least
from mmaccel.core.kv import Stream, StreamPolicy
from mmaccel.core.positions import PositionIds

Pair = tuple[Tensor, Tensor]
"""Keys and values [1, G, n, D]."""
Angles = tuple[Tensor, Tensor]
"""Cosines and sines of positions."""


MOST = 1 << 16
"""Units between two bases at most, where their places pass no limit."""


@dataclass(frozen=True, kw_only=True)
class WindowedPolicy(StreamPolicy):
    """The fields of a memory with a local window; budgets are in frames.

    window     frames, the current one included, that a query sees while the stream is encoded
    local      of these, the last so many are seen by a question; the rest are recalled or not, like older ones
    positions  where a question sees units: "compact", one after the other as if nothing lay between them, or
               "original", at their true places, and compact from the moment when these pass what the model was made for
    """

    window: int = 76
    local: int = 8
    positions: Literal["compact", "original"] = "compact"

    def __post_init__(self) -> None:
        check_least(self, 1, "window", of=" frame")
        if not 0 <= self.local <= self.window:
            raise RecipeError(
                f"{self.name}: local is {self.local}; give 0 to window, which is {self.window}."
            )
        check_choice(self.name, "positions", self.positions, ("compact", "original"))


class Bases:
    """What to take from the slots of units (`PositionIds`), their numbers where they come evenly, so that places stay within
    the model's limit while a window is encoded.

    Places are the true ones up to the last unit that fits under the limit. From there on a base is subtracted, a multiple
    of `every`, which is the same for all chunks; only the distance to the head changes with it, not those in the window.
    `reach` is how many units stand at true places under the limit. Before the window `spare` units find places of their own.
    """

    def __init__(self, places: PositionIds, window: int, spare: int = 0) -> None:
        low, high = 0, 1
        while high < MOST and places.span(high) < places.limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if places.span(middle) < places.limit else (low, middle)
        self._places, self.window, self.reach = places, window + spare, low
        # Spare units take no place that a window of up to half the limit has without them.
        self.every = max(low - self.window, window - spare, 1)

    def of(self, unit: int) -> int:
        """The base for the queries of a unit."""
        return int(self._places.at(max(0, unit - self.window)) // self.every * self.every)

    def same(self, unit: int, count: int) -> int:
        """How many of `count` units from `unit` on have its base."""
        if self._places.even:
            return min(count, self.of(unit) + self.every + self.window - unit)
        base = self.of(unit)
        return next((some for some in range(1, count) if self.of(unit + some) != base), count)


class Ring(NamedTuple):
    """The last units of one layer: raw keys, the same turned for the base in force, values; [1, G, m * P, D]."""

    key: Tensor
    turned: Tensor
    value: Tensor


@dataclass(eq=False)
class Asked:
    """What a question sees at one layer: turned keys and values with room for more; `base` columns of it, in which `seen`
    units stand, come before the question."""

    key: Tensor
    value: Tensor
    base: int
    seen: int


def moved(old: Ring | None, new: Ring, cut: int) -> tuple[Ring, Pair]:
    """`old` followed by `new` without its first `cut` columns, and those columns' raw keys and values."""
    parts = [new] if old is None else [old, new]
    key, turned, value = (torch.cat(side, 2) for side in zip(*parts, strict=True))
    gone = key[:, :, :cut], value[:, :, :cut]
    if cut:
        # Copied: a slice would keep the whole.
        return Ring(key[:, :, cut:].clone(), turned[:, :, cut:].clone(), value[:, :, cut:].clone()), gone
    return Ring(key, turned, value), gone


class Rope:
    """Rotates keys and queries [1, heads, n, D]; the angles of a name are made once until `forget`."""

    def __init__(self, model: ModelView, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._kept: dict[Hashable, Angles] = {}

    def forget(self) -> None:
        """The next pass begins."""
        self._kept.clear()

    def at(self, name: Hashable, positions: Callable[[], Tensor]) -> Angles:
        """The angles of `positions()` [n] or [3, n], made when `name` is new."""
        found = self._kept.get(name)
        if found is None:
            found = self._kept[name] = self._model.angles(positions(), self._dtype)
        return found

    def angles(self, positions: Tensor) -> Angles:
        """The angles of `positions` [n] or [3, n], which no other layer shares."""
        return self._model.angles(positions, self._dtype)

    def apply(self, x: Tensor, angles: Angles) -> Tensor:
        """`x` rotated by `angles`, which are those of as many positions."""
        return self._model.turn(x, angles)

    def apply_(self, x: Tensor, angles: Angles) -> None:
        """`apply` in place."""
        self._model.turn_(x, angles)


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
    checkpoint_io.write_tensors(folder / "window.safetensors", tensors)
    checkpoint_io.write_json(folder / "state.json", {"units": count, "first": first})


def load_window(
    folder: Path, stream: Stream, layers: int, sizes: tuple[int, int], window: int, device: torch.device
) -> tuple[list[Pair | None], list[Ring | None], int, int]:
    """What `save_window` wrote, for heads of `sizes` (G, D), with keys that are not turned; raises `ModelError` for what is
    damaged."""
    facts = checkpoint_io.read_json(folder / "state.json", {"units": int, "first": int})
    count, first = facts["units"], facts["first"]
    if not 0 <= first <= count or count - first > window:
        raise ModelError(f"{folder}: the window holds units {first} to {count}; the file is damaged.")
    wanted: dict[str, Any] = {}
    for layer in range(layers):
        for name, rows in (("head", stream.head), ("window", (count - first) * stream.unit)):
            if rows or name == "head":
                size = (1, sizes[0], rows, sizes[1])
                wanted |= {f"{name}.{layer}.{side}": (size, stream.dtype) for side in ("key", "value")}
    found = checkpoint_io.read_tensors(folder / "window.safetensors", wanted, device)
    heads: list[Pair | None] = [
        (found[f"head.{layer}.key"], found[f"head.{layer}.value"]) for layer in range(layers)
    ]
    rings: list[Ring | None] = []
    for layer in range(layers):
        key = found.get(f"window.{layer}.key")
        rings.append(None if key is None else Ring(key, key, found[f"window.{layer}.value"]))
    return heads, rings, count, first
