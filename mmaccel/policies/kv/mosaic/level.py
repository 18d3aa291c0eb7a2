"""The clusters of one level of the hierarchy, for all layers at once, as tensors.

Letters: L layers, C places for clusters, M places for the entries of a cluster, N entries, d size of an entry's vector. A
cluster is a pair (layer, id); an id of size 0 is free.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.buffers import grown
from mmaccel.policies.kv.mosaic.statistics import summary

ROWS = ("centroid", "variance", "size", "members", "parent", "home", "lazy", "limit")
FILL = {"members": -1, "owner": -1, "parent": -1, "home": -1}


class Level:
    """Clusters of L layers over the same N entries.

    centroid [L, C, d], variance, size [L, C]; members [L, C, M] entries, -1 past the size; owner [L, N] the cluster of each
    entry, -1 for none; parent [L, C] the cluster of the level above; home [L, C] the cluster that a buffered one is to be
    merged into, -1 for others; lazy [L, C] whether a split is owed; limit [L, C] a threshold raised for this cluster alone;
    dirty [L, C] whether it has changed since `changed` was last asked. Read them; write by the methods, which note what was
    there before, so that `restore` can bring it back.
    """

    def __init__(self, layers: int, width: int, dtype: torch.dtype) -> None:
        self.centroid = torch.zeros(layers, 0, width, dtype=dtype)
        self.variance, self.limit = (torch.zeros(layers, 0, dtype=dtype) for _ in range(2))
        self.size, self.parent, self.home, self.owner = (
            torch.zeros(layers, 0, dtype=torch.long) for _ in range(4)
        )
        self.members = torch.zeros(layers, 0, 1, dtype=torch.long)
        self.lazy, self.dirty, self._noted = (torch.zeros(layers, 0, dtype=torch.bool) for _ in range(3))
        self._journal: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
        self._entries = 0
        self._count_ids()

    @property
    def layers(self) -> int:
        return self.size.shape[0]

    @property
    def used(self) -> int:
        """The ids in use, in any layer, are below this."""
        return max(self._used)

    def count(self) -> Tensor:
        """[L] clusters that have entries."""
        return (self.size > 0).sum(1)

    def reach(self, entries: int) -> None:
        """Make room for `entries` entries."""
        self.owner = grown(self.owner, 1, entries, -1)
        self._entries = max(self._entries, entries)

    def take(self, layer: Tensor, parent: Tensor) -> Tensor:
        """New ids [b], one for each of `layer` [b], under `parent` [b]; the lowest free ones."""
        ids = []
        for at in layer.tolist():
            if self._free[at]:
                ids.append(heapq.heappop(self._free[at]))
            else:
                ids.append(self._used[at])
                self._used[at] += 1
        for name in (*ROWS, "dirty", "_noted"):
            setattr(self, name, grown(getattr(self, name), 1, self.used, FILL.get(name, 0)))
        new = torch.tensor(ids, dtype=torch.long)
        self._note(layer, new)
        self.parent[layer, new] = parent
        self.home[layer, new] = -1
        self.lazy[layer, new] = False
        self.limit[layer, new] = 0
        return new

    def add(self, layer: Tensor, cluster: Tensor, entry: int, centroid: Tensor, variance: Tensor) -> None:
        """Entry `entry` joins `cluster` [b] at `layer` [b] (each layer once), which makes their statistics these."""
        self._note(layer, cluster)
        size = self.size[layer, cluster]
        self._widen(int(size.max()) + 1)
        self.members[layer, cluster, size] = entry
        self.owner[layer, entry] = cluster
        self.size[layer, cluster] = size + 1
        self.centroid[layer, cluster], self.variance[layer, cluster] = centroid, variance
        self.dirty[layer, cluster] = True

    def fill(self, layer: Tensor, cluster: Tensor, members: Tensor, x: Tensor) -> None:
        """The clusters (layer [b], cluster [b]) are made of `members` [b, m] (-1: none) with vectors `x` [b, m, d]."""
        self.write(layer, cluster, members, *summary(x, members >= 0))

    def write(
        self,
        layer: Tensor,
        cluster: Tensor,
        members: Tensor,
        centroid: Tensor,
        variance: Tensor,
        size: Tensor,
    ) -> None:
        """As `fill`, with the statistics given; none may be empty."""
        self._note(layer, cluster)
        order = torch.argsort((members < 0).to(torch.int8), dim=1, stable=True)
        packed = members.gather(1, order)[:, : int(size.max())]
        self._widen(packed.shape[1])
        self.members[layer, cluster] = -1
        self.members[layer, cluster, : packed.shape[1]] = packed
        self.size[layer, cluster] = size
        self.centroid[layer, cluster], self.variance[layer, cluster] = centroid, variance
        self._own(layer, cluster, packed)
        self.dirty[layer, cluster] = True

    def set(self, name: str, layer: Tensor, cluster: Tensor, value: Tensor | float) -> None:
        """Write one of the other rows of the clusters (layer [b], cluster [b])."""
        self._note(layer, cluster)
        getattr(self, name)[layer, cluster] = value
        self.dirty[layer, cluster] = True

    def release(self, layer: int, cluster: int) -> None:
        """Free an id; its entries belong to other clusters by now."""
        at = torch.tensor([layer]), torch.tensor([cluster])
        self._note(*at)
        for name, value in (("size", 0), ("members", -1), ("parent", -1), ("home", -1), ("lazy", 0)):
            getattr(self, name)[at] = value
        self.dirty[at] = True
        heapq.heappush(self._free[layer], cluster)

    def centroids(self, layer: Tensor, cluster: Tensor) -> Tensor:
        """`centroid` [b, m, d] of (layer [b, 1], cluster [b, m]): row by row, a third of the time that indexing takes."""
        rows = (layer * self.centroid.shape[1] + cluster).flatten()
        return self.centroid.flatten(0, 1).index_select(0, rows).view(*cluster.shape, -1)

    def contents(self, layer: Tensor, cluster: Tensor) -> Tensor:
        """The members [b, m] of (layer [b], cluster [b]), as wide as the largest; -1: none."""
        size = self.size[layer, cluster]
        return self.members[layer, cluster, : int(size.max()) if size.numel() else 0]

    def changed(self) -> tuple[Tensor, Tensor]:
        """(layer [b], cluster [b]) of the clusters that have changed since this was last asked."""
        layer, cluster = self.dirty.nonzero(as_tuple=True)
        self.dirty.zero_()
        return layer, cluster

    def checkpoint(self) -> None:
        """What `restore` comes back to; the one before is forgotten."""
        self._journal, self._marked = [], self._entries
        self._noted.zero_()

    def restore(self) -> None:
        """Be as at the last `checkpoint`."""
        self.owner[:, self._marked :] = -1
        self._entries = self._marked
        for layer, cluster, rows in reversed(self._journal):
            for name, row in rows.items():
                if name == "members":
                    self.members[layer, cluster] = -1
                    self.members[layer, cluster, : row.shape[1]] = row
                else:
                    getattr(self, name)[layer, cluster] = row
            self.dirty[layer, cluster] = True
        for layer, cluster, _ in self._journal:
            self._own(layer, cluster, self.contents(layer, cluster))
        self.checkpoint()
        self._count_ids()

    def tensors(self) -> dict[str, Tensor]:
        """What there is to save."""
        rows = {name: getattr(self, name)[:, : self.used].contiguous() for name in ROWS}
        return {**rows, "owner": self.owner[:, : self._entries].contiguous()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """What `tensors` gave."""
        for name, value in tensors.items():
            setattr(self, name, value)
        self.dirty = self.size > 0
        self._noted = torch.zeros_like(self.dirty)
        self._entries = self.owner.shape[1]
        self.checkpoint()
        self._count_ids()

    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.tensors().values(), self.dirty))

    _marked = 0

    def _count_ids(self) -> None:
        """Free ids are those below the last one in use that have no entries; the lowest goes first."""
        self._used: list[int] = []
        self._free: list[list[int]] = []
        for size in self.size:
            some = size.nonzero()
            used = int(some.max()) + 1 if some.numel() else 0
            self._used.append(used)
            self._free.append((size[:used] == 0).nonzero()[:, 0].tolist())

    def _note(self, layer: Tensor, cluster: Tensor) -> None:
        fresh = ~self._noted[layer, cluster]
        if bool(fresh.any()):
            layer, cluster = layer[fresh], cluster[fresh]
            rows = {name: getattr(self, name)[layer, cluster] for name in ROWS}
            # Copied narrow: what is past the largest size is -1.
            rows["members"] = rows["members"][:, : int(rows["size"].max())].clone()
            self._journal.append((layer, cluster, rows))
            self._noted[layer, cluster] = True

    def _own(self, layer: Tensor, cluster: Tensor, members: Tensor) -> None:
        row, col = (members >= 0).nonzero(as_tuple=True)
        self.owner[layer[row], members[row, col]] = cluster[row]

    def _widen(self, width: int) -> None:
        have = self.members.shape[2]
        if have < width:
            more = torch.full((*self.members.shape[:2], max(width - have, have)), -1, dtype=torch.long)
            self.members = torch.cat([self.members, more], 2)
