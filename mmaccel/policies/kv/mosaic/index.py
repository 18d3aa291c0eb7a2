"""The representatives of all clusters on the device, and what a question retrieves by them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops import clusters
from mmaccel.policies.kv.mosaic.buffers import LEAST, grown
from mmaccel.policies.kv.mosaic.hierarchy import Hierarchy
from mmaccel.policies.kv.mosaic.present import Present
from mmaccel.policies.kv.store.wire import on_device

STAGE = 4
"""The first stage stops when its visual clusters hold so many times what is to be retrieved."""
FEWEST = 2
"""Visual clusters that the first stage takes at least."""


SPARE = 0.25
"""What is on the device grows by this share, and is then somewhere else; doubling would waste up to half of it."""

Reps = Literal["none", "mean", "medoid"]


class Found(NamedTuple):
    """What one layer retrieves: `entries` ascending; whether each semantic cluster was `picked` [C], and the score [C] of
    each, -inf where the search did not look. Before there are clusters every entry counts as one, and none is picked."""

    entries: Tensor
    picked: Tensor
    scores: Tensor

    @property
    def clusters(self) -> Tensor:
        """The clusters that were picked, ascending; waits for the device."""
        return self.picked.nonzero()[:, 0]


@dataclass(eq=False)
class _There:
    """What there is below an entry `end`, on the device: made when the stream has changed, for the questions until it does.

    Tensors have places to spare, C, V and N of them, so that they stay where they are while the stream grows into these.

    entries  [n] ascending: those that are not forgotten
    visual   [V] sizes of visual clusters, counting these alone
    parent   [L, C] the visual cluster of each semantic one, V for those without entries; None before there are clusters
    lists    the entries of semantic clusters, R = L layers of them
    counted  [L, C] the sizes of semantic clusters, on the host; of these `alive` [L] have entries
    """

    end: int
    entries: Tensor
    visual: Tensor
    parent: Tensor | None
    lists: clusters.Lists
    counted: Tensor

    @cached_property
    def alive(self) -> list[int]:
        return [int(count) for count in (self.counted > 0).sum(1)]


class Index:
    """Letters as in `Hierarchy`; G kv heads, D head size, d = G * D.

    On the device: key [L, C, d], the mean of a semantic cluster's keys before rotation; what stands for it when it is not
    retrieved: value [L, C, d] and time [L, C], means too, or with `pseudo` [L, C, d] the mean key, the mean value and the
    number of the entry nearest to the centroid; visual_key [L, V, d], in the space of keys because a question's queries
    cannot be compared with looks. On the host: the hierarchy. `refresh` brings the device up to date, `prepare` makes what
    a search needs besides; then a search reads nothing back.
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
        self.time = torch.zeros(layers, 0, device=device)
        self.visual_key = torch.zeros(layers, 0, width, dtype=dtype, device=device)
        self.absent = torch.zeros(0, dtype=torch.bool)
        # On the device, of clusters: whose each entry is.
        self._owner = torch.zeros(layers, 0, dtype=torch.long, device=device)
        self._present = Present(lambda: hierarchy.semantic, 1)
        self._visual_present = Present(lambda: hierarchy.visual, hierarchy.summaries.parts)
        self._ready: _There | None = None
        self._units = 0
        self._fewest: dict[int, list[int]] = {}
        self._fixed: dict[str, Tensor] = {}

    def forget(self, entries: Sequence[int]) -> None:
        """Entries whose keys and values are no more; they are not found again."""
        self.absent = grown(self.absent, 0, max(entries, default=-1) + 1)
        new = [entry for entry in entries if not self.absent[entry]]
        self.absent[new] = True
        for present in (self._present, self._visual_present):
            present.forget(torch.tensor(new, dtype=torch.long))
        self._ready = None

    def cut(self, end: int) -> None:
        """Entries from `end` on are others from now on, and are there."""
        self.absent = self.absent[:end].clone()
        for present in (self._present, self._visual_present):
            present.recount(self.absent)
        self._ready = None

    @property
    def behind(self) -> int:
        """Units that have been clustered since the last `refresh`."""
        return self._tree.units - self._units

    def refresh(self) -> None:
        """Bring over what has changed in the hierarchy."""
        if self._tree.units != self._units or bool(self._tree.semantic.dirty.any()):
            self._ready, self._units = None, self._tree.units
        level, means = self._tree.semantic, self._tree.summaries.means
        layer, cluster = level.changed()
        if layer.numel():
            # What was taken back may lie beyond all that is in use.
            room = max(level.used, int(cluster.max()) + 1)
            for name in ("key", "value", "pseudo", "time"):
                setattr(self, name, grown(getattr(self, name), 1, room, share=SPARE))
            members = level.contents(layer, cluster)
            self._present.changed(layer, cluster, members, self.absent)
            self._own(layer, cluster, members)
            time = members.clamp_min(0).sum(1) / level.size[layer, cluster].clamp_min(1)
            at = self._sent(layer), self._sent(cluster)
            self.key[at] = self._sent(means(self._tree.summaries.key, layer, members), self.key)
            if self._reps == "medoid":
                nearest = self._medoids(layer, cluster, members)
                time, kept = nearest, self._tree.summaries
                self.value[at] = self._sent(kept.value[nearest, layer], self.value)
                self.pseudo[at] = self._sent(kept.key[nearest, layer], self.pseudo)
            elif self._reps == "mean":
                self.value[at] = self._sent(means(self._tree.summaries.value, layer, members), self.value)
            self.time[at] = self._sent(time, self.time)
        self._refresh_visual()

    def _own(self, layer: Tensor, cluster: Tensor, members: Tensor) -> None:
        """The device is told whose `members` [b, m] are."""
        row, column = (members >= 0).nonzero(as_tuple=True)
        entry = members[row, column]
        with torch.inference_mode(False):
            self._owner = grown(self._owner, 1, self._tree.semantic.owner.shape[1], share=SPARE)
            self._owner[self._sent(layer[row]), self._sent(entry)] = self._sent(cluster[row])

    def _medoids(self, layer: Tensor, cluster: Tensor, members: Tensor) -> Tensor:
        """[b] of `members` [b, m] the entry nearest to the centroid; the first of equal ones, anything for none."""
        if not members.shape[1]:
            # What was split off is taken back: of nothing there is no nearest.
            return torch.zeros_like(layer)
        points = self._tree.summaries.key_points(layer, members)
        near = (points @ self._tree.semantic.centroid[layer, cluster][:, :, None])[:, :, 0]
        best = near.masked_fill(members < 0, -torch.inf).argmax(1, keepdim=True)
        return members.gather(1, best)[:, 0].clamp_min(0)

    def _refresh_visual(self) -> None:
        level, parts = self._tree.visual, self._tree.summaries.parts
        _, cluster = level.changed()
        if not cluster.numel():
            return
        self.visual_key = grown(self.visual_key, 1, max(level.used, int(cluster.max()) + 1), share=SPARE)
        units = level.contents(torch.zeros_like(cluster), cluster)
        entries = units[:, :, None] * parts + torch.arange(parts)
        entries = entries.masked_fill(units[:, :, None] < 0, -1).flatten(1)
        self._visual_present.changed(torch.zeros_like(cluster), cluster, entries, self.absent)
        means = [self._tree.summaries.key_mean(some[some >= 0]) for some in entries]
        self.visual_key[:, self._sent(cluster)] = self._sent(torch.stack(means, 1), self.visual_key)

    def _sent(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """`x` of the host on the device, in the type of `like`; nothing waits for it."""
        return on_device(x if like is None else x.to(like.dtype), self._device)

    def prepare(self, end: int, budget: int | None = None) -> _There:
        """What searches among the entries below `end` need; with a `budget`, what `rest` does too."""
        if self._ready is None or self._ready.end != end:
            self._ready, self._fewest = self._survey(end), {}
        if budget is not None and budget not in self._fewest:
            rising = self._ready.counted.sort(1).values
            used = ((rising.cumsum(1) - rising < budget) & (rising > 0)).sum(1)
            left = zip(self._ready.alive, used.tolist(), strict=True)
            self._fewest[budget] = [alive - needed for alive, needed in left]
        return self._ready

    def _survey(self, end: int) -> _There:
        tree, parts, layers = self._tree, self._tree.summaries.parts, self._tree.layers
        absent = grown(self.absent, 0, end)[:end]
        some, last = bool(absent.any()), tree.units * parts
        if tree.started:
            count, above = self.key.shape[1], self.visual_key.shape[1]
            size = self._present.sizes(end, last, self.absent, count)
            visual = self._visual_present.sizes(end, last, self.absent, above)[0]
        else:
            rows = tree.summaries.key[:end].transpose(0, 1)
            self.key = grown(self.key, 1, end, share=SPARE)
            self.key[:, :end] = rows.to(self.key)
            count, visual = self.key.shape[1], torch.zeros(0, dtype=torch.long)
            size = pad((~absent).long(), (0, count - end)).repeat(layers, 1)
        parent = None
        if tree.started:
            parents = pad(tree.semantic.parent[:, :count], (0, count), value=above)[:, :count]
            parent = self._fix("parent", torch.where(size > 0, parents, above))
        room = max(end, self._fixed["owner"].shape[1] if "owner" in self._fixed else 0)
        room = room if room > end else end + max(int(SPARE * end), LEAST)
        number = torch.arange(room, device=self._device)
        if tree.started:
            owner = pad(self._owner[:, :room], (0, max(0, room - self._owner.shape[1])))
        else:
            owner = number.expand(layers, -1)
        if some:
            owner = owner.masked_fill(self._sent(pad(absent, (0, room - end))), count)
        owners = self._fix("owner", owner.masked_fill(number >= end, count + 1))
        first = self._fix("first", size.cumsum(1) - size)
        flat = self._fix("flat", _by_owner(owners, count + 1))
        begin = first.gather(1, owners.clamp(max=count - 1)) if count else 0
        within = torch.empty_like(flat).scatter_(1, flat, number.expand_as(flat)) - begin
        largest = int(size.max()) if size.numel() else 0
        return _There(
            end=end,
            entries=self._sent((~absent).nonzero()[:, 0]) if some else torch.arange(end, device=self._device),
            visual=self._fix("visual", visual),
            parent=parent,
            lists=clusters.Lists(
                owner=owners,
                within=self._fix("within", within),
                flat=flat,
                first=first,
                size=self._fix("size", size),
                largest=1 << max(largest - 1, 0).bit_length(),
            ),
            counted=size,
        )

    def _fix(self, name: str, new: Tensor) -> Tensor:
        """`new` on the device, where what had this name and shape was."""
        held = self._fixed.get(name)
        if held is None or held.shape != new.shape:
            with torch.inference_mode(False):
                held = self._fixed[name] = torch.empty_like(new, device=self._device)
        return held.copy_(new if new.device == held.device else self._sent(new))

    def mark(self) -> Hashable:
        """Where all lies that searches read; it stays the same until something has been moved."""
        kept = (self.key, self.value, self.pseudo, self.time, self.visual_key, self._tree.summaries.all_keys)
        return tuple((one.data_ptr(), one.shape) for one in (*kept, *self._fixed.values()))

    def search(self, layer: int, query: Tensor, budget: int, end: int) -> Found:
        """`budget` entries below `end` (all, when they are fewer) for a query [d] float32 on the device.

        First whole visual clusters by score until they hold `STAGE` times the budget, then semantic clusters inside these
        until the budget is full; of the last one those entries of the largest score of their own.
        """
        self.prepare(end)
        return self.search_ahead(layer, query[None], budget, 0)[0]

    @property
    def _now(self) -> _There:
        """What was prepared."""
        assert self._ready is not None
        return self._ready

    def search_ahead(
        self, layer: int, queries: Tensor, budget: int, ahead: int, late: clusters.Late | None = None
    ) -> tuple[Found, Tensor | None]:
        """`search` by the first of `queries` [1 or 2, d], and by the second, in the next layer, `ahead` entries: of the last
        cluster the oldest ones; -1 where there are no more. After `prepare`. `late` follow what is
        found."""
        there, rows = self._now, slice(layer, layer + len(queries))
        if len(there.entries) <= budget:
            entries, scores = there.entries, clusters.scored(self.key[rows], queries, self._cosine)
            picked = there.lists.size[layer] > 0
            coming: Tensor | None = entries if len(queries) > 1 else None
            if late is not None:
                entries = torch.cat([entries, late.numbers()])
        else:
            scores, before = self._candidates(rows, queries, budget, there)
            own = clusters.Own(
                self._tree.summaries.all_keys,
                layer,
                partial(self._tree.summaries.key_rows, layer),
                queries[0],
                self._cosine,
            )
            lists = _of(there.lists, rows)
            entries, coming = clusters.selected(before, lists, budget, ahead, own, late)
            picked = before[0] < budget
        return Found(entries, picked if there.parent is not None else picked[:0], scores[0]), coming

    def _candidates(self, rows: slice, queries: Tensor, budget: int, there: _There) -> tuple[Tensor, Tensor]:
        """[R, C] scores of the semantic clusters inside the visual ones of the first stage, -inf elsewhere; and how many
        entries are in the clusters before each."""
        scores, size = clusters.scored(self.key[rows], queries, self._cosine), there.lists.size[rows]
        if there.parent is None:
            return clusters.ordered(scores, size, None, None)
        ranked = clusters.scored(self.visual_key[rows], queries, self._cosine)
        without = clusters.outside(ranked, there.visual, STAGE * budget, FEWEST)
        return clusters.ordered(scores, size, there.parent[rows], without)

    def left(self, layer: int, budget: int, most: int, everyone: bool) -> int:
        """How many clusters around a search for `budget` entries have something that stands for them, at most `most`.

        With `everyone` all clusters, those that the search retrieved last; none, if it retrieved everything. Otherwise those
        that it left, as many as are sure to be left, so that the host knows their number: those that may be needed to fill
        the budget, were they the smallest, have none.
        """
        there = self._now
        some = there.alive[layer] * (len(there.entries) > budget) if everyone else self._fewest[budget][layer]
        return min(some, most)

    @property
    def room(self) -> int:
        """Clusters of a layer that searches look through, those that are not there among them."""
        return int(self._now.lists.size.shape[1])

    def rest(
        self, layer: int, found: Found, out: Tensor, head: int, left: Tensor | None, tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the k clusters of the largest score, that first, into `out` [2, G, k, D], and their time [k]
        and what is added to the scores of the head and of these; see `clusters.stand_ins`. Those that were retrieved come
        last, before them what the search left aside; and after them all, beyond `left`, what is no cluster."""
        key = self.pseudo if self._reps == "medoid" else self.key
        rows, size = (key[layer], self.value[layer]), self._now.lists.size[layer]
        return clusters.stand_ins(
            found.scores, found.picked, size, rows, self.time[layer], out, head, left, tokens
        )

    def stood_for(self, layer: int, found: Found, shares: Tensor) -> Tensor:
        """[n, end]: what entries get of the `shares` [n, k] of what `rest` made: in a cluster all the same."""
        there, (rows, few) = self._now, shares.shape
        size = there.lists.size[layer]
        ids = clusters.stand_in_order(found.scores, found.picked, size)[:few]
        # Two more places: of entries that are no cluster's.
        out = shares.new_zeros(rows, len(size) + 2)
        out[:, ids] = shares / size[ids].clamp_min(1)
        return out[:, there.lists.owner[layer, : there.end]]

    def guess(self, layer: int, entries: Tensor, budget: int) -> Tensor:
        """[n] what the clusters of `layer` that hold `entries` contain, largest overlap first, up to `budget`; -1: none."""
        there = self._now
        width = min(budget, len(there.entries))
        if there.parent is None or not entries.numel():
            return entries[:width]
        lists = _of(there.lists, slice(layer, layer + 1))
        owner = lists.owner[0][entries]
        count = torch.zeros_like(lists.size).scatter_add_(1, owner[None], torch.ones_like(owner)[None])
        known = (lists.size * (count > 0)).sum()
        found = clusters.lined_up(clusters.preceding(count, lists.size), lists, width)
        return torch.where(torch.arange(width, device=self._device) < known, found[0], -1)

    def nbytes(self) -> int:
        kept = (self.key, self.value, self.pseudo, self.time, self.visual_key, self._owner)
        return sum(tensor.nbytes for tensor in (*kept, *self._fixed.values()))


def _by_owner(owner: Tensor, most: int) -> Tensor:
    """[L, N] the entries in the order of their `owner` [L, N], at most `most`; ascending where that is the same."""
    if owner.device.type == "cpu" and most < 1 << 15:
        # NumPy sorts 16 bits by their digits, in a tenth of the time.
        order = owner.to(torch.int16).numpy().argsort(axis=1, kind="stable")
        return torch.from_numpy(order)
    return owner.argsort(dim=1, stable=True)


def _of(lists: clusters.Lists, layers: slice) -> clusters.Lists:
    """Those of some layers."""
    owner, within, flat, first, size = (one[layers] for one in lists[:5])
    return clusters.Lists(owner, within, flat, first, size, lists.largest)
