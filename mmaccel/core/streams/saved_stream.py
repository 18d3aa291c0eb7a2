"""A saved stream (its frame times and its KV memory), in the folder that `session_io` fills: written and read here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmaccel.core.attach import StreamAdapter
from mmaccel.core.errors import ModelError, quoted
from mmaccel.core.files import checkpoint_io
from mmaccel.core.memory.frames import FrameMemory
from mmaccel.core.memory.kv import KVPolicy, StreamPolicy
from mmaccel.core.memory.split import load_stream
from mmaccel.core.recipe import Recipe
from mmaccel.core.streams.listening import AttentionRecording
from mmaccel.core.streams.parts import StreamInfo
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.core.streams.timed_text import TimedText

FILM, MEMORY = "film.safetensors", "memory"
PIXELS = 1 << 25
"""Most pixels of a frame: 8K."""


def _is_size(value: Any) -> bool:
    """Whether it is a height and a width in pixels, of a frame that memory has room for."""
    whole = isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)
    return whole and value[0] * value[1] <= PIXELS


def _is_stretch(value: Any) -> bool:
    """Whether it is two seconds, the first one first."""
    pair = isinstance(value, list) and len(value) == 2 and all(type(s) in (int, float) for s in value)
    return pair and -math.inf < value[0] <= value[1] < math.inf


def _is_line(value: Any) -> bool:
    """Whether it is two seconds, the first one first, and a text."""
    return isinstance(value, list) and _is_stretch(value[:2]) and len(value) == 3 and type(value[2]) is str


def _counts(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


SIZES: dict[str, Callable[[Any], bool]] = {
    "size": _is_size,
    "raw": lambda value: value is None or _is_size(value),
    "fps": lambda value: value is None or (isinstance(value, float) and 0 < value < math.inf),
    **dict.fromkeys(("unit", "frames"), _counts(1)),
    **dict.fromkeys(("units", "marks", "pending"), _counts(0)),
}
"""What a list of facts says of a stream, and what it must be."""


def write_stream(folder: Path, live: StreamRunner) -> dict[str, Any]:
    """Write a stream's times and memory into the existing `folder`; return facts for `read_stream`. The caller
    adds the fact `model`, the checksum of the weights, when the model is free again. Raises OSError."""
    adapter, info = live.adapter, live.info
    (folder / MEMORY).mkdir()
    live.state.save(folder / MEMORY)
    tensors = {
        "spans": torch.tensor(info.spans, dtype=torch.long).view(-1, 2),
        "times": torch.tensor(info.times, dtype=torch.float64),
        "marks": info.marks,
    }
    if info.pending is not None:
        tensors["pending"] = info.pending
    around = live.around
    states = (
        {n: around.unit_hidden_states(n) for n in around.states}
        if isinstance(around, AttentionRecording)
        else {}
    )
    # A memory of frames has no states between questions.
    heard = {n: kept for n, kept in states.items() if len(kept) == len(info.spans) * info.tokens_per_unit > 0}
    tensors |= {f"heard {layer}": kept for layer, kept in heard.items()}
    if live.running is not None:
        tensors |= live.running.named_tensors()
    checkpoint_io.write_tensors(folder / FILM, tensors)
    return {
        "dtype": _name(adapter.dtype),
        "size": info.size,
        "fps": None if info.fps is None else float(info.fps),
        "unit": info.tokens_per_unit,
        "timed": info.timed,
        "raw": info.raw,
        "frames": len(info.times),
        "units": len(info.spans),
        "marks": info.marks.shape[0],
        "pending": 0 if info.pending is None else info.pending.shape[0],
        "heard": sorted(heard),
        "pins": info.pins,
        "lines": info.timed_texts,
    }


def check_saved_model(where: Path, facts: dict[str, Any], adapter: StreamAdapter) -> None:
    """Raise `ModelError` unless `facts` name the weights and the type of the model of `adapter`."""
    dtype = _name(adapter.dtype)
    if facts["model"] != adapter.weights_checksum():
        raise ModelError(
            f"{where} was saved from another model; give the model it was saved with (--model MODEL)."
        )
    if facts["dtype"] != dtype:
        kind = quoted(facts["dtype"])[1:-1]
        raise ModelError(
            f"{where} was saved from a model in {kind} and this one is in {dtype}; load the model in {kind}."
        )


def read_stream(
    data: Path, told: Path, facts: dict[str, Any], adapter: StreamAdapter, kv: StreamPolicy, chunk: int | None
) -> StreamRunner:
    """Return a `StreamRunner` with the saved stream that `write_stream` wrote into folder `data`; `kv` opens its memory.

    `facts` are those that `write_stream` returned, read from the file `told`. Raises `ModelError` if the stream does not fit
    the model or `kv`.
    """
    for name, fits in SIZES.items():
        if name not in facts or not fits(facts[name]):
            raise damaged_session_error(told.parent, f"{name} in {told.name} cannot be")
    live = StreamRunner(adapter, kv, chunk, _read_info(data, facts, adapter))
    try:
        if (tokens := live.stream.positions.tokens) != facts["unit"]:
            raise ModelError(
                f"{told.parent} has {facts['unit']} tokens of each frame and this session {tokens}; open it with the prune "
                "that it was saved with."
            )
        if live.info.timed:  # earlier versions placed every unit at the first clip's rate
            live.stream.positions.record_unit_times(0, live.info.unit_times(0))
        load_stream(live.state, data / MEMORY)
        if live.running is not None and not isinstance(live.state, FrameMemory):
            live.running.load(lambda wanted: checkpoint_io.read_tensors(data / FILM, wanted, adapter.device))
        if (units := live.state.units()) != facts["units"]:
            raise damaged_session_error(data, f"the memory holds {units} units of {facts['units']}")
        if (
            isinstance(live.around, AttentionRecording)
            and facts.get("heard") == sorted(live.around.states) != []
        ):
            shape, kind = (units * facts["unit"], adapter.view.geometry.hidden), adapter.dtype
            for layer in live.around.states:
                wanted: checkpoint_io.Wanted = {f"heard {layer}": (shape, kind)}
                film = checkpoint_io.read_tensors(data / FILM, wanted, torch.device("cpu"))
                live.around.states[layer] = [*film.values()]
    except BaseException:
        live.state.close()
        raise
    return live


def saved_content_fields(kv: KVPolicy) -> dict[str, Any] | None:
    """Return the fields of `kv` on which the content that it stores depends, JSON-ready; None if it is not for streams."""
    if not isinstance(kv, StreamPolicy):
        return None
    fields = as_json_value(Recipe(kv=kv).to_dict()["kv"]).items()
    return {name: value for name, value in fields if name not in kv.query_time_fields}


def damaged_session_error(where: Path, fault: str) -> ModelError:
    """Return the error for a session in folder `where` that is damaged: `fault` says how."""
    return ModelError(f"{where}: {fault}; the session is damaged, save it again.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_json_value(value: Any) -> Any:
    """Return `value` as it is after a round trip through JSON; raises `ModelError` if it cannot be stored."""

    def refuse(one: Any) -> None:
        raise ModelError("recipe: it holds an object that cannot be saved; name its policies instead.")

    return json.loads(json.dumps(value, default=refuse))


def _read_info(data: Path, facts: dict[str, Any], adapter: StreamAdapter) -> StreamInfo:
    wanted: checkpoint_io.Wanted = {
        "marks": ((facts["marks"], adapter.view.geometry.hidden), adapter.dtype),
        "spans": ((facts["units"], 2), torch.long),
        "times": ((facts["frames"],), torch.float64),
        **({"pending": ((facts["pending"], 3, -1, -1), torch.uint8)} if facts["pending"] else {}),
    }
    film = checkpoint_io.read_tensors(data / FILM, wanted, torch.device("cpu"))
    spans, times = [(a, b) for a, b in film["spans"].tolist()], film["times"].tolist()
    ends = [0, *(first + count for first, count in spans)]
    unbroken = all(count > 0 and first == end for (first, count), end in zip(spans, ends, strict=False))
    rising = all(map(math.isfinite, times)) and times == sorted(times)
    if not (unbroken and rising and ends[-1] <= len(times)):
        raise damaged_session_error(data, f"spans or times in {FILM} cannot be")
    (height, width), raw = facts["size"], facts["raw"]
    raw = None if raw is None else (raw[0], raw[1])
    marks, timed = film["marks"].to(adapter.device), facts.get("timed") is True
    pins = facts.get("pins", [])
    if not (isinstance(pins, list) and all(map(_is_stretch, pins))):
        raise damaged_session_error(data, "pins cannot be")
    lines = facts.get("lines", [])
    if not (isinstance(lines, list) and all(map(_is_line, lines)) and lines == sorted(lines)):
        raise damaged_session_error(data, "lines cannot be")
    more = (
        raw,
        spans,
        times,
        film.get("pending"),
        [(begin, end) for begin, end in pins],
        tuple(map(TimedText._make, lines)),
    )
    return StreamInfo((height, width), facts["fps"], facts["unit"], marks, timed, *more)
