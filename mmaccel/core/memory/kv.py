"""Interfaces of KV memories: what a sequence or video stream keeps of its keys and values, and what each query sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView, TokenTree
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.layout import PositionIds, TokenLayout
from mmaccel.core.memory.buffers import grow_buffer as grow_buffer
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.registry import Policy, refuse_former_names


@dataclass(frozen=True, eq=False)
class KVView:
    """The keys and values that the queries of one layer see.

    key, value [B, G, N, D]; `column` [N] long, the sequence column of each key, or None if key n is column n. Of these a
    query sees its own and earlier columns: the first `sinks`, and those less than `window` (None: no limit) behind it.

    In a stream the columns are numbered in the order of the keys, and the n queries are the last n of them; `query`
    [B, H, n, D] are the queries after RoPE, which the memory applies. `bias` [m] float32 is added to the scores of the first
    m keys. `layout` [1, N], shared by layers alike, describes the columns if a sparse pattern may choose among them.
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
    """The KV cache of one batch of sequences, for all layers."""

    in_place: bool = False  # whether it is buffers whose first columns a query sees (`layer_buffers`)
    follows: ClassVar[bool] = False  # whether it is a part of the recipe's own memory, which is pruned
    running: tuple[Any, ...] = ()  # what each layer without keys carries along the sequence; set by its cache

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_former_names(cls)

    @abstractmethod
    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Add keys and values [B, G, n, D] of `n` new columns to one layer."""

    @abstractmethod
    def view(self, layer: int, query: Tensor) -> KVView:
        """Return the keys and values of `layer` that `query` [B, H, n, D] of the last `n` appended columns may attend to."""

    def receive_hidden(self, layer: int, hidden: Tensor) -> None:
        """Take the hidden states [B, n, E] that enter `layer`. An offloading memory may start copies for the next layer."""

    @abstractmethod
    def accept(self, keep: int | Tensor) -> None:
        """Of the last appended columns keep the first `keep`, or those at the given indices (a path of a token tree)."""

    @abstractmethod
    def length(self) -> int:
        """Return the number of columns appended and not rolled back, including those evicted since."""

    @abstractmethod
    def held_columns(self) -> int:
        """Return the number of columns on the device in the layer that has most, with those retrieved for a question."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all columns of the KV cache."""

    @abstractmethod
    def select_sequences(self, rows: Tensor) -> None:
        """Select the batch rows `rows` [B'] (beam search, dropping finished sequences)."""

    def nbytes(self) -> int:
        """Return the bytes that the KV cache holds on the device."""
        return 0

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        """Context for a question on a stream: columns appended inside are dropped at exit."""
        start = self.length()
        try:
            yield
        finally:
            self.truncate(start)

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Roll back to the first `length` columns; raises `ModelError` if the policy cannot roll back that far."""

    def layer_buffers(self, room: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values [B, G, capacity, D] of each layer, with room for `room` more columns after those held. Only
        for a memory that is `in_place`: callers write new columns there, not by `append`, then `record_written`."""
        raise ModelError(f"{type(self).__name__} has no buffers; call append.")

    def record_written(self, count: int) -> None:
        """Record that a caller wrote `count` new columns into the `layer_buffers` of all layers, after those held."""
        raise ModelError(f"{type(self).__name__} has no buffers; call append.")

    def count_dropped(self, layer: int) -> int:
        """Return how many columns of the prompt `layer` does not hold because a pruner dropped them at an earlier layer."""
        return 0

    def save(self, path: str | Path) -> None:
        """Write the state into the existing folder `path` (`mmaccel.core.files.checkpoint_io`); raises OSError."""
        raise ModelError(f"{type(self).__name__} cannot be saved; choose another kv policy.")

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote into a newly opened state; raises `ModelError` if it does not fit."""
        raise ModelError(f"{type(self).__name__} cannot be loaded; choose another kv policy.")

    def counters(self) -> dict[str, float]:
        """Return figures for the report, which prints names with "bytes" in MiB and names with "seconds" in seconds."""
        return dict(held=float(self.held_columns()), seen=float(self.length()), bytes=float(self.nbytes()))


@dataclass(frozen=True, kw_only=True)
class KVPolicy(Policy, ABC, kind="kv"):
    """Which keys and values a sequence keeps: a KV cache policy. `open` returns the state of one batch of sequences."""

    needs: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = False  # whether answers equal those of a model that keeps everything
    sequences: ClassVar[bool] = True  # whether it can be the memory of ordinary sequences, by `open`
    allows_sparse: ClassVar[bool] = True  # whether a sparse prefill pattern may stand beside this memory
    shares_columns: ClassVar[bool] = False  # whether processes may hold shares of its columns

    @property
    def rollback_limit(self) -> int | None:
        """How many of the last cache columns can be rolled back; None: all."""
        return None

    def footprint(self, tokens: int, frames_per_unit: int) -> Footprint:
        """Return what this memory keeps and shows of a video with `tokens` tokens a unit, to predict its costs."""
        return Footprint()

    @abstractmethod
    def open(self, geometry: Geometry, model: ModelView | None, device: torch.device) -> KVState:
        """Return the empty `KVState` of one batch of sequences; raises `RecipeError` if the fields do not fit the model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Facts of a video stream that its KV memory gets when it is opened.

    A stream is: the prompt before the video (head) | units, numbered from 0 | the tokens of a question. A *unit* is what the
    model takes as one step of time: a frame, or a temporal patch of `frames_per_unit` frames.

    tokens_per_unit  P
    words   (before, after): text tokens of each unit before and after its visual tokens, such as a timestamp
    head    tokens before the video
    frames_per_unit  frames of a unit
    positions  rotary positions of head, units and text
    dtype   of keys and values
    """

    tokens_per_unit: int
    head: int
    frames_per_unit: int
    positions: PositionIds
    dtype: torch.dtype
    words: tuple[int, int] = (0, 0)

    def units(self, frames: int) -> int:
        """Return how many units (temporal patches of frames) `frames` frames are, rounded up."""
        return -(-frames // self.frames_per_unit)


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamPass:
    """Describes the next forward pass of a stream: its kind, its rows and its frames.

    kind     "head": the prompt before the video, once. "units": new units of the stream. "proxy": the chat template's words
             after a question, run after each pass of units for a memory that needs "proxy", and dropped. "question": all
             tokens from the end of the video to the first of the answer. "answer": tokens of the answer, one or more
    rows     tokens of the pass, n
    first, count  number of the first unit, and how many ("units"); units are consecutive
    times    seconds from the start of the stream at which each unit was shown ("units")
    look     [count, E] float32, mean visual feature (projector output) of each unit
    pending  the first rows of a question that are tokens of units not yet in the memory, after all others. A multiple of P
    words    [begin, end) rows of the question that the user wrote; their queries search the memory
    room     tokens that an answer may add after a question
    weigh    True if `evidence` will be called after a question
    layout   [1, rows - pending] of a question's rows behind units, if a pattern may plan them (views have one then), or None
    branches  the tree of an answer's rows, placed by depth; None: a chain. Only if the memory's policy `allows_branches`
    pause    of "units": to be called between parts of the memory's work on them; answers on snapshots decode meanwhile
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
    branches: TokenTree | None = None
    pause: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class UnitEvidence:
    """How much an answer rests on one unit (frame): the share of layers that attended to it (retrieved or local), the share
    that retrieved it, and its part, 0 to 1, of the attention of the answer's first token to units (None: unknown)."""

    share: float
    retrieved: float
    score: float | None


