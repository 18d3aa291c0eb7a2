"""Which clusters of the lower level lie inside each cluster of the upper one, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.buffers import grown


class Nest:
    """Ids of children by (parent, layer), so that a newcomer is compared with the few clusters inside its parent alone."""

    def __init__(self, layers: int) -> None:
        self._table = torch.full((0, layers, 4), -1, dtype=torch.long)
        self._count = torch.zeros(0, layers, dtype=torch.long)
        self._told: dict[int, Tensor] = {}
        """What `children` gave, of parents that have not changed since."""

    @classmethod
    def of_parents(cls, parent: Tensor) -> Nest:
        """From the parent [L, C] of every cluster, -1 for none."""
        nest = cls(parent.shape[0])
        for cluster in range(parent.shape[1]):
            layer = (parent[:, cluster] >= 0).nonzero()[:, 0]
            if layer.numel():
                nest.add(parent[layer, cluster], layer, torch.full_like(layer, cluster))
        return nest

    def add(self, parent: Tensor, layer: Tensor, child: Tensor) -> None:
        """Children [b] of distinct (parent [b], layer [b])."""
        self._forget(parent.tolist())
        self._table = grown(self._table, 0, int(parent.max()) + 1, -1)
        self._count = grown(self._count, 0, self._table.shape[0])
        at = self._count[parent, layer]
        self._table = grown(self._table, 2, int(at.max()) + 1, -1)
        self._table[parent, layer, at] = child
        self._count[parent, layer] = at + 1

    def extend(self, parent: int, layer: Tensor, child: Tensor) -> None:
        """Children [b] of one parent, at layers [b] in ascending order that may occur again."""
        many = torch.bincount(layer, minlength=self._table.shape[1])
        rank = torch.arange(len(layer)) - (many.cumsum(0) - many)[layer]
        for turn in range(int(many.max())):
            now = rank == turn
            self.add(torch.full_like(layer[now], parent), layer[now], child[now])

    def move(self, old: int, new: int, layer: Tensor, child: Tensor) -> None:
        """Children [b] of `old`, at layers [b] in ascending order that may occur again, are children of `new`."""
        if not layer.numel():
            return
        row = self._table[old]
        at, place = (row >= 0).nonzero(as_tuple=True)
        gone = torch.zeros(len(row), max(int(row.max()), int(child.max())) + 1, dtype=torch.bool)
        gone[layer, child] = True
        kept = ~gone[at, row[at, place]]
        at, left = at[kept], row[at, place][kept]
        row.fill_(-1)
        self._count[old] = 0
        self._forget([old])
        self.extend(old, at, left)
        self.extend(new, layer, child)

    def remove(self, parent: int, layer: int, child: int) -> None:
        """`child` of `parent` at `layer` is no more; the last of its siblings takes its place."""
        self._forget([parent])
        row, last = self._table[parent, layer], int(self._count[parent, layer]) - 1
        row[int((row == child).nonzero()[0])] = row[last].clone()
        row[last] = -1
        self._count[parent, layer] = last

    def children(self, parent: int) -> Tensor:
        """[L, W] children of `parent` at each layer in ascending order, then -1; not to be written to."""
        if parent >= self._count.shape[0]:
            return torch.full((self._count.shape[1], 0), -1, dtype=torch.long)
        if parent not in self._told:
            row = self._table[parent, :, : int(self._count[parent].max())]
            most = torch.iinfo(torch.long).max
            row = row.masked_fill(row < 0, most).sort(1).values
            self._told[parent] = row.masked_fill(row == most, -1)
        return self._told[parent]

    def _forget(self, parents: list[int]) -> None:
        for parent in parents:
            self._told.pop(parent, None)
