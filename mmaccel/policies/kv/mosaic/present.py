"""How many entries of each cluster can be found: those that have left the window, and whose keys are still held."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.policies.kv.mosaic.buffers import grown
from mmaccel.policies.kv.mosaic.level import Level


class Present:
    """For a `level` of L layers and C clusters, whose entries are `parts` of what is numbered below.

    Counted as clusters change, so that a pass of a long stream counts what it brought, and not all that there is. In what
    is said to be `absent` [n], numbers from n on are not.
    """

    def __init__(self, level: Callable[[], Level], parts: int) -> None:
        self._level, self._parts = level, parts
        # How many of a cluster are absent.
        self._gone = torch.zeros(level().layers, 0, dtype=torch.long)

    def changed(self, layer: Tensor, cluster: Tensor, numbers: Tensor, absent: Tensor) -> None:
        """The clusters (layer [b], cluster [b]) hold `numbers` [b, m] now; -1: none."""
        self._gone = grown(self._gone, 1, self._level().size.shape[1])
        self._gone[layer, cluster] = 0
        if absent.numel():
            known = (numbers >= 0) & (numbers < len(absent))
            held = absent[numbers.clamp(0, len(absent) - 1)] & known
            self._gone[layer, cluster] = held.sum(1)

    def forget(self, numbers: Tensor) -> None:
        """`numbers` [n], which were there, are absent."""
        self._gone = self._less(grown(self._gone, 1, self._level().size.shape[1]), numbers, 1)

    def recount(self, absent: Tensor) -> None:
        """Other numbers may be absent, and in other clusters."""
        self._gone = torch.zeros(self._level().layers, self._level().size.shape[1], dtype=torch.long)
        self.forget(absent.nonzero()[:, 0])

    def sizes(self, begin: int, end: int, absent: Tensor, count: int) -> Tensor:
        """[L, count] how many below `begin` are there, of `end` in all."""
        size, gone = (
            pad(x[:, :count], (0, max(0, count - x.shape[1])))
            for x in (self._level().size * self._parts, self._gone)
        )
        late = torch.arange(begin, end)
        here = late >= len(absent)
        here[: max(0, len(absent) - begin)] = ~absent[begin:end]
        return self._less(size - gone, late[here], -1)

    def _less(self, counted: Tensor, numbers: Tensor, sign: int) -> Tensor:
        """`counted` [L, C] and one more, or less, for each of `numbers` [n] where it is."""
        owner, place = self._level().owner, numbers // self._parts
        if not counted.shape[1]:
            return counted
        place = place[place < owner.shape[1]]
        of = owner[:, place]
        return counted.scatter_add(1, of.clamp_min(0), sign * (of >= 0).long())
