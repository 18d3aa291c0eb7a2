"""The contract of one sequence at work on one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmaccel.core.errors import ModelError


@dataclass(frozen=True, eq=False)
class Branches:
    """Rows of a tree, run in one pass after the columns that were run before.

    sees [n, m] bool: whether new row i sees column j of the last m columns, the n new ones included; all before it sees.
    depth [n] long: the place of each row, counted from the first of those m columns.
    """

    sees: Tensor
    depth: Tensor


class Runner(ABC):
    """One sequence at work on one model: prefill once, then step and roll back; positions are explicit. No gradients."""

    @abstractmethod
    def prefill(self, inputs: Mapping[str, Any], keep: Tensor | None = None, compact: bool = False) -> Tensor:
        """Run the whole prompt (ids, pixels, grids; batch 1); logits [1, V] of its last token.

        keep [n] runs only those columns, the last one among them, each at its own rotary position; with `compact` they are
        numbered anew.
        """

    @abstractmethod
    def step(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        """Run `ids` [1, n] after what was run; logits [1, n, V]. They are a chain, or the rows of a tree."""

    def resume(self, inputs: Mapping[str, Any]) -> None:
        """Go on after the prompt of `inputs`, which the memory holds already."""
        raise ModelError(f"{type(self).__name__} cannot go on from a memory that another filled.")

    def accept(self, path: Tensor) -> None:
        """Of the columns of the last `step` keep those at `path` [k] ascending, one after the other."""
        raise ModelError(f"{type(self).__name__} cannot take one branch of many; propose chains.")

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget all but the first `length` columns."""

    @abstractmethod
    def length(self) -> int:
        """Columns run and not rolled back."""
