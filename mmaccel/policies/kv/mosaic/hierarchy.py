"""The nested clusters of a stream: built from its first units, and kept while units come (Mosaic's maintainer).

A unit is a step of time, an entry a part of a unit (all of it, a tile, a token). Units are clustered by their look, and
inside each visual cluster their entries by their keys, layer by layer. Everything happens in the order of the stream and in
single steps of one entry (all layers at once), so that the clusters do not depend on how a stream is cut into chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.construct import construct
from mmaccel.policies.kv.mosaic.level import Level
from mmaccel.policies.kv.mosaic.matching import Matching
from mmaccel.policies.kv.mosaic.nest import Nest
from mmaccel.policies.kv.mosaic.rules import Bounds, Rules, refine
from mmaccel.policies.kv.mosaic.serial import one_thread
from mmaccel.policies.kv.mosaic.statistics import insert, merge
from mmaccel.policies.kv.mosaic.summaries import Summaries
from mmaccel.policies.kv.mosaic.threshold import Threshold

ZERO = torch.zeros(1, dtype=torch.long)

TOGETHER = 16
"""Units compared with all clusters at once, and entries made points at once."""


class Hierarchy:
    """Letters as in `Level` and `Summaries`; the visual level is a `Level` of one layer over units."""

    def __init__(self, rules: Rules, summaries: Summaries, layers: int, look: int, width: int) -> None:
        self.rules, self.summaries, self.layers = rules, summaries, layers
        self._sizes = look, width
        self.counters: Counter[str] = Counter()
        self._empty()

    def clear(self) -> None:
        """Forget all units and clusters; the counters stay."""
        self._empty()
        self.summaries.cut(0)

    def _empty(self) -> None:
        look, width = self._sizes
        self.visual = Level(1, look + 1, self.summaries.work)
        self.semantic = Level(self.layers, width + 1, self.summaries.work)
        self.nest = Nest(self.layers)
        self.buffer: list[list[int]] = [[] for _ in range(self.layers)]
        """Of each layer the buffered clusters, the oldest first."""
        self._bounds: tuple[Bounds, Bounds] | None = None
        self.units = 0
        self.summaries.centre = None

    def checkpoint(self) -> Any:
        """What `restore` needs; one is in use at a time."""
        self.visual.checkpoint()
        self.semantic.checkpoint()
        return self.units, self._bounds, [list(ids) for ids in self.buffer], Counter(self.counters)

    def restore(self, mark: Any) -> None:
        """Be as at `checkpoint`, the summaries too."""
        units, bounds, buffer, counters = mark
        if bounds is None:
            self._empty()
        else:
            self.visual.restore()
            self.semantic.restore()
            self.nest = Nest.of_parents(self.semantic.parent)
            self.buffer = [list(ids) for ids in buffer]
        self.units, self.counters = units, Counter(counters)
        self.summaries.cut(units)

    def tensors(self) -> dict[str, Tensor]:
        """What there is to save, but for the summaries; besides it `units`, `buffer` and `counters`, which are numbers."""
        if not self.started:
            return {}
        kept = {f"visual.{name}": value for name, value in self.visual.tensors().items()}
        kept |= {f"semantic.{name}": value for name, value in self.semantic.tensors().items()}
        for name, bounds in zip(("visual", "semantic"), self.bounds, strict=True):
            kept[f"{name}.threshold"] = torch.stack([bounds.threshold.small, bounds.threshold.large])
        return kept

    def load(
        self, tensors: dict[str, Tensor], units: int, buffer: list[list[int]], counters: dict[str, int]
    ) -> None:
        """What `tensors` gave, into a hierarchy as it was made."""
        self.units, self.counters = units, Counter(counters)
        if not tensors:
            return
        rules, made = self.rules, []
        sizes = (("both", "visual"), rules.visual), (("both", "semantic"), rules.semantic)
        for name, level, size in zip(
            ("visual", "semantic"), (self.visual, self.semantic), sizes, strict=True
        ):
            own = {key.split(".")[1]: value for key, value in tensors.items() if key.startswith(name)}
            small, large = own.pop("threshold")
            level.load(own)
            threshold = Threshold(small, large, rules.alpha, rules.threshold)
            made.append(Bounds(threshold, rules.smallest, self.most(*size)))
        self._bounds = made[0], made[1]
        self.nest = Nest.of_parents(self.semantic.parent)
        self.buffer = [list(ids) for ids in buffer]

    @property
    def started(self) -> bool:
        """Whether there are clusters yet; before, the units are only counted."""
        return self._bounds is not None

    def owners(self) -> dict[str, Tensor]:
        """The visual cluster [1, units] of each unit, and the semantic one [L, entries] of each entry at each layer."""
        levels = ("visual", self.visual, 1), ("semantic", self.semantic, self.summaries.parts)
        return {
            name: level.owner[:, : self.units * parts].clone()
            for name, level, parts in levels
            if self.started
        }

    def bind(self, visual: Bounds, semantic: Bounds) -> None:
        """Set the bounds of both levels: there are clusters now."""
        self._bounds = visual, semantic

    @property
    def bounds(self) -> tuple[Bounds, Bounds]:
        """Of the visual and of the semantic level."""
        assert self._bounds is not None
        return self._bounds

    @one_thread()
    def insert(self, window: int, retrieved: Tensor | None = None, batched: bool = True) -> None:
        """Take in the units that the summaries have and the hierarchy has not, in their order.

        window   the last units before one that counts as held on the device when it comes
        retrieved  [L, n] older entries that are held there too
        batched  whether looks are compared with all clusters for many units at once; the clusters are the same
        """
        have, parts = self.summaries.units, self.summaries.parts
        self.visual.reach(have)
        self.semantic.reach(have * parts)
        if not self.started and have >= self.rules.init:
            construct(self, self.rules.init)
            self.units = self.rules.init
        if not self.started:
            self.units = have
            return
        cached = None
        if retrieved is not None and self.rules.deferred:
            cached = torch.zeros(self.layers, have * parts, dtype=torch.bool).scatter_(1, retrieved, True)
        for begin in range(self.units, have, TOGETHER):
            units = range(begin, min(begin + TOGETHER, have))
            looks = self.summaries.looks(torch.arange(units.start, units.stop))
            matching, keys = Matching(self.visual, looks, batched), self._keys(units)
            for row, unit in enumerate(units):
                cluster = self._place_look(unit, row, matching)
                for entry in range(unit * parts, (unit + 1) * parts):
                    self._place_key(entry, next(keys), cluster, (unit - window + 1) * parts, cached)
                self.units = unit + 1

    def _keys(self, units: range) -> Iterator[Tensor]:
        """The points [L, d] of the entries of `units`, one after the other."""
        parts, layer = self.summaries.parts, torch.arange(self.layers)
        end = units.stop * parts
        for begin in range(units.start * parts, end, TOGETHER):
            entries = torch.arange(begin, min(begin + TOGETHER, end))
            yield from self.summaries.key_points(layer, entries.expand(self.layers, -1)).unbind(1)

    def most(self, levels: tuple[str, ...], mean: int) -> int | None:
        """The largest cluster of a level of mean size `mean`, in the proportion of the semantic level's."""
        rules = self.rules
        return rules.largest * mean // rules.semantic if rules.levels in levels else None

    def open(self, layer: Tensor, parent: int) -> Tensor:
        """New semantic clusters at `layer` [b] inside the visual cluster `parent`."""
        up = torch.full_like(layer, parent)
        ids = self.semantic.take(layer, up)
        self.nest.add(up, layer, ids)
        return ids

    def _place_look(self, unit: int, row: int, matching: Matching) -> int:
        """The visual cluster of `unit`, the `row`-th of those being matched."""
        rules, level = self.rules, self.visual
        u, best = matching.x[row : row + 1], matching.nearest(row)
        near, bounds = slice(best, best + 1), self.bounds[0]
        centroid, n = level.centroid[0, near], level.size[0, near]
        apart = (u - centroid).square().sum(-1)
        if bounds.largest is not None and bool(apart > rules.new_scene * bounds.threshold.at(ZERO, n + 1)):
            cluster = level.take(ZERO, ZERO - 1)
            level.fill(ZERO, cluster, torch.tensor([[unit]]), u[:, None])
            self.counters["scenes"] += 1
        else:
            cluster = torch.tensor([best])
            level.add(ZERO, cluster, unit, *insert(centroid, level.variance[0, near], n, u))
        new = self.refine_visual(cluster)
        matching.renew([int(cluster), *new])
        return int(level.owner[0, unit]) if new else int(cluster)

    def refine_visual(self, cluster: Tensor) -> list[int]:
        made: list[int] = []

        def split(_: Tensor, old: Tensor, new: Tensor) -> None:
            for one, other in zip(old.tolist(), new.tolist(), strict=True):
                self._cut(one, other)
                made.append(other)

        rules = self.rules
        self.counters["visual_splits"] += refine(
            self.visual,
            self.bounds[0],
            self.summaries.look_points,
            torch.zeros_like(cluster),
            cluster,
            split,
            gain=rules.gain,
            iterations=rules.iterations,
        )
        return made

    def _cut(self, old: int, new: int) -> None:
        """Some units of the visual cluster `old` are in `new` now: so are their entries, in clusters of their own."""
        children = self.nest.children(old)
        layer, at = (children >= 0).nonzero(as_tuple=True)
        if not layer.numel():
            return
        level, cluster = self.semantic, children[layer, at]
        apart: tuple[Tensor, Tensor] | None = None
        members = level.contents(layer, cluster)
        gone = (self.visual.owner[0, members.clamp_min(0) // self.summaries.parts] == new) & (members >= 0)
        whole = gone.sum(1) == level.size[layer, cluster]
        torn = gone.any(1) & ~whole
        if bool(torn.any()):
            at, ids, members, gone = layer[torn], cluster[torn], members[torn], gone[torn]
            x = self.summaries.key_points(at, members)
            piece = level.take(at, torch.full_like(at, new))
            level.fill(at, piece, members.masked_fill(~gone, -1), x)
            level.fill(at, ids, members.masked_fill(gone, -1), x)
            level.set("limit", at, piece, level.limit[at, ids])
            self.nest.extend(new, at, piece)
            self.counters["cuts"] += at.numel()
            apart = torch.cat([at, at]), torch.cat([ids, piece])
        level.set("parent", layer[whole], cluster[whole], new)
        self.nest.move(old, new, layer[whole], cluster[whole])
        self._part_buffers()
        if apart is not None:
            # A part may vary more than the whole did.
            ordinary = level.home[apart] < 0
            self.counters["cut_splits"] += self.refine(apart[0][ordinary], apart[1][ordinary])

    def _part_buffers(self) -> None:
        """A buffered cluster whose home lies in another visual cluster now is an ordinary one."""
        level, waiting = self.semantic, [(layer, one) for layer, ids in enumerate(self.buffer) for one in ids]
        layer, ids = torch.tensor(waiting, dtype=torch.long).view(-1, 2).unbind(1)
        parted = level.parent[layer, level.home[layer, ids]] != level.parent[layer, ids]
        for at in parted.nonzero()[:, 0].tolist():
            self._unbuffer(*waiting[at])

    def _place_key(self, entry: int, u: Tensor, parent: int, resident: int, cached: Tensor | None) -> None:
        """Entry `entry`, the points `u` [L, d], joins a cluster inside `parent` at every layer.

        Entries from `resident` on are on the device.
        """
        level, layer = self.semantic, torch.arange(self.layers)
        children = self.nest.children(parent)
        if self.rules.levels == "none" or not children.shape[1]:
            self._alone(layer, parent, entry, u)
            return
        near, c, s2 = self._nearest(layer, children, u)
        bounds = self.bounds[1]
        n = level.size[layer, near]
        home, limit = level.home[layer, near], level.limit[layer, near]
        bad = bounds.exceeded(layer, n + 1, s2, limit)
        if not bool(bad.any()):
            level.add(layer, near, entry, c, s2)
            self._flush(layer[home >= 0])
            return
        split = bad
        if self.rules.deferred:
            members = level.contents(layer, near)
            here = members >= resident
            if cached is not None:
                here |= cached[layer[:, None], members.clamp_min(0)]
            split = bad & (here | (members < 0)).all(1) & (home < 0)
        take = ~bad | split
        if bool(take.any()):
            level.add(layer[take], near[take], entry, c[take], s2[take])
            self._flush(layer[take & (home >= 0)])
        if bool(split.any()):
            self.counters["eager_splits"] += self.refine(layer[split], near[split])
        wait = bad & ~split
        if bool(wait.any()):
            self._defer(layer[wait], near[wait], children[wait], parent, entry, u[wait])

    def _alone(self, layer: Tensor, parent: int, entry: int, u: Tensor) -> Tensor:
        ids = self.open(layer, parent)
        self.semantic.fill(layer, ids, torch.full((layer.numel(), 1), entry), u[:, None])
        return ids

    def _nearest(self, layer: Tensor, ids: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of `ids` [b, W] (-1: none) the cluster [b] nearest to `u` [b, d] in cosine, and its statistics were `u` in it."""
        centroid = self.semantic.centroids(layer[:, None], ids.clamp_min(0))
        cosine = (centroid @ u[:, :, None])[:, :, 0] / centroid.norm(dim=-1).clamp_min(1e-12)
        best = cosine.masked_fill(ids < 0, -torch.inf).argmax(1)
        near = ids.gather(1, best[:, None])[:, 0].clamp_min(0)
        level = self.semantic
        c, s2 = insert(level.centroid[layer, near], level.variance[layer, near], level.size[layer, near], u)
        return near, c, s2

    def _defer(self, layer: Tensor, near: Tensor, ids: Tensor, parent: int, entry: int, u: Tensor) -> None:
        """The cluster `near` [b] would have to be split and is not on the device: the entry waits in a buffered one."""
        level = self.semantic
        home = torch.where(level.home[layer, near] < 0, near, level.home[layer, near])
        waiting = (level.home[layer[:, None], ids.clamp_min(0)] == home[:, None]) & (ids >= 0)
        mini, c, s2 = self._nearest(layer, ids.masked_fill(~waiting, -1), u)
        n = level.size[layer, mini] + 1
        bounds = self.bounds[1]
        fits = s2 <= bounds.threshold.at(layer, n)
        if bounds.largest is not None:
            fits &= n <= bounds.largest
        fits &= waiting.any(1)
        if bool(fits.any()):
            level.add(layer[fits], mini[fits], entry, c[fits], s2[fits])
        single, home = layer[~fits], home[~fits]
        if single.numel():
            new = self._alone(single, parent, entry, u[~fits])
            level.set("home", single, new, home)
            level.set("lazy", single, home, 1)
            for at, one in zip(single.tolist(), new.tolist(), strict=True):
                self.buffer[at].append(one)
        self.counters["deferred"] += layer.numel()
        self.counters["singletons"] += single.numel()
        self._flush(layer)

    def _flush(self, layer: Tensor) -> None:
        """Where more entries wait than may, the oldest buffered clusters become ordinary ones."""
        for at in layer.tolist():
            while int(self.semantic.size[at, self.buffer[at]].sum()) > self.rules.buffer:
                self._unbuffer(at, self.buffer[at][0])
                self.counters["flushed"] += 1

    def _unbuffer(self, layer: int, cluster: int) -> None:
        """A buffered cluster becomes an ordinary one."""
        level, at = self.semantic, (torch.tensor([layer]), torch.tensor([cluster]))
        home = level.home[at]
        self.buffer[layer].remove(cluster)
        level.set("home", *at, -1)
        if not bool((level.home[layer, self.buffer[layer]] == home).any()):
            level.set("lazy", at[0], home, 0)

    def resolve(self, entries: Tensor) -> None:
        """The clusters that hold `entries` [L, n] have been on the device: make the splits that they owe."""
        if self.started:
            for layer, owners in enumerate(self.semantic.owner.gather(1, entries)):
                self.touch(layer, owners.unique())

    @one_thread()
    def touch(self, layer: int, clusters: Tensor) -> None:
        """The semantic `clusters` [b] of `layer` have been on the device: make the splits that they owe."""
        level = self.semantic
        for home in clusters[level.lazy[layer, clusters]].tolist():
            at = torch.tensor([layer]), torch.tensor([home])
            for one in [mini for mini in self.buffer[layer] if int(level.home[layer, mini]) == home]:
                other = at[0], torch.tensor([one])
                both = torch.cat([level.contents(*at), level.contents(*other)], 1)
                joined = merge(
                    *(
                        rows[pair]
                        for pair in (at, other)
                        for rows in (level.centroid, level.variance, level.size)
                    )
                )
                size = level.size[at] + level.size[other]
                self.nest.remove(int(level.parent[other]), layer, one)
                level.release(layer, one)
                level.write(*at, both, *joined, size)
                self.buffer[layer].remove(one)
            level.set("lazy", *at, 0)
            splits = self.refine(*at)
            self.counters["deferred_splits"] += splits
            self.counters["resolved"] += 1

    def nested(self, layer: Tensor, old: Tensor, new: Tensor) -> None:
        """Semantic clusters `new` [b] have been split off `old` [b]."""
        parents = self.semantic.parent[layer, old].tolist()
        for at, one, parent in zip(layer.tolist(), new.tolist(), parents, strict=True):
            self.nest.add(torch.tensor([parent]), torch.tensor([at]), torch.tensor([one]))

    def refine(self, layer: Tensor, cluster: Tensor) -> int:
        return refine(
            self.semantic,
            self.bounds[1],
            self.summaries.key_points,
            layer,
            cluster,
            self.nested,
            gain=self.rules.gain,
            iterations=self.rules.iterations,
        )
