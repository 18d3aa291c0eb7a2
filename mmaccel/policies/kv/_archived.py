"""Windowed memories whose older units lie on the host: an index finds them, and other parts show what it leaves out.

The parts are fields: `index`, retrieval while the stream is encoded, summary tokens, the cache and the prefetch. `rekv` and
`mosaic` are two choices of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import RecipeError, check_choice, check_least, shown
from mmaccel.core.kv import CacheSlot, Stream, StreamPass, StreamState
from mmaccel.core.registry import policy as built
from mmaccel.policies.kv._index import Former, Found, Index, IndexPolicy, upgraded
from mmaccel.policies.kv._prefetch import Prefetcher
from mmaccel.policies.kv._retrieval import Asking, Chosen, EncodeRetrieval, End, Prefetch, Retriever
from mmaccel.policies.kv._window import Angles, Asked, Bases, Look, Pair, WindowedPolicy, words_of
from mmaccel.policies.kv._windowed import StreamMemory
from mmaccel.policies.kv.store import HostPolicy
from mmaccel.policies.kv.store.transfer import in_units

ALL = 1 << 62
"""As many summary tokens as there are clusters."""


@dataclass(frozen=True, kw_only=True)
class ArchivedPolicy(WindowedPolicy, HostPolicy):
    """The fields of a memory that keeps units on the host and recalls some of them at a question.

    frames      recalled at a question, by each layer for itself; the local frames come on top
    index       how units are found, by name or with its fields: "frames" or "clusters" (`mmaccel describe clusters`)
    encode_frames  while the stream is encoded, each layer of a pass retrieves so many frames; 0: it sees the window alone. A
                frame that was stored under its window alone knows nothing of what came before, and questions about the order
                of two things are then answered at chance, whatever they retrieve (`docs/mosaic.md`). Above 0 what is stored
                depends on how the stream is cut into passes, so on where calls of `watch` end too; not on questions
    encode_by   what retrieves then: the mean query of a "pass", or each "frame" by its own, one frame a pass
    reps        summary tokens at most, those of the largest score first: one stands for each cluster, at its mean time
                (Mosaic V-C); null: all, 0: none
    cache       frames a layer that stay on the device after a question, for the next one
    prefetch    fetch ahead for the next layer: what this layer's "query" finds in the next one's index (Mosaic VII-B), or
                the next layer's query "projected" from the hidden states that enter this one; or "off". It changes no
                answer
    host_bytes, spill, folder  the host's memory, see `HostPolicy`
    """

    query_time_fields: ClassVar[frozenset[str]] = frozenset({"frames", "local"})
    FORMER: ClassVar[Mapping[str, Former]] = {
        "similarity": Former(part="frames"),
        "copies": Former("coalesced", "the store brings frames by its best way", speed=("frame",)),
    }

    frames: int = 64
    index: Any
    encode_frames: int = 0
    encode_by: Literal["pass", "frame"] = "pass"
    reps: int | None = 0
    cache: int = 0
    prefetch: Prefetch = "off"

    @classmethod
    def upgrade(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return upgraded(cls.name, fields, cls.FORMER, cls.__dataclass_fields__["index"].default)

    def __post_init__(self) -> None:
        super().__post_init__()
        HostPolicy.__post_init__(self)
        object.__setattr__(self, "index", built("index", self.index, f"{self.name}: index"))
        if not isinstance(self.index, IndexPolicy):
            raise RecipeError(
                f"{self.name}: index is {shown(self.index)}; give a name, or a mapping with a name."
            )
        check_least(self, 1, "frames")
        check_choice(self.name, "encode_by", self.encode_by, ("pass", "frame"))
        check_choice(self.name, "prefetch", self.prefetch, get_args(Prefetch))
        check_least(self, 0, "encode_frames", "reps", "cache")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        hidden = {"hidden"} if self.prefetch == "projected" else set[str]()
        return frozenset(self.index.needs | hidden)

    def stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        return ArchivedMemory(self, stream, geometry, model, device)


class ArchivedMemory(StreamMemory):
    """Letters as in `StreamMemory`."""

    def __init__(
        self,
        policy: ArchivedPolicy,
        stream: Stream,
        geometry: Geometry,
        model: ModelView,
        device: torch.device,
    ) -> None:
        window, recalled = stream.units(policy.window), stream.units(policy.encode_frames)
        super().__init__(
            stream,
            geometry,
            model,
            device,
            window=window,
            local=stream.units(policy.local),
            positions=policy.positions,
        )
        self.policy, self.budget = policy, stream.units(policy.frames)
        self.index: Index = policy.index.open(stream, geometry, device, window, policy.reps != 0)
        self.store = policy.store(stream, geometry, device)
        self.prefetcher = Prefetcher(self.store, geometry.layers, window, stream.units(policy.cache))
        reps = ALL if policy.reps is None else policy.reps
        self.retriever = Retriever(
            self.index, stream, geometry, model, self.rope, device, self.prefetcher, policy.prefetch, reps
        )
        self.encode_retrieval = EncodeRetrieval(recalled, self.retriever, self.prefetcher, self.rope)
        # What passes retrieve stands before the window, wherever the stream is.
        self.bases = Bases(stream.places, window, recalled)
        self._found: dict[int, Found] = {}
        self._entering: Tensor | None = None
        self._summary_bias: list[Tensor | None] = [None] * geometry.layers
        self._recalled = self._questions = 0

    def set_query_fields(self, policy: Any) -> None:
        super().set_query_fields(policy)
        self.policy = policy
        self.budget = self.stream.units(policy.frames)
        self.idle()

    def clusters(self) -> dict[str, Tensor]:
        return self.index.owners()

    # The stream comes in.

    def fit(self, first: int, count: int) -> int:
        return super().fit(first, 1 if self.policy.encode_by == "frame" else count)

    def _move(self, piece: StreamPass) -> None:
        self.index.arrived(piece.look, list(self._new.values()), self.encode_retrieval.retrieved())
        # Until passes retrieve, the host clusters what came before while the device still computes this one.
        self.index.digest(keep=1)
        super()._move(piece)

    def idle(self) -> None:
        self.index.digest()
        self.retriever.begin(self._end, self.budget)

    def _gone(self, layer: int, first: int, count: int, key: Tensor, value: Tensor) -> None:
        lost = self.store.put(layer, range(first, first + count), key, value)
        if lost:
            self.index.forget(lost)

    def _retrieved(self, layer: int, query: Tensor) -> list[Pair]:
        return self.encode_retrieval.view(layer, query, self._base, self._first)

    # A question.

    def begin_pass(self, piece: StreamPass) -> None:
        if piece.kind == "question":
            self.index.digest()
            self._found = {}
            self._questions += 1
            begin, end = words_of(piece)
            self.retriever.begin(self._end, self.budget)
            self.retriever.asked(end - begin)
        elif piece.kind == "units":
            if self.encode_retrieval.budget and self._first:
                # A pass retrieves from the clusters of all that came before, wherever calls of `watch` and questions lie.
                # The host makes them while the device runs the vision tower for this pass, which was begun already.
                self.index.digest()
            self.encode_retrieval.begin(self._first, piece.look)
        super().begin_pass(piece)

    def ahead(self, layer: int, hidden: Tensor) -> None:
        piece, self._entering = self._piece, None
        if piece is None or piece.kind != "question":
            return
        begin, end = words_of(piece)
        if layer == 0 and self.index.by_look:
            self.index.by(hidden[0, begin:end].float().mean(0))
        if self.policy.prefetch == "projected" and self._first:
            self._entering = hidden[:, begin:end]

    def _most(self) -> int:
        return self.budget + super()._most()

    def _gather(self, layer: int, query: Tensor, piece: StreamPass) -> Asked:
        if piece.kind == "proxy":
            return super()._gather(layer, query, piece)
        begin, end = words_of(piece)
        asking = Asking(query[0, :, begin:end], self._entering)
        chosen = self.retriever.choose(layer, asking, self._end, self.budget, self.compact)
        self._found[layer] = chosen.found
        self._recalled += len(chosen.found.entries)
        few, unit, ring = chosen.reps, self.stream.unit, self._rings[layer]
        columns = few + len(chosen.entries) * unit
        asked, raw = self._space(layer, columns, columns + piece.rows + piece.room)
        out = raw[:, :, few:]
        if self._first:
            assert ring is not None
            recalled, near = len(chosen.found.entries), (ring.key, ring.value)
            self.prefetcher.bring(layer, chosen.entries, chosen.code, recalled, out, near)
        elif ring is not None:  # of the first unit all frames have come
            for side, rows in enumerate((ring.key, ring.value)):
                in_units(out[side], unit).copy_(in_units(rows[0], unit).index_select(1, chosen.entries))
        if chosen.ahead is not None:
            self.prefetcher.prefetch(layer + 1, chosen.ahead)
        angles, self._summary_bias[layer] = self.retriever.position(
            layer, chosen, raw, self._end, self.compact
        )
        self.prefetcher.arrive(layer)
        self._finish(layer, chosen, raw, angles)
        asked.seen = chosen.seen
        return asked

    def _finish(self, layer: int, chosen: Chosen, raw: Tensor, angles: Angles) -> None:
        """What was brought into `raw` [2, G, m + n * P, D] is kept in the cache; all of it is turned."""
        few, retrieved = chosen.reps, chosen.found.entries

        def finish() -> tuple[Tensor, ...]:
            if chosen.code is not None:
                kept = raw[:, :, few : few + len(retrieved) * self.stream.unit]
                self.prefetcher.keep(layer, retrieved, kept)
            self.rope.apply_(raw[:1], angles)
            return ()

        if chosen.name is None:
            finish()
        else:
            at = raw.data_ptr(), raw.stride(), angles[0].data_ptr(), retrieved.data_ptr()
            self.retriever.replays(("finish", chosen.name, raw.shape), finish, at=at)

    @property
    def _end(self) -> End:
        return End(max(self._count - self.local, self._first), self._count, self._first)

    def _slot(self, layer: int, query: Tensor, piece: StreamPass) -> CacheSlot:
        return replace(super()._slot(layer, query, piece), bias=self._summary_bias[layer])

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        try:
            with super().question_scope():
                yield
        finally:
            # A question that broke off may still be written to where the next one's columns go.
            self.store.lanes.join()
            self._settle()
            # The next question need not wait for what this one split.
            self.idle()

    def _settle(self) -> None:
        """What was retrieved has been on the device: the splits that it owed are made, if passes of the stream make none."""
        self.prefetcher.drop()
        self.retriever.prediction.settle()
        self._entering = None
        self._summary_bias = [None] * len(self._summary_bias)
        found, self._found = self._found, {}
        if found and (not self.encode_retrieval.budget or self.index.retrievals_split):
            self.index.touched(found)
        self.prefetcher.settle()

    def _looked(self) -> dict[int, Look]:
        if not self._found:
            return {}
        entries = torch.stack([one.entries for one in self._found.values()]).cpu()
        return {layer: (units, self._end.begin) for layer, units in zip(self._found, entries, strict=True)}

    def _units_of(self, layer: int, shares: Tensor) -> Tensor:
        found, begin = self._found[layer], self._end.begin
        late = torch.arange(begin, self._count, device=shares.device)
        entries, unit = torch.cat([found.entries, late]), self.stream.unit
        few = shares.shape[1] - len(entries) * unit
        own = shares[:, few:].view(len(shares), -1, unit).sum(2)
        out = shares.new_zeros(len(shares), self._count).index_add_(1, entries, own)
        if few:
            out[:, :begin] += self.index.stood_for(layer, found, shares[:, :few])
        return out

    # The stream as a whole.

    def checkpoint(self) -> Any:
        index = self.index.checkpoint()
        return super().checkpoint(), index

    def restore(self, mark: Any) -> None:
        inner, index = mark
        self._found = {}
        self.prefetcher.drop()
        # What a broken pass brought has crossed: counted while its codes mean the places that they did.
        self.prefetcher.tally()
        self.index.restore(index)
        super().restore(inner)
        self.index.refresh()

    def reset(self) -> None:
        self.index.clear()
        self.retriever.prediction.clear()
        empty: list[Any] = [None] * self.geometry.layers
        super().restore((0, 0, 0, empty, empty))

    def _rewind(self, units: int, first: int) -> None:
        # Units that were forgotten to make room do not come back.
        self.index.cut(first)
        self.prefetcher.cut(first)
        self.store.cut(first)

    def nbytes(self) -> int:
        kept = self.index.nbytes() + self.prefetcher.nbytes() + self.store.nbytes()
        return super().nbytes() + kept

    def counters(self) -> dict[str, float]:
        own = {
            "recalled": float(self._recalled),
            "questions": float(self._questions),
            **self.index.counters(),
            **{f"fetch_{name}": count for name, count in self.prefetcher.counts().items()},
            "prefetch_coverage": self.prefetcher.coverage(),
        }
        host = {"host_" + name.removeprefix("host_"): n for name, n in self.store.counters().items()}
        return {**super().counters(), **own, **host}

    def _save(self, folder: Path) -> None:
        self.index.save(folder)
        (folder / "store").mkdir()
        self.store.save(folder / "store")

    def _load(self, folder: Path) -> None:
        self.index.load(folder, self._count)
        self.store.load(folder / "store", self._count)

    def close(self) -> None:
        self.store.close()
