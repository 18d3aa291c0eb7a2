"""What each layer sees of a stream at a question: retrieved entries, pseudo tokens, where all stand; and a guess of the next
layer's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.kv import Stream
from mmaccel.core.replay import Replays
from mmaccel.policies.kv._angles import Angles, Turner
from mmaccel.policies.kv.mosaic.index import Found, Index
from mmaccel.policies.kv.mosaic.standing import Standing
from mmaccel.policies.kv.store.wire import on_device

if TYPE_CHECKING:
    from mmaccel.policies.kv.mosaic.policy import Mosaic


STEP = 64
"""Pseudo tokens of a replay are a multiple of this, as far as there are places for clusters."""


class End(NamedTuple):
    """The end of a stream of so many `units`: those from `begin` on are seen unsearched; `away`: some before them
    have left the window."""

    begin: int
    units: int
    away: bool


class Chosen(NamedTuple):
    """What one layer sees of a stream at a question: what it `found`, all `entries` [k] ascending, those that it need not
    search among them; what to fetch `ahead` [n] for the next layer (-1: nothing); pseudo tokens `reps` [2, G, m, D] before
    them, and a `bias` [h + m] of the scores of these and the head; the `angles` of all, and how many units they seem to be
    of (`seen`)."""

    found: Found
    entries: Tensor
    ahead: Tensor | None
    reps: Tensor | None
    bias: Tensor | None
    angles: Angles
    seen: int


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
    ) -> None:
        self.index, self.stream, self.geometry, self.parts = index, stream, geometry, parts
        self.standing = Standing(stream.places, stream.unit, parts)
        self.replays = Replays(device)
        self._model, self._turner, self._device = model, turner, device
        self._left: list[int] = []

    def begin(self, end: End, budget: int, policy: Mosaic) -> None:
        """A question for `budget` entries a layer is about to be asked."""
        there, layers = self.index.prepare(end.begin * self.parts, budget), range(self.geometry.layers)
        self.replays.under((self.index.mark(), self.stream.places.mark(end.units)))
        everyone, most = policy.reps_for == "all", policy.reps if there.parent is not None else 0
        self._left = [self.index.left(layer, budget, most, everyone) for layer in layers] if most else []
        if self._left and self.replays.works:
            room = self.replays.room("left", (len(self._left),), torch.long)
            room.copy_(on_device(self._left, self._device))

    def choose(
        self,
        layer: int,
        mean: Tensor,
        words: Tensor | None,
        end: End,
        policy: Mosaic,
        budget: int,
        compact: bool,
    ) -> Chosen:
        """For the mean query [H, D] of a question's words, and their mean normed state `words` [1, 1, E] before the next
        layer, if that is guessed."""
        parts, (begin, count, away) = self.parts, end
        local = count - begin
        there = self.index.prepare(begin * parts, budget)
        reps = self._left[layer] if self._left else 0
        again = away and parts == 1 and len(there.entries) > budget
        replayed = again and self.replays.works
        if replayed and reps:
            # Clusters come and go with every question: a replay has places for some more, which nobody sees.
            reps = min(-(-reps // STEP) * STEP, self.index.room)
        last = layer + 1 == self.geometry.layers
        guessing, wide = policy.prefetch and away and not last, int(budget * policy.slack)
        total = min(len(there.entries), budget) + local * parts
        # What all layers share is made once.
        shared = not reps and (total == count * parts or (compact and parts == 1))
        size = (2, 1, 1, reps + total * self.stream.unit // parts, self.geometry.head_dim)
        room = self.replays.room("angles", size, self.stream.dtype)
        told = self.replays.room("left", (len(self._left),), torch.long)[layer] if replayed and reps else None

        def choose(mean: Tensor, at: Tensor, words: Tensor | None = None) -> tuple[Tensor, ...]:
            found, ahead = self._search(layer, mean, words, budget, 0 if last else wide)
            if guessing and policy.predictor == "frames":
                ahead = self.index.guess(layer + 1, found.entries, wide)
            late = (at - local) * parts + torch.arange(local * parts, device=self._device)
            entries = torch.cat([found.entries, late])
            made, places = [ahead] if guessing and ahead is not None else [], []
            if reps:
                rows, times, held = self.index.rest(layer, found, reps)
                made += self._standing_for(rows, held, policy.rep_bias == "log_size", told)
                places.append(self.standing.middles(times, entries, count, compact))
            if not shared:
                # One room for all layers: a layer turns its keys before the next one is asked.
                places.append(self.standing.where(entries, count, compact))
                torch.stack(self._turner.angles(torch.cat(places, -1)), out=room)
            return entries, found.picked, found.scores, *made

        given = [mean, torch.full((1,), count, device=self._device), *([] if words is None else [words])]
        if again:
            sizes = (layer, budget, wide, local, reps, there.largest)
            kinds = (compact, shared, guessing, policy.predictor, policy.slack, policy.rep_bias)
            entries, picked, scores, *made = self.replays((sizes, kinds), choose, *given)
        else:
            entries, picked, scores, *made = choose(*given)
        ahead = made.pop(0) if guessing else None
        rows, bias = (made.pop(0), made.pop(0)) if reps else (None, None)
        angles = (room[0], room[1])
        if shared:
            angles = self._turner.at(("ranks", total), lambda: self.standing.where(entries, count, compact))
        return Chosen(
            Found(entries[: len(entries) - local * parts], picked, scores),
            entries,
            ahead,
            rows,
            bias if replayed or policy.rep_bias == "log_size" else None,
            angles,
            self.standing.seen(entries, count, compact),
        )

    def folded(self, query: Tensor) -> Tensor:
        """[d]: a query [H, D] against keys of all heads, the heads of a group summed, for they share their keys."""
        heads, size = self.geometry.kv_heads, self.geometry.head_dim
        return query.reshape(heads, -1, size).sum(1).flatten()

    def _search(
        self, layer: int, mean: Tensor, words: Tensor | None, budget: int, wide: int
    ) -> tuple[Found, Tensor | None]:
        """What a layer retrieves, and `wide` entries that the next will need; none of these for 0."""
        folded = self.folded(mean)
        if not wide:
            return self.index.search_ahead(layer, folded[None], budget, 0)
        later = folded
        if words is not None:
            later = self.folded(self._model.query(layer + 1, words.to(self.stream.dtype))[0, :, 0].float())
        # Without a guess too: what else is computed beside it may change the last bit of a score.
        return self.index.search_ahead(layer, torch.stack([folded, later]), budget, wide)

    def _standing_for(self, rows: Tensor, held: Tensor, weighed: bool, left: Tensor | None) -> list[Tensor]:
        """Pseudo tokens [2, G, k, D] of keys and values [2, k, d], and what is added to the scores of the head and of them:
        if `weighed` the logarithms of the tokens of `held` [k] entries; and to those from `left` on, on the device, what
        hides them."""
        heads, size = self.geometry.kv_heads, self.geometry.head_dim
        added = torch.zeros(held.shape, device=held.device)
        if weighed:
            # What stands for retrieved tokens adds nothing to them.
            added = (held * (self.stream.unit // self.parts)).float().clamp_min(1e-30).log()
        if left is not None:
            added = added.masked_fill(torch.arange(len(held), device=held.device) >= left, -torch.inf)
        return [rows.view(2, -1, heads, size).transpose(1, 2), pad(added, (self.stream.head, 0))]
