"""What it takes to watch: the steps of `bench/stream.py` in which frames go through `VideoSession.watch`; what all share."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from scenes import QUESTION, SIDE, Scenes, build
from timing import Log, Times, compare

import mmaccel

WINDOW, FRAMES, LOCAL, KINDS = 76, 64, 8, 48
"""Of every memory, in frames; and the scenes of the stream."""
SOME = 180
"""Planted frames in which clusters are split, also under `--shrink`."""


MUST = ("recalled", "host_bytes_in")
"""Of any memory that retrieves from the host."""
MUST_PUT_OFF = ("deferred", "singletons")
"""Of mosaic besides; after many questions, which make owed ones, `deferred_splits` too. And `splits` wherever they are
made."""
OFF = 0.9
"""Of a stream's units, at least so many are not on the device."""


class Sizes:
    """What the steps run at: the table's sizes, or under `--shrink` ones that show that the steps run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.small, self.device = options.shrink > 1, torch.device(options.device)
        part = options.shrink
        self.window, self.budget, self.local = (max(2, n // part) for n in (WINDOW, FRAMES, LOCAL))
        self.frames, self.questions = max(24, 1800 // part), 3 if self.small else options.questions
        self.kinds, self.side = max(3, KINDS // part), 112 if self.small else SIDE
        self.early, self.late = (max(30, n // part) for n in (1024, 7200))

    def kv(self, name: str, **more: Any) -> dict[str, Any]:
        """A memory under the common window and budget."""
        fields: dict[str, Any] = {"name": name, "window": self.window, "frames": self.budget}
        if name == "mosaic":
            fields["local"] = self.local
            if self.small:
                fields["index"] = {"name": "clusters", "init": 16}
        return {**fields, **more}


class Held:
    """The model and the streams that steps share; made when first asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def model(self, sizes: Sizes) -> tuple[Any, Any]:
        if "model" not in self._made:
            self._made["model"] = build(str(sizes.device), sizes.small)
        return self._made["model"]  # type: ignore[no-any-return]

    def session(self, sizes: Sizes, name: str) -> tuple[mmaccel.VideoSession, Scenes]:
        """A session with the planted stream in the memory `name`."""
        if name not in self._made:
            model, processor = self.model(sizes)
            scenes = Scenes(model, sizes.frames, sizes.kinds)
            session = mmaccel.VideoSession(model, processor, None, kv=sizes.kv(name))
            began = time.perf_counter()
            scenes.open(session, (sizes.side, sizes.side))
            wait(sizes.device)
            print(
                f"  {name}: {sizes.frames} frames planted in {time.perf_counter() - began:.1f} s", flush=True
            )
            self._made[name] = session, scenes
        return self._made[name]  # type: ignore[no-any-return]

    def drop(self, *names: str) -> None:
        """Give up streams, or the model."""
        for name in names:
            made = self._made.pop(name, None)
            if made is not None and isinstance(made[0], mmaccel.VideoSession):
                made[0].close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


HELD = Held()


def wait(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


SWITCHES: dict[str, dict[str, Any]] = {
    "all on": {},
    "layers off": {"encode_by": "frame"},
    "retrieval off": {"encode_frames": 0},
}
SLOW = ("layers off",)
"""They are shown half as many frames."""


class Clustering:
    """Seconds that the host spends on the clusters of a session: on units that come, and on splits that were put off."""

    def __init__(self, session: mmaccel.VideoSession) -> None:
        self.seconds = 0.0
        state: Any = session._live.state  # type: ignore[union-attr]
        for name in ("assign_units", "split_deferred"):
            if hasattr(state.index, "tree"):
                setattr(state.index.tree, name, self._timed(getattr(state.index.tree, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*given, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def encode_step(options: argparse.Namespace, log: Log) -> None:
    """All sessions are open at once and take turns: host memory that one gave back would be pinned already for the next.

    Each begins with planted scenes, as many as make its stream long enough.
    """
    sizes = Sizes(options)
    HELD.drop("rekv", "mosaic")
    model, processor = HELD.model(sizes)
    count, turns = 12 if sizes.small else 64, (2, 3)
    frames = noise(sizes.side, count, sizes.device)
    ways = {f"mosaic, {way}": ("mosaic", told) for way, told in SWITCHES.items()} | {
        "rekv, all on": ("rekv", {})
    }
    shown = {way: frames[: count // 2] if way.endswith(SLOW) else frames for way in ways}
    runs: dict[str, Callable[[], Any]] = {}
    clustering: dict[str, Clustering] = {}
    sessions: dict[str, mmaccel.VideoSession] = {}
    with ExitStack() as stack:
        for way, (name, told) in ways.items():
            session = sessions[way] = stack.enter_context(
                mmaccel.VideoSession(model, processor, None, kv=sizes.kv(name, **told))
            )
            planted(session, sizes, length(sizes.window) - sum(turns) * len(shown[way]))
            clustering[way] = Clustering(session)
            runs[way] = partial(session.watch, shown[way], fps=0.5)
        taken = compare(runs, warmup=turns[0], repeats=turns[1], device=sizes.device)
        for way, session in sessions.items():
            session.ask(QUESTION, 1)
            log_happened(log, f"encode, {way}", session, ways[way][0])
    for way, times in taken.items():
        each = Times(tuple(seconds / len(shown[way]) for seconds in times.seconds))
        # Those of all turns, the first ones too.
        spent = clustering[way].seconds / (len(shown[way]) * sum(turns))
        log.row(case="encode", way=way, frames_s=1 / each.median, cluster_s=spent, **each.row())
        print(
            f"encode {way:24} {1 / each.median:7.1f} frames/s, {spent * 1e3:5.2f} ms of a frame are clustering",
            flush=True,
        )


def planted(session: mmaccel.VideoSession, sizes: Sizes, frames: int) -> None:
    """A fresh session's stream begins with `frames` frames of scenes or `SOME`, past the layers."""
    frames = max(frames, SOME)
    scenes = Scenes(HELD.model(sizes)[0], frames, sizes.kinds)
    scenes.open(session, (sizes.side, sizes.side))


def length(window: int) -> int:
    """Frames of a stream of which enough are off the device, under a window of so many."""
    return int(window / (1 - OFF)) + 1


def happened(session: mmaccel.VideoSession, name: str, many: bool) -> dict[str, float]:
    """What shows that a stream was worth measuring, after `many` questions or few; raises `RuntimeError` for what did not
    happen. `name`: of the memory."""
    told = session.counters()
    told["splits"] = sum(told.get(one, 0.0) for one in ("eager_splits", "deferred_splits", "visual_splits"))
    must = [*MUST]
    if name == "mosaic":
        must += ["splits", *MUST_PUT_OFF, *(["deferred_splits"] if many else [])]
    missing = [one for one in must if not told[one]]
    off = 1 - told["resident"] / told["units"]
    if off < OFF:
        missing.append(f"{OFF:.0%} of the stream off the device, but {off:.1%}")
    if missing:
        raise RuntimeError(f"{name}, a stream that shows too little: no {', no '.join(missing)}")
    return {one: told[one] for one in must} | {"off": off}


def log_happened(log: Log, way: str, session: mmaccel.VideoSession, name: str, many: bool = False) -> None:
    """A row of `happened`."""
    log.row(case="happened", way=way, **happened(session, name, many))


def noise(side: int, count: int, device: torch.device) -> torch.Tensor:
    """[count, 3, side, side] uint8 frames with nothing in them."""
    draw = torch.Generator(device).manual_seed(0)
    return torch.randint(256, (count, 3, side, side), generator=draw, device=device, dtype=torch.uint8)
