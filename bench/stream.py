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
budgets, lengths, rivals, whole: `bench/asking.py`
encode    frames a second through `VideoSession.watch`, vision tower included, of streams that begin with planted scenes;
          with each batching switch off, and with passes that retrieve nothing; all in turns
splits    seconds a frame of a planted stream, those of clustering, and how often clusters are split: at once or put off
          (Figure 8), in turns
memory    device memory after 1 024 and 7 200 frames, its growth a frame, ReKV's after 1 024, and where keeping everything on
          the device ends
streams   frames a second of one process on each of 1, 2, ... devices, to that of one
ingest, capped: `bench/ingest.py`; drafted: `bench/drafted.py`
day       43 200 rendered frames through `watch` on tiny-ov: seconds a frame and memory, hour by hour

A stream in a host store of which less than nine in ten frames are off the device, or in which nothing was split, put off or
retrieved, is no measurement: its step fails (`bench/happened.py`; rows `happened`). A step whose row is in the file is not
run again; none is begun that would not end within `--limit` seconds by its own estimate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from asking import CopiesEach, asked, budgets_step, grown, lengths_step, rivals_step, spread, whole_step
from drafted import drafted_step
from happened import log_happened
from ingest import capped_step, ingest_step, spread_step
from scenes import QUESTION, SHAPE, Scenes
from steps import Step, parser_of, run_steps
from timing import Log
from watching import HELD, LOCAL, Sizes, day_step, encode_step, splits_step, streams_step

import mmaccel

ALONE = 10
"""Questions of a variant that is asked alone, after two that do not count."""

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
        ("budgets", 40.0, budgets_step),
        ("encode", 200.0, encode_step),
        ("rivals", 70.0, rivals_step),
        ("splits", 60.0, splits_step),
        ("lengths", 90.0, lengths_step),
        ("day", 240.0, day_step),
        ("memory", 150.0, memory_step),
        ("whole", 120.0, whole_step),
        ("streams", 150.0, streams_step),
        ("ingest:short", 260.0, ingest_step("frames")),
        ("ingest:long", 420.0, ingest_step("late")),
        ("drafted", 200.0, drafted_step),
        ("ingest:spread", 120.0, spread_step),
        ("capped:tiny", 150.0, capped_step("tiny-ov")),
        ("capped:7b", 330.0, capped_step(SHAPE)),
    ]
    return [Step(*one) for one in found]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--questions", type=int, default=20, help="questions of each variant")
    parser.add_argument(
        "--shrink", type=int, default=1, help="the tiny model, and all lengths divided: a smoke test"
    )
    # A host that feeds several devices is to wait for none of them.
    os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    run_steps(steps(), parser.parse_args(argv))


if __name__ == "__main__":
    main()
