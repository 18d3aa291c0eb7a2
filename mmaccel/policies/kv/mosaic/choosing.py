"""What each layer sees of a stream at a question: retrieved entries, pseudo tokens, where all stand; and a guess of the next
layer's."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mmaccel.backends.ops import clusters, words
from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.kv import Stream
from mmaccel.core.replay import Replays
from mmaccel.policies.kv._angles import Angles, Turner
from mmaccel.policies.kv.mosaic.drift import Drift
from mmaccel.policies.kv.mosaic.fetching import Fetcher
from mmaccel.policies.kv.mosaic.index import Found, Index
from mmaccel.policies.kv.mosaic.standing import Standing
from mmaccel.policies.kv.store.wire import on_device

if TYPE_CHECKING:
    from mmaccel.policies.kv.mosaic.policy import Mosaic


STEP = 64
"""Pseudo tokens of a replay are a multiple of this, as far as there are places for clusters."""


ROWS = 8
"""Rows of words that a replay takes are a multiple of this."""


class End(NamedTuple):
    """The end of a stream of so many `units`: those from `begin` on are seen unsearched, those from `first` on are in the
    window."""

    begin: int
    units: int
    first: int

    @property
    def away(self) -> bool:
        """Whether some have left the window."""
        return self.first > 0


class Chosen(NamedTuple):
    """What one layer sees of a stream at a question: what it `found`, all `entries` [k] ascending, those that it need not
    search among them, and their codes `code` [k], None where the store has none; codes of what to fetch `ahead` [n] for the
    next layer; how many pseudo tokens (`reps`) stand before them, and how many units all seem to be of (`seen`). `name`: of
    the question's kind; the next one's of this name lies where this does. None: everything is another's the next time."""

    found: Found
    entries: Tensor
    code: Tensor | None
    ahead: Tensor | None
    reps: int
    seen: int
    name: Hashable | None


class Asking(NamedTuple):
    """What a layer is asked: queries [H, n, D] of a question's words, and the hidden states [1, n, E] of these that enter
    the layer, if the next one's query is guessed by them."""

    query: Tensor
    hidden: Tensor | None


