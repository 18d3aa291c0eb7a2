"""The `no_cache` memory: stores frames instead of keys, and runs the model on some of them for each question."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.memory.frames import FrameMemory
from mmaccel.core.memory.kv import Stream, StreamPass, StreamPolicy, StreamState
from mmaccel.core.registry import at_least, limited, register
from mmaccel.policies.kv.full import Full

FILE = 64
"""Units in one file of a saved stream."""


@register("kv", "no_cache")
@dataclass(frozen=True, kw_only=True)
class NoCache(StreamPolicy):
    """Keep frames on the host; for a question take `frames` of them, evenly spaced over all so far, and run the plain model.

    The time to the first token includes the vision tower and the whole prompt. The plain baseline of the papers on streams.
    Up to `kept` frames all are stored. Then every second stored frame is dropped, and of new frames every second is stored;
    at `kept` again every fourth, and so on. A question's frames are evenly spaced among at least ``kept / 2`` stored ones,
    both ends included, rounded down.

    As the memory of a draft whose pruner reads attention, it takes the stored frames that the target's question attended to
    most instead. The draft model then runs only when a question is asked, on those frames.

    frames  frames run for a question
    kept    most frames on the host; at least twice `frames`
    """

    query_time_fields: ClassVar[frozenset[str]] = frozenset({"frames"})
    ingests: ClassVar[bool] = True
    allows_branches: ClassVar[bool] = True

    frames: int = limited(64, at_least(1))
    kept: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept < 2 * self.frames:
            raise RecipeError(
                f"{self.name}: kept is {self.kept}; give at least twice frames, {2 * self.frames}."
            )

    def footprint(self, tokens: int, frames_per_unit: int) -> Footprint:
        return Footprint(shown=self.frames, host=self.kept, deferred=True)

    def open_stream(
        self, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> StreamState:
        return _Frames(self, stream, geometry, model, device)


class _Frames(FrameMemory):
    """Stores those units, [frames_per_unit, 3, H, W] each, whose number is a multiple of `stride`."""

    def __init__(
        self, policy: NoCache, stream: Stream, geometry: Geometry, model: ModelView, device: torch.device
    ) -> None:
        self.most = max(2, policy.kept // stream.frames_per_unit)
        self._parts = stream, geometry, model, device
        self.stream = stream
        self.set_query_fields(policy)
        self._held: dict[int, Tensor] = {}
        self._count, self._stride = 0, 1
        # Shared with snapshots.
        self._asked = {"recalled": 0, "questions": 0}

    def set_query_fields(self, policy: StreamPolicy) -> None:
        assert isinstance(policy, NoCache)
        self.budget = max(1, policy.frames // self.stream.frames_per_unit)

    def store_frames(self, frames: Tensor) -> None:
        frames_per_unit = self.stream.frames_per_unit
        for start in range(0, len(frames), frames_per_unit):
            if self._count % self._stride == 0:
                self._held[self._count] = frames[start : start + frames_per_unit].cpu().clone()
            self._count += 1
            if len(self._held) > self.most:
                self._stride *= 2
                self._held = {n: held for n, held in self._held.items() if n % self._stride == 0}

    parts = several = True

    def snapshot(self, stream: Stream, pause: Callable[[], None]) -> StreamState:
        taken = copy.copy(self)
        taken._held = dict(self._held)
        return taken

    def limit_to_units(self, first: int, end: int) -> None:
        self._held = {number: frames for number, frames in self._held.items() if first <= number < end}

    def choose_units(self, paid: Mapping[int, float]) -> list[tuple[int, Tensor]]:
        picked = self._pick(paid)
        self._asked["recalled"] += len(picked)
        self._asked["questions"] += 1
        return picked

    def _pick(self, paid: Mapping[int, float]) -> list[tuple[int, Tensor]]:
        numbers = list(self._held)
        count = min(self.budget, len(numbers))
        if paid:
            # A unit that is held stands for those up to the next one.
            sums = dict.fromkeys(numbers, 0.0)
            for number, weight in paid.items():
                sums[number // self._stride * self._stride] += weight
            best = sorted(numbers, key=lambda number: -sums[number])[:count]
            return [(number, self._held[number]) for number in sorted(best) if sums[number]]
        last = len(numbers) - 1
        chosen = [i * last // (count - 1) for i in range(count)] if count > 1 else [last] * count
        return [(numbers[i], self._held[numbers[i]]) for i in chosen]

    def shown_units(self, stream_pass: StreamPass) -> tuple[int, bool]:
        return min(self.budget, len(self._held)), False

    def new_kv_memory(self) -> StreamState:
        return Full().open_stream(*self._parts)

    def begin_pass(self, *_: Any, **named: Any) -> Any:
        raise ModelError("kv: a memory of frames runs no pass itself; run the memory that it opens.")

    end_pass = append = view = begin_pass

    def units(self) -> int:
        return self._count

    def length(self) -> int:
        return 0

    def held_columns(self) -> int:
        return 0

    def truncate(self, length: int) -> None:
        if length:
            raise ModelError(f"kv: a memory of frames has no columns; it cannot be cut to {length}.")

    def checkpoint(self) -> Any:
        return self._count, self._stride, dict(self._held)

    def restore(self, mark: Any) -> None:
        self._count, self._stride, held = mark
        self._held = dict(held)

    def reset(self) -> None:
        self.restore((0, 1, {}))

    def usage(self) -> dict[str, float]:
        held = float(sum(held.nbytes for held in tuple(self._held.values())))
        return {**super().usage(), "host_bytes": held, "questions": float(self._asked["questions"])}

    def counters(self) -> dict[str, float]:
        return {
            **super().counters(),
            **self.usage(),
            "recalled": float(self._asked["recalled"] * self._parts[1].layers),
            "units": float(self._count),
            "kept": float(len(self._held)),
            "resident": 0.0,
        }

    def save(self, path: str | Path) -> None:
        folder = Path(path)
        numbers = list(self._held)
        facts = {"units": self._count, "stride": self._stride, "kept": len(numbers)}
        checkpoint_io.write_json(folder / "state.json", facts)
        for begin in range(0, len(numbers), FILE):
            some = {str(n): self._held[n] for n in numbers[begin : begin + FILE]}
            checkpoint_io.write_tensors(folder / f"frames-{begin:07d}.safetensors", some)

    def load(self, path: str | Path) -> None:
        folder = Path(path)
        told = checkpoint_io.read_json(folder / "state.json", {"units": int, "stride": int, "kept": int})
        stride = told["stride"]
        if stride < 1 or len(range(0, told["units"], stride)) != told["kept"]:
            raise ModelError("state.json: units, stride and kept do not fit; the file is damaged.")
        numbers = list(range(0, told["units"], stride))
        shape = (self.stream.frames_per_unit, 3, -1, -1)
        held: dict[int, Tensor] = {}
        for begin in range(0, len(numbers), FILE):
            wanted = {str(n): (shape, torch.uint8) for n in numbers[begin : begin + FILE]}
            file = folder / f"frames-{begin:07d}.safetensors"
            found = checkpoint_io.read_tensors(file, wanted, torch.device("cpu"))
            held |= {int(name): frames for name, frames in found.items()}
        self._count, self._stride, self._held = told["units"], stride, held
