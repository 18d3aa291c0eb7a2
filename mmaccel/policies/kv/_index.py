"""Interface of the index by which an archived memory finds units (frames): on the device, for each layer, a key of each
cluster.

Letters: L layers, C cluster ids (used or free), N units, d = G * D the size of a key. In `rekv` every unit is a cluster of
its own, in `mosaic` clusters are nested in visual clusters. Any archived memory can use any index.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmaccel.backends.ops import clusters
from mmaccel.core.adapter import Geometry
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.buffers import UnitRowMap, is_too_long, on_device
from mmaccel.core.memory.kv import Stream, grow_buffer
from mmaccel.core.registry import Policy
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.store import Rows

LEAST = 256
"""Units that are no more are let go of when they are so many at least."""
SPARE = 0.25
"""Tensors of keys on the device grow by this share, and then lie elsewhere; doubling would waste up to half of them."""


@dataclass(frozen=True, kw_only=True)
class IndexPolicy(Policy, ABC):
    """The choice of an index, as a field of a memory: ``index: {name: clusters, visual: 8}``.

    similarity  how a cluster's key is compared with a query: "dot" product or "cosine"
    ask_by      what a question searches by: the "mean" query of its words, or its "words", each alone
                (`clusters.score_by_words`); passes of the stream search by their mean query
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """What the memory must declare in its own `StreamPolicy.needs` for this index."""

    opens: ClassVar[type[Index]]
    """The class of `Index` that this policy makes, with the constructor arguments of `Index`."""
    clusters: ClassVar[bool] = False  # whether each unit that comes is put into a cluster, on the host

    similarity: Literal["dot", "cosine"] = "dot"
    ask_by: Literal["mean", "words"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not hasattr(self, "opens"):
            raise RecipeError(f"{self.name}: the index opens nothing; set opens, its class of `Index`.")


class SearchResult(NamedTuple):
    """A layer's search result: numbers `entries` [k] of the units (frames) found, ascending; `picked` [C] bool, their
    clusters (empty before clusters have summaries); `scores` [C] of all clusters, -inf if not searched."""

    entries: Tensor
    picked: Tensor
    scores: Tensor


@dataclass(eq=False)
class SearchTables:
    """What a search among the units (frames) below number `end` reads, on the device; all questions share it until units
    come. Tensors have spare room, so that their addresses stay the same while the stream grows.

    entries  [n] ascending: numbers of the units that are not forgotten
    lists    which units each cluster has, for R = L layers
    alive    for each layer, number of clusters with units
    visual   [V] sizes of visual clusters; None: the search has one stage
    parent   [L, C] the visual cluster of each cluster, V for an empty one
    number   [N] the unit in each row of the index's tensors, after `Index.compact` freed rows; None: row n is unit n
    rows     number of rows of units below `end`; None: `end`
    ready    whether clusters have summaries
    """

    end: int
    entries: Tensor
    lists: clusters.ClusterMembership
    alive: list[int]
    visual: Tensor | None = None
    parent: Tensor | None = None
    ready: bool = True
    number: Tensor | None = None
    rows: int | None = None


class Index(ABC):
    """Base of the indices that find the units (frames) of a stream for a query; their tensors are on the device.

    key [L, C, d]: mean key of each cluster, before RoPE. For summary tokens also value [L, C, d], the mean value, and time
    [L, C], the mean unit number. After `prepare`, a search does not wait for the device. An index is made from its `policy`
    for a stream whose last `window` units are on the device; `summaries`: whether it keeps mean values.
    """

    by_look = False
    """Whether searches go by visual embeddings too; see `set_visual_query`."""
    retrievals_split = False
    """Whether what questions retrieve changes the index, even where passes of the stream retrieve too."""

    def __init__(
        self,
        policy: IndexPolicy,
        stream: Stream,
        geometry: Geometry,
        device: torch.device,
        window: int,
        summaries: bool,
    ) -> None:
        self.layers, self.device, self.geometry, self.summaries = geometry.layers, device, geometry, summaries
        self.cosine, self._window = policy.similarity == "cosine", window
        self._tokens, self.by_words = stream.tokens_per_unit, policy.ask_by == "words"
        layers, width, dtype = geometry.layers, geometry.kv_heads * geometry.head_dim, stream.dtype
        self.key = torch.zeros(layers, 0, width, dtype=dtype, device=device)
        self.value = torch.zeros(layers, 0, width * summaries, dtype=dtype, device=device)
        self.time = torch.zeros(layers, 0, device=device)
        self.absent = torch.zeros(0, dtype=torch.bool)
        """Of units, on the host: those whose keys and values are no more."""
        self._units = 0
        """Units that the device knows of."""
        self.at = UnitRowMap()
        """Whoever asks speaks of units; tensors are by row, which is the same until `compact`."""
        self._ready: SearchTables | None = None
        self._fixed: dict[str, Tensor] = {}

    # The stream comes in.

    @abstractmethod
    def add_units(self, look: Tensor | None, pairs: Sequence[Pair], retrieved: Tensor | None) -> None:
        """Add n new units (frames). look [n, E]: visual features, None if not needed; pairs: each layer's keys (before RoPE)
        and values [1, G, n * P, D]; retrieved [L, k]: older units that each layer retrieved while these were encoded."""

    def set_pause(self, pause: Callable[[], None]) -> None:
        """Set the function that long work on the host calls between its parts, so that answers are decoded meanwhile."""

    def cluster_units(self, keep: int = 0) -> None:
        """Assign all new units (frames) to clusters, except those of the last `keep` forward passes."""

    def cluster_some_units(self) -> None:
        """Assign a few of the new units (frames) to clusters, unless that would wait for the device."""

    def forget(self, units: Sequence[int]) -> None:
        """Exclude `units` (frames), whose keys and values were dropped, from searches."""
        rows = torch.from_numpy(self.at.rows_of(np.array(units, dtype=np.int64)))
        rows = rows[rows >= 0]
        self.absent = grow_buffer(self.absent, 0, int(rows.max()) + 1 if len(rows) else 0, fill=0, share=1.0)
        self.absent[rows] = True
        self._ready = None

    def forget_from(self, end: int) -> None:
        """Forget the units (frames) from number `end` on; later units will get these numbers."""
        self.absent = self.absent[: self.at.count_rows_below(end)].clone()
        self._ready = None

    def compact(self) -> None:
        """Free the rows of forgotten units if most are; not between `checkpoint` and `restore`, nor in a question."""
        rows, gone = self._known(), int(self.absent.sum())
        if not rows or gone < LEAST or 2 * gone <= rows:
            return
        kept = (~grow_buffer(self.absent, 0, rows, fill=0, share=0.0)[:rows]).nonzero()[:, 0]
        self.at.keep_rows(rows, kept)
        self.absent, self._ready = torch.zeros(0, dtype=torch.bool), None
        self._fixed = {k: x for k, x in self._fixed.items() if not is_too_long(len(kept), max(x.shape))}
        self._keep(kept)

    def _known(self) -> int:
        """Rows of units; 0 where none are to be given back."""
        return 0

    def _keep(self, kept: Tensor) -> None:
        """The rows `kept` [k] alone stay, as the first ones."""

    def refresh(self) -> None:
        """Update the tensors on the device that searches read; an index that keeps them up to date does nothing."""

    def record_retrieved(self, found: dict[int, SearchResult]) -> None:
        """Note what each layer retrieved for a question (layer -> `SearchResult`): it is on the device now, so clusters
        among it whose split was deferred can be split."""

    # Searches.

    def prepare(self, end: int) -> SearchTables:
        """Return the `SearchTables` of the units (frames) below number `end`, which searches then use; cached."""
        if self._ready is None or self._ready.end != end:
            self._ready = self._survey(end)
        return self._ready

    @abstractmethod
    def _survey(self, end: int) -> SearchTables: ...

    @property
    def _now(self) -> SearchTables:
        assert self._ready is not None
        return self._ready

    def set_visual_query(self, look: Tensor) -> None:
        """Set the mean visual embedding [E] (of frames, or of a question's words) that the next searches compare with."""

    def search(self, layer: int, query: Tensor, budget: int, end: int) -> SearchResult:
        """Find the `budget` best units (frames) below number `end` (all, if fewer) by a query [d] float32: whole clusters by
        score until the budget is full; of the last cluster the units of highest own score."""
        self.prepare(end)
        return self.search_ahead(layer, query[None], budget, 0)[0]

    def search_ahead(
        self, layer: int, queries: Tensor, budget: int, ahead: int, late: Any = None, words: Any = None
    ) -> tuple[SearchResult, Tensor | None]:
        """Return what `search` finds by `queries[0]` and, by `queries[1]` if given, units (frames) [ahead] to prefetch for
        the next layer (-1: none; of its last cluster the oldest). queries [1 or 2, d]; `prepare` comes first. `words`
        (`clusters.WordQueries`), if given, score clusters; units `late` (`clusters.NewestEntryRange`) come behind it."""
        now, rows = self._now, slice(layer, layer + len(queries))
        if len(now.entries) <= budget:
            entries, scores = now.entries, clusters.score_keys(self.key[rows], queries, self.cosine)
            picked = now.lists.size[layer] > 0
            coming: Tensor | None = entries if len(queries) > 1 else None
            if late is not None:
                entries = torch.cat([entries, late.newest_entry_indices()])
        else:
            scores, before = self._candidates(rows, queries, budget, words)
            own = clusters.EntryKeys(*self._own_keys(layer), queries[0], self.cosine)
            owner, within, flat, first, size = (one[rows] for one in now.lists[:5])
            lists = clusters.ClusterMembership(owner, within, flat, first, size, now.lists.largest)
            entries, coming = clusters.select_entries(before, lists, budget, ahead, own, late)
            if now.number is not None:
                entries = torch.cat([now.number[entries[:budget]], entries[budget:]])
                if coming is not None:
                    coming = torch.where(coming < 0, coming, now.number[coming.clamp_min(0)])
            picked = before[0] < budget
        return SearchResult(entries, picked if now.ready else picked[:0], scores[0]), coming

    def _candidates(
        self, rows: slice, queries: Tensor, budget: int, words: clusters.WordQueries | None
    ) -> tuple[Tensor, Tensor]:
        """[R, C] scores of the clusters that may be retrieved, -inf elsewhere; how many units are in the clusters before
        each."""
        size = self._now.lists.size[rows]
        scores = self._scored(self.key[rows], queries, size, words)
        return clusters.mask_and_count_better(scores, size, None, None)

    def _scored(self, key: Tensor, queries: Tensor, size: Tensor, words: Any) -> Tensor:
        """[R, C] scores of clusters of `size` [R, C] with keys [R, C, d]."""
        if words is None:
            return clusters.score_keys(key, queries, self.cosine)
        return clusters.score_by_words(key, words, size, self.cosine)

    @abstractmethod
    def _own_keys(self, layer: int) -> tuple[Tensor, int, Callable[[Tensor], Tensor]]:
        """The first three of `clusters.EntryKeys`: the mean key of each unit."""

    # Summary tokens: clusters that stand for their units.

    def summary_count(self, layer: int, budget: int, most: int) -> int:
        """Return the number of summary tokens to show beside a search for `budget` units (frames): one for each cluster, at
        most `most`; 0 if the search returns all units."""
        now = self._now
        return min(now.alive[layer] * (len(now.entries) > budget), most) if now.ready else 0

    @property
    def cluster_capacity(self) -> int:
        """The number of cluster ids per layer, used or free, for which there is a summary token; at most C."""
        return min(one.shape[1] for one in (self._now.lists.size, self.value, self.time))

    def summarise(
        self, layer: int, found: SearchResult, out: Tensor, head: int, left: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of the k best-scored clusters, best first and those in `found` last, into `out` [2, G, k,
        D]. Return their times [k] (mean unit numbers) and a score bias [head + k]: 0 for the `head` first columns, then of
        each summary token, -inf from index `left` [1] on, where there is no cluster."""
        rows, size = (self.key[layer], self.value[layer]), self._now.lists.size[layer]
        return clusters.write_best_clusters(
            found.scores, found.picked, size, rows, self.time[layer], out, head, left, 0
        )

    def share_by_unit(self, layer: int, found: SearchResult, shares: Tensor) -> Tensor:
        """Divide attention `shares` [n, k] of summary tokens evenly over their clusters' units (frames): [n, end]."""
        now, (rows, few) = self._now, shares.shape
        size = now.lists.size[layer]
        ids = clusters.rank_summary_clusters(found.scores, found.picked, size)[:few]
        # Two more places: of units that are in no cluster.
        out = shares.new_zeros(rows, len(size) + 2)
        out[:, ids] = shares / size[ids].clamp_min(1)
        known = now.end if now.rows is None else now.rows
        out = out[:, now.lists.owner[layer, :known]]
        if now.number is None:
            return out
        return shares.new_zeros(rows, now.end).index_copy_(1, now.number[:known], out)

    def _surveyed(self, end: int, room: int, absent: Tensor) -> dict[str, Any]:
        """Of the `SearchTables` of units below `end`, by `room` rows: those that are not `absent` [rows], and numbers."""
        rows, some = len(absent), bool(absent.any())
        number = self._fix("number", torch.from_numpy(self.at.units_of(room))) if self.at.moves else None
        here = torch.arange(rows, device=self.device)
        if number is not None or some:
            # By the host, which knows them: a mask on the device would be waited for.
            here = self._sent(torch.from_numpy(self.at.units_of(rows))[~absent])
        return {"end": end, "entries": here, "number": number, "rows": rows}

    def copy(self) -> Index:
        """Return a copy that later changes of this index leave alone, with the same search results; `prepare` was called."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(other, name, value.clone())
        other._fixed, other._ready = {}, copy.deepcopy(self._ready)
        return other

    # On the device, at a fixed place.

    def _sent(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """`x` of the host on the device, in the type of `like`; nothing waits for it."""
        return on_device(x if like is None else x.to(like.dtype), self.device)

    def _fix(self, name: str, new: Tensor) -> Tensor:
        """`new` on the device, where the last tensor of this name and shape was."""
        held = self._fixed.get(name)
        if held is None or held.shape != new.shape:
            with torch.inference_mode(False):
                held = torch.empty(new.shape, dtype=new.dtype, device=self.device)
            self._fixed[name] = held
        return held.copy_(new if new.device == held.device else self._sent(new))

    def _places(self) -> tuple[Tensor, ...]:
        """The tensors that searches read, but for the fixed ones."""
        return self.key, self.value, self.time

    def addresses(self) -> Hashable:
        """Return addresses and shapes of all tensors that searches read; while equal, captured CUDA graphs are valid."""
        return self.at.moves, *((x.data_ptr(), x.shape) for x in (*self._places(), *self._fixed.values()))

    # The stream as a whole.

    @abstractmethod
    def checkpoint(self) -> Any:
        """Return the index's present state, for `restore`."""

    @abstractmethod
    def restore(self, mark: Any) -> None:
        """Return the index to its state at `checkpoint`."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all units (frames) from the index."""

    def cluster_of_units(self) -> dict[str, Tensor]:
        """Return level name -> the cluster [L or 1, N] of each unit (frame) at each layer; empty without clusters."""
        return {}

    def nbytes(self) -> int:
        """Return the bytes that the index holds on the device."""
        return sum(one.nbytes for one in (self.key, self.value, self.time, *self._fixed.values()))

    def counters(self) -> dict[str, float]:
        """Return the index's figures for the report, by name: `index_bytes` on the device, and those of subclasses."""
        return {"index_bytes": float(self.nbytes())}

    @abstractmethod
    def rows(self) -> dict[str, Tensor]:
        """Return by name what the index keeps of each unit (frame), [N, ...] by row; rows do not change, but go and move."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write all but `rows` into `folder`."""

    @abstractmethod
    def load(self, folder: Path, units: int, rows: Rows | None) -> None:
        """Read what `save` wrote for a stream of `units` units (frames), and its `rows`, None if an earlier version wrote
        them into `folder`; raises `ModelError` if it does not fit."""

    def _load_rows(
        self, folder: Path, facts: dict[str, Any], gone: str, units: int, rows: Rows | None
    ) -> tuple[int, dict[str, Tensor]]:
        """Set `at`, and `absent` to the rows `gone`, as `facts` say; return how many rows there are, and their tensors."""
        count = self.at.load_dict(facts, units)
        if rows is not None and rows.units != self.at.units_of(count).tolist():
            raise ModelError(f"{folder}: the index has rows of other units than the stream; it is damaged.")
        self.absent = torch.zeros(count, dtype=torch.bool)
        self.absent[checkpoint_io.check_ints(facts[gone], f"index: {gone}", count)] = True
        return count, self._former_rows(folder, count) if rows is None else rows.tensors

    def _former_rows(self, folder: Path, count: int) -> dict[str, Tensor]:
        """Read `count` rows that an earlier version wrote, the index `clusters` into this file."""
        wanted = {name: ((count, *one.shape[1:]), one.dtype) for name, one in self.rows().items()}
        return checkpoint_io.read_tensors(folder / "clusters.safetensors", wanted, torch.device("cpu"))
