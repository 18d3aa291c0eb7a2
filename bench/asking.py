"""What a question costs: how one is asked of a planted stream and what it is seen to do; the steps of `bench/stream.py` that
vary what is asked of.

budgets  to the first token at 16 to 128 retrieved frames (the paper's Figure 10)
lengths  to the first token as a stream grows (Figures 3b, 3c and 12); `seconds_in` of it are spent on the wire
rivals   to the first token of the memories that retrieve nothing from the host (Table III, Figure 7)
whole    the plain model without a memory: everything from the pixels on, and its peak (Table I)
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from happened import log_happened, noise
from scenes import QUESTION, SHAPE, Scenes
from timing import Log
from torch import Tensor
from watching import HELD, Sizes, wait

import mmaccel
from mmaccel.policies.kv.store import HostStore
from mmaccel.policies.kv.store.slabs import view_by_unit

WIRE = ("copies_in", "bytes_in", "seconds_in", "gathers")
WAITS = ("slack_seconds", "waited_seconds", "waited_missing_seconds")
FETCH = ("needed", "covered", "missing", "guessed", "in_time", *WAITS)
BUDGETS = (16, 32, 64, 128)
LENGTHS = (225, 450, 900, 1800, 3600)
WHOLE = (32, 64, 128, 256, 512, 1024)
SEEN = 256
"""Frames watched by memories whose cost does not depend on how many there were, and by those that keep everything."""
RIVALS: dict[str, dict[str, Any]] = {
    "no_cache": {},
    "livevlm": {},
    "streammem": {},
    "recent": {},
    "full": {},
    "offload": {},
}


class CopiesEach(HostStore):
    """A store that brings keys and values of every unit by a copy of their own, as ReKV moves them."""

    can_gather = False  # type: ignore[assignment]

    def fetch(self, layer: int, units: Sequence[int], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = self.new_device_buffer(len(units)) if out is None else out
        wire = self.lanes.wire

        def work() -> None:
            for at, unit in enumerate(units):
                for side, rows in enumerate(self.unit_view(layer, unit)[0]):
                    view_by_unit(out, self.shape.tokens)[side, :, at].copy_(rows, non_blocking=True)

        wire.wait(self.lanes.compute_queue.record_mark())
        began = wire.record_mark(timed=True)
        wire.run(work)
        self.lanes.compute_queue.wait(self._end("seconds_in", began, fetches=1, copies_in=2 * len(units)))
        self.count_copied(len(units))
        return out[0], out[1]


@contextmanager
def changed(state: Any, told: Mapping[str, Any]) -> Iterator[None]:
    """A memory with one part changed, for a question."""
    changes = [(state, name, value) for name, value in told.items() if name not in ("store", "warm")]
    changes += [(state.store, "__class__", told["store"])] if "store" in told else []
    before = [(part, name, getattr(part, name)) for part, name, _ in changes]
    try:
        for part, name, value in changes:
            setattr(part, name, value)
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


def asked(
    session: mmaccel.VideoSession,
    scenes: Scenes,
    kinds: tuple[int, ...],
    told: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """One question under what `told` changes: seconds and the difference that it made to the counters."""
    live, told, device = session._live, told or {}, scenes.device
    assert live is not None
    state: Any = live.state
    if hasattr(state, "prefetcher") and not told.get("warm"):
        state.prefetcher.forget_from(0)
    with changed(state, told), scenes.asking(*kinds):
        state.end_ingest()
        before = state.counters()
        wait(device)
        began = time.perf_counter()
        answer = session.ask(QUESTION, 1)
        wait(device)
        whole = time.perf_counter() - began
    after = state.counters()
    found = {"ttft_s": answer.ttft_s, "whole_s": whole, "recall": scenes.recall(answer, kinds)}
    for names, prefix in ((WIRE, "host_"), (FETCH, "fetch_")):
        for one in names:
            if prefix + one in after:
                found[one] = after[prefix + one] - before[prefix + one]
    return found


def grown(session: mmaccel.VideoSession, scenes: Scenes, sizes: Sizes, until: int) -> None:
    """A session's planted stream up to frame number `until`."""
    if session.frames:
        scenes.go_on(session, until)
    else:
        scenes.open(session, (sizes.side, sizes.side), until)


