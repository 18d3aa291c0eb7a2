"""What each layer of a question sees of an archived stream: retrieved units, summary tokens, their positions; and a guess of
what the next layer will retrieve. On CUDA, all of it is captured at a question's second occurrence and replayed.

Letters: L layers, H query heads, D head size, E hidden size, C places for clusters.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops import clusters
from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.kv import Stream
from mmaccel.core.positions import PositionIds
from mmaccel.core.replay import Replays
from mmaccel.policies.kv._index import Found, Index
from mmaccel.policies.kv._prefetch import Prefetcher
from mmaccel.policies.kv._window import Angles, Pair, Rope
from mmaccel.policies.kv.store.pinned_slabs import on_device

Prefetch = Literal["off", "query", "projected"]

STEP = 64
"""Summary tokens of a replay are a multiple of this, as far as there are places for clusters."""
ROWS = 8
"""Rows of words that a replay takes are a multiple of this."""
AHEAD = 1.25
"""The prefetch brings so many times the budget: neighbouring layers agree on most of what they retrieve, not on all."""


class End(NamedTuple):
    """The end of a stream of so many `units`: a question sees those from `begin` on without a search; those from `first` on
    are in the window."""

    begin: int
    units: int
    first: int

    @property
    def away(self) -> bool:
        """Whether some have left the window."""
        return self.first > 0


class Chosen(NamedTuple):
    """What one layer sees at a question.

    found    what it retrieved
    entries  [k] ascending: all units that it sees, those that it need not search among them
    code     [k] where they are (`Prefetcher.codes`); None where the store is not read by codes
    ahead    [n] codes of what to fetch for the next layer
    reps     summary tokens before them
    seen     units that all positions span
    name     of the kind of question: the next one's results of this name lie at the same addresses. None: they do not
    """

    found: Found
    entries: Tensor
    code: Tensor | None
    ahead: Tensor | None
    reps: int
    seen: int
    name: Hashable | None


class Asking(NamedTuple):
    """Raw queries [H, n, D] of a question's words, and the hidden states [1, n, E] of these that enter the layer, where the
    next layer's query is predicted from them."""

    query: Tensor
    hidden: Tensor | None


