"""Cosines and sines of positions, kept while the layers of one pass ask for the same ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView

Angles = tuple[Tensor, Tensor]


class Turner:
    """Turns keys and queries [1, heads, n, D]; the angles of a name are made once until `forget`."""

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

    def turn(self, x: Tensor, angles: Angles) -> Tensor:
        """`x` rotated by `angles`, which are those of as many positions."""
        return self._model.turn(x, angles)

    def turn_(self, x: Tensor, angles: Angles) -> None:
        """`turn` in place."""
        self._model.turn_(x, angles)
