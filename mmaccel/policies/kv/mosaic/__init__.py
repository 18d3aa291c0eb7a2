"""The `mosaic` memory: retrieves clusters of frames with similar visual features and keys; and its index `clusters`.

Other memories can use the index. Letters as in `_index` and `ClusterTable`; V ids of visual clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.backends.ops import clusters as ops
from mmaccel.core.adapter import Geometry
from mmaccel.core.errors import RecipeError, quoted
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.buffers import LEAST as PLACES
from mmaccel.core.memory.kv import Stream, grow_buffer
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.kv._archived import ArchivedPolicy, FormerField, Prefetch, replace_field
from mmaccel.policies.kv._index import SPARE, Index, IndexPolicy, SearchResult, SearchTables
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.mosaic.clusters import ClusterTable
from mmaccel.policies.kv.mosaic.maintain import ClusterHierarchy
from mmaccel.policies.kv.mosaic.split import Params, UnitMeans
from mmaccel.policies.kv.store import Rows

SPLIT = dict(smallest=4, largest=32, tau_small=1.25, tau_large=2, alpha=8, new_scene=2, gain=0.05, unmix=0.5)
BATCHED = "attention", "feed", "match"
LARGEST = 128  # units of a cluster for which searches are captured; above 32 one waits for a split
PREDICTORS = {"query": "query", "projected": "projected", "frames": "query"}
"""What a predictor of earlier versions is now; "frames", which changed no answer either, is none of its own any more."""
STAGE = 4
"""The first stage stops when its visual clusters hold so many times what is to be retrieved."""
FEWEST = 2
"""Visual clusters that the first stage takes at least."""
BEHIND = 256
"""Units by which the device may be behind the clusters, about."""
COUNTED: tuple[str, ...] = ("eager_splits", "deferred_splits", "visual_splits", "deferred", "singletons")
COUNTED += ("flushed", "resolved", "scenes", "cuts")
"""The counters of the hierarchy that a memory reports."""


class ClusterIndex(Index):
    """The index of clusters nested in visual clusters. Before the first clustering every unit (frame) counts as a cluster,
    without a summary token.

    visual_key [L, V, d] is the mean key of each visual cluster, which the first search stage compares with queries; or, with
    first_stage "look", visual_look [V, E] is its mean visual feature, compared with that of a pass or a question's words.
    """

    def __init__(self, policy: Clusters, stream: Stream, geometry: Geometry, *rest: Any) -> None:
        super().__init__(policy, stream, geometry, *rest)
        device = self.device
        layers, width, init = self.layers, self.key.shape[2], stream.units(policy.init)
        rules = Params(visual=policy.visual, semantic=policy.semantic, init=init, buffer=policy.buffer)
        self.tree = ClusterHierarchy(rules, UnitMeans(layers, geometry.hidden, width, stream.dtype, device))
        self.by_look, self.retrievals_split = policy.first_stage == "look", policy.splits == "all"
        self.visual_key = torch.zeros(layers, 0, width, dtype=stream.dtype, device=device)
        self.visual_look = torch.zeros(0, geometry.hidden * self.by_look, device=device)
        self._asked = torch.zeros(geometry.hidden * self.by_look, device=device)
        self._owner = torch.zeros(layers, 0, dtype=torch.long, device=device)  # the cluster of each unit

    # The stream comes in.

    def set_pause(self, pause: Callable[[], None]) -> None:
        """Set what the hierarchy of clusters calls between parts of its work (see `Index.set_pause`)."""
        self.tree.pause = pause

    def add_units(self, look: Tensor | None, pairs: Sequence[Pair], retrieved: Tensor | None) -> None:
        assert look is not None
        self.tree.means.start_copy(self._tokens, look, pairs, retrieved)

    @torch.inference_mode(False)
    @torch.no_grad()
    def cluster_units(self, keep: int = 0) -> None:
        """Cluster all units (frames) that have reached the host, except those of the last `keep` passes. The search tables
        on the device are updated if they lack more than `BEHIND` units, or, with `keep` 0, any."""
        if self.tree.has_unclustered:
            self.tree.assign_units(self._window)
        while self.tree.means.waiting_passes > keep:
            retrieved = self.tree.means.add_oldest_waiting_pass()
            retrieved = None if retrieved is None else torch.from_numpy(self.at.rows_of(retrieved.numpy()))
            if retrieved is not None and self.tree.has_clusters:
                owners = self.tree.semantic.owner.gather(1, retrieved)
                at = (owners >= 0).nonzero(as_tuple=True)
                self.tree.split_deferred(at[0], owners[at])
            self.tree.assign_units(self._window, retrieved)
        if self.tree.units - self._units > BEHIND * bool(keep):
            self.refresh()

    @torch.inference_mode(False)
    @torch.no_grad()
    def cluster_some_units(self) -> None:
        if self.tree.has_unclustered or self.tree.means.oldest_pass_has_arrived:
            if not self.tree.has_unclustered:
                self.tree.means.add_oldest_waiting_pass()
            self.tree.assign_units(self._window, most=1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def record_retrieved(self, found: dict[int, SearchResult]) -> None:
        picked = torch.stack([one.picked for one in found.values()]).cpu()
        row, cluster = picked.nonzero(as_tuple=True)
        self.tree.split_deferred(torch.tensor([*found])[row], cluster)
        self.refresh()

    def refresh(self) -> None:
        self.tree.pause()
        level, kept = self.tree.semantic, self.tree.means
        if self.tree.units != self._units or bool(level.dirty.any()):
            self._ready, self._units = None, self.tree.units
        layer, cluster = level.pop_changed_clusters()
        if layer.numel():
            # What was taken back may lie beyond all that is in use.
            room = max(level.id_bound, int(cluster.max()) + 1)
            for name in ("key", "value", "time"):
                setattr(self, name, grow_buffer(getattr(self, name), 1, room, fill=0, share=SPARE))
            members = level.members_of(layer, cluster)
            row, column = (members >= 0).nonzero(as_tuple=True)
            owned = self._sent(layer[row]), self._sent(members[row, column])
            self._owner = grow_buffer(self._owner, 1, level.owner.shape[1], fill=0, share=SPARE)
            self._owner[owned] = self._sent(cluster[row])
            at = self._sent(layer), self._sent(cluster)
            self.key[at] = self._sent(kept.means(kept.keys, layer, members), self.key)
            if self.summaries:
                self.value[at] = self._sent(kept.means(kept.values, layer, members), self.value)
            unit = members
            if self.at.gap:
                unit = torch.from_numpy(self.at.units_of(kept.units))[members.clamp_min(0)]
            time = unit.masked_fill(members < 0, 0).sum(1) / level.size[layer, cluster].clamp_min(1)
            self.time[at] = self._sent(time, self.time)
        self._refresh_visual()

    def _refresh_visual(self) -> None:
        level, kept = self.tree.visual, self.tree.means
        _, cluster = level.pop_changed_clusters()
        if not cluster.numel():
            return
        room = max(level.id_bound, int(cluster.max()) + 1)
        self.visual_key = grow_buffer(self.visual_key, 1, room, fill=0, share=SPARE)
        units = level.members_of(torch.zeros_like(cluster), cluster)
        at, members = self._sent(cluster), [some[some >= 0] for some in units]
        keys = [kept.keys[some].to(kept.work).sum(0) / max(1, len(some)) for some in members]
        self.visual_key[:, at] = self._sent(torch.stack(keys, 1), self.key)
        if self.by_look:
            self.visual_look = grow_buffer(self.visual_look, 0, room, fill=0, share=SPARE)
            looks = torch.stack([kept.visuals[some].sum(0) / max(1, len(some)) for some in members])
            self.visual_look[at] = self._sent(looks, self.visual_look)

    def set_visual_query(self, look: Tensor) -> None:
        self._asked.copy_(look)

    def _candidates(
        self, rows: slice, queries: Tensor, budget: int, words: ops.WordQueries | None
    ) -> tuple[Tensor, Tensor]:
        """First whole visual clusters by score until they hold `STAGE` times the budget; of the clusters inside these, as
        `Index` has it."""
        now = self._now
        if now.parent is None or now.visual is None:
            return super()._candidates(rows, queries, budget, words)
        size = now.lists.size[rows]
        scores = self._scored(self.key[rows], queries, size, words)
        if self.by_look:
            looks = ops.score_keys(self.visual_look[None], self._asked[None], True)
            ranked = looks.expand(len(queries), -1).contiguous()
        else:
            held = now.visual.expand(len(queries), -1)
            ranked = self._scored(self.visual_key[rows], queries, held, words)
        without = ops.mark_clusters_beyond_budget(ranked, now.visual, STAGE * budget, FEWEST)
        return ops.mask_and_count_better(scores, size, now.parent[rows], without)

    def _own_keys(self, layer: int) -> tuple[Tensor, int, Callable[[Tensor], Tensor]]:
        means = self.tree.means
        return means.key_buffer, layer, lambda units: means.key_rows(layer, units)

    def _known(self) -> int:
        self.cluster_units()
        return self.tree.units if self.tree.has_clusters else 0

    def _keep(self, kept: Tensor) -> None:
        self.tree.keep_units(kept)
        self._owner = self._owner[:, :0]
        self.refresh()

    def _survey(self, end: int) -> SearchTables:
        tree, layers, whole, end = self.tree, self.layers, end, self.at.count_rows_below(end)
        absent = grow_buffer(self.absent, 0, end, fill=0, share=0.0)[:end]
        some = bool(absent.any())
        visual = parent = None
        if tree.has_clusters:
            count, above = self.key.shape[1], self.visual_key.shape[1]
            size = self._visible(tree.semantic, absent, count)
            visual = self._fix("visual", self._visible(tree.visual, absent, above)[0])
            parents = pad(tree.semantic.parent[:, :count], (0, count), value=above)[:, :count]
            parent = self._fix("parent", torch.where(size > 0, parents, above))
        else:
            self.key = grow_buffer(self.key, 1, end, fill=0, share=SPARE)
            self.key[:, :end] = tree.means.keys[:end].transpose(0, 1).to(self.key)
            count = self.key.shape[1]
            size = pad((~absent).long(), (0, count - end)).repeat(layers, 1)
        room = max(end, self._fixed["owner"].shape[1] if "owner" in self._fixed else 0)
        room = room if room > end else max(2 * PLACES, 1 << end.bit_length())
        number = torch.arange(room, device=self.device)
        if tree.has_clusters:
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
        largest = 1 << (max(largest, LARGEST) - 1).bit_length()
        fixed = self._fix("within", within), flat, first, self._fix("size", size)
        lists = ops.ClusterMembership(owners, *fixed, largest)
        told, alive = self._surveyed(whole, room, absent), (size > 0).sum(1).tolist()
        return SearchTables(
            lists=lists, alive=alive, visual=visual, parent=parent, ready=tree.has_clusters, **told
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
        own = self.visual_key, self.visual_look, self.tree.means.key_buffer
        return *super()._places(), *own

    # The stream as a whole.

    def checkpoint(self) -> Any:
        self.cluster_units()
        return self.tree.checkpoint()

    def restore(self, mark: Any) -> None:
        self.tree.restore(mark)

    def clear(self) -> None:
        self.at.clear()
        self.tree.clear()
        self.refresh()

    def cluster_of_units(self) -> dict[str, Tensor]:
        rows, found = self.tree.units, dict[str, Tensor]()
        for name, level in self.tree.levels().items():
            found[name] = level.owner.new_full((level.layers, rows + self.at.gap), -1)
            found[name][:, self.at.units_of(rows)] = level.owner[:, :rows]
        return found

    def nbytes(self) -> int:
        return super().nbytes() + sum(one.nbytes for one in (self.visual_key, self.visual_look, self._owner))

    def counters(self) -> dict[str, float]:
        tree = self.tree
        own = {
            "visual_clusters": int(tree.visual.cluster_counts()),
            "clusters": float(tree.semantic.cluster_counts().float().mean()),
            "buffered": sum(int(tree.semantic.size[at, ids].sum()) for at, ids in enumerate(tree.buffer)),
            **{name: tree.counters[name] for name in COUNTED},
            "summary_bytes": tree.means.nbytes(),
        }
        return {**super().counters(), **{name: float(count) for name, count in own.items()}}

    def rows(self) -> dict[str, Tensor]:
        means = self.tree.means
        return {"look": means.visuals, "key": means.keys, "value": means.values}

    def save(self, folder: Path) -> None:
        self.cluster_units()
        self.tree.save(folder, {"absent": self.absent.nonzero()[:, 0].tolist(), **self.at.to_dict()})

    def load(self, folder: Path, units: int, rows: Rows | None) -> None:
        facts = checkpoint_io.read_json(folder / "clusters.json", {"absent": list})
        self.tree.load(folder, *self._load_rows(folder, facts, "absent", units, rows))
        self.refresh()


def _by_owner(owner: Tensor, most: int) -> Tensor:
    """[L, N] the units in the order of their `owner` [L, N], at most `most`; ascending where that is the same."""
    if owner.device.type == "cpu" and most < 1 << 15:
        # NumPy sorts 16 bits by their digits, in a tenth of the time.
        order = owner.to(torch.int16).numpy().argsort(axis=1, kind="stable")
        return torch.from_numpy(order)
    return owner.argsort(dim=1, stable=True)


@register("index", "clusters")
@dataclass(frozen=True, kw_only=True)
class Clusters(IndexPolicy):
    """Units clustered by visual feature, and within each visual cluster by key, per layer (Mosaic V-B); a search retrieves
    whole clusters.

    Clusters are updated as units come: by their centroid and variance, split when the variance passes a threshold that
    depends on the size, at once if a cluster is on the device, else when it is next retrieved (VI-B). Departures from the
    paper (arXiv 2604.10060): a cluster holds units, found by their mean keys (the paper speaks of tokens, its budgets of
    frames); points are centred and have one more, constant coordinate (`split.LIFT`); every unit is written to the host,
    buffered ones too. A question asks by the mean query of its words; `ask_by="words"` also finds what one word alone is
    about.

    init          frames before the first clustering; until then units are retrieved one by one
    visual, semantic  units of a cluster at the start, on average, at each level
    buffer        most units per layer that may wait for a deferred split
    first_stage   what the visual level is searched by (V-C): "key", the mean keys of its clusters, as a layer's queries and
                  visual features are in different spaces; or "look", as in the paper: mean visual embeddings, compared with
                  those of a pass's frames, or with a question's words as they enter the first layer
    splits        which retrievals make deferred splits (algorithm 1): "passes", those of passes of the stream, so that a
                  question does not change what is stored later (questions do, if passes retrieve nothing); or "all", as in
                  the paper
    """

    needs: ClassVar[frozenset[str]] = frozenset({"look", "hidden"})
    opens: ClassVar = ClusterIndex
    clusters: ClassVar[bool] = True

    init: int = limited(64, at_least(2))
    visual: int = limited(16, at_least(1))
    semantic: int = limited(4, at_least(1))
    buffer: int = limited(64, at_least(0))
    first_stage: Literal["key", "look"] = "key"
    splits: Literal["passes", "all"] = "passes"


@register("kv", "mosaic")
@dataclass(frozen=True, kw_only=True)
class Mosaic(ArchivedPolicy):
    """Clusters frames on the host. A question retrieves whole clusters, and sees one summary token of every other cluster.

    After Mosaic (arXiv 2604.10060), of three parts that `rekv` can use too: the index `clusters`, retrieval while the stream
    is encoded (`encode_frames`), and summary tokens (`reps`). The device keeps the local window, one summary token for each
    cluster and a cache; the host keeps everything. While a layer computes, the frames that the next layer will need are
    predicted and fetched. A frame that was not predicted is fetched before it is used, so the prediction changes no answer.
    Exact while all frames fit into `frames` and also into `window`, and none was forgotten. The recipe `mosaic-paper`
    follows the paper where the defaults differ.

    positions  "original" by default, where `rekv` has "compact": at compact ones, summary tokens would lose their time
    """

    FORMER: ClassVar[Mapping[str, FormerField]] = {
        **ArchivedPolicy.FORMER,
        **{name: FormerField(part="index") for name in ("init", "visual", "semantic", "buffer")},
        "levels": FormerField("both", "the index is always nested; kv 'rekv' retrieves frame by frame"),
        "granularity": FormerField("frame", "clusters hold frames"),
        "tile": FormerField(49, "clusters hold frames"),
        **{
            name: FormerField(value, "it is a constant of mosaic/split.py (equation 5)")
            for name, value in SPLIT.items()
        },
        "lift": FormerField(2.0, "it is the constant LIFT of mosaic/split.py (V-B)"),
        "threshold": FormerField("relaxing", "thresholds relax as clusters grow (equation 5)"),
        "deferred": FormerField(True, "splits are always deferred (VI-B)"),
        "reps_for": FormerField("all", "all clusters have summary tokens (V-C)"),
        "rep_of": FormerField("mean", "a summary token is the mean of its cluster"),
        "rep_bias": FormerField("none", "a summary token weighs as one token"),
        "slack": FormerField(1.25, "it is the constant AHEAD of _retrieval.py", speed=(int, float)),
        "clip": FormerField(None, "the recipe's chunk sets the units of a pass", speed=(int,)),
        **{
            f"batch_{name}": FormerField(True, "it is always done (VII-A)", speed=(False,))
            for name in BATCHED
        },
    }

    local: int = 8
    positions: Literal["compact", "original"] = "original"
    index: Any = "clusters"
    encode_frames: int = 8
    reps: int | None = 512
    cache: int = 64
    prefetch: Prefetch = "projected"

    @classmethod
    def upgrade(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        given, on = dict(fields), fields.get("prefetch")
        if "predictor" in given or type(on) is bool:
            predictor = given.pop("predictor", "projected")
            if not isinstance(predictor, str) or predictor not in PREDICTORS:
                raise RecipeError(f"mosaic: predictor is {quoted(predictor)}; leave it out and set prefetch.")
            if type(on) is bool:
                del given["prefetch"]
            told = "predictor, or a prefetch of true or false,"
            replace_field("mosaic", given, told, "off" if on is False else PREDICTORS[predictor], "prefetch")
        if "batch_layers" in given:
            if type(on := given.pop("batch_layers")) is not bool:
                raise RecipeError(f"mosaic: batch_layers is {quoted(on)}; leave it out and set encode_by.")
            replace_field("mosaic", given, "batch_layers", "pass" if on else "frame", "encode_by")
        return super().upgrade(given)
