"""The index that an archived memory searches: a representative key for each cluster of units, on the device, for each
layer.

Letters: L layers, C places for clusters, N units, d = G * D the size of a key. `rekv` has an index in which every unit is a
cluster of its own, `mosaic` one of clusters inside visual clusters. An index is a part: any memory of `_archived` takes any.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops import clusters
from mmaccel.core.adapter import Geometry
from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import PositionIds
from mmaccel.core.memory.buffers import UnitRows
from mmaccel.core.memory.kv import Stream, grow_buffer
from mmaccel.core.registry import Policy
from mmaccel.policies.kv._window import Pair
from mmaccel.policies.kv.store.slabs import on_device

LEAST = 256
"""Units that are no more are let go of when they are so many at least."""
SPARE = 0.25
"""Tensors of an index on the device grow by this share, and then lie elsewhere; doubling would waste up to half of them."""


@dataclass(frozen=True, kw_only=True)
class IndexPolicy(Policy, ABC):
    """The choice of an index, as a part of a memory: ``index: {name: clusters, visual: 8}``.

    similarity  of a representative key to a query: "dot" or "cosine"
    ask_by      what a question searches by: the "mean" query of its words, or its "words", each for itself
                (`clusters.scored_by_words`); passes of the stream search by their mean query
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """What the memory has to ask for; see `StreamPolicy.needs`."""

    opens: ClassVar[type[Index]]
    """What `Index` says makes it, of this policy."""
    clusters: ClassVar[bool] = False  # whether each unit that comes is put into a cluster, on the host

    similarity: Literal["dot", "cosine"] = "dot"
    ask_by: Literal["mean", "words"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not hasattr(self, "opens"):
            raise RecipeError(f"{self.name}: the index opens nothing; set opens, its class of `Index`.")


class Found(NamedTuple):
    """What a layer retrieves: ascending `entries` [k]; which clusters were `picked` [C]; the score [C] of each, -inf where
    the search did not look. Nothing is picked where the index has no summaries yet."""

    entries: Tensor
    picked: Tensor
    scores: Tensor


@dataclass(eq=False)
class Survey:
    """The units below `end` that can be retrieved, on the device; made once for all questions until the stream changes.

    Tensors have room to grow, so that they stay where they are while the stream does.

    entries  [n] ascending: the units that are not forgotten
    lists    the rows of clusters, R = L layers of them
    alive    of each layer, clusters that have units
    visual   [V] sizes of visual clusters; None: the search has one stage
    parent   [L, C] the visual cluster of each cluster, V for an empty one
    number   [N] the unit of each row, where these are not the same (`Index.compact`)
    rows     of units below `end`; None: as many
    ready    whether clusters have summaries
    """

    end: int
    entries: Tensor
    lists: clusters.Lists
    alive: list[int]
    visual: Tensor | None = None
    parent: Tensor | None = None
    ready: bool = True
    number: Tensor | None = None
    rows: int | None = None


class Index(ABC):
    """key [L, C, d]: the mean raw key of each cluster. For summary tokens also value [L, C, d], the mean value, and time
    [L, C], the mean unit number. `prepare` makes what a search needs; then a search reads nothing back.

    It is made of its `policy` for a stream, whose last `window` units are on the device; `summaries`: it keeps mean values.
    """

    by_look = False
    """Whether searches go by visual embeddings too; see `by`."""
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
        self.cosine, self._tokens, self._window = policy.similarity == "cosine", stream.unit, window
        self.by_words = policy.ask_by == "words"
        layers, width, dtype = geometry.layers, geometry.kv_heads * geometry.head_dim, stream.dtype
        self.key = torch.zeros(layers, 0, width, dtype=dtype, device=device)
        self.value = torch.zeros(layers, 0, width * summaries, dtype=dtype, device=device)
        self.time = torch.zeros(layers, 0, device=device)
        self.absent = torch.zeros(0, dtype=torch.bool)
        """Of units, on the host: those whose keys and values are no more."""
        self._units = 0
        """Units that the device knows of."""
        self._at = UnitRows()
        """Whoever asks speaks of units; tensors are by row, which is the same until `compact`."""
        self._ready: Survey | None = None
        self._fixed: dict[str, Tensor] = {}

    # The stream comes in.

    @abstractmethod
    def arrived(self, look: Tensor | None, pairs: Sequence[Pair], retrieved: Tensor | None) -> None:
        """New units: looks [n, E], if the index needs them; of each layer raw keys and values [1, G, n * P, D]; the units
        [L, k] that their pass `retrieved`."""

    def digest(self, keep: int = 0) -> None:
        """Take in what has arrived, but for the last `keep` passes."""

    def digest_some(self) -> None:
        """Take in a few of the units that have arrived, if that waits for no device."""

    def forget(self, units: Sequence[int]) -> None:
        """The keys and values of `units` are no more: they are not found again."""
        rows = self._at.rows(torch.tensor(list(units), dtype=torch.long))
        rows = rows[rows >= 0]
        self.absent = grow_buffer(self.absent, 0, int(rows.max()) + 1 if len(rows) else 0, fill=0, share=1.0)
        self.absent[rows] = True
        self._ready = None

    def cut(self, end: int) -> None:
        """Units from `end` on are others from now on, and are there."""
        self.absent = self.absent[: self._at.below(end)].clone()
        self._ready = None

    def compact(self) -> None:
        """Give back the rows of units that are no more, where these are most of all; not between `checkpoint` and
        `restore`, nor while a question is asked."""
        rows, gone = self._known(), int(self.absent.sum())
        if not rows or gone < LEAST or 2 * gone <= rows:
            return
        kept = (~grow_buffer(self.absent, 0, rows, fill=0, share=0.0)[:rows]).nonzero()[:, 0]
        self._at.keep(rows, kept)
        self.absent, self._ready, self._fixed = torch.zeros(0, dtype=torch.bool), None, {}
        self._keep(kept)

    def _known(self) -> int:
        """Rows of units; 0 where none are to be given back."""
        return 0

    def _keep(self, kept: Tensor) -> None:
        """The rows `kept` [k] alone stay, as the first ones."""

    def refresh(self) -> None:
        """Bring the device up to date."""

    def touched(self, found: dict[int, Found]) -> None:
        """A question is over that retrieved this, layer by layer."""

    # Searches.

    def prepare(self, end: int) -> Survey:
        """Prepare tables for searches among the units below `end`."""
        if self._ready is None or self._ready.end != end:
            self._ready = self._survey(end)
        return self._ready

    @abstractmethod
    def _survey(self, end: int) -> Survey: ...

    @property
    def _now(self) -> Survey:
        assert self._ready is not None
        return self._ready

    def by(self, look: Tensor) -> None:
        """The mean visual embedding [E] that the next searches are for, of frames or of a question's words."""

    def search(self, layer: int, query: Tensor, budget: int, end: int) -> Found:
        """`budget` units below `end` (all, when they are fewer) for a query [d] float32 on the device: whole clusters by
        score until the budget is full; of the last one those units of the largest score of their own."""
        self.prepare(end)
        return self.search_ahead(layer, query[None], budget, 0)[0]

    def search_ahead(
        self, layer: int, queries: Tensor, budget: int, ahead: int, late: Any = None, words: Any = None
    ) -> tuple[Found, Tensor | None]:
        """`search` by the first of `queries` [1 or 2, d], and by the second, in the next layer, `ahead` units: of the last
        cluster the oldest ones; -1 where there are no more. After `prepare`. Clusters are scored by `words`, of type
        `clusters.Words`, if given; `late`, a `clusters.Late`, follow what is found."""
        now, rows = self._now, slice(layer, layer + len(queries))
        if len(now.entries) <= budget:
            entries, scores = now.entries, clusters.scored(self.key[rows], queries, self.cosine)
            picked = now.lists.size[layer] > 0
            coming: Tensor | None = entries if len(queries) > 1 else None
            if late is not None:
                entries = torch.cat([entries, late.numbers()])
        else:
            scores, before = self._candidates(rows, queries, budget, words)
            own = clusters.Own(*self._own_keys(layer), queries[0], self.cosine)
            owner, within, flat, first, size = (one[rows] for one in now.lists[:5])
            lists = clusters.Lists(owner, within, flat, first, size, now.lists.largest)
            entries, coming = clusters.selected(before, lists, budget, ahead, own, late)
            if now.number is not None:
                entries = torch.cat([now.number[entries[:budget]], entries[budget:]])
                if coming is not None:
                    coming = torch.where(coming < 0, coming, now.number[coming.clamp_min(0)])
            picked = before[0] < budget
        return Found(entries, picked if now.ready else picked[:0], scores[0]), coming

    def _candidates(
        self, rows: slice, queries: Tensor, budget: int, words: clusters.Words | None
    ) -> tuple[Tensor, Tensor]:
        """[R, C] scores of the clusters that may be retrieved, -inf elsewhere; how many units are in the clusters before
        each."""
        size = self._now.lists.size[rows]
        return clusters.scores_and_preceding(
            self._scored(self.key[rows], queries, size, words), size, None, None
        )

    def _scored(self, key: Tensor, queries: Tensor, size: Tensor, words: clusters.Words | None) -> Tensor:
        """[R, C] scores of clusters of `size` [R, C] with keys [R, C, d]."""
        if words is None:
            return clusters.scored(key, queries, self.cosine)
        return clusters.scored_by_words(key, words, size, self.cosine)

    @abstractmethod
    def _own_keys(self, layer: int) -> tuple[Tensor, int, Callable[[Tensor], Tensor]]:
        """The first three of `clusters.Own`: the mean key of each unit."""

    # Summary tokens: clusters that stand for their units.

    def count(self, layer: int, budget: int, most: int) -> int:
        """How many summary tokens there are beside a search for `budget` units, at most `most`: one for each cluster, those
        that it retrieves last; none, if it retrieves everything."""
        now = self._now
        return min(now.alive[layer] * (len(now.entries) > budget), most) if now.ready else 0

    @property
    def room(self) -> int:
        """How many clusters a layer has room for, empty slots included."""
        return int(self._now.lists.size.shape[1])

    def summarise(
        self, layer: int, found: Found, out: Tensor, head: int, left: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the k clusters of the largest score, that first, into `out` [2, G, k, D]; their time [k], and
        what is added to the scores of the head and of these (`clusters.stand_ins`): -inf from place `left` [1] on, where
        no cluster is. Retrieved clusters come last."""
        rows, size = (self.key[layer], self.value[layer]), self._now.lists.size[layer]
        return clusters.stand_ins(
            found.scores, found.picked, size, rows, self.time[layer], out, head, left, 0
        )

    def stood_for(self, layer: int, found: Found, shares: Tensor) -> Tensor:
        """[n, end]: what units get of the `shares` [n, k] of what `summarise` made; those of one cluster get the same."""
        now, (rows, few) = self._now, shares.shape
        size = now.lists.size[layer]
        ids = clusters.stand_in_order(found.scores, found.picked, size)[:few]
        # Two more places: of units that are in no cluster.
        out = shares.new_zeros(rows, len(size) + 2)
        out[:, ids] = shares / size[ids].clamp_min(1)
        known = now.end if now.rows is None else now.rows
        out = out[:, now.lists.owner[layer, :known]]
        if now.number is None:
            return out
        return shares.new_zeros(rows, now.end).index_copy_(1, now.number[:known], out)

    def _surveyed(self, end: int, room: int, absent: Tensor) -> dict[str, Any]:
        """Of the `Survey` of units below `end`, by `room` rows: those that are not `absent` [rows], and numbers."""
        rows, some = len(absent), bool(absent.any())
        number = self._fix("number", self._at.units(room)) if self._at.gap else None
        here = torch.arange(rows, device=self.device)
        if number is not None or some:
            # By the host, which knows them: a mask on the device would be waited for.
            here = self._sent(self._at.units(rows)[~absent])
        return {"end": end, "entries": here, "number": number, "rows": rows}

    def copied(self) -> Index:
        """What searches as this one does now, when `prepare` was last asked, whatever comes to this one."""
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

    def mark(self) -> Hashable:
        """Where everything lies that searches read; it stays the same until something has been moved."""
        return tuple((one.data_ptr(), one.shape) for one in (*self._places(), *self._fixed.values()))

    # The stream as a whole.

    @abstractmethod
    def checkpoint(self) -> Any:
        """State for `restore` to return to."""

    @abstractmethod
    def restore(self, mark: Any) -> None:
        """Be as at `checkpoint`."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    def owners(self) -> dict[str, Tensor]:
        """Name of a level -> the cluster [L or 1, N] of each unit at each layer; empty where units are in none."""
        return {}

    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(one.nbytes for one in (self.key, self.value, self.time, *self._fixed.values()))

    def counters(self) -> dict[str, float]:
        """Figures for the report."""
        return {"index_bytes": float(self.nbytes())}

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the index into `folder`."""

    @abstractmethod
    def load(self, folder: Path, units: int) -> None:
        """Read what `save` wrote of a stream of `units` units; raises `ModelError` where it does not fit."""


def unit_positions(places: PositionIds, entries: Tensor, count: int, compact: bool) -> Tensor:
    """Positions [k * P] or [3, k * P] of the tokens of units `entries` [k], ascending, of `count`: their own, or
    consecutive."""
    if compact:
        return places.units(0, len(entries))
    if len(entries) == count:
        return places.own(0, count)
    return places.chosen(entries, count - 1, own=True)


def summary_positions(
    places: PositionIds, time: Tensor, entries: Tensor, count: int, compact: bool, middle: int
) -> Tensor:
    """[k] or [3, k]: token `middle` of the unit at the mean unit numbers `time` [k]; `compact`: where `entries` are then."""
    if compact and len(entries) < count:
        numbers = torch.searchsorted(entries.to(time), time).clamp(max=len(entries) - 1)
    else:
        numbers = time.round().long()
    # What is no cluster may have any time. (Not below `count`: that is another at the next question.)
    numbers = numbers.clamp(0, places.known(count, not compact) - 1)
    return places.chosen(numbers, count - 1, middle, not compact)


def closed_up(units: Tensor, base: int, first: int, even: bool) -> Tensor:
    """[n] where ascending `units` [n], all below `first`, stand where `base` is taken from them: what lies before the base
    is closed up behind it, so that its order is still seen. All stand before the window."""
    rank = torch.arange(len(units), device=units.device)
    room = first - base - 1 - rank[-1]
    there = torch.maximum(units - base, rank) if even else rank + room
    return torch.minimum(there, rank + room).clamp_min(0)
