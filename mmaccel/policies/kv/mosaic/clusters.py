"""`ClusterTable`: the clusters of one level (visual, or semantic for each layer) as tensors, with statistics and members.

Letters: L layers, C cluster ids (used or free), M most members of a cluster, N units (frames), d size of a unit's vector. A
cluster is a pair (layer, id); an id of size 0 is free. Statistics: c centroid [..., d], s2 population variance [...] (the
mean squared distance to c), n size [...]. For points of unit length s2 = 1 - |c|^2.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmaccel.core.memory.kv import grow_buffer

Array = NDArray[Any]
"""Where a unit is placed NumPy computes, on the tensors' memory: its calls cost a third of the time of PyTorch's."""
ROWS = ("centroid", "variance", "size", "members", "parent", "home", "lazy", "limit")
TOGETHER = 256
"""Clusters whose statistics are computed at once."""
FILL = {"members": -1, "owner": -1, "parent": -1, "home": -1}


def mean_variance_and_size(x: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return centroid c [..., d], variance s2 [...] (mean squared distance to c) and size n [...] of those points `x` [...,
    m, d] that are `present` [..., m] (bool); zeros where no point is."""
    n = present.sum(-1)
    weight = present.to(x.dtype)[..., None]
    some = n.clamp_min(1).to(x.dtype)
    c = (x * weight).sum(-2) / some[..., None]
    s2 = ((x - c[..., None, :]).square() * weight).sum((-2, -1)) / some
    return c, s2, n


def welford(c: Array, s2: Array, n: Array, u: Array) -> tuple[Array, Array]:
    """Return centroid and variance of a cluster (c, s2, n) after point `u` [..., d] joined it (Mosaic, equations 3, 4)."""
    size = n.astype(c.dtype)
    away = u - c
    new = c + away / (size + 1)[..., None]
    return new, (size * s2 + np.einsum("...d,...d", away, u - new)) / (size + 1)


