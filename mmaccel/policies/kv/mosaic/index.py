"""The index `clusters`: units by look, and inside each visual cluster by key, layer by layer; on the device one key each.

Letters as in `_index` and `ClusterTable`; V places for visual clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops import clusters
from mmaccel.core import checkpoint_io
from mmaccel.core.errors import ModelError
from mmaccel.core.kv import LEAST, grow_buffer
from mmaccel.policies.kv._index import SPARE, Found, Index, Survey
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.mosaic.clusters import ROWS, ClusterTable
from mmaccel.policies.kv.mosaic.maintain import Hierarchy
from mmaccel.policies.kv.mosaic.split import Rules, UnitMeans

if TYPE_CHECKING:
    from mmaccel.core.adapter import Geometry
    from mmaccel.core.kv import Stream

MOST = 1 << 53
"""Saved counters are below this."""
FACTS = {"units": int, "started": bool, "buffer": list, "counters": dict, "absent": list}
STAGE = 4
"""The first stage stops when its visual clusters hold so many times what is to be retrieved."""
FEWEST = 2
"""Visual clusters that the first stage takes at least."""
BEHIND = 256
"""Units by which the device may be behind the clusters, about."""
COUNTED = (
    "eager_splits",
    "deferred_splits",
    "visual_splits",
    "deferred",
    "singletons",
    "flushed",
    "resolved",
    "refused",
    "scenes",
    "cuts",
)
"""The counters of the hierarchy that a memory reports."""


class ClusterIndex(Index):
    """Before there are clusters every unit counts as one, and has no summary.

    visual_key [L, V, d] is the mean key of a visual cluster: by default the first stage compares queries with these, for a
    layer's queries and looks have nothing in common. With `by_look` it compares visual embeddings, those of the frames of a
    pass or of a question's words as they enter the first layer, with the mean looks visual_look [V, E] (Mosaic V-C).
    `every`: what questions retrieve is split even where passes of the stream retrieve too (Mosaic, algorithm 1).
    """

    def __init__(
        self,
        rules: Rules,
        stream: Stream,
        geometry: Geometry,
        device: torch.device,
        window: int,
        *,
        summaries: bool,
        cosine: bool = False,
        by_look: bool = False,
        every: bool = False,
    ) -> None:
        layers, width = geometry.layers, geometry.kv_heads * geometry.head_dim
        super().__init__(layers, width, stream.dtype, device, summaries, cosine)
        self._tokens, self._window = stream.unit, window
        means = UnitMeans(layers, geometry.hidden, width, stream.dtype, device)
        self.tree = Hierarchy(rules, means, layers, geometry.hidden, width)
        self.visual_key = torch.zeros(layers, 0, width, dtype=stream.dtype, device=device)
        self.by_look, self.retrievals_split = by_look, every
        self.visual_look = torch.zeros(0, geometry.hidden * by_look, device=device)
        self._asked = torch.zeros(geometry.hidden * by_look, device=device)
        # On the device, of units: whose each is.
        self._owner = torch.zeros(layers, 0, dtype=torch.long, device=device)
        self._units = 0

    # The stream comes in.

    def arrived(self, look: Tensor | None, pairs: Sequence[Pair], retrieved: Tensor | None) -> None:
        assert look is not None
        self.tree.means.arrived(self._tokens, look, pairs, retrieved)

    @torch.inference_mode(False)
    @torch.no_grad()
    def digest(self, keep: int = 0) -> None:
        """Cluster what has arrived; the device is told later, unless it would be too far behind, or `keep` is 0."""
        while self.tree.means.waiting > keep:
            retrieved = self.tree.means.take()
            if retrieved is not None:
                self.tree.resolve(retrieved)
            self.tree.insert(self._window, retrieved)
        if self.tree.units - self._units > BEHIND * bool(keep):
            self.refresh()

    @torch.inference_mode(False)
    @torch.no_grad()
    def touched(self, found: dict[int, Found]) -> None:
        picked = torch.stack([one.picked for one in found.values()]).cpu()
        for layer, one in zip(found, picked, strict=True):
            self.tree.touch(layer, one.nonzero()[:, 0])
        self.refresh()

    def refresh(self) -> None:
        level, kept = self.tree.semantic, self.tree.means
        if self.tree.units != self._units or bool(level.dirty.any()):
            self._ready, self._units = None, self.tree.units
        layer, cluster = level.changed()
        if layer.numel():
            # What was taken back may lie beyond all that is in use.
            room = max(level.used, int(cluster.max()) + 1)
            for name in ("key", "value", "time"):
                setattr(self, name, grow_buffer(getattr(self, name), 1, room, fill=0, share=SPARE))
            members = level.contents(layer, cluster)
            self._own(layer, cluster, members)
            at = self._sent(layer), self._sent(cluster)
            self.key[at] = self._sent(kept.means(kept.key, layer, members), self.key)
            if self.summaries:
                self.value[at] = self._sent(kept.means(kept.value, layer, members), self.value)
            time = members.clamp_min(0).sum(1) / level.size[layer, cluster].clamp_min(1)
            self.time[at] = self._sent(time, self.time)
        self._refresh_visual()

    def _own(self, layer: Tensor, cluster: Tensor, members: Tensor) -> None:
        """The device is told whose `members` [b, m] are."""
        row, column = (members >= 0).nonzero(as_tuple=True)
        unit = members[row, column]
        self._owner = grow_buffer(self._owner, 1, self.tree.semantic.owner.shape[1], fill=0, share=SPARE)
        self._owner[self._sent(layer[row]), self._sent(unit)] = self._sent(cluster[row])

    def _refresh_visual(self) -> None:
        level, kept = self.tree.visual, self.tree.means
        _, cluster = level.changed()
        if not cluster.numel():
            return
        room = max(level.used, int(cluster.max()) + 1)
        self.visual_key = grow_buffer(self.visual_key, 1, room, fill=0, share=SPARE)
        units = level.contents(torch.zeros_like(cluster), cluster)
        at, members = self._sent(cluster), [some[some >= 0] for some in units]
        self.visual_key[:, at] = self._sent(
            torch.stack([kept.key_mean(some) for some in members], 1), self.key
        )
        if self.by_look:
            self.visual_look = grow_buffer(self.visual_look, 0, room, fill=0, share=SPARE)
            looks = torch.stack([kept.look[some].sum(0) / max(1, len(some)) for some in members])
            self.visual_look[at] = self._sent(looks, self.visual_look)

    # Searches.

    def by(self, look: Tensor) -> None:
        self._asked.copy_(look)

    def _candidates(self, rows: slice, queries: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        """First whole visual clusters by score until they hold `STAGE` times the budget; of the clusters inside these, as
        `Index` has it."""
        now = self._now
        if now.parent is None or now.visual is None:
            return super()._candidates(rows, queries, budget)
        scores, size = clusters.scored(self.key[rows], queries, self.cosine), now.lists.size[rows]
        if self.by_look:
            looks = clusters.scored(self.visual_look[None], self._asked[None], True)
            ranked = looks.expand(len(queries), -1).contiguous()
        else:
            ranked = clusters.scored(self.visual_key[rows], queries, self.cosine)
        without = clusters.outside(ranked, now.visual, STAGE * budget, FEWEST)
        return clusters.ordered(scores, size, now.parent[rows], without)

    def _own_keys(self, layer: int) -> tuple[Tensor, int, Callable[[Tensor], Tensor]]:
        means = self.tree.means
        return means.all_keys, layer, lambda units: means.key_rows(layer, units)

    def _survey(self, end: int) -> Survey:
        tree, layers = self.tree, self.layers
        absent = grow_buffer(self.absent, 0, end, fill=0, share=0.0)[:end]
        some = bool(absent.any())
        visual = parent = None
        if tree.started:
            count, above = self.key.shape[1], self.visual_key.shape[1]
            size = self._visible(tree.semantic, absent, count)
            visual = self._fix("visual", self._visible(tree.visual, absent, above)[0])
            parents = pad(tree.semantic.parent[:, :count], (0, count), value=above)[:, :count]
            parent = self._fix("parent", torch.where(size > 0, parents, above))
        else:
            self.key = grow_buffer(self.key, 1, end, fill=0, share=SPARE)
            self.key[:, :end] = tree.means.key[:end].transpose(0, 1).to(self.key)
            count = self.key.shape[1]
            size = pad((~absent).long(), (0, count - end)).repeat(layers, 1)
        room = max(end, self._fixed["owner"].shape[1] if "owner" in self._fixed else 0)
        room = room if room > end else end + max(int(SPARE * end), LEAST)
        number = torch.arange(room, device=self.device)
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
        return Survey(
            end=end,
            entries=self._sent((~absent).nonzero()[:, 0]) if some else torch.arange(end, device=self.device),
            lists=clusters.Lists(
                owner=owners,
                within=self._fix("within", within),
                flat=flat,
                first=first,
                size=self._fix("size", size),
                largest=1 << max(largest - 1, 0).bit_length(),
            ),
            alive=(size > 0).sum(1).tolist(),
            visual=visual,
            parent=parent,
            ready=tree.started,
        )

    def _visible(self, level: ClusterTable, absent: Tensor, count: int) -> Tensor:
        """[L, count] how many units of each cluster can be found: those that are not `absent` [end], whose keys are still
        held. They are counted, or the others, whichever are fewer: a store may have dropped all but the last of a stream."""
        size = pad(level.size[:, :count], (0, max(0, count - level.size.shape[1])))
        here, late = (~absent).nonzero()[:, 0], torch.arange(len(absent), self.tree.units)
        some, sign = torch.cat([absent.nonzero()[:, 0], late]), -1
        if len(here) < len(some):
            size, some, sign = torch.zeros_like(size), here, 1
        owner = level.owner.index_select(1, some)
        return size.scatter_add(1, owner.clamp_min(0), sign * (owner >= 0).long())

    def _places(self) -> tuple[Tensor, ...]:
        own = self.visual_key, self.visual_look, self.tree.means.all_keys
        return *super()._places(), *own

    # The stream as a whole.

    def checkpoint(self) -> Any:
        self.digest()
        return self.tree.checkpoint()

    def restore(self, mark: Any) -> None:
        self.tree.restore(mark)

    def clear(self) -> None:
        self.tree.clear()
        self.refresh()

    def owners(self) -> dict[str, Tensor]:
        return self.tree.owners()

    def nbytes(self) -> int:
        return super().nbytes() + sum(one.nbytes for one in (self.visual_key, self.visual_look, self._owner))

    def counters(self) -> dict[str, float]:
        tree = self.tree
        own = {
            "visual_clusters": int(tree.visual.count()),
            "clusters": float(tree.semantic.count().float().mean()),
            "buffered": sum(int(tree.semantic.size[at, ids].sum()) for at, ids in enumerate(tree.buffer)),
            **{name: tree.counters[name] for name in COUNTED},
            "summary_bytes": tree.means.nbytes(),
        }
        return {**super().counters(), **{name: float(count) for name, count in own.items()}}

    def save(self, folder: Path) -> None:
        self.digest()
        tree = self.tree
        checkpoint_io.write_tensors(folder / "clusters.safetensors", tree.tensors())
        facts = {
            "units": tree.units,
            "started": tree.started,
            "buffer": tree.buffer,
            "counters": dict(tree.counters),
            "absent": self.absent.nonzero()[:, 0].tolist(),
        }
        checkpoint_io.write_json(folder / "clusters.json", facts)

    def load(self, folder: Path, units: int) -> None:
        tree, means = self.tree, self.tree.means
        facts = checkpoint_io.read_json(folder / "clusters.json", FACTS)
        if facts["units"] != units or len(facts["buffer"]) != tree.layers:
            raise ModelError(
                f"{folder}: clusters of {facts['units']} units are beside {units} units; it is damaged."
            )
        layers, width = means.key.shape[1:]
        look, work, dtype = means.look.shape[1], means.work, means.key.dtype
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "look": ((units, look), work),
            "key": ((units, layers, width), dtype),
            "value": ((units, layers, width), dtype),
        }
        if facts["started"]:
            wanted |= {"centre_look": ((look + 1,), work), "centre_key": ((layers, width + 1), work)}
            for name, level in (("visual", tree.visual), ("semantic", tree.semantic)):
                for row in ROWS:
                    own: Tensor = getattr(level, row)
                    size = own.shape[2:] if row == "centroid" else (-1,) * (own.ndim - 2)
                    wanted[f"{name}.{row}"] = (level.layers, -1, *size), own.dtype
                wanted[f"{name}.owner"] = (level.layers, units), torch.long
                wanted[f"{name}.threshold"] = (2, level.layers), work
        found = checkpoint_io.read_tensors(folder / "clusters.safetensors", wanted, torch.device("cpu"))
        count = found["semantic.size"].shape[1] if facts["started"] else 0
        buffer = [checkpoint_io.numbers(ids, "clusters.json: buffer", count) for ids in facts["buffer"]]
        checkpoint_io.numbers(list(facts["counters"].values()), "clusters.json: counters", MOST)
        gone = checkpoint_io.numbers(facts["absent"], "clusters.json: absent", units)
        for name in ("visual", "semantic") if facts["started"] else ():
            if not _fits(found, name, units):
                raise ModelError(f"{folder}: {name} clusters do not fit together; the file is damaged.")
        tree.load(found, buffer, facts["counters"])
        self.absent = torch.zeros(units, dtype=torch.bool)
        self.absent[gone] = True
        self.refresh()


def _fits(found: Mapping[str, Tensor], name: str, units: int) -> bool:
    """Whether the rows of a level are of as many clusters and point to what is there, and each cluster has as many members
    as its size says, they are its own, and it has a parent."""
    size, members, owner = (found[f"{name}.{row}"] for row in ("size", "members", "owner"))
    count, above = size.shape[1], found["visual.size"]
    ends = {"owner": count, "members": units, "home": count, "parent": above.shape[1]}
    for row, end in ends.items():
        pointed = found[f"{name}.{row}"]
        if bool(((pointed < -1) | (pointed >= end)).any()):
            return False
    if any(found[f"{name}.{row}"].shape[1] != count for row in ROWS):
        return False
    held = torch.arange(members.shape[2]) < size[..., None]
    owners = owner.gather(1, members.clamp_min(0).flatten(1)).view(members.shape)
    own = torch.arange(count)[:, None].expand(members.shape)
    parent = found[f"{name}.parent"]
    up = above.expand(len(parent), -1).gather(1, parent.clamp_min(0))
    return (
        torch.equal(held, members >= 0)
        and torch.equal(held.sum(2), size)
        and torch.equal(owners[held], own[held])
        and (name == "visual" or bool(((parent >= 0) & (up > 0))[size > 0].all()))
    )


def _by_owner(owner: Tensor, most: int) -> Tensor:
    """[L, N] the units in the order of their `owner` [L, N], at most `most`; ascending where that is the same."""
    if owner.device.type == "cpu" and most < 1 << 15:
        # NumPy sorts 16 bits by their digits, in a tenth of the time.
        order = owner.to(torch.int16).numpy().argsort(axis=1, kind="stable")
        return torch.from_numpy(order)
    return owner.argsort(dim=1, stable=True)
