"""The window under which a stream is encoded, and what a question sees, layer by layer.

Letters: G key/value heads, D head size, P tokens a unit. Keys are raw (before rotation) unless said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mmaccel.core.errors import RecipeError, shown
from mmaccel.core.kv import MARGIN, StreamPolicy
from mmaccel.core.places import Places

Pair = tuple[Tensor, Tensor]
"""Keys and values [1, G, n, D]."""


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
        if self.window < 1:
            raise RecipeError(f"{self.name}: window is {self.window}; give at least 1 frame.")
        if not 0 <= self.local <= self.window:
            raise RecipeError(
                f"{self.name}: local is {self.local}; give 0 to window, which is {self.window}."
            )
        if self.positions not in ("compact", "original"):
            raise RecipeError(
                f"{self.name}: positions is {shown(self.positions)}; give 'compact' or 'original'."
            )


class Bases:
    """What to take from the slots of units (`Places`), their numbers where they come evenly, so that places stay within the
    model's limit while a window is encoded.

    Places are the true ones up to the last unit that fits under the limit. From there on a base is subtracted, a multiple
    of `every`, which is the same for all chunks; only the distance to the head changes with it, not those in the window.
    `reach` is how many units stand at true places under the limit. Before the window `spare` units find places of their own.
    """

    def __init__(self, places: Places, window: int, spare: int = 0) -> None:
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


def joined(parts: list[Pair], room: int, seen: int) -> Asked:
    """Turned keys and values one after the other, in which `seen` units stand, with room for `room` columns."""
    base = sum(key.shape[2] for key, _ in parts)
    key, value = (_joined(list(side), base + room) for side in zip(*parts, strict=True))
    return Asked(key, value, base, seen)


def _joined(parts: list[Tensor], rows: int) -> Tensor:
    """`parts` [1, G, n, D] one after the other, in a tensor of `rows` rows."""
    first = parts[0]
    out = torch.empty(1, first.shape[1], rows, first.shape[3], dtype=first.dtype, device=first.device)
    torch.cat(parts, 2, out=out[:, :, : sum(one.shape[2] for one in parts)])
    return out


class Spacious(NamedTuple):
    """A tensor [2, G, N, D], keys and values, that begins with those of a head, whose keys [1, G, h, D] are `head`."""

    rows: Tensor
    head: Tensor


def spacious(kept: Spacious | None, head: Pair, room: int) -> Spacious:
    """A head with `room` columns after it: `kept`, if that is large enough; where nobody else writes over a head."""
    key, value = head
    count = key.shape[2]
    if kept is None or kept.rows.shape[2] < count + room:
        with torch.inference_mode(False):
            rows = key.new_empty(2, key.shape[1], count + room + MARGIN, key.shape[3])
    elif kept.head is key:
        return kept
    else:
        rows = kept.rows
    rows[0, :, :count], rows[1, :, :count] = key[0], value[0]
    return Spacious(rows, key)
