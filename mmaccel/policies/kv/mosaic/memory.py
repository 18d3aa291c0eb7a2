"""The memory of a stream in clusters: units in, questions answered, the splits that they cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.kv import KVView, Piece, Seat, Seen, Stream, StreamPolicy
from mmaccel.policies.kv._angles import Angles
from mmaccel.policies.kv._evidence import Look, words_of
from mmaccel.policies.kv._stream import Asked, Pair, StreamMemory, weigh
from mmaccel.policies.kv._window import Bases
from mmaccel.policies.kv.mosaic import saved
from mmaccel.policies.kv.mosaic.choosing import Asking, Chooser, Chosen, End
from mmaccel.policies.kv.mosaic.fetching import Fetcher, Window
from mmaccel.policies.kv.mosaic.hierarchy import Hierarchy
from mmaccel.policies.kv.mosaic.index import Found, Index
from mmaccel.policies.kv.mosaic.recalling import Recalling
from mmaccel.policies.kv.mosaic.summaries import Summaries
from mmaccel.policies.kv.mosaic.writing import Writer
from mmaccel.policies.kv.store import HostStore
from mmaccel.policies.kv.store.wire import in_units

if TYPE_CHECKING:
    from mmaccel.policies.kv.mosaic.policy import Mosaic


class MosaicMemory(StreamMemory):
    """Letters as in `StreamMemory`; T entries a unit of p = P / T tokens each, numbered unit by unit."""

    def __init__(
        self,
        policy: Mosaic,
        parts: int,
        stream: Stream,
        geometry: Geometry,
        model: ModelView,
        device: torch.device,
    ) -> None:
        super().__init__(
            stream,
            geometry,
            model,
            device,
            window=stream.units(policy.window),
            local=stream.units(policy.local),
            positions=policy.positions,
        )
        self.policy, self.parts = policy, parts
        self.feed_rows = None if policy.batch_feed else stream.unit
        self.budget = stream.units(policy.frames) * parts
        layers, width, tokens = geometry.layers, geometry.kv_heads * geometry.head_dim, stream.unit // parts
        self.tree = Hierarchy(
            policy.rules(stream.units(policy.init)),
            Summaries(layers, geometry.hidden, width, parts, stream.dtype, policy.lift, device),
            layers,
            geometry.hidden,
            width,
        )
        self.index = Index(
            self.tree,
            width,
            stream.dtype,
            device,
            policy.rep_of if policy.reps else "none",
            policy.similarity == "cosine",
        )
        self.store = HostStore(
            layers=layers,
            groups=geometry.kv_heads,
            tokens=tokens,
            size=geometry.head_dim,
            dtype=stream.dtype,
            device=device,
            cap=policy.host_bytes,
            spill=policy.spill,
            folder=policy.folder,
        )
        cached = stream.units(policy.cache) * parts
        self.fetcher = Fetcher(self.store, layers, self.window * parts, cached)
        self.writer = Writer(self.store, self.tree)
        self._found: dict[int, Found] = {}
        self._entering: Tensor | None = None
        self.chooser = Chooser(self.index, stream, geometry, model, self.turner, parts, device, self.fetcher)
        recalled = stream.units(policy.encode_frames)
        self.recalling = Recalling(
            recalled * parts, self.index, self.chooser, self.fetcher, self.turner, stream, parts
        )
        # What passes retrieve stands before the window, wherever the stream is.
        self.bases = Bases(stream.places, self.window, recalled)
        self._rep_bias: list[Tensor | None] = [None] * layers
        self._recalled = self._questions = 0

    def asked_under(self, policy: StreamPolicy) -> None:
        assert isinstance(policy, type(self.policy))
        self.policy, self.local = policy, self.stream.units(policy.local)
        self.budget = self.stream.units(policy.frames) * self.parts
        self.idle()

    def clusters(self) -> dict[str, Tensor]:
        return self.tree.owners()

    # The stream comes in.

    def fit(self, first: int, count: int) -> int:
        return super().fit(first, count if self.policy.batch_layers else 1)

    def _took(self, piece: Piece) -> None:
        assert piece.look is not None
        pairs = [pair for pair in self._new if pair is not None]
        self.writer.arrived(piece.look, pairs, self.recalling.retrieved())
        # Until passes retrieve, the host clusters what came before while the device still computes this one.
        self._digest(keep=1)

    def _digest(self, keep: int = 0) -> None:
        """Cluster what has arrived but for the last `keep` passes; all of it also comes into the index."""
        self.writer.digest(self.window, keep, self.policy.batch_match)
        # In between nobody asks, and clusters change often; but what has changed must not become too much.
        if self.index.behind > BEHIND * bool(keep):
            self.index.refresh()

    def idle(self) -> None:
        self._digest()
        self.chooser.begin(self._end, self.budget, self.policy)

    def _gone(self, layer: int, first: int, count: int, key: Tensor, value: Tensor) -> None:
        if layer == 0 and first + count > self.tree.units:
            self.writer.digest(self.window, 0, self.policy.batch_match)
        entries = range(first * self.parts, (first + count) * self.parts)
        lost = self.writer.gone(layer, entries, key, value)
        if lost:
            self.index.forget(lost)

    def _encode(self, layer: int, query: Tensor, piece: Piece, key: Tensor, value: Tensor) -> KVView:
        view = super()._encode(layer, query, piece, key, value)
        return view if self.policy.batch_attention else replace(view, step=self.stream.unit)

    def _retrieved(self, layer: int, query: Tensor) -> list[Pair]:
        return self.recalling.view(layer, query, self._base, self._first)

    # A question.

    def enter(self, piece: Piece) -> None:
        if piece.kind == "question":
            self._digest()
            self._found = {}
            self._questions += 1
            begin, end = words_of(piece)
            self.chooser.begin(self._end, self.budget, self.policy)
            self.chooser.asked(end - begin)
        elif piece.kind == "units":
            if self.recalling.budget and self._first:
                # A pass retrieves from the clusters of all that came before, wherever calls of `watch` and questions lie.
                # The host makes them while the device runs the vision tower for this pass, which was begun already.
                self._digest()
            self.recalling.begin(self._first)
        super().enter(piece)

    def ahead(self, layer: int, hidden: Tensor) -> None:
        piece = self._piece
        asking = piece is not None and piece.kind == "question" and self._guesses
        self._entering = hidden if asking else None

    @property
    def _guesses(self) -> bool:
        return self.policy.prefetch and self.policy.predictor == "projected" and bool(self._first)

    def _most(self) -> int:
        return self.budget + super()._most()

    def _gather(self, layer: int, query: Tensor, piece: Piece) -> Asked:
        if piece.kind == "proxy":
            return super()._gather(layer, query, piece)
        begin, end = words_of(piece)
        hidden = None if self._entering is None else self._entering[:, begin:end]
        chosen = self.chooser.choose(
            layer, Asking(query[0, :, begin:end], hidden), self._end, self.policy, self.budget, self.compact
        )
        self._found[layer] = chosen.found
        self._recalled += len(chosen.found.entries)
        few = chosen.reps
        columns = few + len(chosen.entries) * self.stream.unit // self.parts
        asked, raw = self._space(layer, columns, columns + piece.rows + piece.room)
        if self._first:
            cached, window = len(chosen.found.entries), self._window_of(layer)
            self.fetcher.bring(layer, chosen.entries, chosen.code, cached, raw[:, :, few:], window)
        else:
            self._chosen_near(layer, chosen.entries, raw[:, :, few:])
        if chosen.ahead is not None:
            self.fetcher.prefetch(layer + 1, chosen.ahead)
        angles, self._rep_bias[layer] = self.chooser.stand(
            layer, chosen, raw, self._end, self.policy, self.compact
        )
        self.fetcher.arrive(layer)
        self._finish(layer, chosen, raw, angles)
        asked.seen = chosen.seen
        return asked

    def _finish(self, layer: int, chosen: Chosen, raw: Tensor, angles: Angles) -> None:
        """What was brought into `raw` [2, G, m + n * p, D] is kept in the cache; all of it is turned."""
        few, retrieved, p = chosen.reps, chosen.found.entries, self.stream.unit // self.parts

        def finish() -> tuple[Tensor, ...]:
            if chosen.code is not None:
                self.fetcher.cache.keep(layer, retrieved, raw[:, :, few : few + len(retrieved) * p])
            self.turner.turn_(raw[:1], angles)
            return ()

        if chosen.name is None:
            finish()
        else:
            at = raw.data_ptr(), raw.stride(), angles[0].data_ptr(), retrieved.data_ptr()
            self.chooser.replays(("finish", chosen.name, raw.shape), finish, at=at)

    @property
    def _end(self) -> End:
        return End(max(self._count - self.local, self._first), self._count, self._first)

    def _window_of(self, layer: int) -> Window:
        ring = self._rings[layer]
        assert ring is not None
        return Window(self._first * self.parts, (ring.key, ring.value))

    def _chosen_near(self, layer: int, entries: Tensor, out: Tensor) -> None:
        """Keys and values of `entries`, all of which are in the window, into `out` [2, G, n * p, D]."""
        ring, p = self._rings[layer], self.stream.unit // self.parts
        if ring is None:
            # Of the first unit not all frames have come.
            return
        for side, rows in enumerate((ring.key, ring.value)):
            in_units(out[side], p).copy_(in_units(rows[0], p).index_select(1, entries))

    def _seat(self, layer: int, query: Tensor, piece: Piece) -> Seat:
        return replace(super()._seat(layer, query, piece), bias=self._rep_bias[layer])

    @contextmanager
    def turn(self) -> Iterator[None]:
        try:
            with super().turn():
                yield
        finally:
            # A question that broke off may still be written to where the next one's columns go.
            self.store.lanes.join()
            self._settle()
            # The next question need not wait for what this one split.
            self.idle()

    def _settle(self) -> None:
        """What was retrieved has been on the device: the splits that it owed are made, if passes of the stream make none."""
        self.fetcher.drop()
        self.chooser.drift.settle()
        self._entering = None
        self._rep_bias = [None] * len(self._rep_bias)
        found, self._found = self._found, {}
        if found and not self.recalling.budget:
            picked = torch.stack([one.picked for one in found.values()]).cpu()
            with torch.inference_mode(False), torch.no_grad():
                for layer, one in zip(found, picked, strict=True):
                    self.tree.touch(layer, one.nonzero()[:, 0])
                self.index.refresh()
        self.fetcher.settle()

    def evidence(self) -> dict[int, Seen]:
        looks: dict[int, Look] = {}
        begin = self._end.begin
        if self._found:
            entries = torch.stack([one.entries for one in self._found.values()]).cpu()
            for layer, chosen in zip(self._found, entries, strict=True):
                looks[layer] = torch.unique_consecutive(chosen // self.parts), begin
        return weigh(looks, self._count, self._reached())

    def _units_of(self, layer: int, shares: Tensor) -> Tensor:
        found, begin = self._found[layer], self._end.begin * self.parts
        late = torch.arange(begin, self._count * self.parts, device=shares.device)
        entries, p = torch.cat([found.entries, late]), self.stream.unit // self.parts
        few = shares.shape[1] - len(entries) * p
        own = shares[:, few:].view(len(shares), -1, p).sum(2)
        out = shares.new_zeros(len(shares), self._count * self.parts).index_add_(1, entries, own)
        if few:
            out[:, :begin] += self.index.stood_for(layer, found, shares[:, :few])
        return out.view(len(shares), -1, self.parts).sum(2)

    # The stream as a whole.

    def checkpoint(self) -> Any:
        self._digest()
        return super().checkpoint(), self.tree.checkpoint()

    def restore(self, mark: Any) -> None:
        inner, tree = mark
        self._found = {}
        self.fetcher.drop()
        # What a broken pass brought has crossed: counted while its codes mean the places that they did.
        self.fetcher.sources.tally()
        self.writer.clear()
        self.tree.restore(tree)
        super().restore(inner)
        self.index.refresh()

    def reset(self) -> None:
        self.writer.clear()
        self.tree.clear()
        self.chooser.drift.clear()
        self.index.refresh()
        empty: list[Any] = [None] * self.geometry.layers
        super().restore((0, 0, 0, False, empty, empty))

    def _rewind(self, units: int, first: int) -> None:
        # Units that were forgotten to make room do not come back.
        end = first * self.parts
        self.index.cut(end)
        self.fetcher.cache.cut(end)
        self.store.cut(end)

    def nbytes(self) -> int:
        kept = self.index.nbytes() + self.fetcher.nbytes() + self.store.nbytes()
        return super().nbytes() + kept

    def counters(self) -> dict[str, float]:
        tree = self.tree
        clusters = tree.semantic.count().float().mean()
        own = {
            "recalled": self._recalled / self.parts,
            "questions": self._questions,
            "visual_clusters": int(tree.visual.count()),
            "clusters": float(clusters),
            "buffered": sum(int(tree.semantic.size[at, ids].sum()) for at, ids in enumerate(tree.buffer)),
            **{name: tree.counters[name] for name in COUNTED},
            **{f"fetch_{name}": count for name, count in self.fetcher.counts().items()},
            "prefetch_coverage": self.fetcher.coverage(),
            "index_bytes": self.index.nbytes(),
            "summary_bytes": tree.summaries.nbytes(),
        }
        host = {"host_" + name.removeprefix("host_"): n for name, n in self.store.counters().items()}
        return {**super().counters(), **{name: float(count) for name, count in own.items()}, **host}

    def _save(self, folder: Path) -> None:
        self._digest()
        saved.save(self.tree, self.index.absent, folder)
        (folder / "store").mkdir()
        self.store.save(folder / "store")

    def _load(self, folder: Path) -> None:
        self.index.absent = saved.load(self.tree, self._count, folder)
        self.index.refresh()
        self.store.load(folder / "store", self._count * self.parts)

    def close(self) -> None:
        self.store.close()


BEHIND = 256
"""Units by which the index may be behind the clusters, about."""

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
"""The counters that a memory tells of."""