@dataclass(frozen=True, eq=False)
class CacheSlot:
    """Where a caller that applies RoPE itself writes n rows of a question or answer at a layer: after `column` columns of
    key and value [1, G, N, D], keys after RoPE, with room for at least `MARGIN` rows. `angles`: the rows' cosines and
    sines [1, 1, n, D]. `bias` [m] is added to the scores of the first m keys. A row sees the columns up to its own."""

    key: Tensor
    value: Tensor
    column: int
    angles: tuple[Tensor, Tensor]
    bias: Tensor | None = None


MARGIN = 64  # columns ahead of need for rows of a question or an answer; a few rows too many may be computed


class StreamState(KVState):
    """The KV memory of one video stream (batch 1). Keys and queries arrive before RoPE; the memory applies it.

    A forward pass is: `begin_pass`; for each layer in order `append` and `view` (before them `receive_hidden`, for policies
    that need "hidden"); `end_pass`. Columns of a "head" or "units" pass belong to the stream once it has ended; if a pass
    fails, the session calls `restore` with what `checkpoint` gave before the clip. "question" and "answer" passes run inside
    `question_scope`, which drops all they appended; "proxy" is dropped at `end_pass`. `length` counts all; `truncate`
    reaches back to the question's begin. `counters` has "units" taken in, and "resident" on the device.
    """

    recalls_alike: bool = False  # whether all layers show a question the same tokens of the same units
    last_listed: dict[int, Any] | None = None  # by layer, of an ingestion (`beats_dense`)

    @abstractmethod
    def begin_pass(self, stream_pass: StreamPass) -> None:
        """Prepare the stream's memory for the forward pass that `stream_pass` describes."""

    @abstractmethod
    def end_pass(self) -> None:
        """Finish the current forward pass, after all layers have run."""

    @abstractmethod
    def units(self) -> int:
        """Return the number of units (frames) that the stream's memory has taken in."""

    @abstractmethod
    def checkpoint(self) -> Any:
        """Return the memory's present state, for `restore`. Cheap, as taken before every clip; never inside a question."""

    @abstractmethod
    def restore(self, mark: Any) -> None:
        """Return the memory to its state at `checkpoint`, also after a pass that failed."""

    def snapshot(self, stream: Stream, pause: Callable[[], None]) -> StreamState | None:
        """Return a copy of the memory that one question reads while new frames enter the original. None: unsupported, so
        frames wait for the answer. `stream`: the copy's facts; `pause` is called inside `evidence`, to let frames in."""
        return None

    def limit_to_units(self, first: int, end: int) -> None:
        """Restrict this snapshot's question to the units (frames) from `first` to before `end`: it retrieves no others."""

    parts: bool = False  # whether units may also come while the question of a snapshot is between two layers
    replays_pass: bool = False  # whether the "units" pass that begun last runs, or ran, by `replay_forward`
    several: bool = False  # whether another snapshot may be asked while the answer on one is decoded
    forgets: bool = False  # whether units may become too old (`forget_old_units`)

    def new_kv_slot(self, layer: int, query: Tensor) -> CacheSlot | None:
        """Return where a caller that applies RoPE itself writes new keys and values of `layer`; None: call `view`."""
        return None

    def new_kv_slots(self) -> list[CacheSlot] | None:
        """Return `new_kv_slot` of each layer for an answer's tokens, before any layer runs; None: use `new_kv_slot`."""
        return None

    def replay_forward(self, embeds: Tensor, forward: Any, shared: Any) -> Tensor:
        """Return ``forward(embeds)`` [n, E] of such a pass, a CUDA graph from its second run on; others use `shared` too."""
        return forward(embeds)  # type: ignore[no-any-return]

    def units_that_fit(self, first: int, count: int) -> int:
        """Return how many of `count` units (frames) from number `first` on may go in one pass, at least 1."""
        return count

    def shown_units(self, stream_pass: StreamPass) -> tuple[int, bool]:
        """Return how many units (frames) come before a question's tokens, to compute their positions, and whether units keep
        their own positions. If units keep them, all units of the stream count. Otherwise units get consecutive positions,
        and only those that the question of `stream_pass` sees count (an upper bound if not yet known)."""
        return self.units(), True

    def begin_ingest(self) -> None:
        """Start an ingestion: units (frames) until `end_ingest` are of a stored video, each sees all earlier ones of it,
        and views have a `layout`. Called before each clip, if the policy `ingests`."""

    def end_ingest(self) -> None:
        """End an ingestion, and do the work that was postponed while units (frames) came; none come for now."""

    def forget_old_units(self, shown: Callable[[int], float], pinned: Callable[[int], bool]) -> list[int]:
        """Forget units (frames) that are too old. ``shown(unit)`` is a unit's time in seconds. A unit with ``pinned(unit)``
        true is kept, and from now on also when room is short. Return the numbers of all forgotten since the last call."""
        return []

    def usage(self) -> dict[str, float]:
        """Return, of `counters`, bytes, host_bytes, host_disk_bytes and questions, as far as there are; nothing waits."""
        return {"bytes": float(self.nbytes())}

    def evidence(self) -> dict[int, UnitEvidence]:
        """Return the units (frames) that the last question attended to: unit number -> `UnitEvidence`."""
        return {}

    def count_summary_columns(self, layer: int) -> int:
        """Return, in a question, how many columns of the view of `layer`, between head and frames, are summary tokens."""
        return 0

    def seen_tokens(self, layer: int) -> Tensor | None:
        """Return, in a question, the stream tokens [m] that `layer` sees: unit number * P + index in it; None: not known."""
        return None

    def record_shown_columns(self, layer: int, columns: Tensor) -> None:
        """Record that a pruner shows the question at `layer` only `columns` [k] of those before its own, for `evidence`."""

    def record_sparse_rows(self, layer: int, rows: int) -> None:
        """Record that the first `rows` rows of a question ran sparse attention at `layer`; `evidence` uses later ones."""

    def set_query_fields(self, policy: StreamPolicy) -> None:
        """Use from now on the `query_time_fields` of `policy`: fields that matter only to questions."""

    def clusters(self) -> dict[str, Tensor]:
        """Return level name -> cluster index [L or 1, N] of N stored entries at L layers (1: the same at all), else {} if it
        does not cluster. Entries are in order of time, equally many for each unit (frame)."""
        return {}

    def merge_units(self, features: Tensor) -> tuple[Tensor, list[int]]:
        """Merge similar units (frames) before they are run, given features [n, P, E]: return the features to run, [m, P, E],
        and for each how many consecutive units it represents. Units are numbered after merging; those that may be merged
        with later units are held back (`waiting_features`)."""
        return features, [1] * features.shape[0]

    def waiting_features(self) -> Tensor | None:
        """Return the features [w, P, E] of frames that `merge_units` holds back, merged as of now; a question sees them."""

    def accept(self, keep: int | Tensor) -> None:
        """Of the last answer rows keep the first `keep`, or those at the given indices."""
        raise ModelError("kv: this memory cannot verify token trees; use a draft that proposes chains.")

    def select_sequences(self, rows: Tensor) -> None:
        raise ModelError("kv: a stream is one sequence; ask without beams.")

    def close(self) -> None:
        """Release what the memory holds outside the device (host memory, files)."""


@dataclass(frozen=True, kw_only=True)
class StreamPolicy(KVPolicy):
    """A KV memory for an endless video stream; `open_stream` opens it. Budgets are fields in frames.
    needs    "hidden": `receive_hidden` is called; "look": `StreamPass.look` is set; "proxy": passes of kind "proxy" come
    clip     units in one forward pass; None leaves it to the session
    query_time_fields  fields that matter only to a question: what is kept of a stream is the same for all their values
    ingests  accepts stored videos by `VideoSession.ingest` (`StreamState.begin_ingest`), under a sparse pattern too
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

    def for_layer_share(self, share: float) -> StreamPolicy:
        """Return the policy for a share of the layers, on one of several devices: budgets in bytes shrink by that share."""
        return self

    @abstractmethod
    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        """Return a new KV memory for one video stream; raises `RecipeError` for fields that do not fit the stream."""
