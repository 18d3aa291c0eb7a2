"""The KV memory of a stream whose model is spread over several devices: one memory for the layers of each device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.adapter import Geometry, ModelView
from mmaccel.core.errors import ModelError
from mmaccel.core.files import checkpoint_io
from mmaccel.core.layout import TokenLayout
from mmaccel.core.memory.frames import FrameMemory
from mmaccel.core.memory.kv import KVView, Stream, StreamPass, StreamPolicy, StreamState, UnitEvidence
from mmaccel.core.memory.relay import make_delegate

SPLIT = "split.json"
"""In the folder of a saved memory: how many layers each device had."""

BY_LAYER = {"bytes", "seconds", "recalled", "pages", "fetch", "fetches", "copies", "gathers"}
"""Words in the names of counters that add up what each layer does."""


@dataclass(frozen=True, eq=False)
class LayerRange(ModelView):
    """The `ModelView` of consecutive `layers` of a model, on device `at`; its methods number these layers from 0."""

    layers: range = field(kw_only=True)
    at: torch.device = field(kw_only=True)

    @property
    def geometry(self) -> Geometry:
        return replace(super().geometry, layers=len(self.layers))

    @property
    def device(self) -> torch.device:
        return self.at

    def input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        return super().input_norm(self.layers[layer], hidden)

    def project_query(self, layer: int, rows: Tensor) -> Tensor:
        return super().project_query(self.layers[layer], rows)

    def rope_angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = super().rope_angles(positions, dtype)
        return cos.to(self.at, non_blocking=True), sin.to(self.at, non_blocking=True)


def create_multi_device_state(
    policy: StreamPolicy,
    devices: Sequence[torch.device],
    stream: Stream,
    geometry: Geometry,
    view: ModelView,
    home: torch.device,
) -> StreamState:
    """Open the stream memory of a model whose decoder layer n is on ``devices[n]``: one memory for each device's layers."""
    begins = [n for n, device in enumerate(devices) if n == 0 or device != devices[n - 1]]
    parts: list[tuple[range, torch.device, StreamState]] = []
    try:
        for begin, end in zip(begins, [*begins[1:], len(devices)], strict=True):
            layers = range(begin, end)
            own = LayerRange(view.model, view.adapter, view.resolve, layers=layers, at=devices[begin])
            share = policy.for_layer_share(len(layers) / len(devices))
            parts.append((layers, own.at, share.open_stream(stream, own.geometry, own, own.at)))
            if isinstance(parts[0][2], FrameMemory):
                raise ModelError(
                    f"kv {policy.name!r} runs whole frames at a question and the model's layers lie on several devices; "
                    "choose a memory of keys and values, or put the model on one device."
                )
    except BaseException:
        for *_, state in parts:
            state.close()
        raise
    return MultiDeviceStreamState(parts)


def load_stream(state: StreamState, path: Path) -> None:
    """Load a saved memory into `state`; raises `ModelError` unless it was saved with the same layers on each device."""
    own = state._layers if isinstance(state, MultiDeviceStreamState) else None
    told = (
        checkpoint_io.read_json(path / SPLIT, {"layers": list})["layers"] if (path / SPLIT).exists() else None
    )
    if own != told:
        then, now = (
            "layers on one device" if some is None else f"layers {some} on devices" for some in (told, own)
        )
        raise ModelError(
            f"{path} was saved with {then} and the model has {now}; spread the model as it was then."
        )
    state.load(path)


def _of_layer(split: MultiDeviceStreamState, name: str, layer: int, *given: Any, **named: Any) -> Any:
    state, own = split._of[layer]
    split._begin_waiting(state)
    return getattr(state, name)(own, *given, **named)


def _each(split: MultiDeviceStreamState, name: str, *given: Any, **named: Any) -> None:
    split._begin_waiting()
    for state in split._states:
        getattr(state, name)(*given, **named)


def _first(split: MultiDeviceStreamState, name: str, *given: Any, **named: Any) -> Any:
    return getattr(split._states[0], name)(*given, **named)


