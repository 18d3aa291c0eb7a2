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
from happened import happened, length, log_happened, noise
from scenes import QUESTION, SIDE, Scenes, build
from timing import Log, Times, compare

import mmaccel
from mmaccel_lab.world import World, render

WINDOW, FRAMES, LOCAL, KINDS = 76, 64, 8, 48
"""Of every memory, in frames; and the scenes of the stream."""
SOME = 180
"""Planted frames in which clusters are split, at once and later, also under `--shrink`."""
DAY, HOUR = 43200, 1800
DAY_QUESTION = "what colour was the star ?"


class Sizes:
    """What the steps run at: the table's sizes, or under `--shrink` ones that show that the steps run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.small, self.device = options.shrink > 1, torch.device(options.device)
        part = options.shrink
        self.window, self.budget, self.local = (max(2, n // part) for n in (WINDOW, FRAMES, LOCAL))
        self.frames, self.questions = max(24, 1800 // part), 3 if self.small else options.questions
        self.kinds, self.side = max(3, KINDS // part), 112 if self.small else SIDE
        self.early, self.late = (max(30, n // part) for n in (1024, 7200))
        self.day, self.hour = max(96, DAY // (part * 8)), max(24, HOUR // (part * 8))
        if not self.small:
            self.day, self.hour = DAY, HOUR

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

    def spread(self, sizes: Sizes, devices: list[str]) -> None:
        """Make the model anew, its layers on several devices."""
        self._made["model"] = build(devices[0], sizes.small, devices=devices)

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


def rate(session: mmaccel.VideoSession, frames: torch.Tensor, repeats: int, device: torch.device) -> Times:
    """Seconds a frame, watching `frames` again and again."""
    taken = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        session.watch(frames, fps=0.5)
        wait(device)
        taken.append((time.perf_counter() - began) / len(frames))
    return Times(tuple(taken))


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


class Planting:
    """A session, and the planted stream that it is given piece by piece."""

    def __init__(self, session: mmaccel.VideoSession, scenes: Scenes, side: int, begin: int) -> None:
        self._session, self._scenes, self._until = session, scenes, begin
        scenes.open(session, (side, side), begin)
        self.clustering = Clustering(session)

    def go_on(self, frames: int) -> None:
        self._until += frames
        self._scenes.go_on(self._session, self._until)


def splits_step(options: argparse.Namespace, log: Log) -> None:
    """Of planted streams, past the layers: what is left is the memory's own work, and making the scenes, alike for all.

    All ways see the same frames, and take turns; the first turns do not count.
    """
    sizes = Sizes(options)
    model, processor = HELD.model(sizes)
    count, turns = max(SOME, 900 // options.shrink), 5
    part = count // 3 * 2 // (turns + 1)
    ways = {f"put off, retrieves {frames} while watching": {"encode_frames": frames} for frames in (0, 8)}
    with ExitStack() as stack:
        plantings: dict[str, Planting] = {}
        sessions: dict[str, mmaccel.VideoSession] = {}
        for way, told in ways.items():
            session = mmaccel.VideoSession(model, processor, None, kv=sizes.kv("mosaic", **told))
            sessions[way] = stack.enter_context(session)
            plantings[way] = Planting(session, Scenes(model, count, sizes.kinds), sizes.side, count // 3)
        runs = {way: partial(one.go_on, part) for way, one in plantings.items()}
        taken = compare(runs, warmup=1, repeats=turns, device=sizes.device)
        for way, times in taken.items():
            each, told = Times(tuple(seconds / part for seconds in times.seconds)), sessions[way].counters()
            spent = plantings[way].clustering.seconds / (part * (1 + turns))
            made = {
                name: told[name] for name in ("eager_splits", "deferred_splits", "deferred", "visual_splits")
            }
            log.row(case="splits", way=way, frames=count, cluster_s=spent, **each.row(), **made)
            print(
                f"splits {way:36} {each.median * 1e3:6.2f} ms a frame, {spent * 1e3:5.2f} of them clustering, "
                f"{made['eager_splits']:.0f} at once, {made['deferred_splits']:.0f} later",
                flush=True,
            )
        for way, session in sessions.items():
            session.ask(QUESTION, 1)
            log_happened(log, f"splits, {way}", session, "mosaic")


def work_apart(rank: int, count: int, small: bool, rounds: int, gate: Any, told: Any) -> None:
    """One stream of one process on its own device."""
    options = argparse.Namespace(
        shrink=30 if small else 1, device=f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    )
    options.questions = 1
    sizes = Sizes(options)
    if sizes.device.type == "cuda":
        torch.cuda.set_device(sizes.device)
    torch.set_num_threads(1)
    frames = noise(sizes.side, 16 if small else 64, sizes.device)
    try:
        model, processor = HELD.model(sizes)
        with mmaccel.VideoSession(model, processor, None, kv=sizes.kv("mosaic")) as session:
            planted(session, sizes, length(sizes.window) - (2 + rounds) * len(frames))
            for _ in range(2):
                session.watch(frames, fps=0.5)
            gate.wait()
            seconds = rate(session, frames, rounds, sizes.device).median
            session.ask(QUESTION, 1)
            told.put((seconds, happened(session, "mosaic", many=False)))
    except RuntimeError as error:
        told.put(error)
        gate.abort()


def streams_step(options: argparse.Namespace, log: Log) -> None:
    sizes, alone = Sizes(options), 0.0
    HELD.drop("rekv", "mosaic", "model")
    devices = torch.cuda.device_count() if sizes.device.type == "cuda" else 2
    mp = torch.multiprocessing.get_context("spawn")
    for count in [n for n in (1, 2, 4, 8) if n <= devices]:
        gate, told = mp.Barrier(count), mp.Queue()
        args = (count, sizes.small, 1 if sizes.small else 5, gate, told)
        workers = [mp.Process(target=work_apart, args=(rank, *args)) for rank in range(count)]
        for one in workers:
            one.start()
        found = [told.get(timeout=240) for _ in workers]
        for one in workers:
            one.join()
        for one in found:
            if isinstance(one, Exception):
                raise one
            log.row(case="happened", way=f"streams on {count}", **one[1])
        total = sum(1 / seconds for seconds, _ in found)
        alone = alone or total
        log.row(case="streams", devices=count, frames_s=total, linear=total / (alone * count))
        print(
            f"streams on {count} devices: {total:.1f} frames/s, {total / (alone * count):.2f} of linear",
            flush=True,
        )


def day_step(options: argparse.Namespace, log: Log) -> None:
    sizes = Sizes(options)
    dtype = torch.bfloat16 if sizes.device.type == "cuda" else torch.float32
    model = mmaccel.load_model("tiny-ov", dtype=dtype).to(sizes.device)
    processor = mmaccel.load_processor("tiny-ov")
    kv = sizes.kv("mosaic", window=min(32, sizes.window), frames=min(32, sizes.budget))
    first = {"frame_s": 0.0, "beside": 0.0}
    with mmaccel.VideoSession(model, processor, None, kv=kv, chunk=64 * 64) as session:
        for hour in range(sizes.day // sizes.hour):
            table = World.generate(900 + hour, sizes.hour).table(0.3)
            on = {name: column.to(sizes.device) for name, column in table.items()}
            drawn = watched = 0.0
            for start in range(0, sizes.hour, 256):
                wait(sizes.device)
                began = time.perf_counter()
                frames = render({name: column[start : start + 256] for name, column in on.items()}, 112, 112)
                wait(sizes.device)
                middle = time.perf_counter()
                session.watch(frames, fps=0.5)
                wait(sizes.device)
                drawn, watched = drawn + middle - began, watched + time.perf_counter() - middle
            if not hour:
                # The first question compiles, the second is captured, whose kernels want a room for work.
                opening = [session.ask(DAY_QUESTION, 4).ttft_s for _ in range(2)]
                log.row(case="day begins", first_ttft_s=opening[0], second_ttft_s=opening[1])
            answer = session.ask(DAY_QUESTION, 4)
            told = answer.counters
            held = torch.cuda.memory_allocated() if sizes.device.type == "cuda" else 0
            # Beside what the memory holds nothing on the device grows; the host holds each frame that has left the window
            # once.
            beside = held - told["bytes"]
            if not hour:
                first = {"frame_s": watched / sizes.hour, "beside": beside}
            state: Any = session._live.state  # type: ignore[union-attr]
            shape, left = state.geometry, told["units"] - told["resident"]
            entry = state.stream.tokens_per_unit * 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
            log.row(
                case="day", hour=hour + 1, slower=watched / sizes.hour / first["frame_s"],
                device_predicted=first["beside"] + told["bytes"], host_predicted=left * shape.layers * entry,
                frames=session.frames, frame_s=watched / sizes.hour,
                drawn_s=drawn / sizes.hour, device_bytes=held, memory_bytes=told["bytes"], index_bytes=told["index_bytes"],
                host_bytes=told["host_bytes"], summary_bytes=told["summary_bytes"], clusters=told["clusters"],
                visual_clusters=told["visual_clusters"], ttft_s=answer.ttft_s,
            )  # fmt: skip
            print(
                f"day, hour {hour + 1:2}: {watched / sizes.hour * 1e3:6.2f} ms a frame, drawing "
                f"{drawn / sizes.hour * 1e3:.2f}; device {held / 2**20:7.1f} MiB, index {told['index_bytes'] / 2**20:6.1f}, "
                f"host {told['host_bytes'] / 2**20:8.1f}; {told['clusters']:.0f} clusters; first token "
                f"{answer.ttft_s * 1e3:.1f} ms",
                flush=True,
            )
        log_happened(log, "day, mosaic", session, "mosaic", many=True)
