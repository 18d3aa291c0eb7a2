"""The speed table of endless streams at LLaVA-OneVision-7B's shape, in one resumable run.

    python bench/stream.py --device cuda --out bench/results/stream_h200_202601.jsonl
    python bench/stream.py --device cuda --out ... --only question profile
    python bench/stream.py --device cpu --out rows.jsonl --shrink 30          # does it run at all?

Random weights, bf16, 196 tokens a frame, 1 800 frames of planted scenes (`bench/scenes.py`), all but the window on the host,
64 retrieved by each layer. Steps:

question  seconds from `VideoSession.ask` to the first token on the host, cluster cache flushed: ReKV with the paper's
          copies and with coalesced ones, mosaic, and mosaic with one part changed at a time; in turns, and each "asked
          alone", ten times in a row; for each the copies, the bytes, GB/s while the wire was busy, what was fetched ahead,
          and the share of recalled frames that show the scenes asked for
profile   of one question of each memory: launches, device time, and what the host spends its time on
encode    frames a second through `VideoSession.watch`, vision tower included, of streams that begin with planted scenes;
          with each batching switch off, and with passes that retrieve nothing; all in turns
memory    device memory after 1 024 and 7 200 frames, its growth a frame, ReKV's after 1 024, and where keeping everything on
          the device ends
ingest    a stored film (`bench/ingest.py`)

A stream in a host store of which less than nine in ten frames are off the device, or in which nothing was split, put off or
retrieved, is no measurement: its step fails (rows `happened`). A step whose row is in the file is not
run again; none is begun that would not end within `--limit` seconds by its own estimate.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from ingest import ingest_step
from scenes import QUESTION, SHAPE, Scenes
from steps import Step, parser_of, run_steps
from timing import Log
from watching import HELD, LOCAL, Sizes, encode_step, log_happened, wait

import mmaccel
from mmaccel.policies.kv.store import HostStore
from mmaccel.policies.kv.store.slabs import view_by_unit

ALONE = 10
"""Questions of a variant that is asked alone, after two that do not count."""

WIRE = ("copies_in", "bytes_in", "seconds_in", "gathers")
WAITS = ("slack_seconds", "waited_seconds", "waited_missing_seconds")
FETCH = ("needed", "covered", "missing", "guessed", "in_time", *WAITS)


class CopiesEach(HostStore):
    """A store that brings keys and values of every unit by a copy of their own, as ReKV moves them."""

    can_gather = False  # type: ignore[assignment]

    def fetch(self, layer: int, units: Sequence[int], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = self.new_device_buffer(len(units)) if out is None else out
        wire = self.lanes.wire

        def work() -> None:
            for at, unit in enumerate(units):
                for side, rows in enumerate(self.unit_views(layer, [unit])[0][0]):
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


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rekv, a copy a frame": ("rekv", {"store": CopiesEach}),
    "rekv, coalesced": ("rekv", {}),
    "rekv, 8 local frames": ("rekv", {"local": LOCAL}),
    "rekv, 1 frame": ("rekv", {"budget": 1}),
    "mosaic": ("mosaic", {}),
    "mosaic, asked again": ("mosaic", {"warm": True}),
    "mosaic, no prefetch": ("mosaic", {"prefetch": "off"}),
    "mosaic, predictor query": ("mosaic", {"prefetch": "query"}),
    "mosaic, no pseudo tokens": ("mosaic", {"reps": 0}),
    "mosaic, no local frames, no pseudo tokens": ("mosaic", {"reps": 0, "local": 0}),
}


def question_step(options: argparse.Namespace, log: Log) -> None:
    """In turns, as variants are compared: what captures and caches keep for one another is then in all of them. And each
    alone, as a user asks."""
    sizes = Sizes(options)
    draws = {variant: random.Random(0) for variant in VARIANTS}

    def ask(variant: str) -> dict[str, float]:
        name, told = VARIANTS[variant]
        kinds = tuple(draws[variant].sample(range(sizes.kinds), 2))
        return asked(*HELD.session(sizes, name), kinds, told)

    turns = [{variant: ask(variant) for variant in VARIANTS} for _ in range(sizes.questions + 2)]
    for variant in VARIANTS:
        question_row("question", variant, [turn[variant] for turn in turns[2:]], sizes, log)
    alone = min(ALONE, sizes.questions)
    for variant in VARIANTS:
        rows = [ask(variant) for _ in range(alone + 2)]
        question_row("asked alone", variant, rows[2:], sizes, log)
    growth(sizes, log)


def question_row(case: str, variant: str, some: Sequence[dict[str, float]], sizes: Sizes, log: Log) -> None:
    mean = {name: statistics.fmean(row[name] for row in some) for name in some[0]}
    row: dict[str, Any] = {
        "case": case,
        "way": variant,
        **spread([row["ttft_s"] for row in some]),
        "frames": sizes.frames,
        "model": SHAPE,
        **mean,
    }
    if mean.get("seconds_in"):
        row["gb_s"] = mean["bytes_in"] / mean["seconds_in"] / 1e9
    if "covered" in mean:
        crossed = max(1.0, mean["covered"] + mean["missing"])
        row |= {"coverage": mean["covered"] / crossed, "in_time_share": mean["in_time"] / crossed}
    log.row(**row)
    print(
        f"{case} {variant:42} p50 {row['p50_s'] * 1e3:7.1f} ms, p95 {row['p95_s'] * 1e3:7.1f}, "
        f"whole {mean['whole_s'] * 1e3:6.1f}, {mean['bytes_in'] / 1e6:5.0f} MB at {row.get('gb_s', 0):4.1f} GB/s, "
        f"{mean['copies_in']:5.0f} copies, ahead {row.get('coverage', 0):.2f}, "
        f"in time {row.get('in_time_share', 0):.2f}, waited {1e3 * mean.get('waited_seconds', 0):4.1f} and "
        f"{1e3 * mean.get('waited_missing_seconds', 0):4.1f} ms, of the scenes {mean['recall']:.2f}",
        flush=True,
    )


def growth(sizes: Sizes, log: Log) -> None:
    """What a frame adds on the device: the index of each memory, over the frames of the stream."""
    for name in ("rekv", "mosaic"):
        session = HELD.session(sizes, name)[0]
        state: Any = session._live.state  # type: ignore[union-attr]
        kept = state.index.nbytes() + state.store.nbytes()
        log.row(case="growth", way=name, frames=sizes.frames, index_bytes=kept, a_frame=kept / sizes.frames)
        print(f"growth {name}: {kept / sizes.frames / 1024:.1f} KiB a frame", flush=True)
        log_happened(log, f"question, {name}", session, name, many=True)


def profile_step(options: argparse.Namespace, log: Log) -> None:
    from torch.profiler import ProfilerActivity, profile

    sizes = Sizes(options)
    cuda = sizes.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    for variant in ("rekv, coalesced", "mosaic", "mosaic, no prefetch"):
        name, change = VARIANTS[variant]
        asked(*HELD.session(sizes, name), (0, 1), change)
        with profile(activities=kinds) as told:
            asked(*HELD.session(sizes, name), (1, 2), change)
        events = told.key_averages()
        launches = sum(e.count for e in events if e.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
        waits = sum(e.count for e in events if "Synchronize" in e.key)
        device_s = sum(getattr(e, "self_device_time_total", 0) for e in events) / 1e6
        ops = sum(e.count for e in events if e.key.startswith("aten::"))
        top = sorted(events, key=lambda e: -e.self_cpu_time_total)[:24]
        slow = {e.key[:60]: [e.count, round(e.self_cpu_time_total / 1e3, 2)] for e in top}
        kernels = sorted(events, key=lambda e: -getattr(e, "self_device_time_total", 0))[:14]
        busy = {
            e.key[:60]: [e.count, round(getattr(e, "self_device_time_total", 0) / 1e3, 2)] for e in kernels
        }
        log.row(
            case="profile",
            way=variant,
            launches=launches,
            waits=waits,
            ops=ops,
            device_s=device_s,
            host=slow,
            device=busy,
        )
        print(
            f"profile {variant}: {launches} launches, {waits} waits, {ops} ops, device {device_s * 1e3:.1f} ms"
        )
        print("  host, count and ms:", json.dumps(slow))
        print("  device, count and ms:", json.dumps(busy), flush=True)


def memory_step(options: argparse.Namespace, log: Log) -> None:
    sizes = Sizes(options)
    HELD.drop("rekv", "mosaic")
    model, processor = HELD.model(sizes)
    cuda = sizes.device.type == "cuda"
    for name, lengths in (("rekv", [sizes.early]), ("mosaic", [sizes.early, sizes.late])):
        scenes = Scenes(model, lengths[-1], sizes.kinds)
        with mmaccel.VideoSession(model, processor, None, kv=sizes.kv(name)) as session:
            for until in lengths:
                grown(session, scenes, sizes, until)
                # The first question compiles, the second is captured: what that takes is no part of the peak.
                for kinds in ((1, 2), (0, 2)):
                    with scenes.asking(*kinds):
                        session.ask(QUESTION, 8)
                if cuda:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                with scenes.asking(0, 1):
                    answer = session.ask(QUESTION, 8)
                with scenes.asking(2, 1):
                    session.ask(QUESTION, 8)
                state: Any = session._live.state  # type: ignore[union-attr]
                index = state.index.nbytes() + state.store.nbytes()
                peak = torch.cuda.max_memory_allocated() if cuda else 0
                log.row(
                    case="memory", way=name, frames=until, peak_bytes=peak, index_bytes=index, rest_bytes=peak - index,
                    ttft_s=answer.ttft_s, host_bytes=answer.counters["host_bytes"],
                )  # fmt: skip
                print(
                    f"memory at {until} frames, {name}: peak {peak / 2**30:.2f} GiB, of it index {index / 2**20:.1f} MiB, "
                    f"host {answer.counters['host_bytes'] / 2**30:.1f} GiB, first token {answer.ttft_s * 1e3:.0f} ms",
                    flush=True,
                )
            log_happened(log, f"memory, {name}", session, name)
    shape = scenes.geometry
    frame = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2 * (state.stream.tokens_per_unit)
    weights = sum(p.nbytes for p in model.parameters())
    total = torch.cuda.get_device_properties(0).total_memory if cuda else 0
    log.row(
        case="memory", way="full", frame_bytes=frame, weight_bytes=weights, out_at=(total - weights) // frame
    )
    print(
        f"memory of keeping everything: {frame / 2**20:.1f} MiB a frame, full at {(total - weights) // frame} frames"
    )


def steps() -> list[Step]:
    found: list[tuple[str, float, Callable[[argparse.Namespace, Log], None]]] = [
        ("question", 120.0, question_step),
        ("profile", 60.0, profile_step),
        ("encode", 200.0, encode_step),
        ("memory", 150.0, memory_step),
        ("ingest:short", 260.0, ingest_step("frames")),
        ("ingest:long", 420.0, ingest_step("late")),
    ]
    return [Step(*one) for one in found]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--questions", type=int, default=20, help="questions of each variant")
    parser.add_argument(
        "--shrink", type=int, default=1, help="the tiny model, and all lengths divided: a smoke test"
    )
    run_steps(steps(), parser.parse_args(argv))


if __name__ == "__main__":
    main()
