"""The interface of a draft in the pipeline, and the draft that runs in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from mmaccel.core.adapter import ModelView
from mmaccel.core.draft import Warp
from mmaccel.policies.draft._writer import Writer, Written


class Engine(Protocol):
    """A draft in this process (`Local`) or in another (`Remote`). It has one open request at a time."""

    def begin(
        self, inputs: Mapping[str, Any], warp: Warp | None, pruned: bool, compact: bool, seed: int
    ) -> None: ...

    def keep(self, columns: Tensor) -> None: ...

    def ask(self, length: int, fix: list[int], count: int) -> None: ...

    def collect(self, limit_s: float) -> Written | None: ...

    def close(self) -> None: ...


class Local:
    """A writer in this process. On a CPU it works when its window is collected; on CUDA on a stream of its own."""

    def __init__(self, peer: ModelView, vocab: int, device: torch.device) -> None:
        self._writer = Writer(peer.runner(), peer.device, vocab)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._asked: tuple[int, list[int], int] | None = None

    def begin(
        self, inputs: Mapping[str, Any], warp: Warp | None, pruned: bool, compact: bool, seed: int
    ) -> None:
        self._prompt, self._compact, self._seed = inputs, compact, seed
        self._warp = None if warp is None else _at(warp, inputs["input_ids"].device)
        self._columns: Tensor | None = None
        self._read = False
        self._told: list[torch.cuda.Event] = []
        self._mark()

    def keep(self, columns: Tensor) -> None:
        self._columns = columns
        self._mark()

    def _mark(self) -> None:
        """The columns may still be on their way on the target's stream; later work there is not waited for."""
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._stream.device))
            self._told.append(event)

    def ask(self, length: int, fix: list[int], count: int) -> None:
        self._asked = length, fix, count

    def collect(self, limit_s: float) -> Written | None:
        assert self._asked is not None
        with torch.cuda.stream(self._stream):
            if not self._read:
                for event in self._told:
                    event.wait(self._stream)
                self._writer.read(self._prompt, self._columns, self._compact, self._warp, self._seed)
                self._read = True
            return self._writer.write(*self._asked)

    def close(self) -> None:
        pass


def _at(warp: Warp, device: torch.device) -> Warp:
    """Runs `warp` on the device of its own tensors, for a draft on another device."""
    return lambda ids, logits: warp(ids.to(device), logits.to(device))