class Retriever:
    """Chooses what a question sees, layer by layer.

    prefetch  how the next layer's retrieval is predicted: "query", by this layer's query in the next layer's index (Mosaic
              VII-B); "projected", by the next layer's query of the states that enter this one (`QueryPrediction`); "off"
    reps      summary tokens at most
    """

    def __init__(
        self,
        index: Index,
        stream: Stream,
        geometry: Geometry,
        model: ModelView,
        rope: Rope,
        device: torch.device,
        prefetcher: Prefetcher,
        prefetch: Prefetch,
        reps: int,
    ) -> None:
        self.index, self.stream, self.geometry = index, stream, geometry
        self.prefetch, self.reps = prefetch, reps
        self.replays = Replays(device)
        self.prediction = QueryPrediction(geometry.layers, geometry.hidden, device)
        self._model, self._rope, self._device, self._prefetcher = model, rope, device, prefetcher
        self._left: list[int] = []
        self._known: tuple[Tensor | None, list[int]] = None, []

    def begin(self, end: End, budget: int) -> None:
        """A question for `budget` units a layer may be asked next; what the device was told before is not sent again."""
        self.index.prepare(end.begin)
        if end.away:
            self._prefetcher.begin(end.first)
        at = (
            self.index.mark(),
            self.stream.places.mark(end.units),
            self._prefetcher.mark() if end.away else None,
        )
        self.replays.under(at)
        layers = range(self.geometry.layers) if self.reps else ()
        self._left = [self.index.count(layer, budget, self.reps) for layer in layers]
        numbers = self._numbers
        sent = [end.units, *self._left]
        if self._known[0] is not numbers or self._known[1] != sent:
            self._known = numbers, sent
            numbers[1 : 1 + len(sent)] = on_device(sent, self._device)

    def asked(self, words: int) -> None:
        """A question of so many words is asked."""
        self._numbers[0].fill_(words)

    @property
    def _numbers(self) -> Tensor:
        """[2 + L] on the device: words of the question, units of the stream, summary tokens of each layer."""
        return self.replays.room("told", (2 + self.geometry.layers,), torch.long)

    def choose(self, layer: int, asking: Asking, end: End, budget: int, compact: bool) -> Chosen:
        """For a question whose first layer `asked` announced."""
        more, away = end.units - end.begin, end.away
        now = self.index.prepare(end.begin)
        reps = self._left[layer] if self._left else 0
        again = away and len(now.entries) > budget
        if again and self.replays.works and reps:
            # Clusters come and go with every question: a replay has places for some more, which nobody sees.
            reps = min(-(-reps // STEP) * STEP, self.index.room)
        last = layer + 1 == self.geometry.layers
        coded = away and self._prefetcher.indexed
        guessing, wide = self.prefetch != "off" and coded and not last, int(budget * AHEAD)
        numbers = self._numbers
        query, hidden = self._laid(asking)
        if hidden is not None:
            self.prediction.entered(layer)

        def choose() -> tuple[Tensor, ...]:
            predicted = None
            if hidden is not None:
                entering = self.prediction.next(layer, hidden, numbers[:1])
                if not last:
                    # A mean goes through the projection as its rows do.
                    predicted = clusters.folded(self._model.norm(layer + 1, entering), numbers[:1], 1)
            mean = self.folded(query, numbers[:1])
            late = clusters.Late(numbers[1:2], 1, more)
            found, ahead = self._search(layer, mean, predicted, budget, 0 if last else wide, late)
            made = list[Tensor]()
            if coded:
                made.append(self._prefetcher.codes(layer, found.entries))
            if guessing and ahead is not None:
                made.append(self._prefetcher.foretell(layer + 1, ahead))
            return *found, *made

        name = None
        if again:
            sizes = layer, budget, wide, more, reps, now.lists.largest, query.shape[1]
            name = sizes, compact, coded, self.prefetch, hidden is None
            entries, picked, scores, *made = self.replays(name, choose)
        else:
            entries, picked, scores, *made = choose()
        return Chosen(
            Found(entries[: len(entries) - more], picked, scores),
            entries,
            made.pop(0) if coded else None,
            made.pop(0) if guessing else None,
            reps,
            len(entries) if compact else end.units,
            name,
        )

    def position(
        self, layer: int, chosen: Chosen, out: Tensor, end: End, compact: bool
    ) -> tuple[Angles, Tensor | None]:
        """Summary tokens into the first columns of `out` [2, G, m + k * P, D]; the angles of all that is `chosen`, and a
        bias [h + m] of the scores of the head and the summary tokens, if any. Units need not have been brought."""
        found, entries, reps, count, places = (
            chosen.found,
            chosen.entries,
            chosen.reps,
            end.units,
            self.stream.places,
        )
        if not reps and (len(entries) == count or compact):
            # What all layers share is made once.
            name = "ranks", len(entries)
            return self._rope.at(name, lambda: unit_positions(places, entries, count, compact)), None
        # One room for all layers: a layer turns its keys before the next one is asked.
        room = self.replays.room("angles", (2, 1, 1, *out.shape[2:]), self.stream.dtype)
        left = self._numbers[2 + layer, None] if chosen.name is not None and self.replays.works else None

        def stand() -> tuple[Tensor, ...]:
            parts, bias = [unit_positions(places, entries, count, compact)], list[Tensor]()
            if reps:
                columns, head = out[:, :, :reps], self.stream.head
                times, added = self.index.summarise(layer, found, columns, head, left)
                bias.append(added)
                middle = self.stream.unit // 2
                parts.insert(0, summary_positions(places, times, entries, count, compact, middle))
            torch.stack(self._rope.angles(torch.cat(parts, -1)), out=room)
            return tuple(bias)

        if chosen.name is None:
            made = stand()
        else:
            given = entries, found.picked, found.scores, out
            at = *(one.data_ptr() for one in given), out.stride()
            made = self.replays(("stand", chosen.name, out.shape), stand, at=at)
        return (room[0], room[1]), made[0] if made and left is not None else None

    def _laid(self, asking: Asking) -> Asking:
        """`asking` where replays read it, with rows to a multiple of `ROWS` that may be anything."""
        few = asking.query.shape[1]
        rows = -(-few // ROWS) * ROWS

        def laid(name: str, x: Tensor) -> Tensor:
            room = self.replays.room(name, (x.shape[0], rows, x.shape[2]), x.dtype)
            room[:, :few] = x
            return room

        hidden = None if asking.hidden is None else laid("hidden", asking.hidden)
        return Asking(laid("query", asking.query), hidden)

    def folded(self, query: Tensor, count: Tensor | None = None) -> Tensor:
        """[d]: the mean of raw queries [H, n, D] of the first `count` [1] rows, or of all, against keys of all heads: the
        heads of a group summed, for they share their keys."""
        return clusters.folded(query, count, self.geometry.kv_heads)

    def _search(
        self, layer: int, mean: Tensor, predicted: Tensor | None, budget: int, wide: int, late: clusters.Late
    ) -> tuple[Found, Tensor | None]:
        """What a layer retrieves by its folded query `mean` [d], and `late`; and `wide` units that the next will need, by
        the mean hidden state `predicted` [E], or else by the same query; none of these for 0."""
        if not wide:
            return self.index.search_ahead(layer, mean[None], budget, 0, late)
        later = mean
        if predicted is not None:
            entering = predicted[None, None].to(self.stream.dtype)
            later = self.folded(self._model.query(layer + 1, entering)[0])
        # Without a guess too: what else is computed beside it may change the last bit of a score.
        return self.index.search_ahead(layer, torch.stack([mean, later]), budget, wide, late)


def unit_positions(places: PositionIds, entries: Tensor, count: int, compact: bool) -> Tensor:
    """[k * P] or [3, k * P]: the tokens of ascending units `entries` [k] of `count`, at their own times or closed up."""
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


class EncodeRetrieval:
    """Each layer of a pass of the stream retrieves `budget` units that have left the window, by the mean query of the pass,
    so that units are stored as they are after what came before (Mosaic VII-A).

    Nothing is read back: what was retrieved goes to the host with the pass's own keys. So what is stored follows from the
    passes of the stream alone (a call of `watch` ends with a pass), not from questions, from what the cache holds, or from
    the way by which units come. Nothing is fetched ahead: what a layer needs of 8 frames crosses the wire in less than a
    hundredth of the time that it takes for a pass.
    """

    def __init__(self, budget: int, retriever: Retriever, prefetcher: Prefetcher, rope: Rope) -> None:
        self.budget = budget
        self._retriever, self._prefetcher, self._rope = retriever, prefetcher, rope
        self._found: list[Tensor] = []
        self._some = False

    def begin(self, first: int, look: Tensor | None) -> None:
        """A pass begins, of units of mean visual embeddings `look` [n, E]; units from `first` on are in the window."""
        index = self._retriever.index
        self._found = []
        self._some = bool(self.budget and first)
        if self._some:
            index.refresh()
            self._some = len(index.prepare(first).entries) > 0
        if self._some:
            self._prefetcher.begin(first)
            if look is not None and index.by_look:
                index.by(look.mean(0))

    def view(self, layer: int, query: Tensor, base: int, first: int) -> list[Pair]:
        """Keys, turned for `base`, and values of what the queries [1, H, n, D] of a pass retrieve, if anything can be."""
        if not self._some:
            return []
        # One launch for the thousands of rows of a pass, which a question's kernel would go through one after the other.
        mean = query[0].mean(1, keepdim=True, dtype=torch.float32)
        units = self._retriever.index.search(layer, self._retriever.folded(mean), self.budget, first).entries
        self._found.append(units)
        rows = self._prefetcher.recall(layer, units)
        places = self._retriever.stream.places
        # In slots, where the base is taken from these; units that do not come evenly are then all closed up.
        numbers = _closed(units, base, places.slots(first), places.even) if base else units
        where = places.chosen(numbers, places.slots(first), own=not base)
        self._rope.apply_(rows[:1], self._rope.angles(where))
        return [(rows[:1], rows[1:])]

    def retrieved(self) -> Tensor | None:
        """[L, n] the units that the pass retrieved, still on the device; None where there were none."""
        found, self._found = self._found, []
        if not found:
            return None
        self._prefetcher.tally()
        return torch.stack(found)


def _closed(units: Tensor, base: int, first: int, even: bool) -> Tensor:
    """[n] where ascending `units` [n], all below `first`, stand where `base` is taken from them: what lies before the base
    is closed up behind it, so that its order is still seen. All stand before the window."""
    rank = torch.arange(len(units), device=units.device)
    room = first - base - 1 - rank[-1]
    there = torch.maximum(units - base, rank) if even else rank + room
    return torch.minimum(there, rank + room).clamp_min(0)


class QueryPrediction:
    """What each layer adds to the hidden states of a question's words, in the mean, as the last question showed it.

    Questions go through the same template and the same layers: most of what a layer adds is alike for all. On both tiny
    models the next layer's own query of states moved so far finds 84% of what that layer retrieves, with a quarter more
    asked for, and the query of the states as they are 68%.

    All of it lies on the device, where it stays, so that `next` can be replayed: known, seen [L, E] float32.
    """

    def __init__(self, layers: int, hidden: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._known, self._seen = torch.zeros(2, layers, hidden, device=device)
            self._before = torch.zeros(hidden, device=device)
        self._reached = -1

    def clear(self) -> None:
        """Nothing was asked yet."""
        self._known.zero_()
        self._reached = -1

    def next(self, layer: int, rows: Tensor, count: Tensor) -> Tensor:
        """The hidden states that will enter the next layer, about, for those [1, n, E] of rows entering this one, of which
        the first `count` [1] are a question's words. Notes what this layer shows of the one before."""
        seen = self._seen[layer - 1] if layer else None
        return clusters.moved(rows[0], count, self._known[layer], self._before, seen)[None]

    def entered(self, layer: int) -> None:
        """The states that enter a layer are given to `next`, or to what replays it."""
        self._reached = layer if layer == self._reached + 1 else -1

    def settle(self) -> None:
        """The question is over: what it showed is known to the next."""
        if self._reached > 0:
            self._known[: self._reached] = self._seen[: self._reached]
        self._reached = -1
