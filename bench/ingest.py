"""Bulk ingestion at size: the steps of `bench/stream.py` in which a stored film is taken in.

ingest  frames a second of the language model, from features of planted scenes to mosaic's host store: a film encoded live
        under the window, ingested under `grid` and `vertical_slash` heads by a table, and ingested dense over everything;
        with the floor by the work and the bytes of each. At the longer film dense attention is timed on one layer at three
        depths, and the rest scaled from the shorter film's row (`scaled`)

Rows that are in the file are not measured again. Random weights know no scenes: diagonals are given, at multiples of a
frame, as in `bench/prefill.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from attend import GivenDiagonals
from scenes import SHAPE, timeline
from timing import Log, measure, read_rows
from torch import Tensor, nn
from watching import HELD, Sizes, wait

import mmaccel
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.attach import adapter_for
from mmaccel.models.stream import HFStreamAdapter

SIDE = 14
"""Pixels of a frame that no tower looks at."""
MARKS = {1800: 2.0, 7200: 1.5}
"""Sparse ingestion over encoding under the window, by frames; over dense at the longer film `OVER_DENSE`."""
OVER_DENSE = 3.0


class FilmFeatures:
    """What stands for the vision tower: features of scenes that stay, cut and return, and noise; of each adapter its own."""

    def __init__(self, frames: int, kinds: int) -> None:
        self._scene, _ = timeline(frames, kinds, torch.Generator().manual_seed(0))
        self._kinds, self._of = kinds, dict[int, Any]()

    def __call__(self, adapter: Any, frames: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        device, hidden, unit = adapter.device, adapter.view.geometry.hidden, adapter._unit(size)[1]
        if id(adapter) not in self._of:
            draw = torch.Generator(device).manual_seed(0)
            looks = torch.randn(self._kinds, hidden, generator=draw, device=device)
            self._of[id(adapter)] = [adapter, draw, looks, 0]
        _, draw, looks, at = held = self._of[id(adapter)]
        count = len(frames) // adapter.frames_a_step
        held[3] = at + count
        scene = self._scene[(torch.arange(count) + at) % len(self._scene)].to(device)
        own = torch.randn(count, 1, hidden, generator=draw, device=device)
        rows = looks[scene][:, None] + 0.3 * own
        rows = rows + torch.randn(count, unit, hidden, generator=draw, device=device)
        return (0.02 * rows).to(adapter.dtype), rows.new_zeros(1, hidden, dtype=adapter.dtype)


@contextmanager
def without_tower(frames: int, kinds: int) -> Iterator[None]:
    """While inside, sessions take features of a planted film for those of their frames."""
    film = FilmFeatures(frames, kinds)

    def features(adapter: Any, frames: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return film(adapter, frames, size)

    with patch.object(HFStreamAdapter, "features", features):
        yield


def table(model: nn.Module, small: bool) -> dict[str, Any]:
    """Half of the heads of each layer grid, half vertical-slash at multiples of a frame."""
    shape, block = adapter_for(model).geometry(model), 16 if small else 64
    budgets = {"vertical": 16, "slash": 16, "pitch": 16} if small else {"slash": 1024, "pitch": 196}
    lines = GivenDiagonals(block=block, **budgets)
    heads = {head: lines if head % 2 else {"name": "grid", "stride": "frame"} for head in range(shape.heads)}
    return {"name": "per_head", "block": block, "table": dict.fromkeys(range(shape.layers), heads)}


def recipe_of(way: str, sizes: Sizes, model: nn.Module, frames: int) -> dict[str, Any]:
    """The choices of a session: "window", "sparse" or "dense"."""
    chunk = 512 if sizes.small else None
    if way == "sparse":
        sparse = table(model, sizes.small)
        return {"kv": sizes.kv("mosaic"), "sparse": sparse, "chunk": chunk}
    more = {"ingest_frames": frames} if way == "dense" else {}
    # The passes of a window are what `watch` makes of it by itself.
    return {"kv": sizes.kv("mosaic", **more), "chunk": chunk if way == "dense" else None}


def take_in(session: mmaccel.VideoSession, way: str, frames: int, name: str) -> tuple[float, float]:
    """Seconds in which a film of `frames` frames is taken in, and how many of these come after its last pass, when an
    ingestion's units leave for the host. Tells how far it is in tenths."""
    devices, tenths, passed = {*session._stream_adapter.layer_devices}, 0, 0.0

    def tell(done: int, total: int | None) -> None:
        nonlocal tenths, passed
        if done == frames:
            wait(*devices)
            passed = time.perf_counter()
        if 10 * done // frames > tenths:
            tenths = 10 * done // frames
            print(f"  {name}: {done} frames, {time.perf_counter() - began:.1f} s", flush=True)

    film = torch.zeros(frames, 3, SIDE, SIDE, dtype=torch.uint8)
    wait(*devices)
    began = time.perf_counter()
    (session.watch if way == "window" else session.ingest)(film, fps=0.5, progress=tell)
    wait(*devices)
    ended = time.perf_counter()
    return ended - began, ended - passed


