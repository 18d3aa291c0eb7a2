"""What stream memories that keep everything have in common: keys turned once, to their true places, and none left out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core import checkpoint_io
from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import ModelError
from mmaccel.core.kv import KVView, Seen, Stream, StreamPass, StreamState
from mmaccel.policies.kv._window import Rope


class WholeStream(StreamState):
    """Every query sees every column before it, as in the plain model; so how the stream is cut changes nothing.

    Subclasses keep turned keys and values: `_show` takes in those of a pass and gives all, `_cut` forgets the last.
    """

    def __init__(self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device) -> None:
        self.stream, self.geometry, self.device = stream, geometry, device
        self.rope = Rope(model, stream.dtype)
        self._new: list[tuple[Tensor, Tensor] | None] = [None] * geometry.layers
        self._piece: StreamPass | None = None
        self._headed = False
        self._count = self._extra = self._pending = 0

    @abstractmethod
    def _show(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep turned keys and values [1, G, n, D] of the pass; all of the layer, these last."""

    @abstractmethod
    def _cut(self, columns: int) -> None:
        """Keep the first `columns` columns of each layer, as far as it has them."""

    def begin_pass(self, piece: StreamPass) -> None:
        self._piece = piece
        self.rope.forget()
        if piece.kind == "question":
            self._pending = piece.pending

    @torch.no_grad()
    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._new[layer] = (key, value)

    @torch.no_grad()
    def view(self, layer: int, query: Tensor) -> KVView:
        new = self._new[layer]
        if self._piece is None or new is None:
            raise ModelError(f"kv: layer {layer} is asked for before anything was appended to it.")
        angles = self.rope.at("pass", self._places)
        key, value = self._show(layer, self.rope.apply(new[0], angles), new[1])
        self._new[layer] = None
        return KVView(key, value, query=self.rope.apply(query, angles))

    def _places(self) -> Tensor:
        piece, places = self._piece, self.stream.places
        assert piece is not None
        if piece.kind == "head":
            return places.head()
        if piece.kind == "units":
            return places.own(piece.first, piece.count)
        return places.after(self._count, self._pending, self._extra, piece.rows, own=True)

    def end_pass(self) -> None:
        piece = self._piece
        if piece is None:
            return
        if piece.kind == "head":
            self._headed = True
        elif piece.kind == "units":
            self._count += piece.count
        elif piece.kind == "proxy":
            self._cut(self.length())
        else:
            self._extra += piece.rows
        self._piece = None

    def units(self) -> int:
        return self._count

    def length(self) -> int:
        return self._base() + self._extra

    def _base(self) -> int:
        return self.stream.head * self._headed + self._count * self.stream.unit

    def truncate(self, length: int) -> None:
        extra = length - self._base()
        if not 0 <= extra <= self._extra:
            raise ModelError(f"kv: the stream has {self.length()} columns; it cannot be cut to {length}.")
        self._extra = extra
        self._cut(length)

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._extra = self._pending = 0
            self._piece = None
            self._cut(self._base())

    def checkpoint(self) -> Any:
        return self._count, self._headed

    def restore(self, mark: Any) -> None:
        self._count, self._headed = mark
        self._piece = None
        self._extra = self._pending = 0
        self._cut(self._base())

    def reset(self) -> None:
        self.restore((0, False))

    def evidence(self) -> dict[int, Seen]:
        """Every layer sees every unit."""
        return {number: Seen(1.0, 0.0, None) for number in range(self._count)}

    def counters(self) -> dict[str, float]:
        return {**super().counters(), "units": float(self._count), "resident": float(self._count)}

    def save(self, path: str | Path) -> None:
        folder = Path(path)
        checkpoint_io.write_json(folder / "state.json", {"units": self._count, "head": self.stream.head})
        self._save(folder)

    def load(self, path: str | Path) -> None:
        folder = Path(path)
        told = checkpoint_io.read_json(folder / "state.json", {"units": int, "head": int})
        if told["units"] < 0 or told["head"] != self.stream.head:
            raise ModelError(
                "state.json: it is of a stream with another head, or damaged; save the session again."
            )
        self._count, self._headed = told["units"], True
        self._load(folder)

    @abstractmethod
    def _save(self, folder: Path) -> None:
        """Write all columns."""

    @abstractmethod
    def _load(self, folder: Path) -> None:
        """Read them; the number of units is set."""
