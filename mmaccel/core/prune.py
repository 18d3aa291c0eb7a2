"""The contract of a token pruner: which visual tokens are worth keeping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from mmaccel.core.layout import TokenLayout


@dataclass(frozen=True, kw_only=True)
class TokenPruner(ABC):
    """Chooses the rows to keep, from signals it declares.

    seat   where it acts: on whole "frames" before the language model, at a "layer" of the target, on the "draft"'s prompt,
           or on the cache in "decode"
    needs  names of the signals it reads (for example "attention", "hidden", "value")
    lossy  whether the target's own output may change
    """

    name: ClassVar[str]
    seat: ClassVar[Literal["frames", "layer", "draft", "decode"]]
    needs: ClassVar[frozenset[str]] = frozenset()
    lossy: ClassVar[bool] = False

    @abstractmethod
    def keep(self, signals: Mapping[str, Tensor], layout: TokenLayout, layer: int) -> Tensor:
        """[n] long, ascending: the columns of `layout` that stay; text columns always do."""