class MultiDeviceStreamState(StreamState):
    """Several stream memories as one, each for consecutive layers on their device. All hold the same units (frames).

    The devices work on different passes at the same time, as a pipeline, so no method waits for a device. A memory begins a
    pass only when its first layer is called: what is copied to its device then comes after the work on the previous pass.
    """

    def __init__(self, parts: Sequence[tuple[range, torch.device, StreamState]]) -> None:
        self._states, self._devices = [state for *_, state in parts], [device for _, device, _ in parts]
        self._layers = [len(layers) for layers, *_ in parts]
        self._of = [(state, layer) for layers, _, state in parts for layer in range(len(layers))]
        self.recalls_alike = self._states[0].recalls_alike
        self._waiting: dict[int, tuple[StreamState, StreamPass]] = {}
        """Memories that have not begun the pass under way, and the pass."""
        self._ingests, self._layouts = False, dict[int, TokenLayout]()

    def snapshot(self, stream: Stream, pause: Callable[[], None]) -> StreamState | None:
        """Return a snapshot of the memories of all devices; None if one of them supports none."""
        self._begin_waiting()
        taken = [state.snapshot(stream, pause) for state in self._states]
        if None in taken:
            return None
        other = copy.copy(self)
        other._states, other._waiting = [state for state in taken if state is not None], {}
        of = dict(zip(map(id, self._states), other._states, strict=True))
        other._of = [(of[id(state)], layer) for state, layer in self._of]
        return other

    @property
    def parts(self) -> bool:  # type: ignore[override]
        """Whether new units (frames) may be added between two layers of a running question: True if the memories of all
        devices allow it."""
        return all(state.parts for state in self._states)

    append = receive_hidden = new_kv_slot = count_summary_columns = seen_tokens = record_shown_columns = (
        record_sparse_rows
    ) = make_delegate(_of_layer)
    end_pass = begin_ingest = end_ingest = set_query_fields = limit_to_units = make_delegate(_each)
    accept = truncate = reset = make_delegate(_each)
    units = length = shown_units = waiting_features = make_delegate(_first)

    @property
    def last_listed(self) -> dict[int, Any] | None:  # type: ignore[override]
        """Layer number -> counts of query-key pairs in the blocks that its pattern chose in an ingestion's last passes."""
        return self._states[0].last_listed

    def view(self, layer: int, query: Tensor) -> KVView:
        shown: KVView = _of_layer(self, "view", layer, query)
        if self._ingests and shown.layout is not None:
            # All show the same columns; what was read of the first device is not read of one that has yet to get there.
            shown.layout.share_host_values(self._layouts.setdefault(shown.layout.length, shown.layout))
        return shown

    def begin_pass(self, stream_pass: StreamPass) -> None:
        self._waiting = {id(state): (state, stream_pass) for state in self._states}
        self._ingests, self._layouts = stream_pass.kind == "units", {}
        self._begin_waiting(self._states[0])

    def _begin_waiting(self, *some: StreamState) -> None:
        """Begin the pass under way in these memories (none: in all), where they have not begun it."""
        for one in map(id, some) if some else list(self._waiting):
            if one not in self._waiting:
                continue
            state, stream_pass = self._waiting.pop(one)
            device = self._devices[self._states.index(state)]
            layout, look = stream_pass.layout, stream_pass.look
            layout = None if layout is None else layout.to(device)
            look = None if look is None else look.to(device, non_blocking=True)
            state.begin_pass(replace(stream_pass, layout=layout, look=look))

    def forget_old_units(self, shown: Callable[[int], float], pinned: Callable[[int], bool]) -> list[int]:
        return sorted({unit for state in self._states for unit in state.forget_old_units(shown, pinned)})

    def merge_units(self, features: Tensor) -> tuple[Tensor, list[int]]:
        # Each keeps the same features back.
        first, *_ = [state.merge_units(features) for state in self._states]
        return first

    def close(self) -> None:
        with ExitStack() as stack:
            for state in self._states:
                stack.callback(state.close)

    @contextmanager
    def question_scope(self) -> Iterator[None]:
        with ExitStack() as stack:
            for state in self._states:
                stack.enter_context(state.question_scope())
            yield

    def checkpoint(self) -> Any:
        self._begin_waiting()
        return [state.checkpoint() for state in self._states]

    def restore(self, mark: Any) -> None:
        self._waiting.clear()
        for state, own in zip(self._states, mark, strict=True):
            state.restore(own)

    def save(self, path: str | Path) -> None:
        checkpoint_io.write_json(Path(path) / SPLIT, {"layers": self._layers})
        for number, state in enumerate(self._states):
            (folder := Path(path) / f"part-{number}").mkdir()
            state.save(folder)

    def load(self, path: str | Path) -> None:
        for number, state in enumerate(self._states):
            state.load(Path(path) / f"part-{number}")

    def held_columns(self) -> int:
        return max(state.held_columns() for state in self._states)

    def nbytes(self) -> int:
        return sum(state.nbytes() for state in self._states)

    def units_that_fit(self, first: int, count: int) -> int:
        for state in self._states:
            count = state.units_that_fit(first, count)
        return count

    def evidence(self) -> dict[int, UnitEvidence]:
        """Return the evidence averaged over layers; each device's memory computes its `UnitEvidence.score` by itself."""
        whole, found = sum(self._layers), [state.evidence() for state in self._states]
        out: dict[int, UnitEvidence] = {}
        for unit in sorted({unit for one in found for unit in one}):
            each = [one.get(unit, UnitEvidence(0.0, 0.0, 0.0)) for one in found]
            scores = [one.score for one in each]
            score = None if None in scores else self._mean(scores, whole)
            out[unit] = UnitEvidence(
                self._mean([x.share for x in each], whole),
                self._mean([x.retrieved for x in each], whole),
                score,
            )
        return out

    def _mean(self, values: Sequence[Any], whole: int) -> float:
        return float(sum(count * value for count, value in zip(self._layers, values, strict=True))) / whole

    def clusters(self) -> dict[str, Tensor]:
        found = [state.clusters() for state in self._states]

        def shared(name: str) -> bool:
            """A level that all layers share has one row, and all parts the same."""
            return max(self._layers) > 1 and all(len(one[name]) == 1 for one in found)

        return {
            name: rows if shared(name) else torch.cat([one[name].to(rows.device) for one in found])
            for name, rows in found[0].items()
        }

    def usage(self) -> dict[str, float]:
        return self._joined([state.usage() for state in self._states])

    def counters(self) -> dict[str, float]:
        return self._joined([state.counters() for state in self._states])

    def _joined(self, found: Sequence[dict[str, float]]) -> dict[str, float]:
        """The counters of all devices' memories as one set: the sum of each counter that adds up over layers (`BY_LAYER`),
        and the largest value of any other."""
        ways = {name: sum if BY_LAYER & {*name.split("_")} else max for name in found[0]}
        return {name: way(one.get(name, 0.0) for one in found) for name, way in ways.items()}
