"""The memory of a stream in clusters: units in, questions answered, the splits that they cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.kv import KVView, Piece, Seen, Stream
from mmaccel.policies.kv._stream import Asked, Pair, StreamMemory, mean_query, weigh
from mmaccel.policies.kv.mosaic import saved
from mmaccel.policies.kv.mosaic.cache import Cache
from mmaccel.policies.kv.mosaic.fetching import Fetcher
from mmaccel.policies.kv.mosaic.hierarchy import Hierarchy
from mmaccel.policies.kv.mosaic.index import Found, Index
from mmaccel.policies.kv.mosaic.summaries import Summaries
from mmaccel.policies.kv.mosaic.writing import Writer
from mmaccel.policies.kv.store import HostStore

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
        self.policy, self.parts, self._model = policy, parts, model
        self.budget = stream.units(policy.frames) * parts
        layers, width, tokens = geometry.layers, geometry.kv_heads * geometry.head_dim, stream.unit // parts
        self.tree = Hierarchy(
            policy.rules(stream.units(policy.init)),
            Summaries(layers, geometry.hidden, width, parts, stream.dtype, policy.lift),
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
        cache = Cache(layers, geometry.kv_heads, tokens, geometry.head_dim, stream.dtype, device)
        self.fetcher = Fetcher(self.store, cache, stream.units(policy.cache) * parts)
        self.writer = Writer(self.store, self.tree, cache)
        self._found: dict[int, Found] = {}
        self._hidden: Tensor | None = None
        self._rep_logs: list[Tensor | None] = [None] * layers
        self._recalled = self._questions = 0

    # The stream comes in.

    def fit(self, first: int, count: int) -> int:
        return super().fit(first, count if self.policy.batch_layers else 1)

    def _took(self, piece: Piece) -> None:
        assert piece.look is not None
        self.writer.arrived(piece.look, [pair for pair in self._new if pair is not None])
        # The host clusters what came before while the device still computes this pass.
        self._digest(keep=1)

    def _digest(self, keep: int = 0) -> None:
        if self.writer.digest(self.window, keep, self.policy.batch_match):
            self.index.refresh()

    def _gone(self, layer: int, first: int, count: int, key: Tensor, value: Tensor) -> None:
        if layer == 0 and first + count > self.tree.units:
            self._digest()
        entries = range(first * self.parts, (first + count) * self.parts)
        lost = self.writer.gone(layer, entries, key, value)
        if lost:
            self.index.forget(lost)

    def _encode(self, layer: int, query: Tensor, piece: Piece, key: Tensor, value: Tensor) -> KVView:
        view = super()._encode(layer, query, piece, key, value)
        if not self.policy.encode_frames or not self._first:
            return view
        if layer == 0:
            self._digest()
        budget = self.stream.units(self.policy.encode_frames) * self.parts
        mean = self._folded(query[0].float().mean(1))
        found = self._found[layer] = self.index.search(layer, mean, budget, self._first * self.parts)
        old_key, old_value = self.fetcher.bring(layer, found.entries.tolist(), lambda: None)
        where = self._places_of(found.entries, (found.entries // self.parts - self._base).clamp(min=0))
        old_key = self.turner.turn(old_key, self.turner.at(("recalled", layer), lambda: where))
        head = self.stream.head
        return KVView(
            torch.cat([view.key[:, :, :head], old_key, view.key[:, :, head:]], 2),
            torch.cat([view.value[:, :, :head], old_value, view.value[:, :, head:]], 2),
            sinks=head + old_key.shape[2],
            window=view.window,
            query=view.query,
        )

    def leave(self) -> None:
        encoding = self._piece is not None and self._piece.kind == "units"
        super().leave()
        if encoding and self._found:
            self._settle()

    # A question.

    def enter(self, piece: Piece) -> None:
        if piece.kind == "question":
            self._digest()
            self._found = {}
            self._questions += 1
        super().enter(piece)

    def ahead(self, layer: int, hidden: Tensor) -> None:
        self._hidden = hidden

    def _gather(self, layer: int, query: Tensor, piece: Piece) -> Asked:
        if piece.kind == "proxy":
            return super()._gather(layer, query, piece)
        begin = max(self._count - self.local, self._first)
        mean = self._folded(mean_query(query, piece))
        found = self._found[layer] = self.index.search(layer, mean, self.budget, begin * self.parts)
        self._recalled += found.entries.numel()
        self._next = (layer + 1, mean, found, piece, begin)
        entries = torch.cat([found.entries, torch.arange(begin * self.parts, self._count * self.parts)])
        extra = self._representatives(layer, found, entries, begin)
        room = piece.rows + piece.room
        if self.parts == 1:
            asked = self._assemble(layer, entries.tolist(), room, extra)
        else:
            asked = self._assemble_parts(layer, entries, room, extra)
        self.fetcher.drop(layer)
        self._launch()
        return asked

    _next: tuple[int, Tensor, Found, Piece, int] | None = None

    def _fetch(self, layer: int, numbers: Sequence[int]) -> Pair:
        return self.fetcher.bring(layer, numbers, self._launch)

    def _launch(self) -> None:
        """Guess what the next layer will need, and start to fetch it; once a layer."""
        if self._next is None:
            return
        layer, mean, found, piece, begin = self._next
        self._next = None
        policy, end = self.policy, begin * self.parts
        if not policy.prefetch or layer == self.geometry.layers or not self._first:
            return
        budget = int(self.budget * policy.slack)
        if policy.predictor == "frames":
            entries = self.index.guess(layer, found.entries, budget, end)
        else:
            if policy.predictor == "projected":
                assert self._hidden is not None
                mean = self._folded(mean_query(self._model.query(layer, self._hidden), piece))
            entries = self.index.search(layer, mean, budget, end).entries
        self.fetcher.prefetch(layer, entries[entries < self._first * self.parts].tolist())

    def _folded(self, query: Tensor) -> Tensor:
        """[d]: a query [H, D] against keys of all heads, the heads of a group summed, for they share their keys."""
        heads, size = self.geometry.kv_heads, self.geometry.head_dim
        return query.reshape(heads, -1, size).sum(1).flatten()

    def _representatives(self, layer: int, found: Found, entries: Tensor, begin: int) -> Pair | None:
        """Pseudo tokens [1, G, k, D] of the clusters left out, turned to the middle of the unit at their mean time."""
        self._rep_logs[layer] = None
        if not self.policy.reps or not self.tree.started or not entries.numel():
            return None
        key, value, time, held = self.index.rest(layer, found, self.policy.reps, begin * self.parts)
        if not key.shape[0]:
            return None
        if self.compact:
            seen = torch.unique_consecutive(entries // self.parts).to(time)
            numbers, most = (
                torch.searchsorted(seen, time / self.parts).clamp(max=len(seen) - 1),
                len(seen) - 1,
            )
        else:
            numbers, most = (time / self.parts).round().long(), self._count - 1
        middle = self.stream.unit // 2

        def where() -> Tensor:
            return self.stream.places.chosen(numbers, most)[..., middle :: self.stream.unit]

        heads, size = self.geometry.kv_heads, self.geometry.head_dim
        key, value = (rows.view(1, -1, heads, size).transpose(1, 2) for rows in (key, value))
        if self.policy.rep_bias == "log_size":
            self._rep_logs[layer] = (held * (self.stream.unit // self.parts)).float().log()
        return self.turner.turn(key, self.turner.at(("representatives", layer), where)), value

    def _answer(self, layer: int, query: Tensor, piece: Piece, key: Tensor, value: Tensor) -> KVView:
        view, logs = super()._answer(layer, query, piece, key, value), self._rep_logs[layer]
        if logs is None or view.query is None:
            return view
        # One more coordinate adds the logarithms to the scores, which are scaled by 1 / sqrt(D).
        column = view.key.new_zeros(*view.key.shape[:3], 1)
        head = self.stream.head
        column[:, :, head : head + len(logs), 0] = (logs * self.geometry.head_dim**0.5).to(column)
        ones = view.query.new_ones(*view.query.shape[:3], 1)
        return KVView(torch.cat([view.key, column], 3), view.value, query=torch.cat([view.query, ones], 3))

    def _assemble_parts(self, layer: int, entries: Tensor, room: int, extra: Pair | None) -> Asked:
        """As `_assemble`, of parts of units."""
        first, p = self._first * self.parts, self.stream.unit // self.parts
        gone, near = entries[entries < first], entries[entries >= first] - first
        parts = [self._fetch(layer, gone.tolist())] if gone.numel() else []
        ring = self._rings[layer]
        if near.numel() and ring is not None:
            index = (near[:, None] * p + torch.arange(p)).flatten().to(ring.key.device)
            parts.append((ring.key.index_select(2, index), ring.value.index_select(2, index)))
        key, value = (torch.cat(side, 2) for side in zip(*parts, strict=True))
        units, rank = torch.unique_consecutive(entries // self.parts, return_inverse=True)
        where = self._places_of(entries, rank if self.compact else units[rank])
        turned = self.turner.turn(key, self.turner.at(("parts", layer), lambda: where))
        return self._joined(layer, [extra, (turned, value)], room, units.numel())

    def _places_of(self, entries: Tensor, numbers: Tensor) -> Tensor:
        """[k * p] or [3, k * p]: places of the tokens of entries whose units stand at `numbers` [k]."""
        p = self.stream.unit // self.parts
        if not entries.numel():
            return self.stream.places.units(0, 0)
        units, rank = torch.unique_consecutive(numbers, return_inverse=True)
        whole = self.stream.places.chosen(units, int(units.max()))
        start = rank * self.stream.unit + entries % self.parts * p
        return whole[..., (start[:, None] + torch.arange(p)).flatten().to(whole.device)]

    @contextmanager
    def turn(self) -> Iterator[None]:
        try:
            with super().turn():
                yield
        finally:
            self._settle()

    def _settle(self) -> None:
        """What was retrieved has been on the device: the splits that it owed are made."""
        self.fetcher.drop()
        self._hidden = self._next = None
        self._rep_logs = [None] * len(self._rep_logs)
        found, self._found = self._found, {}
        with torch.inference_mode(False), torch.no_grad():
            for layer, one in found.items():
                self.tree.touch(layer, one.clusters)
            self.index.refresh()
        self.writer.unpin()

    def evidence(self) -> dict[int, Seen]:
        looks: dict[int, tuple[list[int], int, Tensor | None]] = {}
        begin = max(self._count - self.local, self._first)
        for layer, found in self._found.items():
            numbers = torch.unique_consecutive(found.entries // self.parts).tolist()
            looks[layer] = numbers, begin, self._unit_scores(layer, found, begin)
        return weigh(looks, self._count)

    def _unit_scores(self, layer: int, found: Found, end: int) -> Tensor:
        """[end]: the best score of a unit's entries, that of their clusters; the lowest where the search did not look."""
        scores = found.scores.float().cpu()
        if self.tree.started:
            scores = scores[self.tree.semantic.owner[layer, : end * self.parts]]
        known = scores.isfinite()
        scores = torch.where(known, scores, scores[known].min() if bool(known.any()) else 0.0)
        return scores.view(-1, self.parts).amax(1)

    # The stream as a whole.

    def checkpoint(self) -> Any:
        self._digest()
        return super().checkpoint(), self.tree.checkpoint(), self.index.absent.clone()

    def restore(self, mark: Any) -> None:
        inner, tree, self.index.absent = mark
        self._found, self._next = {}, None
        self.fetcher.drop()
        self.writer.clear()
        self.tree.restore(tree)
        super().restore(inner)
        self.index.refresh()

    def reset(self) -> None:
        self.writer.clear()
        self.tree.clear()
        self.index.absent = self.index.absent[:0]
        self.index.refresh()
        empty: list[Any] = [None] * self.geometry.layers
        super().restore((0, 0, 0, False, empty, empty))

    def _rewind(self, units: int, first: int) -> None:
        end = first * self.parts
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
        self.store.load(folder / "store")

    def close(self) -> None:
        self.store.close()


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