class Chooser:
    """Letters as in `MosaicMemory`. From the second question of a kind on, what a layer chooses is replayed as one."""

    def __init__(
        self,
        index: Index,
        stream: Stream,
        geometry: Geometry,
        model: ModelView,
        turner: Turner,
        parts: int,
        device: torch.device,
        fetcher: Fetcher,
    ) -> None:
        self.index, self.stream, self.geometry, self.parts = index, stream, geometry, parts
        self.standing = Standing(stream.places, stream.unit, parts)
        self.replays = Replays(device)
        self.drift = Drift(geometry.layers, geometry.hidden, device)
        self._model, self._turner, self._device, self._fetcher = model, turner, device, fetcher
        self._left: list[int] = []
        self._known: tuple[Tensor | None, list[int]] = None, []

    def begin(self, end: End, budget: int, policy: Mosaic) -> None:
        """A question for `budget` entries a layer may be asked next; what the device was told before is not sent again."""
        there, layers = self.index.prepare(end.begin * self.parts, budget), range(self.geometry.layers)
        if end.away:
            self._fetcher.begin(end.first * self.parts)
        at = self.index.mark(), self.stream.places.mark(end.units), self._fetcher.mark() if end.away else None
        self.replays.under(at)
        everyone, most = policy.reps_for == "all", policy.reps if there.parent is not None else 0
        self._left = [self.index.left(layer, budget, most, everyone) for layer in layers] if most else []

        told, numbers = self._told, [end.units, *self._left]
        if self._known[0] is not told or self._known[1] != numbers:
            self._known = told, numbers
            told[1 : 1 + len(numbers)] = on_device(numbers, self._device)

    def asked(self, words: int) -> None:
        """A question of so many words is asked."""
        self._told[0].fill_(words)

    @property
    def _told(self) -> Tensor:
        """[2 + L] on the device: words of a question, units of the stream, and what `Index.left` says of each layer."""
        return self.replays.room("told", (2 + self.geometry.layers,), torch.long)

    def choose(
        self,
        layer: int,
        asking: Asking,
        end: End,
        policy: Mosaic,
        budget: int,
        compact: bool,
    ) -> Chosen:
        """For a question whose first layer was told of by `asked`."""
        parts, begin, count, away = self.parts, end.begin, end.units, end.away
        more = (count - begin) * parts
        there = self.index.prepare(begin * parts, budget)
        reps = self._left[layer] if self._left else 0
        again = away and len(there.entries) > budget
        replayed = again and self.replays.works
        if replayed and reps:
            # Clusters come and go with every question: a replay has places for some more, which nobody sees.
            reps = min(-(-reps // STEP) * STEP, self.index.room)
        last = layer + 1 == self.geometry.layers
        coded = away and self._fetcher.indexed
        guessing, wide = policy.prefetch and coded and not last, int(budget * policy.slack)
        told = self._told
        query, hidden = self._laid(asking)
        if hidden is not None:
            self.drift.entered(layer)

        def choose() -> tuple[Tensor, ...]:
            heard = None
            if hidden is not None:
                entering = self.drift.next(layer, hidden, told[:1])
                if not last:
                    # A mean goes through the projection as its rows do.
                    heard = words.folded(self._model.norm(layer + 1, entering), told[:1], 1)
            mean = self.folded(query, told[:1])
            late = clusters.Late(told[1:2], parts, more)
            found, ahead = self._search(layer, mean, heard, budget, 0 if last else wide, late)
            if guessing and policy.predictor == "frames":
                ahead = self.index.guess(layer + 1, found.entries[: len(found.entries) - more], wide)
            made = list[Tensor]()
            if coded:
                made.append(self._fetcher.codes(layer, found.entries))
            if guessing and ahead is not None:
                made.append(self._fetcher.foretell(layer + 1, ahead))
            return *found, *made

        name = None
        if again:
            sizes = layer, budget, wide, more, reps, there.lists.largest, query.shape[1]
            name = sizes, compact, coded, policy.prefetch, hidden is None, policy.predictor, policy.rep_bias
            entries, picked, scores, *made = self.replays(name, choose)
        else:
            entries, picked, scores, *made = choose()
        return Chosen(
            Found(entries[: len(entries) - more], picked, scores),
            entries,
            made.pop(0) if coded else None,
            made.pop(0) if guessing else None,
            reps,
            self.standing.seen(entries, count, compact),
            name,
        )

    def stand(
        self, layer: int, chosen: Chosen, out: Tensor, end: End, policy: Mosaic, compact: bool
    ) -> tuple[Angles, Tensor | None]:
        """Pseudo tokens into the first columns of `out` [2, G, m + k * p, D]; the angles of all that is `chosen`, and a bias
        [h + m] of the scores of the head and the pseudo tokens, if any. Nothing of it need be known to bring entries."""
        found, entries, reps, count = chosen.found, chosen.entries, chosen.reps, end.units
        if not reps and (len(entries) == count * self.parts or (compact and self.parts == 1)):
            # What all layers share is made once.
            name = "ranks", len(entries)
            return self._turner.at(name, lambda: self.standing.where(entries, count, compact)), None
        # One room for all layers: a layer turns its keys before the next one is asked.
        room = self.replays.room("angles", (2, 1, 1, *out.shape[2:]), self.stream.dtype)
        left = self._told[2 + layer, None] if chosen.name is not None and self.replays.works else None
        weighed = policy.rep_bias == "log_size"

        def stand() -> tuple[Tensor, ...]:
            places, bias = [], list[Tensor]()
            if reps:
                tokens = self.stream.unit // self.parts * weighed
                columns, head = out[:, :, :reps], self.stream.head
                times, added = self.index.rest(layer, found, columns, head, left, tokens)
                bias.append(added)
                places.append(self.standing.middles(times, entries, count, compact))
            places.append(self.standing.where(entries, count, compact))
            torch.stack(self._turner.angles(torch.cat(places, -1)), out=room)
            return tuple(bias)

        if chosen.name is None:
            made = stand()
        else:
            given = entries, found.picked, found.scores, out
            at = *(one.data_ptr() for one in given), out.stride()
            made = self.replays(("stand", chosen.name, out.shape), stand, at=at)
        return (room[0], room[1]), made[0] if made and (left is not None or weighed) else None

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
        return words.folded(query, count, self.geometry.kv_heads)

    def _search(
        self, layer: int, mean: Tensor, heard: Tensor | None, budget: int, wide: int, late: clusters.Late
    ) -> tuple[Found, Tensor | None]:
        """What a layer retrieves by its folded query `mean` [d], and `late`; and `wide` entries that the next will need, by
        the mean hidden state `heard` [E], or else by the same; none of these for 0."""
        if not wide:
            return self.index.search_ahead(layer, mean[None], budget, 0, late)
        later = mean
        if heard is not None:
            later = self.folded(self._model.query(layer + 1, heard[None, None].to(self.stream.dtype))[0])
        # Without a guess too: what else is computed beside it may change the last bit of a score.
        return self.index.search_ahead(layer, torch.stack([mean, later]), budget, wide, late)
