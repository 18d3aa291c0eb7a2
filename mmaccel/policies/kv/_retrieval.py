"""Base of memories that archive older units (frames) on the host: what questions retrieve of them, and summary tokens for
the rest. `_encoding` has what passes of the stream retrieve.

Letters: L layers, H query heads, G key/value heads, D head size, E hidden size, P tokens a unit, C cluster ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmaccel.backends.ops import clusters
from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.layout import PositionIds
from mmaccel.core.memory.buffers import on_device
from mmaccel.core.memory.kv import Stream, StreamPass
from mmaccel.policies.kv._encoding import EncodingMemory
from mmaccel.policies.kv._index import SearchResult
from mmaccel.policies.kv._prefetch import QueryPrediction
from mmaccel.policies.kv._window import Angles, Look, QuestionView, words_of
from mmaccel.policies.kv.store.slabs import view_by_unit

ALL = 1 << 62
"""As many summary tokens as there are clusters."""
STEP = 64
"""Summary tokens of a replay are a multiple of this, as far as there are places for clusters."""
ROWS = 8
"""Rows of words that a replay takes are a multiple of this."""
AHEAD = 1.25
"""The prefetch brings so many times the budget: neighbouring layers agree on most of what they retrieve, not on all."""


class ArchivedMemory(EncodingMemory):
    """An `EncodingMemory` that answers questions: each layer retrieves units (frames) for itself, and shows summary tokens
    for the rest. On CUDA, what a layer chooses is captured as a graph at its second run, then replayed."""

    def __init__(
        self, policy: Any, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> None:
        super().__init__(policy, stream, geometry, model, device)
        self.set_query_fields(policy)
        self.prefetch, self.reps = policy.prefetch, ALL if policy.reps is None else policy.reps
        self.prediction = QueryPrediction(geometry.layers, geometry.hidden, device)
        self._model, self.recalls_alike = model, False
        # Summary tokens of each layer; what the device was told last, and where.
        self._left: list[int] = []
        self._known: tuple[Tensor | None, list[int]] = None, []
        self._found: dict[int, SearchResult] = {}
        self._entering: Tensor | None = None
        self._recalled = self._questions = 0

    def set_query_fields(self, policy: Any) -> None:
        super().set_query_fields(policy)
        self.policy, self.budget = policy, self.stream.units(policy.frames)

    def clusters(self) -> dict[str, Tensor]:
        self.index.cluster_units()
        return self.index.cluster_of_units()

    def begin_pass(self, stream_pass: StreamPass) -> None:
        super().begin_pass(stream_pass)
        if stream_pass.kind == "question":
            self._found = {}
            (self._main or self)._questions += 1
            if self._main is None:
                self.end_ingest()
            begin, end = words_of(stream_pass)
            self._numbers[0].fill_(end - begin)

    @property
    def _begin(self) -> int:
        """The first unit that a question sees without a search."""
        return max(self._count - self.local, self._first)

    @property
    def _numbers(self) -> Tensor:
        """[2 + L] on the device: words of the question, units of the stream, summary tokens of each layer."""
        return self.replays.get_buffer("told", (2 + self.geometry.layers,), torch.long)

    def end_ingest(self) -> None:
        """Prepare the search tables for the next question; only numbers that changed are sent to the device."""
        super().end_ingest()
        self.index.cluster_units()
        self.index.prepare(self._begin)
        if self._first:
            self.prefetcher.begin(self._first)
        self._set_data_place(self._count)
        layers = range(self.geometry.layers) if self.reps else ()
        self._left = [self.index.summary_count(layer, self.budget, self.reps) for layer in layers]
        numbers, sent = self._numbers, [self._count, *self._left]
        if self._known[0] is not numbers or self._known[1] != sent:
            self._known = numbers, sent
            numbers[1 : 1 + len(sent)] = on_device(sent, self.device)

    def receive_hidden(self, layer: int, hidden: Tensor) -> None:
        stream_pass, self._entering = self._stream_pass, None
        if stream_pass is None or stream_pass.kind != "question":
            return
        begin, end = words_of(stream_pass)
        if layer == 0 and self.index.by_look:
            self.index.set_visual_query(hidden[0, begin:end].float().mean(0))
        if self.prefetch == "projected" and self._first:
            self._entering = hidden[:, begin:end]

    def _most(self) -> int:
        return self.budget + super()._most()

    def _gather(self, layer: int, query: Tensor, stream_pass: StreamPass) -> QuestionView:
        if stream_pass.kind == "proxy":
            return super()._gather(layer, query, stream_pass)
        asking = query[0, :, slice(*words_of(stream_pass))]
        found, entries, code, ahead, few, name = self._choose(layer, asking)
        self._found[layer] = found
        recalled = len(found.entries)
        (self._main or self)._recalled += recalled
        unit, ring = self.stream.tokens_per_unit, self._rings[layer]
        columns = few + len(entries) * unit
        asked, raw = self._space(layer, columns, columns + stream_pass.rows + stream_pass.room)
        out = raw[:, :, few:]
        ready = None
        if self._first:
            assert ring is not None
            window = ring.key, ring.value
            ready = self.prefetcher.copy_units(layer, entries, code, recalled, out, window)
        elif ring is not None:  # of the first unit all frames have come
            for side, rows in enumerate((ring.key, ring.value)):
                view_by_unit(out[side], unit).copy_(view_by_unit(rows[0], unit).index_select(1, entries))
        if ahead is not None:
            self.prefetcher.prefetch(layer + 1, ahead)
        angles, asked.bias = self._stand(layer, found, entries, few, name, raw)
        if ready is not None:
            self.store.lanes.compute_queue.wait(ready)

        def finish() -> tuple[Tensor, ...]:
            """What was brought is kept in the cache; all of it is turned."""
            if code is not None:
                self.prefetcher.cache_units(layer, found.entries, raw[:, :, few : few + recalled * unit])
            self.rope.apply_(raw[:1], angles)
            return ()

        if name is None:
            finish()
        else:
            at = raw.data_ptr(), raw.stride(), angles[0].data_ptr(), found.entries.data_ptr()
            self.replays(("finish", name, raw.shape), finish, at=at)
        asked.seen, asked.summaries = len(entries) if self.compact else self._count, few
        return asked

    def _choose(
        self, layer: int, query: Tensor
    ) -> tuple[SearchResult, Tensor, Tensor | None, Tensor | None, int, Hashable | None]:
        """By raw queries [H, n, D] of the question's words, and the hidden states that enter the layer, where the next
        layer's query is predicted from them: what is retrieved; [k] ascending, all units that the layer sees; codes [k] of
        where they are, if the store has such; codes [n] of what to fetch for the next layer; how many summary tokens come
        first; and the name of the kind of question, if the next one's results of this name lie at the same addresses."""
        more, budget = self._count - self._begin, self.budget
        now = self.index.prepare(self._begin)
        reps = self._left[layer] if self._left else 0
        planned = self._stream_pass is not None and self._stream_pass.layout is not None
        again = bool(self._first) and len(now.entries) > budget and not planned
        if again and self.replays.works and reps:
            # Clusters come and go with every question: a replay has places for some more, which nobody sees.
            reps = min(-(-reps // STEP) * STEP, self.index.cluster_capacity)
        last = layer + 1 == self.geometry.layers
        coded = bool(self._first) and self.store.can_gather
        guessing, wide = self.prefetch != "off" and coded and not last, int(budget * AHEAD)
        numbers, query = self._numbers, self._laid("query", query)
        hidden = None if self._entering is None else self._laid("hidden", self._entering)
        if hidden is not None:
            self.prediction.note_input(layer)

        def choose() -> tuple[Tensor, ...]:
            entering = None if hidden is None else self.prediction.predict_hidden(layer, hidden, numbers[:1])
            asked, words, model = [query], None, self._model
            if not last:
                # Without a guess too: what else is computed beside it may change the last bit of a score.
                coming = None if entering is None else model.input_norm(layer + 1, entering)
                asked.append(query if coming is None else model.project_query(layer + 1, coming)[0])
            queries = torch.stack([self._folded(one, numbers[:1]) for one in asked])
            if self.index.by_words:
                rows = torch.stack([clusters.sum_query_groups(one, self.geometry.kv_heads) for one in asked])
                words = clusters.WordQueries(rows, numbers[:1])
            late = clusters.NewestEntryRange(numbers[1:2], 1, more)
            found, ahead = self.index.search_ahead(layer, queries, budget, 0 if last else wide, late, words)
            made = list[Tensor]()
            if coded:
                made.append(self.prefetcher.location_codes(layer, found.entries))
            if guessing and ahead is not None:
                made.append(self.prefetcher.predict_codes(layer + 1, ahead))
            return *found, *made

        name = None
        if again:
            sizes = layer, budget, wide, more, reps, now.lists.largest, query.shape[1]
            name = sizes, self.compact, coded, self.prefetch, hidden is None
        entries, picked, scores, *made = choose() if name is None else self.replays(name, choose)
        found = SearchResult(entries[: len(entries) - more], picked, scores)
        code, coming = made.pop(0) if coded else None, made[-1] if guessing else None
        return found, entries, code, coming, reps, name

    def _stand(
        self, layer: int, found: SearchResult, entries: Tensor, reps: int, name: Hashable | None, out: Tensor
    ) -> tuple[Angles, Tensor | None]:
        """Summary tokens into the first columns of `out` [2, G, m + k * P, D]; the angles of these and of `entries`, and a
        bias [h + m] of the scores of the head and the summary tokens, if any. Units need not have been brought."""
        positions, compact, count = self.stream.positions, self.compact, self._count
        if not reps and (len(entries) == count or compact):
            # What all layers share is made once.
            return self.rope.cached(
                ("ranks", len(entries)), lambda: unit_positions(positions, entries, count, compact)
            ), None
        size = 2, 1, 1, out.shape[2], self.rope.rotated_dims(positions.positions_before_video())
        room = self.replays.get_buffer("angles", size, self.stream.dtype)  # of all layers, in turn
        left = self._numbers[2 + layer, None] if name is not None and self.replays.works else None

        def stand() -> tuple[Tensor, ...]:
            parts, bias = [unit_positions(positions, entries, count, compact)], list[Tensor]()
            if reps:
                times, added = self.index.summarise(layer, found, out[:, :, :reps], self.stream.head, left)
                bias.append(added)
                middle = self.stream.tokens_per_unit // 2
                parts.insert(0, summary_positions(positions, times, entries, count, compact, middle))
            torch.stack(self.rope.angles(torch.cat(parts, -1)), out=room)
            return tuple(bias)

        if name is None:
            made = stand()
        else:
            given = entries, found.picked, found.scores, out
            at = *(one.data_ptr() for one in given), out.stride()
            made = self.replays(("stand", name, out.shape), stand, at=at)
        return (room[0], room[1]), made[0] if made and left is not None else None

    def _laid(self, name: str, x: Tensor) -> Tensor:
        """`x` [a, n, b] where replays read it, with rows to a multiple of `ROWS` that may be anything."""
        few = x.shape[1]
        room = self.replays.get_buffer(name, (x.shape[0], -(-few // ROWS) * ROWS, x.shape[2]), x.dtype)
        room[:, :few] = x
        return room

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        main = self if self._main is None else self._main
        try:
            with super().question_scope():
                yield
        finally:
            # A question that broke off may still be written to where the next one's columns go.
            self.store.lanes.wait_for_copies()
            self.prefetcher.drop_prefetched()
            self.prediction.end_question()
            self._entering = None
            # What was retrieved has been on the device: the splits that it owed are made, if passes of the stream make none.
            found, self._found = self._found, {}
            if found and (not self.encode_budget or self.index.retrievals_split):
                main.index.record_retrieved(found)
            self.prefetcher.update_counters()
            # The next question need not wait for what this one split.
            main.end_ingest()

    def seen_tokens(self, layer: int) -> Tensor | None:
        return self._tokens_of(self._found[layer].entries, self._begin) if layer in self._found else None

    def _looked(self) -> dict[int, Look]:
        entries = torch.stack([one.entries for one in self._found.values()]).cpu() if self._found else ()
        return {layer: (units, self._begin) for layer, units in zip(self._found, entries, strict=True)}

    def _units_of(self, layer: int, shares: Tensor) -> Tensor:
        found, begin = self._found[layer], self._begin
        late, unit = torch.arange(begin, self._count, device=shares.device), self.stream.tokens_per_unit
        few = shares.shape[1] - len(entries := torch.cat([found.entries, late])) * unit
        own = shares[:, few:].view(len(shares), -1, unit).sum(2)
        out = shares.new_zeros(len(shares), self._count).index_add_(1, entries, own)
        if few:
            out[:, :begin] += self.index.share_by_unit(layer, found, shares[:, :few])
        return out

    # The stream as a whole.

    def checkpoint(self) -> Any:
        index = self.index.checkpoint()
        return super().checkpoint(), index

    def restore(self, mark: Any) -> None:
        inner, index = mark
        self._found, self._encoded = {}, []
        self.prefetcher.drop_prefetched()
        # What a broken pass brought has crossed: counted while its codes mean the places that they did.
        self.prefetcher.count_copies()
        self.index.restore(index)
        super().restore(inner)
        self.index.refresh()

    def reset(self) -> None:
        self.index.clear()
        self.prediction.clear()
        super().restore((0, 0, 0, [None] * len(self._heads), [None] * len(self._rings)))

    def _rewind(self, units: int, first: int) -> None:
        # Units that were forgotten to make room do not come back.
        self.index.forget_from(first)
        self.prefetcher.forget_from(first)
        self.store.forget_from(first)


def unit_positions(positions: PositionIds, entries: Tensor, count: int, compact: bool) -> Tensor:
    """Return the positions [k * P] or [3, k * P] of the tokens of the units (frames) `entries` [k], ascending, in a stream
    of `count` units: their own, or consecutive ones from unit 0 on if `compact`."""
    if compact:
        return positions.position_range(0, len(entries))
    if len(entries) == count:
        return positions.positions_by_time(0, count)
    return positions.of_units(entries, count - 1, own=True)


def summary_positions(
    positions: PositionIds, time: Tensor, entries: Tensor, count: int, compact: bool, middle: int
) -> Tensor:
    """Return positions [k] or [3, k] for summary tokens: that of token `middle` of the unit (frame) nearest the mean unit
    number `time` [k]; if `compact`, of the first retrieved unit (`entries`) not before that time."""
    if compact and len(entries) < count:
        numbers = torch.searchsorted(entries.to(time), time).clamp(max=len(entries) - 1)
    else:
        numbers = time.round().long()
    # What is no cluster may have any time. (Not below `count`: that is another at the next question.)
    numbers = numbers.clamp(0, positions.position_table_capacity(count, not compact) - 1)
    return positions.of_units(numbers, count - 1, middle, not compact)
