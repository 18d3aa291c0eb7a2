"""The fields of memories that archive units (frames) in host memory; `rekv` and `mosaic` are two choices of them. They are
for the index that finds units, retrieval while the stream is encoded, summary tokens, cache and prefetching."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.decoding.replay import CudaGraphCache
from mmaccel.core.errors import RecipeError, quoted, warn
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.memory.kv import CacheSlot, KVView, Stream, StreamPass, StreamPolicy, StreamState
from mmaccel.core.registry import FieldLimit, Policy, at_least, limited, register, with_base_dir
from mmaccel.core.registry import policy as built
from mmaccel.policies.kv._index import IndexPolicy
from mmaccel.policies.kv._ingest import RUN
from mmaccel.policies.kv._retrieval import ArchivedMemory
from mmaccel.policies.kv._window import Pair, WindowedPolicy
from mmaccel.policies.kv.store import HostStore, Rows, Spill, UnitShape, Window

Prefetch = Literal["off", "query", "projected"]


@dataclass(frozen=True)
class FormerField:
    """A policy field of earlier versions that no longer exists; recipes that still give it are converted or refused.

    default  the value that now always holds
    why      what replaced it
    part     the part ("index", "store") to which the field moved
    speed    other values (or their types) that changed no stored data and no answer: they are dropped with a warning
    """

    default: Any = None
    why: str = ""
    part: str = ""
    speed: tuple[Any, ...] = ()


def replace_field(who: str, given: dict[str, Any], old: str, value: Any, new: str) -> None:
    """Replace the former field `old` by `new` = `value`, with a warning; `RecipeError` if both are given and disagree."""
    if new in given and given[new] != value:
        raise RecipeError(f"{who}: {old} means {new}: {value}, and {new} is given; leave the former out.")
    given[new] = value
    warn(f"{who}: {old} is the former spelling; write {new}: {value}.")


@register("store", "host")
@dataclass(frozen=True, kw_only=True)
class HostMemory(Policy):
    """Limits on the host memory for a stream's keys and values, as a field of a memory: ``store: {spill: disk}``.

    host_bytes  most host memory; None: as much as the host can spare
    process_bytes  most host memory of all sessions of the process; with "drop_oldest", a session that needs room takes it
                from the one that holds most, if both are on one model
    spill       what happens when that memory is full: "refuse", "disk", or "drop_oldest", which forgets the oldest frames
                for good as new ones come, even if the `watch` that brings these fails later
    folder      for files with spill "disk", in a YAML file relative to its folder; None: a temporary folder
    """

    host_bytes: int | None = limited(None, at_least(0))
    process_bytes: int | None = limited(None, at_least(0))
    spill: Spill = "refuse"
    folder: str | None = None

    def open(self, stream: Stream, geometry: Geometry, device: torch.device) -> HostStore:
        """Return an empty store for a stream's units (frames)."""
        sizes = geometry.kv_heads, stream.tokens_per_unit, geometry.head_dim
        shape = UnitShape(geometry.layers, *sizes, stream.dtype)
        own = {"spill": self.spill, "folder": self.folder, "together": self.process_bytes}
        return HostStore(shape, device, cap=self.host_bytes, **own)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class HostPolicy(StreamPolicy):
    """Base of memories that keep units in host memory; its field `store` limits how much of it (`mmaccel describe host`)."""

    FORMER: ClassVar[Mapping[str, FormerField]] = {
        name: FormerField(part="store") for name in ("host_bytes", "process_bytes", "spill", "folder")
    }

    store: Any = "host"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._build("store", HostMemory)

    def _build(self, kind: str, base: type[Policy]) -> None:
        """Put into field `kind` the part that its name or mapping means; raises `RecipeError` if that is no `base`."""
        part = built(kind, getattr(self, kind), f"{self.name}: {kind}")
        if not isinstance(part, base):
            raise RecipeError(
                f"{self.name}: {kind} is {quoted(part)}; give a name, or a mapping with a name."
            )
        object.__setattr__(self, kind, part)

    @classmethod
    def with_base_dir(cls, fields: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
        if isinstance(store := fields.get("store"), Mapping):
            fields = {**fields, "store": with_base_dir(store, folder, "folder")}
        return with_base_dir(fields, folder, "folder")  # where earlier versions had it

    def for_layer_share(self, share: float) -> StreamPolicy:
        most = self.store.host_bytes
        if most is None:
            return self
        return replace(self, store=replace(self.store, host_bytes=int(most * share)))

    @classmethod
    def upgrade(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a recipe's `fields` in today's form: former fields (`FORMER`) are dropped, or moved into the part that has
        them now, with a warning. Raises `RecipeError` for a value that no longer exists."""
        given, moved = dict(fields), dict[str, dict[str, Any]]()
        for name, one in cls.FORMER.items():
            if name not in given:
                continue
            value, known = given.pop(name), (one.default, *one.speed)
            # True and 1 are two values.
            same = (value == each and isinstance(value, bool) == isinstance(each, bool) for each in known)
            if one.part:
                moved.setdefault(one.part, {})[name] = value
            elif type(value) not in known and not any(same):
                told = f"the field {name} is gone, and {quoted(value)} is not what it became"
                raise RecipeError(f"{cls.name}: {told}: {one.why}; leave it out.")
            elif value != one.default:
                told = f"the field {name} is gone, and it changed no answer"
                warn(f"{cls.name}: {told}: {one.why}; leave it out.")
        for part, some in moved.items():
            own, names = given.get(part, cls.__dataclass_fields__[part].default), ", ".join(some)
            own = {"name": own} if isinstance(own, str) else own
            if not isinstance(own, Mapping):
                raise RecipeError(f"{cls.name}: {names} are fields of the {part}; set them there.")
            for name, value in some.items():
                if own.get(name, value) != value:
                    told = f"{name} is {quoted(value)}, and another in its {part}"
                    raise RecipeError(f"{cls.name}: {told}; set it there alone.")
            given[part] = {**own, **some}
            told = ", ".join(f"{name}: {'null' if x is None else x}" for name, x in given[part].items())
            warn(f"{cls.name}: {names} moved to the {part}; write {part}: {{{told}}}.")
        return given


@dataclass(frozen=True, kw_only=True)
class ArchivedPolicy(WindowedPolicy, HostPolicy):
    """The fields of a memory that keeps units on the host and retrieves some of them for a question.

    frames      frames retrieved for a question, by each layer for itself, in addition to the local frames
    index       how units are found, by name or with its fields: "frames" or "clusters" (`mmaccel describe clusters`)
    encode_frames  frames that each layer of a pass retrieves while the stream is encoded; 0: it sees only the window. A
                frame encoded under its window alone knows nothing of what came before, and questions about the order of two
                things are then answered at chance, whatever they retrieve. Above 0 what is stored depends on how the stream
                is cut into passes, so on where calls of `watch` end too; not on questions
    encode_by   what retrieves then: the mean query of a "pass", or each "frame" by its own, one frame a pass
    reps        most summary tokens, those of the highest scores first: one represents each cluster, at its mean time (Mosaic
                V-C); null: all, 0: none
    cache       frames of each layer that stay on the device after a question, so that the next one need not copy them
    prefetch    what is copied ahead for the next layer: what this layer's "query" finds in that layer's index (Mosaic
                VII-B); or what that layer's query finds, "projected" from the hidden states that enter this layer; or "off".
                It changes no answer
    keep_seconds  frames shown more than so many seconds before the newest are forgotten; None: no age limit. Pinned frames
                (`VideoSession.pin`) and those in the window stay
    thin        keep every second frame older than keep_seconds, every fourth of those older than twice that, and so on: the
                number kept grows with the logarithm of the stream's length
    store       limits on host memory, and what happens when it is full (`mmaccel describe host`)
    """

    query_time_fields: ClassVar[frozenset[str]] = frozenset({"frames", "local"})
    no_tensor_parallel: ClassVar[str | None] = "chooses frames by the keys of all heads"
    FORMER: ClassVar[Mapping[str, FormerField]] = {
        **HostPolicy.FORMER,
        "similarity": FormerField(part="index"),
        "copies": FormerField("coalesced", "the store brings frames by its best way", speed=("frame",)),
    }

    frames: int = limited(64, at_least(1))
    index: Any
    encode_frames: int = limited(0, at_least(0))
    encode_by: Literal["pass", "frame"] = "pass"
    reps: int | None = limited(0, at_least(0))
    cache: int = limited(0, at_least(0))
    prefetch: Prefetch = "off"
    keep_seconds: float | None = limited(
        None, FieldLimit(lambda seconds: 0 < seconds < math.inf, "a positive number of seconds")
    )
    thin: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._build("index", IndexPolicy)
        if self.thin and self.keep_seconds is None:
            raise RecipeError(f"{self.name}: thin has no effect without keep_seconds; give it too.")

    def footprint(self, tokens: int, frames_per_unit: int) -> Footprint:
        own, shown = super().footprint(tokens, frames_per_unit), self.frames + self.local
        own = replace(own, shown=shown, recalled=self.frames, cache=self.cache, clusters=self.index.clusters)
        return replace(own, host=None, evicts=self.store.spill == "drop_oldest")

    def is_expired(self, unit: int, age: float) -> bool:
        """Return whether the age limit (`keep_seconds`, `thin`) drops `unit` (a frame), `age` seconds before the newest."""
        if self.keep_seconds is None or age <= self.keep_seconds:
            return False
        return not self.thin or unit % 2 ** (int(math.log2(age / self.keep_seconds)) + 1) != 0

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        hidden = {"hidden"} if self.prefetch == "projected" else set[str]()
        return frozenset(self.index.needs | hidden)

    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        return SharedArchive(self, stream, geometry, model, device)


class SharedArchive(ArchivedMemory):
    """An archived memory on which a question can run while frames arrive: it reads a copy once the shared data change."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.store.relieve = _weakly(self._relieved)
        if self.store.spill == "drop_oldest" or self.forgets:
            self.index.at.may_move = self.store.table.at.may_move = True
        _open[self] = None
        # Snapshots whose questions are under way: what these may be about to fetch stays. One that never ran is nobody's.
        self._questioned = weakref.WeakSet[SharedArchive]()

    @property
    def together(self) -> int:  # type: ignore[override]
        # Each time costs a host a third of a millisecond; as few as passes of live frames have where room is short.
        store = self.policy.store
        capped = (store.host_bytes, store.process_bytes) != (None, None)
        return RUN if store.spill != "refuse" or capped else 4 * RUN

    _lent: Any = None
    """The snapshot that reads what this memory changes."""
    _apart = False
    """Of a snapshot: it reads copies."""

    @property
    def parts(self) -> bool:  # type: ignore[override]
        # What is forgotten to make room may be what a question is about to fetch.
        return bool(self.store.spill != "drop_oldest")

    def snapshot(self, stream: Stream, pause: Callable[[], None]) -> StreamState | None:
        self._part()
        if self._questioned:
            # In the former are results that another answer goes on reading.
            self.replays = CudaGraphCache(self.device)
        self.end_ingest()
        taken: Any = super().snapshot(stream, pause)
        self._lent = taken
        self._questioned.add(taken)
        return taken  # type: ignore[no-any-return]

    def limit_to_units(self, first: int, end: int) -> None:
        self._main._part()
        self.index.forget([*range(first), *range(end, self._count)])
        self.local = 0
        self.end_ingest()

    def _part(self) -> None:
        """Something comes that changes what a question reads: from now on that reads copies."""
        taken, self._lent = self._lent, None
        if taken is not None:
            told = self._numbers
            taken.index, taken.prefetcher = (self.index.copy(), self.prefetcher.uncached(self.window))
            taken.replays, taken.prefetch, taken._apart = CudaGraphCache(self.device), "off", True
            taken._numbers.copy_(told)

    def _answered(self, taken: Any) -> None:
        super()._answered(taken)
        self._questioned.discard(taken)
        if self._lent is taken:
            self._lent = None
        else:
            self._part()  # what its question retrieved may change the index

    # What is let go of.

    forgets = property(lambda self: self.policy.keep_seconds is not None)

    def forget_old_units(self, shown: Callable[[int], float], pinned: Callable[[int], bool]) -> list[int]:
        policy, self.store.pinned = self.policy, _weakly(pinned)
        gone: list[int] = self.store.lost
        self.store.lost = []
        if policy.keep_seconds is not None and not self._questioned and (held := self.store.units(0)):
            newest = shown(self._count - 1)
            old = [unit for unit in held if policy.is_expired(unit, newest - shown(unit))]
            self._forget(old := [unit for unit in old if not pinned(unit)])
            self.store.drop_units(old)
            gone += old
        return gone

    def _forget(self, units: Sequence[int]) -> None:
        if units:
            self._part()
            self.index.forget(units)

    def _relieved(self) -> bool:
        """Whether the memory on the same model that holds more than any has given a slab to this one."""
        own, model = self.store.slabs.memory_bytes(), self._model.model
        there = [one for key in _open.keyrefs() if (one := key()) is not None and one is not self]
        found = [one for one in there if one._model.model is model and one.store.spill == "drop_oldest"]
        most = max(found, key=lambda one: one.store.slabs.memory_bytes(), default=None)
        # Not so that the two change places.
        if most is None or most.store.slabs.memory_bytes() <= own + most.store.slabs.slab_bytes:
            return False
        most.prefetcher.update_counters()
        units = most.store.free_last_slab()
        most._forget(units or ())
        return units is not None

    def _slot(self, layer: int, query: Tensor, stream_pass: StreamPass) -> CacheSlot:
        if self._apart and self._first and layer not in self._asked:
            self.prefetcher.begin(self._first)  # the store may have grown
        return super()._slot(layer, query, stream_pass)

    def _show(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> KVView:
        # The host clusters the pass before in between the layers of this one, which it launches faster than they run.
        self.index.cluster_some_units()
        return super()._show(layer, query, key, value)

    def begin_pass(self, stream_pass: StreamPass) -> None:
        if stream_pass.kind == "units":
            self._part()
        super().begin_pass(stream_pass)

    def end_ingest(self) -> None:
        self._part()
        super().end_ingest()

    def clusters(self) -> dict[str, Tensor]:
        self._part()
        return super().clusters()

    def checkpoint(self) -> Any:
        self._part()
        if not self._questioned:
            self.index.compact()
        return super().checkpoint()

    def nbytes(self) -> int:
        return super().nbytes() + sum(one.nbytes() for one in (self.index, self.prefetcher, self.store))

    def usage(self) -> dict[str, float]:
        return {**super().usage(), **self.store.usage(), "questions": float((self._main or self)._questions)}

    def counters(self) -> dict[str, float]:
        own = {
            "recalled": float((self._main or self)._recalled),
            "questions": float((self._main or self)._questions),
            **self.index.counters(),
            **{f"fetch_{name}": count for name, count in self.prefetcher.counts().items()},
            "prefetch_coverage": self.prefetcher.coverage(),
        }
        host = {"host_" + name.removeprefix("host_"): n for name, n in self.store.counters().items()}
        return {**super().counters(), **own, **host, "let_go": float(self._first - len(self.store.units(0)))}

    def _save(self, folder: Path) -> bool:
        self._part()
        self.index.save(folder)
        rows, pairs = self.index.rows(), [(one.key, one.value) for one in self._rings if one is not None]
        window = Window(self._first, pairs) if self._count > self._first else None
        units = self.index.at.units_of(min(map(len, rows.values()), default=0))
        self.store.save(folder / "store", window, Rows(units.tolist(), rows))
        return True

    def _load(self, folder: Path) -> Sequence[Pair] | None:
        found: tuple[Sequence[Pair] | None, Rows | None]
        found = self.store.load(folder / "store", self._count, self._first, self.index.rows())
        self.index.load(folder, self._count, found[1])
        return found[0]

    def close(self) -> None:
        _open.pop(self, None)
        self.store.close()


def _weakly(call: Callable[..., bool]) -> Callable[..., bool]:
    """`call` for a store, which must not keep whose method it is; False once that is gone."""
    if not hasattr(call, "__self__"):
        return call
    held = weakref.WeakMethod(call)
    return lambda *given: (own := held()) is not None and own(*given)


_open: weakref.WeakKeyDictionary[SharedArchive, None] = weakref.WeakKeyDictionary()
"""From which memories that need room may take it; listed by `keyrefs`, in one step, for other threads add to it."""