def spread(ttft: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile of the seconds to the first token."""
    some = sorted(ttft)
    return {
        "p50_s": statistics.median(some),
        "p95_s": some[min(len(some) - 1, round(0.95 * (len(some) - 1)))],
        "questions": len(some),
    }


def some_questions(
    session: mmaccel.VideoSession, scenes: Scenes, sizes: Sizes, count: int, told: Mapping[str, Any]
) -> dict[str, Any]:
    """A row of several questions, after two that do not count: the spread of the first token, means of the rest."""
    draw, rows = random.Random(0), list[dict[str, float]]()
    for _ in range(count + 2):
        rows.append(asked(session, scenes, tuple(draw.sample(range(sizes.kinds), 2)), told))
    rows = rows[2:]
    mean = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    return {**spread([row["ttft_s"] for row in rows]), **mean, "model": SHAPE}


def budgets_step(options: argparse.Namespace, log: Log) -> None:
    sizes = Sizes(options)
    ways: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("rekv, a copy a frame", "rekv", {"store": CopiesEach}),
        ("rekv, coalesced", "rekv", {}),
        ("mosaic", "mosaic", {}),
    )
    for budget in BUDGETS:
        frames = max(2, budget * sizes.budget // 64)
        for way, name, told in ways:
            session, scenes = HELD.session(sizes, name)
            row = some_questions(
                session, scenes, sizes, max(3, sizes.questions // 2), {**told, "budget": frames}
            )
            log.row(case="budgets", way=way, budget=frames, frames=sizes.frames, **row)
            print(f"{frames:4} frames, {way:22} p50 {row['p50_s'] * 1e3:7.1f} ms", flush=True)
    for name in ("rekv", "mosaic"):
        log_happened(log, f"budgets, {name}", HELD.session(sizes, name)[0], name, many=True)


def lengths_step(options: argparse.Namespace, log: Log) -> None:
    sizes = Sizes(options)
    lengths = [max(6 * sizes.window * (n + 1), length // options.shrink) for n, length in enumerate(LENGTHS)]
    lengths = list(LENGTHS) if not sizes.small else lengths
    model, processor = HELD.model(sizes)
    HELD.drop("rekv", "mosaic")
    for name in ("rekv", "mosaic"):
        scenes = Scenes(model, lengths[-1], sizes.kinds)
        with mmaccel.VideoSession(model, processor, None, kv=sizes.kv(name)) as session:
            for length in lengths:
                grown(session, scenes, sizes, length)
                ways = {"rekv, a copy a frame": {"store": CopiesEach}, "rekv, coalesced": {}}
                for way, told in (ways if name == "rekv" else {name: {}}).items():
                    row = some_questions(session, scenes, sizes, max(3, sizes.questions // 2), told)
                    log.row(case="lengths", way=way, frames=length, budget=sizes.budget, **row)
                    print(
                        f"{length:5} frames, {way:22} p50 {row['p50_s'] * 1e3:7.1f} ms, on the wire "
                        f"{row['seconds_in'] * 1e3:6.1f}",
                        flush=True,
                    )
            log_happened(log, f"lengths, {name}", session, name, many=True)


def first_tokens(session: mmaccel.VideoSession, count: int) -> list[float]:
    """Seconds to the first token of `count` questions, after one that does not count."""
    return [session.ask(QUESTION, 1).ttft_s for _ in range(count + 1)][1:]


def fields_of(name: str, sizes: Sizes, frames: int) -> dict[str, Any]:
    """A memory at the common window and budget, of what it has of them, that has room for `frames`."""
    known = mmaccel.core.registry.registry("kv")[name].__dataclass_fields__
    own = {"window": sizes.window, "frames": sizes.budget, "local": sizes.local, "kept": 2 * max(frames, 64)}
    if name == "recent":
        own["local"] = min(sizes.window, sizes.budget)
    return {"name": name, **{field: value for field, value in own.items() if field in known}}


def rivals_step(options: argparse.Namespace, log: Log) -> None:
    sizes = Sizes(options)
    model, processor = HELD.model(sizes)
    seen = max(16, SEEN // options.shrink)
    part = noise(sizes.side, min(seen, 64), sizes.device)
    for name in RIVALS:
        with mmaccel.VideoSession(model, processor, None, kv=fields_of(name, sizes, seen)) as session:
            while session.frames < seen:
                session.watch(part[: seen - session.frames], fps=0.5)
            row = spread(first_tokens(session, max(3, sizes.questions // 4)))
            if name == "offload":
                log_happened(log, f"rivals, {name}", session, name)
            held = session.counters().get("bytes", 0.0)
            log.row(case="rivals", way=name, frames=seen, budget=sizes.budget, bytes=held, model=SHAPE, **row)
            print(f"{name:10} p50 {row['p50_s'] * 1e3:8.1f} ms, holds {held / 2**30:.2f} GiB", flush=True)


def whole_step(options: argparse.Namespace, log: Log) -> None:
    sizes = Sizes(options)
    model, processor = HELD.model(sizes)
    HELD.drop("rekv", "mosaic")
    cuda = sizes.device.type == "cuda"
    for length in WHOLE:
        frames = max(2, length // options.shrink)
        kv = {"name": "no_cache", "frames": frames, "kept": 2 * frames}
        row: dict[str, Any] = {"case": "whole", "way": "no memory", "frames": frames, "model": SHAPE}
        with mmaccel.VideoSession(model, processor, None, kv=kv) as session:
            session.watch(noise(sizes.side, frames, sizes.device), fps=0.5)
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                row |= spread(first_tokens(session, 2))
            except torch.OutOfMemoryError:
                row["out_of_memory"] = True
            row["peak_bytes"] = torch.cuda.max_memory_allocated() if cuda else 0
        log.row(**row)
        taken = "out of memory" if "p50_s" not in row else f"{row['p50_s']:.2f} s"
        print(f"{frames:5} frames, no memory: {taken}, peak {row['peak_bytes'] / 2**30:.1f} GiB", flush=True)
