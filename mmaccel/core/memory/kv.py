"""The contract of a memory: what a sequence or stream keeps of its keys and values, and what a query gets to see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.adapter import Branches, Geometry, ModelView
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.layout import PositionIds, TokenLayout
from mmaccel.core.memory.buffers import grow_buffer as grow_buffer
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.registry import Policy, refuse_former_names


@dataclass(frozen=True, eq=False)
class KVView:
    """The keys and values that the queries of one layer see.

    key, value [B, G, N, D]; `column` [N] long, the sequence column of each key, or None when key n is column n.
    `sinks` and `window` (None: no limit) restrict each query further: it sees keys of the first `sinks` columns and those
    less than `window` columns behind it, so that a verified window of rows sees what one row at a time would.

    In a stream the columns are the view's own, 0 .. N - 1 in the order of the keys, and the `n` queries stand at the last
    `n` of them; `query` [B, H, n, D] are the queries as the memory turned them. `bias` [m] float32 is added to the scores of
    the first m keys. `layout` [1, N] says what the columns are, where the recipe's pattern may choose among them: the
    same object for all layers that show as many of each kind. There is no bias then.
    """

    key: Tensor
    value: Tensor
    column: Tensor | None = None
    sinks: int = 0
    window: int | None = None
    query: Tensor | None = None
    bias: Tensor | None = None
    layout: TokenLayout | None = None


class KVState(ABC):
    """The memory of one batch of sequences, all layers."""

    in_place: bool = False
    """It is buffers of columns of which a query sees the first ones, all of them; see `buffers`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_former_names(cls)

    @abstractmethod
    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take in the keys and values [B, G, n, D] of `n` new columns of one layer."""

    @abstractmethod
    def view(self, layer: int, query: Tensor) -> KVView:
        """The keys and values that `query` [B, H, n, D] of the last `n` appended columns sees at this layer, theirs too."""

    def ahead(self, layer: int, hidden: Tensor) -> None:
        """Told the hidden state [B, n, E] entering `layer`; a memory elsewhere starts to fetch for the next layer."""

    @abstractmethod
    def accept(self, keep: int | Tensor) -> None:
        """Keep of the columns last appended the first `keep`, or those at the given indices (a tree's path)."""

    @abstractmethod
    def length(self) -> int:
        """Columns seen and not rolled back, whether still held or not."""

    @abstractmethod
    def held_columns(self) -> int:
        """Columns whose keys are still held (the largest layer)."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Take the batch rows `rows` [B'] (beam search, dropping finished sequences)."""

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return 0

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        """A question on a stream: what is appended inside is dropped at exit."""
        start = self.length()
        try:
            yield
        finally:
            self.truncate(start)

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Roll back to `length` columns; raises `ModelError` when the policy cannot reach back so far."""

    def buffers(self, room: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, G, capacity, D] of each layer, with room for `room` more columns after those held: those of a
        memory that is `in_place` are written there, past `append`, and told by `wrote`."""
        raise ModelError(f"{type(self).__name__} is not written in place.")

    def wrote(self, count: int) -> None:
        """The `count` columns after those held were written to the `buffers` of all layers."""
        raise ModelError(f"{type(self).__name__} is not written in place.")

    follows: ClassVar[bool] = False
    """Whether it is a part of the recipe's own memory, so that a pruner has been at work."""

    def lacks(self, layer: int) -> int:
        """How many of the columns of the sequence `layer` does not hold, all of them of the prompt."""
        return 0

    def save(self, path: str | Path) -> None:
        """Write the state into the folder `path`, which exists (`mmaccel.core.files.checkpoint_io`); raises OSError."""
        raise ModelError(f"{type(self).__name__} cannot be saved; choose another kv policy.")

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote, into a state just opened; raises `ModelError` when it does not fit."""
        raise ModelError(f"{type(self).__name__} cannot be loaded; choose another kv policy.")

    def counters(self) -> dict[str, float]:
        """Figures for the report, which prints a name with the word "bytes" in MiB and one that ends in "_s" in seconds."""
        return dict(held=float(self.held_columns()), seen=float(self.length()), bytes=float(self.nbytes()))


@dataclass(frozen=True, kw_only=True)
class KVPolicy(Policy, ABC, kind="kv"):
    """A choice of memory; `open` gives a state that lives as long as one sequence or stream."""

    needs: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = False  # whether answers equal those of a model that keeps everything
    sequences: ClassVar[bool] = True  # whether it can be the memory of ordinary sequences, by `open`
    allows_sparse: ClassVar[bool] = True  # whether a sparse prefill pattern may stand beside this memory
    shares_columns: ClassVar[bool] = False  # whether processes may hold shares of its columns

    @property
    def rollback_limit(self) -> int | None:
        """How many of the last columns can be rolled back; None means all."""
        return None

    def footprint(self, tokens: int, pace: int) -> Footprint:
        """Return what it keeps and shows of a video whose units are of `tokens` tokens and `pace` frames, for `costs`."""
        return Footprint()

    @abstractmethod
    def open(self, geometry: Geometry, model: ModelView | None, device: torch.device) -> KVState: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Facts of a stream that its memory gets when it is opened.

    A stream is: head tokens (the prompt before the video) | units, numbered from 0 | the tokens of a question. A *unit* is
    what the model takes as one step of time, a frame or a temporal patch of `pace` frames.

    unit    P, tokens of a unit
    words   the first and the last so many of them are no visual tokens
    head    tokens before the video
    pace    frames of a unit
    places  where head, units and text stand for the rotary embedding
    dtype   of keys and values
    """

    unit: int
    head: int
    pace: int
    places: PositionIds
    dtype: torch.dtype
    words: tuple[int, int] = (0, 0)

    def units(self, frames: int) -> int:
        """How many units `frames` frames are: a budget in frames, rounded up to whole units."""
        return -(-frames // self.pace)


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamPass:
    """What kind of pass runs next through the layers, and on how many frames and rows.

    kind     "head": the prompt before the video, once. "units": new units of the stream. "proxy": the prompt's own words
             after a question, run after each pass of units for a memory that needs "proxy", and forgotten. "question": all
             tokens from the end of the video to the first of the answer. "answer": tokens of the answer, one or more
    rows     tokens of the pass, n
    first, count  number of the first unit, and how many ("units"); units are consecutive
    times    seconds from the start of the stream at which each unit was shown ("units")
    look     [count, E] float32, the mean over each unit's tokens of its visual features, as the projector gave them
    pending  the first rows of a question that are tokens of units the memory has not taken in yet; they stand after all
             units, as so many more. A multiple of P
    words    rows ``words[0] .. words[1]`` of a question are the user's own words; by their queries memories are searched
    room     columns that may follow a question as its answer
    weigh    whether `evidence` is asked for after a question, so that what weighs it has to be kept
    layout   [1, rows - pending] of the rows of a question behind those of units, where the recipe's pattern may plan them:
             its views have a layout then; None: they are dense
    branches  the tree that the rows of an answer are: they stand at their depth, and see their own branches; None: a chain.
             Only where the memory's policy `allows_branches`
    pause    to be called between two layers of `end_pass` of "units": lets tokens of answers go, which read snapshots
    """

    kind: Literal["head", "units", "proxy", "question", "answer"]
    rows: int
    first: int = 0
    count: int = 0
    times: tuple[float, ...] = ()
    look: Tensor | None = None
    pending: int = 0
    words: tuple[int, int] = (0, 0)
    room: int = 0
    weigh: bool = True
    layout: TokenLayout | None = None
    branches: Branches | None = None
    pause: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Seen:
    """How much an answer is based on one unit: the share of layers that attended to it (retrieved or in the local window),
    the share that retrieved it, and its part of all that reached the answer from units (`Evidence`); None: not known."""

    share: float
    retrieved: float
    score: float | None


@dataclass(frozen=True, eq=False)
class CacheSlot:
    """Where the rows of a question or an answer go at one layer: behind the first `column` columns of buffers key and value
    [1, G, N, D], whose keys are turned; `angles` are the cosines and sines [1, 1, n, D] of the rows, `bias` that of
    `KVView`. A row sees the columns up to its own. There is room for `MARGIN` rows at least."""

    key: Tensor
    value: Tensor
    column: int
    angles: tuple[Tensor, Tensor]
    bias: Tensor | None = None


MARGIN = 64
"""Columns for rows of a question or an answer that are there ahead of need, so that rows may be computed a few too many."""


class StreamState(KVState):
    """The memory of one stream (batch 1). Keys and queries arrive before rotation; the memory turns them.

    A pass goes: ``begin_pass(stream_pass)``; for each layer, in order, ``append`` and ``view`` (and before them ``ahead``,
    for policies that need "hidden"); ``end_pass()``. What a pass of kind "head" or "units" appended belongs to the stream
    once it has ended; when a pass breaks off, the session calls ``restore`` with what ``checkpoint`` gave before the clip.
    Passes of kind "question" and "answer" run inside ``question_scope()``, which drops all they appended; "proxy" is dropped
    at ``end_pass()``. `length()` counts the stream's columns, and inside a question the question's and answer's too;
    `truncate` reaches back to the beginning of the question. `counters` has "units" taken in, and "resident" on the device.
    """

    recalls_alike: bool = False  # whether all layers show a question the same tokens of the same units
    last_listed: dict[int, Any] | None = None  # by layer, of an ingestion's last pass (`ForwardPass.pays`)

    @abstractmethod
    def begin_pass(self, stream_pass: StreamPass) -> None:
        """The next pass is `stream_pass`."""

    @abstractmethod
    def end_pass(self) -> None:
        """The pass is through all layers."""

    @abstractmethod
    def units(self) -> int:
        """Units taken in."""

    @abstractmethod
    def checkpoint(self) -> Any:
        """Return the memory's present state, for `restore`. Cheap, as taken before every clip; never inside a question."""

    @abstractmethod
    def restore(self, mark: Any) -> None:
        """Be as at the moment of `checkpoint`, whatever came after it, a broken pass included."""

    def snapshot(self, stream: Stream, pause: Callable[[], None]) -> StreamState | None:
        """Return the memory as it is now, for one question, or None if frames have to wait until an answer has ended. One is
        in use at a time. The question runs in its `question_scope`, and sees no frame that arrives meanwhile: those go to
        this memory. `stream` is the question's; `pause` lets frames come while `evidence` is computed."""
        return None

    def between(self, first: int, end: int) -> None:
        """Told of a snapshot that its question is on the units ``first .. end`` alone: it retrieves no others."""

    parts: bool = False  # whether units may also come while the question of a snapshot is between two layers

    def write_slot(self, layer: int, query: Tensor) -> CacheSlot | None:
        """In place of `view`, for callers that rotate and write the rows themselves: the slot, or None: use `view`."""
        return None

    def all_write_slot(self) -> list[CacheSlot] | None:
        """Of an answer, `write_slot` of all layers, before any has run; nothing is appended then. None: one by one."""
        return None

    def fit(self, first: int, count: int) -> int:
        """How many of `count` units from number `first` on may go in one pass, at least 1."""
        return count

    def shown_units(self, stream_pass: StreamPass) -> tuple[int, bool]:
        """After how many units the question `stream_pass` gets its positions, asked before it runs, and whether these are
        the units' own: then all units; fewer where the shown units are closed up (an upper bound if not known yet)."""
        return self.units(), True

    def begin_ingest(self) -> None:
        """Units that come from now on, until `idle`, are of a stored video: they see those before them since then, and their
        views have a `layout`. Called before each clip, of a policy that `ingests`."""

    def idle(self) -> None:
        """Nothing more comes for now: what was put off while units came is done, and an ingestion ends."""

    def let_go(self, shown: Callable[[int], float], pinned: Callable[[int], bool]) -> list[int]:
        """Forget units that are too old, by the seconds at which each was `shown`. Those that are `pinned` stay, and from
        now on also when room is made. Gives the numbers of all that were forgotten since this was last asked."""
        return []

    def evidence(self) -> dict[int, Seen]:
        """Units that the last question attended to, and how: number of a unit -> `Seen`."""
        return {}

    def summaries(self, layer: int) -> int:
        """While a question runs: how many columns between head and units in the view of `layer` are tokens of no unit."""
        return 0

    def seen(self, layer: int) -> Tensor | None:
        """While a question runs: the stream tokens [m] long behind the columns that `layer` sees, without head and
        summaries: of each its unit's number times P, plus its index in the unit. None: not known."""
        return None

    def seen_only(self, layer: int, columns: Tensor) -> None:
        """Told, while a question runs, that a pruner leaves of the columns before it only `columns` [k] of the view of
        `layer`: `evidence` weighs these alone."""

    def note_listed_rows(self, layer: int, rows: int) -> None:
        """Told, while a question runs, that its first `rows` rows saw at `layer` what a pattern listed: `evidence` weighs
        the others alone."""

    def set_query_fields(self, policy: StreamPolicy) -> None:
        """Answer from now on as a memory of `policy` does, which differs from its own in `query_time_fields` alone."""

    def clusters(self) -> dict[str, Tensor]:
        """Of a memory that clusters, by the name of a level: the cluster [L or 1, N] of each entry at each layer; entries
        are equal parts of units, in their order."""
        return {}

    def merge(self, features: Tensor) -> tuple[Tensor, list[int]]:
        """Asked before units are run, with their features [n, P, E]: the features to run, [m, P, E], and for each of the m
        how many consecutive units it stands for. The m are numbered from then on; what may be merged with units still to
        come is held back until then (`waiting`)."""
        return features, [1] * features.shape[0]

    def waiting(self) -> Tensor | None:
        """Features [w, P, E] that `merge` keeps back, merged as of now: a question sees them after all units."""

    def accept(self, keep: int | Tensor) -> None:
        raise ModelError("kv: this memory rolls back by truncate; use a draft that proposes chains.")

    def reorder(self, rows: Tensor) -> None:
        raise ModelError("kv: a stream is one sequence; ask without beams.")

    def close(self) -> None:
        """Give back what is held outside the device (host memory, files)."""


@dataclass(frozen=True, kw_only=True)
class StreamPolicy(KVPolicy):
    """A memory that can hold an endless stream; `stream` opens it. Budgets are fields in frames.
    needs    "hidden": the hidden states entering each layer (`ahead`); "look": the units' mean visual features;
             "proxy": passes of kind "proxy" after each chunk
    clip     units that go through the layers together; None leaves it to the session
    query_time_fields  fields that matter at a question alone: what is kept of a stream is the same for all their values
    ingests  takes in stored videos by `VideoSession.ingest` (`StreamState.begin_ingest`), under a sparse pattern too
    allows_branches  the rows of an answer may be a tree (`StreamPass.branches`), of which `accept` then keeps one path
    """

    sequences: ClassVar[bool] = False
    allows_sparse: ClassVar[bool] = False
    clip: ClassVar[int | None] = None
    ingests: ClassVar[bool] = False
    allows_branches: ClassVar[bool] = False
    query_time_fields: ClassVar[frozenset[str]] = frozenset()

    def open(self, geometry: Geometry, model: ModelView | None, device: torch.device) -> KVState:
        raise RecipeError(f"kv {self.name!r} is a memory of streams; call generate, or use a VideoSession.")

    def for_layers(self, share: float) -> StreamPolicy:
        """The memory of a share of the layers, on one of several devices: it has that share of budgets in bytes."""
        return self

    @abstractmethod
    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        """A fresh memory for one stream; raises `RecipeError` for fields that do not fit it."""
