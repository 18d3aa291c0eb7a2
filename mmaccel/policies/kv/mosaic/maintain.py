"""`ClusterHierarchy`: nested clusters of a stream, built from its first units and updated as units come (Mosaic V-B, VI).

A unit is a step of time. Units are clustered by visual feature, and within each visual cluster by their keys, per layer.
Everything happens in the order of the stream and in single steps of one unit (all layers at once), so that the clusters do
not depend on how a stream is cut into chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.core.errors import ModelError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.buffers import single_cpu_thread
from mmaccel.policies.kv.mosaic.clusters import Array, ClusterTable, NearestCluster, cosines, welford
from mmaccel.policies.kv.mosaic.split import FLOOR, Params, SplitBounds, UnitMeans, kmeans, split_exceeding

FACTS = {"units": int, "started": bool, "buffer": list, "counters": dict}
MOST = 1 << 53  # saved counters are below this
ZERO = torch.zeros(1, dtype=torch.long)
FIRST = ZERO.numpy()
TOGETHER = 16
"""Units compared with all clusters at once, and units made points at once (Mosaic VII-A, batched matching)."""
PART = 64
"""Clusters that are cut or split between two pauses; a scene that is cut in two has hundreds of clusters."""


class ClusterHierarchy:
    """A stream's visual and semantic clusters. Letters as in `ClusterTable` and `UnitMeans`; L = 1 for visual ones."""

    def __init__(self, rules: Params, means: UnitMeans) -> None:
        self.rules, self.means, self.layers = rules, means, means.keys.shape[1]
        self.pause: Callable[[], None] = lambda: None  # called between parts of the work
        self.counters: Counter[str] = Counter()
        self.clear()

    def clear(self, units: int = 0) -> None:
        """Forget all clusters, and all units (frames) but the first `units`; the counters stay."""
        means = self.means
        self.visual = ClusterTable(1, means.visuals.shape[1] + 1, means.work)
        self.semantic = ClusterTable(self.layers, means.keys.shape[2] + 1, means.work)
        self.buffer: list[list[int]] = [[] for _ in range(self.layers)]
        """Of each layer the buffered clusters, the oldest first."""
        self.bounds: tuple[SplitBounds, ...] = ()
        """Of the visual and of the semantic level, once there are clusters."""
        self.units = units
        means.centre = None
        means.forget_from(units)

    def checkpoint(self) -> Any:
        """Return a mark of the clusters' present state, for `restore`; a new checkpoint makes older marks invalid."""
        self.visual.checkpoint()
        self.semantic.checkpoint()
        return self.units, self.bounds, [list(ids) for ids in self.buffer], Counter(self.counters)

    def restore(self, mark: Any) -> None:
        """Return clusters and unit (frame) means to their state at `checkpoint`."""
        units, bounds, buffer, counters = mark
        if bounds:
            self.visual.restore()
            self.semantic.restore()
            self.buffer = [list(ids) for ids in buffer]
            self.means.forget_from(units)
        else:
            self.clear(units)
        self.units, self.counters = units, Counter(counters)

    def keep_units(self, kept: Tensor) -> None:
        """Keep only the units (frames) at rows `kept` [k], renumbered; clusters that lose all units are removed."""
        self.means.keep_rows(kept)
        self.visual.keep_units(kept, self.means.centred_looks)
        self.semantic.keep_units(kept, self.means.centred_keys)
        level, self.units = self.semantic, len(kept)
        self.buffer = [[one for one in ids if level.size[at, one]] for at, ids in enumerate(self.buffer)]
        size, home = level.size.numpy(), level.home.numpy()
        self._unbuffer(self._buffered(lambda at, one: not size[at, home[at, one]]))
        owed = torch.zeros_like(level.lazy)
        for layer, ids in enumerate(self.buffer):
            owed[layer, level.home[layer, ids]] = True
        level.lazy &= owed

    def save(self, folder: Path, more: dict[str, Any]) -> None:
        """Write clusters into `folder`, with facts `more` (JSON-ready), such as which units are absent."""
        kept = dict[str, Tensor]()
        if self.means.centre is not None:
            kept |= zip(("centre_look", "centre_key"), self.means.centre, strict=True)
            for (name, level), bounds in zip(self.levels().items(), self.bounds, strict=True):
                kept |= {f"{name}.{row}": value for row, value in level.tensors().items()}
                kept[f"{name}.threshold"] = torch.stack([bounds.small, bounds.large])
        checkpoint_io.write_tensors(folder / "clusters.safetensors", kept)
        facts = {"units": self.units, "started": self.has_clusters, "buffer": self.buffer}
        checkpoint_io.write_json(folder / "clusters.json", {**facts, **more, "counters": dict(self.counters)})

    def load(self, folder: Path, units: int, rows: dict[str, Tensor]) -> None:
        """Read what `save` wrote of `units` units, whose means are `rows` ("look", "key", "value"); raises `ModelError` if
        it does not fit."""
        means, rules = self.means, self.rules
        facts = checkpoint_io.read_json(folder / "clusters.json", FACTS)
        if (told := facts["units"]) != units or len(facts["buffer"]) != self.layers:
            raise ModelError(f"{folder}: clusters of {told} units are beside {units} units; it is damaged.")
        look, layers, width = means.visuals.shape[1], *means.keys.shape[1:]
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        levels = {"visual": self.visual, "semantic": self.semantic} if facts["started"] else {}
        for name, level in levels.items():
            wanted |= {f"{name}.{row}": one for row, one in level.tensor_shapes(units).items()}
            wanted[f"{name}.threshold"] = (2, level.layers), means.work
            wanted["centre_look"] = (look + 1,), means.work
            wanted["centre_key"] = (layers, width + 1), means.work
        found = checkpoint_io.read_tensors(folder / "clusters.safetensors", wanted, torch.device("cpu"))
        count = found["semantic.size"].shape[1] if levels else 0
        self.buffer = [checkpoint_io.check_ints(x, "clusters.json: buffer", count) for x in facts["buffer"]]
        checkpoint_io.check_ints(list(facts["counters"].values()), "clusters.json: counters", MOST)
        means.append(rows["look"], rows["key"], rows["value"])
        self.units, self.counters = units, Counter(facts["counters"])
        for name, level in levels.items():
            above = self.visual.size if level is self.semantic else None
            if not level.load({row: found[f"{name}.{row}"] for row in level.tensor_shapes(units)}, above):
                raise ModelError(f"{folder}: {name} clusters do not fit together; the file is damaged.")
            small, large = found[f"{name}.threshold"]
            self.bounds += (rules.make_split_bounds(small, large, visual=above is None),)
            means.centre = found["centre_look"], found["centre_key"]

    @property
    def has_clusters(self) -> bool:
        """Whether clusters exist. Before the first clustering the hierarchy only collects the means of units (frames)."""
        return bool(self.bounds)

    def levels(self) -> dict[str, ClusterTable]:
        """Return level name -> its table of clusters; empty before the first clustering."""
        return {"visual": self.visual, "semantic": self.semantic} if self.bounds else {}

    @property
    def has_unclustered(self) -> bool:
        """Whether there are units (frames) whose means have arrived and which no cluster holds."""
        return self.has_clusters and self.units < self.means.units

    @single_cpu_thread()
    def assign_units(self, window: int, retrieved: Tensor | None = None, most: int | None = None) -> None:
        """Assign the units (frames) whose means have arrived and which no cluster holds to clusters, in order.

        window   how many of the newest units count as held on the device, counted back from each unit that is assigned
        retrieved  [L, n] older units that are on the device too
        most     process at most `most` times `TOGETHER` units; None: all
        """
        have = self.means.units
        self.visual.reserve_units(have)
        self.semantic.reserve_units(have)
        if not self.has_clusters and have >= self.rules.init:
            self._construct(self.rules.init)
            self.units = self.rules.init
        if not self.has_clusters:
            self.units = have
            return
        cached = None
        if retrieved is not None:
            cached = torch.zeros(self.layers, have, dtype=torch.bool).scatter_(1, retrieved, True).numpy()
        every = torch.arange(self.layers)
        for begin in range(self.units, have, TOGETHER)[:most]:
            units = torch.arange(begin, min(begin + TOGETHER, have))
            matching = NearestCluster(self.visual, self.means.centred_looks(ZERO, units))
            points = self.means.centred_keys(every, units.expand(self.layers, -1))
            keys = points.transpose(0, 1).contiguous().numpy()
            for row, unit in enumerate(units.tolist()):
                cluster = self._place_look(unit, row, matching)
                self._place_key(unit, keys[row], cluster, unit - window + 1, cached)
                self.units = unit + 1
                self.pause()

    def _construct(self, units: int) -> None:
        """Cluster the first `units` units, and calibrate the thresholds on what comes out.

        K-means makes clusters of the mean sizes asked for; those that fall apart when cut in two, mixtures of scenes, are
        cut before they are measured, for thresholds taken from mixtures would allow mixtures for ever.
        """
        rules, means = self.rules, self.means
        floor = means.set_centring_origin(units)
        count = max(1, round(units / rules.visual))
        looks = means.centred_looks(ZERO, torch.arange(units))
        label = kmeans(looks[None], count)[0]
        for one in range(count):
            members = (label == one).nonzero().T
            self.visual.set_members(ZERO, self.visual.allocate_ids(ZERO, ZERO - 1), members, looks[members])
        self._unmix(self.visual)
        visual = rules.calibrate(self.visual, True, floor[0])
        self.bounds = (visual,)
        self._refine_visual(self.visual.size[0].nonzero()[:, 0])
        everything = torch.arange(self.layers)
        for one in self.visual.size[0].nonzero()[:, 0].tolist():
            inside = self.visual.members_of(ZERO, torch.tensor([one]))[0].sort().values
            k = max(1, round(inside.numel() / rules.semantic))
            x = means.centred_keys(everything, inside.expand(self.layers, -1))
            labels = kmeans(x, k)
            for cluster in range(k):
                members = inside.masked_fill(labels != cluster, -1)
                ids = self.semantic.allocate_ids(everything, torch.full_like(everything, one))
                self.semantic.set_members(everything, ids, members, x)
                self.pause()
        self._unmix(self.semantic)
        self.bounds = visual, rules.calibrate(self.semantic, False, floor[1])
        self._refine(*(self.semantic.size > 0).nonzero(as_tuple=True))

    def _unmix(self, level: ClusterTable) -> None:
        """Split the clusters that lose the share `unmix` of their variance by it."""
        rules, least = self.rules, torch.full((level.layers,), FLOOR, dtype=level.variance.dtype)
        bounds = SplitBounds(least, least, rules.alpha, rules.smallest, level.owner.shape[1])
        self._split(level, bounds, rules.unmix, *(level.size > 0).nonzero(as_tuple=True))
        layer, cluster = (level.size > 0).nonzero(as_tuple=True)
        level.set_field("limit", layer, cluster, 0.0)

    def _place_look(self, unit: int, row: int, matching: NearestCluster) -> int:
        """The visual cluster of `unit`, the `row`-th of those being matched."""
        rules, level = self.rules, self.visual
        u, best, bounds = matching.x[row : row + 1], matching.nearest(row), self.bounds[0]
        rows = level.centroid, level.variance, level.size
        centroid, s2, n = (x.numpy()[0, best : best + 1] for x in rows)
        away = (u - centroid)[0]
        if away @ away > rules.new_scene * bounds.threshold(0, int(n[0]) + 1):
            best = int(level.allocate_ids(ZERO, ZERO - 1))
            centroid, s2 = u, np.zeros_like(s2)
            self.counters["scenes"] += 1
        else:
            centroid, s2 = welford(centroid, s2, n, u)
        level.add_unit(FIRST, np.array([best]), unit, centroid, s2)
        new = self._refine_visual(torch.tensor([best])) if bounds.must_split_first_layer(level, best) else []
        matching.update_clusters([best, *new])
        return int(level.owner[0, unit]) if new else best

    def _refine_visual(self, cluster: Tensor) -> list[int]:
        made: list[int] = []

        def split(_: Tensor, old: Tensor, new: Tensor) -> None:
            for one, other in zip(old.tolist(), new.tolist(), strict=True):
                self._cut(one, other)
                made.append(other)

        points, layer = self.means.centred_looks, torch.zeros_like(cluster)
        split_exceeding(self.visual, self.bounds[0], points, layer, cluster, self.rules.gain, split)
        self.counters["visual_splits"] += len(made)
        return made

    def _cut(self, old: int, new: int) -> None:
        """Some units of the visual cluster `old` are in `new` now: so are they at each layer, in clusters of their own."""
        level, children = self.semantic, torch.from_numpy(self.semantic.children(old))
        layer, at = (children >= 0).nonzero(as_tuple=True)
        some, cluster = [slice(n, n + PART) for n in range(0, len(layer), PART)], children[layer, at]
        parts = [self._cut_some(layer[one], cluster[one], new) for one in some]
        # A buffered cluster whose home lies in another visual cluster now is an ordinary one.
        home, parent = level.home.numpy(), level.parent.numpy()
        self._unbuffer(self._buffered(lambda at, one: parent[at, home[at, one]] != parent[at, one]))
        for layer, cluster in parts:  # each may vary more than the whole did
            ordinary = level.home[layer, cluster] < 0
            self.counters["cut_splits"] += self._refine(layer[ordinary], cluster[ordinary])

    def _cut_some(self, layer: Tensor, cluster: Tensor, new: int) -> tuple[Tensor, Tensor]:
        """Cut the semantic clusters (layer [b], cluster [b]) of which only some units are in the visual cluster
        `new`; return both parts of each. A cluster of which all units are in `new` is moved under it."""
        level = self.semantic
        members = level.members_of(layer, cluster)
        gone = (self.visual.owner[0, members.clamp_min(0)] == new) & (members >= 0)
        whole = gone.sum(1) == level.size[layer, cluster]
        torn = gone.any(1) & ~whole
        at, ids, members, gone = layer[torn], cluster[torn], members[torn], gone[torn]
        piece = level.allocate_ids(at, torch.full_like(at, new))
        if at.numel():
            x = self.means.centred_keys(at, members)
            level.set_members(at, piece, members.masked_fill(~gone, -1), x)
            level.set_members(at, ids, members.masked_fill(gone, -1), x)
            level.set_field("limit", at, piece, level.limit[at, ids])
            self.counters["cuts"] += at.numel()
        level.set_field("parent", layer[whole], cluster[whole], new)
        self.pause()
        return at.repeat(2), torch.cat([ids, piece])

    def _place_key(self, unit: int, u: Array, parent: int, resident: int, cached: Array | None) -> None:
        """Unit `unit`, the points `u` [L, d], joins a cluster inside `parent` at every layer. Units from `resident` on
        are on the device, and those `cached` [L, N]."""
        level, layer = self.semantic, np.arange(self.layers)
        children = level.children(parent)
        if not children.shape[1]:
            self._alone(layer, parent, unit, u)
            return
        cosine = cosines(u, level.centroid.numpy()[layer[:, None], children.clip(0)])
        near, n, c, s2 = self._nearest(layer, children, cosine, u)
        home, limit = (row.numpy()[layer, near] for row in (level.home, level.limit))
        bad = self.bounds[1].exceeds_threshold(layer, n, s2, limit)
        if not bad.any():
            level.add_unit(layer, near, unit, c, s2)
            self._flush(layer[home >= 0])
            return
        members = level.members.numpy()[layer, near, : n.max() - 1]
        here = members >= resident
        if cached is not None:
            here |= cached[layer[:, None], members.clip(0)]
        split = bad & (here | (members < 0)).all(1) & (home < 0)
        take = ~bad | split
        if take.any():
            level.add_unit(layer[take], near[take], unit, c[take], s2[take])
            self._flush(layer[take & (home >= 0)])
        if split.any():
            self.counters["eager_splits"] += self._refine(*map(torch.from_numpy, (layer[split], near[split])))
        wait = bad & ~split
        if wait.any():
            self._defer(layer[wait], near[wait], children[wait], cosine[wait], parent, unit, u[wait])

    def _alone(self, layer: Array, parent: int, unit: int, u: Array) -> Tensor:
        at = torch.from_numpy(layer)
        ids = self.semantic.allocate_ids(at, torch.full_like(at, parent))
        self.semantic.add_unit(layer, ids.numpy(), unit, u, np.zeros_like(u[:, 0]))
        return ids

    def _nearest(self, layer: Array, ids: Array, cosine: Array, u: Array) -> tuple[Array, ...]:
        """Of `ids` [b, W] (-1: none) that [b] of largest `cosine` with `u` [b, d]; its size, c and s2 with `u` in it."""
        level = self.semantic
        best = np.where(ids < 0, -np.inf, cosine).argmax(1)
        near = ids[np.arange(len(ids)), best].clip(0)
        c, s2, n = (row.numpy()[layer, near] for row in (level.centroid, level.variance, level.size))
        return near, n + 1, *welford(c, s2, n, u)

    def _defer(
        self, layer: Array, near: Array, ids: Array, cosine: Array, parent: int, unit: int, u: Array
    ) -> None:
        """The cluster `near` [b] would have to be split and is not on the device: the unit waits in a buffered one."""
        level, bounds, homes = self.semantic, self.bounds[1], self.semantic.home.numpy()
        home = np.where(homes[layer, near] < 0, near, homes[layer, near])
        waiting = (homes[layer[:, None], ids.clip(0)] == home[:, None]) & (ids >= 0)
        mini, n, c, s2 = self._nearest(layer, np.where(waiting, ids, -1), cosine, u)
        fits = (s2 <= bounds.threshold(layer, n)) & (n <= bounds.largest) & waiting.any(1)
        if fits.any():
            level.add_unit(layer[fits], mini[fits], unit, c[fits], s2[fits])
        single, owner = layer[~fits], torch.from_numpy(home[~fits])
        if single.size:
            new, at = self._alone(single, parent, unit, u[~fits]), torch.from_numpy(single)
            level.set_field("home", at, new, owner)
            level.set_field("lazy", at, owner, 1)
            for one, cluster in zip(single.tolist(), new.tolist(), strict=True):
                self.buffer[one].append(cluster)
        self.counters.update(deferred=layer.size, singletons=single.size)
        self._flush(layer)

    def _flush(self, layer: Array) -> None:
        """Where more units wait than may, the oldest buffered clusters become ordinary ones."""
        sizes, gone = self.semantic.size.numpy(), list[tuple[int, int]]()
        for at in layer.tolist():
            left = sizes[at, self.buffer[at]][::-1].cumsum()[::-1] > self.rules.buffer
            gone += [(at, one) for one, late in zip(self.buffer[at], left, strict=True) if late]
        self._unbuffer(gone)
        self.counters["flushed"] += len(gone)

    def _unbuffer(self, gone: list[tuple[int, int]]) -> None:
        """Buffered clusters, each (layer, id), become ordinary ones."""
        if not gone:
            return
        level, (layer, cluster) = self.semantic, torch.tensor(gone).unbind(1)
        homes = level.home[layer, cluster]
        level.set_field("home", layer, cluster, -1)
        for at, one in gone:
            self.buffer[at].remove(one)
        left, each = level.home.numpy(), zip(layer.tolist(), homes.tolist(), strict=True)
        alone = [not (left[at, self.buffer[at]] == home).any() for at, home in each]
        level.set_field("lazy", layer[alone], homes[alone], 0)

    def _buffered(self, where: Callable[[int, int], Any]) -> list[tuple[int, int]]:
        """The buffered clusters (layer, id) for which `where` holds."""
        return [(at, one) for at, ids in enumerate(self.buffer) for one in ids if where(at, one)]

    @single_cpu_thread()
    def split_deferred(self, layer: Tensor, cluster: Tensor) -> None:
        """Split those of the retrieved semantic clusters (layer [b], cluster [b]) whose split was deferred."""
        level, lazy = self.semantic, self.semantic.lazy[layer, cluster]
        if not bool(lazy.any()):
            return
        layer, cluster = torch.stack([layer[lazy], cluster[lazy]]).unique(dim=1)  # type: ignore[no-untyped-call]
        homes, parts = level.home.numpy(), list[list[int]]()
        for at, home in zip(layer.tolist(), cluster.tolist(), strict=True):
            parts.append([one for one in self.buffer[at] if homes[at, one] == home])
            self.buffer[at] = [one for one in self.buffer[at] if homes[at, one] != home]
        for number in range(max(map(len, parts))):  # one of each is merged at a time
            some = [k for k, own in enumerate(parts) if number < len(own)]
            level.merge_clusters(layer[some], cluster[some], torch.tensor([parts[k][number] for k in some]))
        level.set_field("lazy", layer, cluster, 0)
        self.counters.update(deferred_splits=self._refine(layer, cluster), resolved=len(layer))

    def _refine(self, layer: Tensor, cluster: Tensor) -> int:
        return self._split(self.semantic, self.bounds[1], self.rules.gain, layer, cluster)

    def _split(self, level: ClusterTable, bounds: SplitBounds, gain: float, *at: Tensor) -> int:
        """Split those of the clusters `at` (layer [b], cluster [b]) that exceed `bounds`; return the number of splits."""
        points, splits = self.means.centred_keys if level is self.semantic else self.means.centred_looks, 0
        for n in range(0, len(at[0]), PART):
            layer, cluster = (one[n : n + PART] for one in at)
            splits += split_exceeding(level, bounds, points, layer, cluster, gain)
            self.pause()
        return splits
