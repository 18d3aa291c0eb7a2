"""Streams a GPU: how many streams one model serves at a rate of frames, each of them asked again and again.

    python bench/crowd.py --streams 2 4 8 --fps 1 --seconds 20                        # tiny-ov on the CPU
    python bench/crowd.py --device cuda --fps 2 --streams 10 20 40 --seconds 40 --host-gib 64   # LLaVA-OneVision-7B's

The server's own calls without HTTP: each stream sends a JPEG at `--fps` by a clock of its own, or `--message` of them
together (what waits when a call has ended goes into the next one, as the WebSocket does), and is asked every `--every`
seconds for `--tokens` tokens. A step adds streams to those of the step before. Each new one ingests `--before` frames, and
is asked while the others wait. Then all take a frame and are asked at once, so that what a server compiles and captures once
is there (`warm`); what comes in the first `--settle` seconds after that does not count. In a row: `late` is the share of
frames that could be asked about more than `LATE_S` after they came; `askable`, ms from the frame's time to the end of the
call that took it in; `first`, from the question's time to its first token, all waiting in it; `gap`, between two tokens of
an answer; `host_ms` what the process spends on a frame, questions among it; `captures`, CUDA graphs that were made. `ok`:
no frame late, `first` p95 and `gap` p99 within `FIRST_MS` and `GAP_MS`. `device` bytes are what the memories hold,
`predicted` what was predicted of them at admission; `holds`, the seconds that each stream still has, the least and the
most. `busy` is the load that admission predicts; with `--busy 0.8` it refuses streams as a server does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from live import quantile
from scenes import SIDE, build
from timing import Log, documented_parser, told

from mmaccel.core.decoding import replay
from mmaccel.core.decoding.generate import Deadline
from mmaccel.core.errors import MmaccelError
from mmaccel.core.recipe import Recipe
from mmaccel.core.report import Meter
from mmaccel.core.streams.live import tune_python_for_streams
from mmaccel.media.video import write_jpeg
from mmaccel.serve.engine import Engine
from mmaccel.serve.messages import AskRequest, SessionRequest
from mmaccel.serve.settings import Limits, Refused, Settings
from mmaccel.serve.streams import Stream, Streams
from mmaccel_lab.world import World, render

LATE_S, FIRST_MS, GAP_MS = 1.5, 250.0, 60.0
CLIP = 16
QUESTION = "what colour was the star before the red square left ?"


class Crowd:
    """The streams of a server, their clients, and what these saw in the step under way."""

    def __init__(self, streams: Streams, film: torch.Tensor, args: argparse.Namespace) -> None:
        self.streams, self.film, self.args = streams, film, args
        self.jpegs = [write_jpeg(one, 4096) for one in film]
        self.open, self.refused, self.predicted = list[Stream](), 0, 0.0
        self.times = defaultdict[str, list[float]](list)

    async def grow(self, count: int) -> None:
        """Open streams until there are `count`, or until one is refused."""
        args = self.args
        while len(self.open) < count and not self.refused:
            lasts = args.before / args.fps + len(args.streams) * (args.settle + args.seconds)
            asked = SessionRequest(fps=args.fps, seconds=lasts)
            try:
                one = await self.streams.open(asked, "crowd")
            except Refused as error:
                self.refused, why = count - len(self.open), error
                print(f"refused: {why}")
                return
            predicted = self.streams.admission.predicted_bytes(one.promise, device=True)
            frames = self.film.repeat(-(-args.before // len(self.film)), 1, 1, 1)[: args.before]
            call = partial(one.session.ingest, frames, fps=args.fps)
            async with self.streams.hold_call(one):
                await self.streams._taken(one, frames[:1], call, Deadline(600), live=False)
            for _ in range(3):  # the second captures, and the third is one of those to come
                await self.ask(one, 4)
            await self.streams.add_encoded_frames(one, self.jpegs[:1], None, args.fps)
            # Of the first stream nothing was known.
            self.predicted += predicted or self.streams.admission.predicted_bytes(one.promise, device=True)
            self.open.append(one)

    async def warm(self) -> None:
        """Have all that a server compiles and captures once, for frames and questions of several streams, before a step."""
        for frames in 3 * (1, 2, 3, 4):
            some = self.jpegs[:frames]
            calls = (self.streams.add_encoded_frames(one, some, None, self.args.fps) for one in self.open)
            await asyncio.gather(*calls)
        rounds = [2**n for n in range(1, len(self.open).bit_length() + 1)]
        for count in [
            *rounds,
            rounds[-1],
        ]:  # what a stream's second question of a kind captures is there, for each
            await asyncio.gather(*(self.ask(one, 2 * self.args.tokens) for one in self.open[:count]))

    async def ask(self, stream: Stream, tokens: int) -> float:
        """Seconds from the call to the first token."""
        asked = AskRequest(question=QUESTION, max_tokens=tokens, evidence=False)
        async with self.streams.ask_stream_context(stream, asked) as reply:
            return (await reply).ttft_s

    async def frames(self, stream: Stream, due: float, end: float) -> None:
        """One frame every 1 / fps seconds from `due` on, waiting ones in one call; at the end they are late."""
        step, now = 1 / self.args.fps, 0.0
        while due < end and now < end + LATE_S:
            await asyncio.sleep(due + (self.args.message - 1) * step - time.perf_counter())
            count = min(CLIP, 1 + int((time.perf_counter() - due) / step))
            count = max(1, count // self.args.message) * self.args.message  # whole messages
            some = [self.jpegs[(stream.session.frames + i) % len(self.jpegs)] for i in range(count)]
            await self.streams.add_encoded_frames(stream, some, None, self.args.fps)
            now = time.perf_counter()
            self.times["askable"] += [now - due - i * step for i in range(count)]
            self.times["call"].append(count)
            due += count * step
        self.times["askable"] += [now - due - i * step for i in range(int((end - due) / step))]

    async def questions(self, stream: Stream, due: float, end: float) -> None:
        while due < end:
            await asyncio.sleep(due - time.perf_counter())
            began = time.perf_counter()
            self.times["first"].append(began - due + await self.ask(stream, self.args.tokens))
            due = max(due + self.args.every, time.perf_counter())

    async def step(self, count: int) -> dict[str, Any]:
        """A row of `count` streams."""
        args, device = self.args, torch.device(self.args.device)
        await self.grow(count)
        await self.warm()
        count, begin = len(self.open), time.perf_counter() + 0.1
        end = begin + args.settle + args.seconds
        clients = [
            self.frames(one, begin + i / count * args.message / args.fps, end)
            for i, one in enumerate(self.open)
        ]
        clients += [self.questions(x, begin + i / count * args.every, end) for i, x in enumerate(self.open)]
        with tune_python_for_streams():
            work = asyncio.gather(*clients, self.progress(begin, end))
            await asyncio.sleep(begin + args.settle - time.perf_counter())
            self.times.clear()
            spent = time.process_time()
            await work
            spent = time.process_time() - spent
        seen = self.times
        took, frames = time.perf_counter() - begin - args.settle, int(sum(seen["call"]))
        row: dict[str, Any] = {"streams": count, "fps": args.fps, "message": args.message}
        row["refused"] = self.refused
        row |= {"frames_per_s": frames / took, "frames_a_call": frames / max(1, len(seen["call"]))}
        row |= {"host_ms": 1e3 * spent / max(1, frames), "captures": len(seen["capture"])}
        row["late"] = sum(one > LATE_S for one in seen["askable"]) / max(1, len(seen["askable"]))
        wanted = dict(askable=(0.5, 0.95, 1), first=(0.5, 0.95, 1), gap=(0.5, 0.99, 1))
        for name, shares in wanted.items():
            row |= {f"{name} p{100 * one:g}": 1e3 * quantile(seen[name], one) for one in shares}
        row["ok"] = not row["late"] and row["first p95"] <= FIRST_MS and row["gap p99"] <= GAP_MS
        held = [await one.kept.read_counters() for one in self.open]
        holds = [
            (one.session.frames - now["let_go"]) / args.fps for one, now in zip(self.open, held, strict=True)
        ]
        row |= {"questions": len(seen["first"]), "device_gib": sum(one["bytes"] for one in held) / 2**30}
        row["host_gib"] = sum(one["host_bytes"] for one in held) / 2**30
        row["predicted_gib"] = self.predicted / 2**30
        row |= {"holds_least_s": min(holds), "holds_most_s": max(holds)}
        row["busy"] = sum(map(self.streams.admission.predicted_load, (one.promise for one in self.open)))
        if device.type == "cuda":
            row["allocated_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        least = self.open[holds.index(min(holds))]
        try:
            asked = AskRequest(question=QUESTION, max_tokens=4, between=(0.0, 1.0))
            async with self.streams.ask_stream_context(least, asked) as reply:
                row["of_the_first_second"] = (await reply).text
        except MmaccelError as error:
            row["of_the_first_second"] = str(error)
        return row

    async def progress(self, begin: float, end: float) -> None:
        while (now := time.perf_counter()) < end:
            done = int(30 * (now - begin) / (end - begin))
            print(
                f"\r{'#' * done:30} {end - now:4.0f} s, {len(self.times['askable'])} frames",
                end="",
                file=sys.stderr,
            )
            await asyncio.sleep(1)
        print("\r" + " " * 60, end="\r", file=sys.stderr)


async def run(args: argparse.Namespace, log: Log) -> None:
    small = args.device == "cpu"
    model, processor = build(args.device, small)
    model.generation_config.eos_token_id = -1  # type: ignore[union-attr]
    kv = {
        "name": "mosaic",
        "window": 16,
        "frames": 64,
        "encode_frames": args.encode_frames,
        "cache": args.cache,
    }
    kv["store"] = {"process_bytes": int(args.host_gib * 2**30), "spill": "drop_oldest"}
    most = max(args.streams)
    limits = Limits(sessions=most, own_sessions=most, calls=4 * most, memory_bytes=1 << 50, busy=args.busy)
    engine = Engine("crowd", model, processor, {"mosaic": Recipe.load(None, kv=kv)}, Settings(limits=limits))
    streams = Streams(engine)
    film = render(World.generate(3, 32).table(), *((84, 140) if small else (SIDE, SIDE)))
    crowd, plain = Crowd(streams, film, args), Meter.count_tokens

    def token(meter: Meter, count: int = 1) -> None:
        if meter.last is not None:
            crowd.times["gap"].append(time.perf_counter() - meter.last)
        plain(meter, count)

    def capture(*given: Any) -> Any:
        crowd.times["capture"].append(0.0)
        return captures(*given)

    captures, replay.capture_graph = replay.capture_graph, capture
    Meter.count_tokens = token  # type: ignore[assignment, method-assign]
    try:
        async with streams:
            for count in args.streams:
                row = await crowd.step(count)
                log.row(case="crowd", tokens=args.tokens, every_s=args.every, seconds=args.seconds, **row)
                print(told(row), flush=True)
                if crowd.refused:
                    break
    finally:
        Meter.count_tokens, replay.capture_graph = plain, captures  # type: ignore[method-assign]


def main(words: Sequence[str] | None = None) -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="on the CPU the model is tiny-ov")
    parser.add_argument("--streams", type=int, nargs="+", default=[2, 4, 8], help="ascending; a row for each")
    parser.add_argument("--fps", type=float, default=1.0)
    each = dict(choices=range(1, CLIP + 1), metavar="N", help="frames that a client sends together")
    parser.add_argument("--message", type=int, default=1, **each)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--settle", type=float, default=5.0)
    parser.add_argument("--before", type=int, default=96, help="frames that a stream has when it begins")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two questions to a stream")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--encode-frames", type=int, default=8, help="that a pass of frames retrieves")
    parser.add_argument(
        "--cache", type=int, default=64, help="frames that each layer keeps on the device for questions"
    )
    parser.add_argument("--host-gib", type=float, default=1.0, help="most host memory of all streams")
    parser.add_argument("--busy", type=float, default=float("inf"), help="admit as much load: see Limits")
    parser.add_argument("--out", type=Path, default=Path("runs/crowd.jsonl"))
    args = parser.parse_args(words)
    with suppress(KeyboardInterrupt):
        asyncio.run(run(args, Log(args.out, args.device)))


if __name__ == "__main__":
    main()
