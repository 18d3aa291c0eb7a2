"""The representatives of all clusters on the device, and what a question retrieves by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mmaccel.policies.kv.mosaic.buffers import grown
from mmaccel.policies.kv.mosaic.hierarchy import Hierarchy

STAGE = 4
"""The first stage stops when its visual clusters hold so many times what is to be retrieved."""
FEWEST = 2
"""Visual clusters that the first stage takes at least."""


SPARE = 0.125
"""What is on the device grows by this share; doubling would waste up to half of it."""

NONE = torch.zeros(0, dtype=torch.long)


Reps = Literal["none", "mean", "medoid"]


class Found(NamedTuple):
    """What one layer retrieves: `entries` ascending, the semantic `clusters` they are from, and the score [C] of every
    cluster, or before there are any [N] of every entry, -inf where the search did not look."""

    entries: Tensor
    clusters: Tensor
    scores: Tensor


class Index:
    """Letters as in `Hierarchy`; G kv heads, D head size, d = G * D.

    On the device: key [L, C, d], the mean of a semantic cluster's keys before rotation, and parent [L, C]; what stands for
    it when it is not retrieved: value [L, C, d] and time [L, C], means too, or with `pseudo` [L, C, d] the mean key, the
    mean value and the number of the entry nearest to the centroid; visual_key [L, V, d], in the space of keys because a
    question's queries cannot be compared with looks. On the host: the hierarchy. `refresh` brings the device up to date.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        reps: Reps,
        cosine: bool,
    ) -> None:
        self._tree, self._device, self._cosine = hierarchy, device, cosine
        layers = hierarchy.layers
        self.key = torch.zeros(layers, 0, width, dtype=dtype, device=device)
        self._reps = reps
        self.value = torch.zeros(layers, 0, width * (reps != "none"), dtype=dtype, device=device)
        self.pseudo = torch.zeros(layers, 0, width * (reps == "medoid"), dtype=dtype, device=device)
        self.parent = torch.zeros(layers, 0, dtype=torch.long, device=device)
        self.time = torch.zeros(layers, 0, device=device)
        self.visual_key = torch.zeros(layers, 0, width, dtype=dtype, device=device)
        self.absent = torch.zeros(0, dtype=torch.bool)
        self._local: tuple[int, tuple[Tensor, Tensor, list[int]]] | None = None

    def forget(self, entries: Sequence[int]) -> None:
        """Entries whose keys and values are no more; they are not found again."""
        self.absent = grown(self.absent, 0, max(entries, default=-1) + 1)
        self.absent[list(entries)] = True
        self._local = None

    def refresh(self) -> None:
        """Bring over what has changed in the hierarchy."""
        self._local = None
        level, means = self._tree.semantic, self._tree.summaries.means
        layer, cluster = level.changed()
        if layer.numel():
            for name in ("key", "value", "pseudo", "parent", "time"):
                setattr(self, name, grown(getattr(self, name), 1, level.used, share=SPARE))
            members = level.contents(layer, cluster)
            time = members.clamp_min(0).sum(1) / level.size[layer, cluster].clamp_min(1)
            at = layer.to(self._device), cluster.to(self._device)
            key, value = means(layer, members)
            self.key[at] = key.to(self.key)
            if self._reps == "medoid":
                nearest = self._medoids(layer, cluster, members)
                time, kept = nearest.float(), self._tree.summaries
                value = kept.value[nearest, layer]
                self.pseudo[at] = kept.key[nearest, layer].to(self.pseudo)
            if self._reps != "none":
                self.value[at] = value.to(self.value)
            self.parent[at] = level.parent[layer, cluster].to(self.parent)
            self.time[at] = time.to(self.time)
        self._refresh_visual()

    def _medoids(self, layer: Tensor, cluster: Tensor, members: Tensor) -> Tensor:
        """[b] of `members` [b, m] the entry nearest to the centroid; the first of equal ones, anything for none."""
        points = self._tree.summaries.key_points(layer, members)
        near = (points @ self._tree.semantic.centroid[layer, cluster][:, :, None])[:, :, 0]
        best = near.masked_fill(members < 0, -torch.inf).argmax(1, keepdim=True)
        return members.gather(1, best)[:, 0].clamp_min(0)

    def _refresh_visual(self) -> None:
        level, parts = self._tree.visual, self._tree.summaries.parts
        _, cluster = level.changed()
        if not cluster.numel():
            return
        self.visual_key = grown(self.visual_key, 1, level.used, share=SPARE)
        units = level.contents(torch.zeros_like(cluster), cluster)
        entries = units[:, :, None] * parts + torch.arange(parts)
        entries = entries.masked_fill(units[:, :, None] < 0, -1).flatten(1)
        at = cluster.to(self._device)
        for layer in range(self._tree.layers):
            key, _ = self._tree.summaries.means(torch.full_like(cluster, layer), entries)
            self.visual_key[layer, at] = key.to(self.visual_key)

    def search(self, layer: int, query: Tensor, budget: int, end: int) -> Found:
        """`budget` entries below `end` (all, when they are fewer) for a query [d] float32 on the device.

        First whole visual clusters by score until they hold `STAGE` times the budget, then semantic clusters inside these
        until the budget is full; of the last one those entries of the largest score of their own.
        """
        tree, there = self._tree, self._there(end)
        if not tree.started:
            score = self._score(tree.summaries.key[:end, layer].float(), query.cpu())
            return Found(there[_best(score[there], budget)], NONE, score)
        if there.numel() <= budget:
            score = self._score(self.key[layer, : tree.semantic.used].float(), query)
            return Found(there, torch.unique(tree.semantic.owner[layer, there]), score)
        sizes, visual_size, _ = self._sizes(end)
        size = sizes[layer]
        ranked = self._score(self.visual_key[layer, : visual_size.numel()].float(), query).masked_fill(
            visual_size == 0, -torch.inf
        )
        order = ranked.argsort(descending=True, stable=True)
        held = visual_size[order]
        rank = torch.arange(order.numel(), device=order.device)
        chosen = (held.cumsum(0) - held < STAGE * budget) | (rank < FEWEST)
        inside = torch.zeros_like(chosen).scatter(0, order, chosen)
        # Of empty clusters the parent may be one of a stream that was taken back.
        parent = self.parent[layer, : size.numel()].clamp(0, inside.numel() - 1)
        among = inside[parent] & (size > 0)
        scores = self._score(self.key[layer, : size.numel()].float(), query).masked_fill(~among, -torch.inf)
        order = scores.argsort(descending=True, stable=True)[:budget]
        held = size[order]
        picked = (held.cumsum(0) - held < budget) & among[order]
        clusters = torch.where(picked, order, -1).cpu()
        return self._expand(layer, clusters[clusters >= 0], query, budget, end, scores)

    def rest(self, layer: int, found: Found, most: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the clusters that were not retrieved, in order of time: key, value [k, d], time and size [k] on the device.

        Of more than `most` those of the largest score; what the search left aside comes after what it looked at.
        """
        sizes, _, alive = self._sizes(end)
        left = sizes[layer] > 0
        left[found.clusters.to(left.device)] = False
        # Finite, so that clusters outside the first stage's choice still come before those that are no candidates.
        rank = found.scores.to(left.device).clamp_min(torch.finfo(torch.float32).min / 2)
        rank = rank.masked_fill(~left, -torch.inf)
        ids = rank.topk(min(alive[layer] - found.clusters.numel(), most)).indices.sort().values
        ids = ids[self.time[layer, ids].argsort(stable=True)]
        key = self.pseudo if self._reps == "medoid" else self.key
        return key[layer, ids], self.value[layer, ids], self.time[layer, ids], sizes[layer, ids]

    def guess(self, layer: int, entries: Tensor, budget: int, end: int) -> Tensor:
        """The contents, ascending, of the clusters of `layer` that hold `entries`, largest overlap first, up to `budget`."""
        level = self._tree.semantic
        if not self._tree.started or not entries.numel():
            return entries
        owner, count = torch.unique(level.owner[layer, entries], return_counts=True)
        owner = owner[count.argsort(descending=True, stable=True)]
        members = level.contents(torch.full_like(owner, layer), owner).flatten()
        members = members[self._is_there(members, end)]
        return members[:budget].sort().values

    def nbytes(self) -> int:
        kept = (self.key, self.value, self.pseudo, self.parent, self.time, self.visual_key)
        return sum(tensor.nbytes for tensor in kept)

    def _is_there(self, entries: Tensor, end: int) -> Tensor:
        """Whether each of `entries` is one (not -1), is below `end` and has not been forgotten."""
        there = (entries >= 0) & (entries < end)
        if self.absent.numel():
            last = self.absent.numel() - 1
            there &= ~self.absent[entries.clamp(0, last)] | (entries > last)
        return there

    def _there(self, end: int) -> Tensor:
        entries = torch.arange(end)
        return entries[self._is_there(entries, end)]

    def _sizes(self, end: int) -> tuple[Tensor, Tensor, list[int]]:
        """Sizes [L, C] and [V] counting entries below `end` alone, and how many [L] are not empty then; the layers of a
        question share them."""
        if self._local is None or self._local[0] != end:
            tree, parts = self._tree, self._tree.summaries.parts
            size = tree.semantic.size[:, : tree.semantic.used].clone()
            visual = tree.visual.size[0, : tree.visual.used] * parts
            last = tree.units * parts
            gone = self.absent.nonzero()[:, 0]
            if gone.numel():
                owner = tree.semantic.owner[:, gone]
                size.scatter_add_(1, owner, torch.full_like(owner, -1))
                above = tree.visual.owner[0, gone // parts]
                visual.scatter_add_(0, above, torch.full_like(above, -1))
            if last > end:
                owner = tree.semantic.owner[:, end:last]
                size.scatter_add_(1, owner, torch.full_like(owner, -1))
                above = tree.visual.owner[0, torch.arange(end, last) // parts]
                visual.scatter_add_(0, above, torch.full_like(above, -1))
            alive = (size > 0).sum(1).tolist()
            self._local = end, (size.to(self._device), visual.to(self._device), alive)
        return self._local[1]

    def _expand(
        self, layer: int, clusters: Tensor, query: Tensor, budget: int, end: int, scores: Tensor
    ) -> Found:
        """The entries of `clusters`, best first; the last one gives what is left of the budget."""
        at = torch.full_like(clusters, layer)
        members = self._tree.semantic.contents(at, clusters)
        members = members.masked_fill(~self._is_there(members, end), -1)
        entries = members[:-1][members[:-1] >= 0]
        last = members[-1][members[-1] >= 0].sort().values
        left = budget - entries.numel()
        if last.numel() > left:
            own = self._score(self._tree.summaries.key[last, layer].float(), query.cpu())
            last = last[_best(own, left)]
        return Found(torch.cat([entries, last]).sort().values, clusters, scores)

    def _score(self, key: Tensor, query: Tensor) -> Tensor:
        score = key @ query
        if self._cosine:
            score = score / (key.norm(dim=-1) * query.norm()).clamp_min(1e-12)
        return score


def _best(score: Tensor, count: int) -> Tensor:
    """The places of the `count` largest scores, ascending; of equal ones the first."""
    return score.argsort(descending=True, stable=True)[:count].sort().values