def before(log: Log, **told: Any) -> dict[str, Any] | None:
    """The last row of the file that has all of `told`."""
    rows = [row for row in read_rows([log.path]) if all(row.get(name) == one for name, one in told.items())]
    return rows[-1] if rows else None


class Floors:
    """The least seconds of a film, by what the device multiplies and what the wire carries in a second, measured."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        family = adapter_for(model)
        self.shape = family.geometry(model)
        layers: Any = family.layers(model)
        self.weights = sum(p.numel() for layer in layers for p in layer.parameters())
        self.dtype = next(model.parameters()).dtype
        n, cuda = (8192, True) if device.type == "cuda" else (256, False)
        x = torch.randn(n, n, device=device, dtype=self.dtype)
        self.flops = 2 * n**3 / measure(lambda: x @ x, repeats=5, device=device).median
        host = torch.empty(n * n, dtype=self.dtype, pin_memory=cuda)
        copies = measure(lambda: host.copy_(x.view(-1), non_blocking=True), repeats=5, device=device)
        self.wire = host.nbytes / copies.median

    def seconds(self, tokens: int, pairs: float) -> float:
        """Of `tokens` tokens that go to the host, and `pairs` pairs over all layers and heads."""
        work = 2 * self.weights * tokens + 4 * self.shape.head_dim * pairs
        each = 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize
        return max(work / self.flops, tokens * each / self.wire)


def pairs_of(way: str, session: mmaccel.VideoSession, frames: int, sizes: Sizes) -> float:
    """Pairs that a film was encoded by, over all layers and heads."""
    live: Any = session._live
    shape, unit = session._stream_adapter.view.geometry, live.info.tokens_per_unit
    tokens = frames * unit
    if way == "sparse":
        meter = session._stream_adapter.attention.meter
        return sum(float(part.sum()) for parts in meter.listed.values() for part in parts)
    most = tokens if way == "dense" else sizes.window * unit
    return shape.layers * shape.heads * (tokens * most - (most * most) / 2)


def film_row(way: str, frames: int, sizes: Sizes, log: Log, floors: Floors) -> dict[str, Any]:
    told = {"case": "ingest", "way": way, "frames": frames}
    if (known := before(log, **told)) is not None:
        return known
    model, processor = HELD.model(sizes)
    with without_tower(frames, sizes.kinds):
        for number, count in enumerate((min(frames, 400), frames)):  # what compiles does so in the first
            with mmaccel.VideoSession(
                model, processor, None, **recipe_of(way, sizes, model, frames)
            ) as session:
                if sizes.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                seconds, left_s = take_in(session, way, count, f"{way}, {count} frames")
                if not number:
                    continue
                report, counters = session.report(), session.counters()
                pairs = pairs_of(way, session, frames, sizes)
                floor = floors.seconds(frames * session._live.info.tokens_per_unit, pairs)  # type: ignore[union-attr]
    figures = {"seconds": seconds, "frames_s": frames / seconds, "floor_s": floor, "kept": report.kept}
    figures |= {
        "left_s": left_s,
        "of_floor": floor / seconds,
        "seen": counters.get("ingest_seen"),
        "peak_bytes": report.peak_bytes,
    }
    figures |= {"host_bytes": counters.get("host_bytes"), "backend": report.backend, "model": SHAPE}
    log.row(**told, **figures)
    print(
        f"ingest {way:7} {frames} frames: {frames / seconds:7.1f} frames/s, floor {frames / floor:7.1f}, "
        f"kept {report.kept}, seen {figures['seen']}, {left_s:.1f} s after the last pass",
        flush=True,
    )
    return {**told, **figures}


def attention_s(sizes: Sizes, frames: int, unit: int) -> float:
    """Seconds of all layers' dense attention of a film, timed on one layer at three depths (Simpson's rule)."""
    shape = adapter_for(HELD.model(sizes)[0]).geometry(HELD.model(sizes)[0])
    device = sizes.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = min(1 << 15 if not sizes.small else 512, frames * unit)
    taken = []
    for depth in (rows, (rows + frames * unit) // 2, frames * unit):
        size = 1, shape.kv_heads, depth, shape.head_dim
        key, value = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
        query = torch.randn(1, shape.heads, rows, shape.head_dim, device=device, dtype=dtype)
        call = partial(dense_attend, query, key, value, shape.head_dim**-0.5, depth - rows, None)
        taken.append(measure(call, warmup=1, repeats=2, device=device).median)
    passes = frames * unit / rows
    return shape.layers * passes * (taken[0] + 4 * taken[1] + taken[2]) / 6


def scaled_dense(frames: int, sizes: Sizes, log: Log, floors: Floors) -> dict[str, Any]:
    """Of a film whose keys no device holds: the rest of the shorter film's seconds, and attention at this length."""
    told = {"case": "ingest", "way": "dense", "frames": frames}
    if (known := before(log, **told)) is not None:
        return known
    short = film_row("dense", sizes.frames, sizes, log, floors)
    unit = HELD.model(sizes)[1].chat(
        [{"type": "video", "video": torch.zeros(1, 3, SIDE, SIDE).byte()}], fps=0.5
    )
    unit = int((unit["input_ids"] == HELD.model(sizes)[1].video_token_id).sum()) - 1
    rest = max(short["seconds"] - attention_s(sizes, sizes.frames, unit), 0.0) / sizes.frames
    seconds = rest * frames + attention_s(sizes, frames, unit)
    tokens = frames * unit
    floor = floors.seconds(tokens, floors.shape.layers * floors.shape.heads * tokens**2 / 2)
    figures = {
        "seconds": seconds,
        "frames_s": frames / seconds,
        "floor_s": floor,
        "scaled": True,
        "model": SHAPE,
    }
    log.row(**told, **figures)
    print(
        f"ingest dense   {frames} frames, scaled: {frames / seconds:7.1f} frames/s, floor {frames / floor:.1f}"
    )
    return {**told, **figures}


def ingest_step(name: str) -> Callable[[argparse.Namespace, Log], None]:
    """All ways of one film; `name` is that of its length among the sizes."""

    def run(options: argparse.Namespace, log: Log) -> None:
        sizes = Sizes(options)
        HELD.drop("rekv", "mosaic")
        frames, long = getattr(sizes, name), name == "late"
        floors = Floors(HELD.model(sizes)[0], sizes.device)
        window = film_row("window", frames, sizes, log, floors)
        sparse = film_row("sparse", frames, sizes, log, floors)
        dense = scaled_dense if long else partial(film_row, "dense")
        row = {"frames": frames, "over_window": sparse["frames_s"] / window["frames_s"]}
        row["over_dense"] = sparse["frames_s"] / dense(frames, sizes, log, floors)["frames_s"]
        row |= {"mark_window": MARKS[7200 if long else 1800], "mark_dense": OVER_DENSE if long else None}
        log.row(case="ingest ratio", **row)
        print(
            f"ingest {frames} frames: sparse {row['over_window']:.2f} x the window (mark {row['mark_window']}), "
            f"{row['over_dense']:.2f} x dense (mark {row['mark_dense']})",
            flush=True,
        )

    return run