def union(
    c_a: Tensor, s2_a: Tensor, n_a: Tensor, c_b: Tensor, s2_b: Tensor, n_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return centroid and variance of the union of two clusters, given the centroid, variance and size of each (Chan, Golub
    and LeVeque 1983). Neither is empty."""
    a, b = n_a.to(c_a.dtype), n_b.to(c_a.dtype)
    n = a + b
    share = b / n
    apart = c_b - c_a
    c = c_a + share[..., None] * apart
    return c, (a * s2_a + b * s2_b) / n + (a / n) * share * apart.square().sum(-1)


def pooled_variance(s2_a: Tensor, n_a: Tensor, s2_b: Tensor, n_b: Tensor) -> Tensor:
    """Return the variance that remains within the two parts of a split (pooled), given variance and size of each part."""
    a, b = n_a.to(s2_a.dtype), n_b.to(s2_a.dtype)
    return (a * s2_a + b * s2_b) / (a + b).clamp_min(torch.finfo(s2_a.dtype).tiny)


class ClusterTable:
    """Clusters of L layers over the same N units (frames).

    centroid [L, C, d], variance, size [L, C]; members [L, C, M] units, -1 past the size; owner [L, N] the cluster of each
    unit, -1 for none; parent [L, C] the cluster of the level above; home [L, C] the cluster that a buffered one will be
    merged into, -1 for others; lazy [L, C] whether a split is deferred; limit [L, C] a threshold raised for this cluster
    alone; dirty [L, C] whether it has changed since the last call of `pop_changed_clusters`. Read them freely, but write
    only by methods, which record former values for `restore`.
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
        self._under: dict[int, list[list[int]]] | None = None
        """Of each parent and layer the clusters under it, ascending; None: not counted yet."""
        self._children: dict[int, Array] = {}
        self._units = 0
        self._count_ids()

    @property
    def layers(self) -> int:
        return self.size.shape[0]

    @property
    def id_bound(self) -> int:
        """Upper bound of the cluster ids in use, in any layer."""
        return max(self._used)

    def cluster_counts(self) -> Tensor:
        """Return [L]: the number of clusters with units (frames)."""
        return (self.size > 0).sum(1)

    def reserve_units(self, units: int) -> None:
        """Enlarge the table so that units (frames) 0 .. `units` - 1 can be assigned to clusters."""
        self.owner = grow_buffer(self.owner, 1, units, fill=-1, share=1.0)
        self._units = max(self._units, units)

    def allocate_ids(self, layer: Tensor, parent: Tensor) -> Tensor:
        """Allocate new cluster ids [b], the lowest free ones, in the layers `layer` [b]; their parents are `parent` [b]."""
        ids = []
        for at in layer.tolist():
            if self._free[at]:
                ids.append(heapq.heappop(self._free[at]))
            else:
                ids.append(self._used[at])
                self._used[at] += 1
        for name in (*ROWS, "dirty", "_noted") if self.id_bound > self.size.shape[1] else ():
            rows = grow_buffer(getattr(self, name), 1, self.id_bound, fill=FILL.get(name, 0), share=1.0)
            setattr(self, name, rows)
        new = torch.tensor(ids, dtype=torch.long)
        self._note(layer, new)
        self._move(layer, new, parent)
        self.home[layer, new] = -1
        self.lazy[layer, new] = False
        self.limit[layer, new] = 0
        return new

    def add_unit(self, layer: Array, cluster: Array, unit: int, centroid: Array, variance: Array) -> None:
        """Add unit (frame) `unit` to clusters (layer [b], cluster [b]), at most one a layer, with their new statistics."""
        self._note(layer, cluster)
        at, sizes = (layer, cluster), self.size.numpy()
        size = sizes[at]
        self._widen(int(size.max()) + 1)
        self.members.numpy()[layer, cluster, size] = unit
        self.owner.numpy()[layer, unit] = cluster
        sizes[at] = size + 1
        self.centroid.numpy()[at], self.variance.numpy()[at] = centroid, variance
        self.dirty.numpy()[at] = True

    def set_members(self, layer: Tensor, cluster: Tensor, members: Tensor, x: Tensor) -> None:
        """Set the members of clusters (layer [b], cluster [b]) to units [b, m] (-1: none) with vectors `x` [b, m, d]."""
        self.write_clusters(layer, cluster, members, *mean_variance_and_size(x, members >= 0))

    def write_clusters(
        self,
        layer: Tensor,
        cluster: Tensor,
        members: Tensor,
        centroid: Tensor,
        variance: Tensor,
        size: Tensor,
    ) -> None:
        """Set the members of clusters, as `set_members` does, with the given statistics; no cluster may be empty."""
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

    def set_field(self, name: str, layer: Tensor, cluster: Tensor, value: Tensor | float) -> None:
        """Set the field `name` (parent, home, lazy or limit) of the clusters (layer [b], cluster [b]) to `value`."""
        self._note(layer, cluster)
        if name == "parent":
            self._move(layer, cluster, torch.as_tensor(value, dtype=torch.long).expand_as(cluster))
        else:
            getattr(self, name)[layer, cluster] = value
        self.dirty[layer, cluster] = True

    def _move(self, layer: Tensor, cluster: Tensor, parent: Tensor) -> None:
        """The clusters (layer [b], cluster [b]) are under `parent` [b], -1 for none, from now on."""
        before, self.parent[layer, cluster] = self.parent[layer, cluster], parent
        if self._under is None:
            return
        for at, one, old, new in zip(*(t.tolist() for t in (layer, cluster, before, parent)), strict=True):
            for above in {old, new} - {-1}:
                self._children.pop(above, None)
            if old >= 0:
                self._under[old][at].remove(one)
            if new >= 0:
                bisect.insort(self._under.setdefault(new, [[] for _ in range(self.layers)])[at], one)

    def free_ids(self, layer: Tensor, cluster: Tensor) -> None:
        """Free the ids of clusters (layer [b], cluster [b]), whose units (frames) now belong to other clusters."""
        self._note(layer, cluster)
        self._move(layer, cluster, torch.full_like(cluster, -1))
        for name, value in (("size", 0), ("members", -1), ("home", -1), ("lazy", 0)):
            getattr(self, name)[layer, cluster] = value
        self.dirty[layer, cluster] = True
        for at, one in zip(layer.tolist(), cluster.tolist(), strict=True):
            heapq.heappush(self._free[at], one)

    def merge_clusters(self, layer: Tensor, cluster: Tensor, other: Tensor) -> None:
        """Merge clusters (layer [b], `other` [b]) into (layer [b], cluster [b]), and free their ids."""
        whole, part, rows = (layer, cluster), (layer, other), (self.centroid, self.variance, self.size)
        members = torch.cat([self.members_of(*whole), self.members_of(*part)], 1)
        joined = union(*(row[at] for at in (whole, part) for row in rows))
        self.write_clusters(*whole, members, *joined, self.size[whole] + self.size[part])
        self.free_ids(*part)

    def keep_units(self, kept: Tensor, points: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Keep only the units (frames) at rows `kept` [k], renumbered from 0; `points` returns the vectors of units by new
        numbers. Statistics of clusters that lose some are recomputed; those that lose all are freed."""
        place = torch.full((self.owner.shape[1],), -1, dtype=torch.long)
        place[kept] = torch.arange(len(kept))
        members = torch.where(self.members >= 0, place[self.members.clamp_min(0)], -1)
        order = torch.argsort((members < 0).to(torch.int8), dim=2, stable=True)
        size, before = (members >= 0).sum(2), self.size
        self.members, self.size = members.gather(2, order), size
        self.owner, self._units = self.owner[:, kept].contiguous(), len(kept)
        empty = (size == 0) & (before > 0)
        for row, value in (("parent", -1), ("home", -1), ("lazy", 0), ("limit", 0)):
            getattr(self, row)[empty] = value
        fewer = ((size > 0) & (size < before)).nonzero()
        for begin in range(0, len(fewer), TOGETHER):
            at = fewer[begin : begin + TOGETHER].unbind(1)
            inside = self.members_of(*at)
            self.centroid[at], self.variance[at], _ = mean_variance_and_size(
                points(at[0], inside), inside >= 0
            )
        self.dirty = (size > 0) | (before > 0)
        self.checkpoint()
        self._count_ids()

    def members_of(self, layer: Tensor, cluster: Tensor) -> Tensor:
        """Return the members [b, m] of clusters (layer [b], cluster [b]), as wide as the largest; -1: none."""
        size = self.size[layer, cluster]
        return self.members[layer, cluster, : int(size.max()) if size.numel() else 0]

    def children(self, parent: int) -> Array:
        """Return the ids [L, W] of the clusters under `parent` at each layer, ascending, padded with -1: a new unit is
        compared with these only. Cached until a cluster enters or leaves; do not write to it."""
        if self._under is None:
            self._under = {}
            for at, parents in enumerate(self.parent[:, : self.id_bound].tolist()):
                for one, above in enumerate(parents):
                    if above >= 0:
                        self._under.setdefault(above, [[] for _ in range(self.layers)])[at].append(one)
        if parent not in self._children:
            lists = self._under.get(parent, [[]] * self.layers)
            width = max(map(len, lists))
            padded = [some + [-1] * (width - len(some)) for some in lists]
            self._children[parent] = np.array(padded, dtype=np.int64).reshape(self.layers, width)
        return self._children[parent]

    def pop_changed_clusters(self) -> tuple[Tensor, Tensor]:
        """Return (layer [b], cluster [b]) of the clusters that have changed since the last call."""
        layer, cluster = self.dirty.nonzero(as_tuple=True)
        self.dirty.zero_()
        return layer, cluster

    def checkpoint(self) -> None:
        """Make the clusters' present state the one to which `restore` returns."""
        self._journal, self._marked = [], self._units
        self._noted.zero_()

    def restore(self) -> None:
        """Return the clusters to their state at the last `checkpoint`."""
        self.owner[:, self._marked :] = -1
        self._units = self._marked
        for layer, cluster, rows in reversed(self._journal):
            for name, row in rows.items():
                if name == "members":
                    self.members[layer, cluster] = -1
                    self.members[layer, cluster, : row.shape[1]] = row
                else:
                    getattr(self, name)[layer, cluster] = row
            self.dirty[layer, cluster] = True
        for layer, cluster, _ in self._journal:
            self._own(layer, cluster, self.members_of(layer, cluster))
        self.checkpoint()
        self._count_ids()

    def tensors(self) -> dict[str, Tensor]:
        """Return the table's tensors, by name, as they are saved."""
        rows = {name: getattr(self, name)[:, : self.id_bound].contiguous() for name in ROWS}
        return {**rows, "owner": self.owner[:, : self._units].contiguous()}

    def tensor_shapes(self, units: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name -> (shape, type) of saved `tensors` of `units` units (frames); -1: any number of clusters, members."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"owner": ((self.layers, units), torch.long)}
        for name in ROWS:
            row: Tensor = getattr(self, name)
            size = row.shape[2:] if name == "centroid" else (-1,) * (row.ndim - 2)
            found[name] = (self.layers, -1, *size), row.dtype
        return found

    def load(self, tensors: dict[str, Tensor], above: Tensor | None) -> bool:
        """Replace this level's table by saved `tensors`; return whether they are consistent: lengths, indices, a parent for
        each cluster, and as many members as its size says. If False, do not use the table. `above` [1, parents]: how many
        members each cluster of the level above has; None for the top level."""
        for name, value in tensors.items():
            setattr(self, name, value)
        members, (count, self._units) = self.members, (self.size.shape[1], self.owner.shape[1])
        self.dirty = self.size > 0
        self._noted = torch.zeros_like(self.dirty)
        self.checkpoint()
        self._count_ids()
        ends = {"owner": count, "members": self._units, "home": count}
        ends["parent"] = 0 if above is None else above.shape[1]
        if any(bool(((tensors[name] < -1) | (tensors[name] >= end)).any()) for name, end in ends.items()):
            return False
        if any(tensors[name].shape[1] != count for name in ROWS):
            return False
        if above is not None:
            up = above.expand(self.layers, -1).gather(1, self.parent.clamp_min(0))
            if not bool(((self.parent >= 0) & (up > 0))[self.dirty].all()):
                return False
        held = torch.arange(members.shape[2]) < self.size[..., None]
        owners = self.owner.gather(1, members.clamp_min(0).flatten(1)).view(members.shape)
        own = torch.arange(count)[:, None].expand(members.shape)
        whole = torch.equal(held, members >= 0) and torch.equal(held.sum(2), self.size)
        return whole and torch.equal(owners[held], own[held])

    _marked = 0

    def _count_ids(self) -> None:
        """Free ids are those below the last one in use that have no units; the lowest goes first."""
        self._children.clear()
        self._under = None
        self._used: list[int] = []
        self._free: list[list[int]] = []
        for size in self.size:
            some = size.nonzero()
            used = int(some.max()) + 1 if some.numel() else 0
            self._used.append(used)
            self._free.append((size[:used] == 0).nonzero()[:, 0].tolist())

    def _note(self, layer: Array | Tensor, cluster: Array | Tensor) -> None:
        at, noted = (np.asarray(layer), np.asarray(cluster)), self._noted.numpy()
        fresh = ~noted[at]
        if fresh.any():
            at = at[0][fresh], at[1][fresh]
            rows = {name: getattr(self, name).numpy()[at] for name in ROWS if name != "members"}
            # Copied narrow: what is past the largest size is -1.
            rows["members"] = self.members.numpy()[..., : rows["size"].max()][at]
            kept = {name: torch.from_numpy(row) for name, row in rows.items()}
            self._journal.append((torch.from_numpy(at[0]), torch.from_numpy(at[1]), kept))
            noted[at] = True

    def _own(self, layer: Tensor, cluster: Tensor, members: Tensor) -> None:
        row, col = (members >= 0).nonzero(as_tuple=True)
        self.owner[layer[row], members[row, col]] = cluster[row]

    def _widen(self, width: int) -> None:
        have = self.members.shape[2]
        if have < width:
            more = torch.full((*self.members.shape[:2], max(width - have, have)), -1, dtype=torch.long)
            self.members = torch.cat([self.members, more], 2)


class NearestCluster:
    """Finds the nearest cluster (largest cosine of point and centroid) in one layer for points `x` [n, d], one by one.

    All cosines are computed at the start, in one product; those with clusters that changed since are computed again.
    """

    def __init__(self, level: ClusterTable, x: Tensor) -> None:
        self._level, self.x = level, x.numpy()
        # In the order of change, each once.
        self._changed: dict[int, None] = {}
        used = slice(0, level.id_bound)
        centroid = level.centroid[0, used]
        cosine = x @ centroid.mT / centroid.norm(dim=-1).clamp_min(1e-12)
        self._cosine = cosine.masked_fill(level.size[0, used] == 0, -torch.inf).numpy()

    def nearest(self, row: int) -> int:
        """Return the id of the cluster with the largest cosine with point `row` of `x`; of equal ones the lowest id."""
        cosine, more = self._cosine[row], self._level.id_bound - self._cosine.shape[1]
        if more:
            cosine = np.pad(cosine, (0, more), constant_values=-np.inf)
        if self._changed:
            changed = list(self._changed)
            cosine[changed] = cosines(self.x[row], self._level.centroid.numpy()[0, changed])
        return int(cosine.argmax())

    def update_clusters(self, clusters: Iterable[int]) -> None:
        """Record that `clusters` have changed or are new, so that later points are compared with them again."""
        self._changed.update(dict.fromkeys(clusters))


def cosines(x: Array, centroid: Array) -> Array:
    """Return the cosines [..., c] of points `x` [..., d] of unit length with `centroid` [..., c, d]; 0 for zero vectors."""
    length = np.sqrt(np.einsum("...d,...d", centroid, centroid))
    # By PyTorch, for NumPy's products take all threads.
    dot = torch.matmul(torch.from_numpy(centroid), torch.from_numpy(x)[..., None])[..., 0].numpy()
    return np.asarray(dot / np.maximum(length, 1e-12))
