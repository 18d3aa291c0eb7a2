"""How long a frame waits while questions are answered, how long the model works without a break, and what ran between two
tokens that came late.

    python bench/live.py                                   # tiny model, on the CPU
    python bench/live.py --device cuda --fps 2 --tokens 200 --seconds 60    # LLaVA-OneVision-7B's shape, random weights

Frames come at `--fps` while questions of `--words` words are asked one after another. The row has, in ms: what frames
waited for their turn; the slices of a question, of which the first reads it in and the last weighs its evidence; the steps
of tokens; the passes of frames, with what they waited for inside; what lay between two tokens of an answer; and how many
frames were `behind`, taken in after the next one had come. A frame is to wait no longer than the longest slice or step, plus
3 ms (`ok`). `alone` are calls of `watch` with one frame before the first question, of which the device works for `device`.

`frame` and `largest` say on what the host spent the time: of a frame, mean ms of each part; and of the largest gaps their
length, when they began, and the parts of all threads within them. A part does not count what it calls if that has a name of
its own. "compiles" and "captures" are what a kernel or a graph takes that comes for the first time; "gc" is Python's
collection, "slabs" what takes pinned memory. `late` are gaps of more than `LATE_MS`. `--profile` prints in which functions
frames alone spend the host's time.
"""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from scenes import build
from timing import documented_parser

import mmaccel
from mmaccel.core.decoding import replay
from mmaccel.core.report import Meter
from mmaccel.core.rows import measurement_conditions
from mmaccel.core.streams.asking import QuestionRunner
from mmaccel.core.streams.fair_lock import FairLock
from mmaccel.core.streams.live import tune_python_for_streams
from mmaccel.core.streams.stream_runner import StreamRunner
from mmaccel.models.stream import HFStreamAdapter, StreamForwardPasses
from mmaccel.policies.kv._archived import SharedArchive
from mmaccel.policies.kv._index import Index
from mmaccel.policies.kv._prefetch import Prefetcher
from mmaccel.policies.kv._windowed import StreamMemory
from mmaccel.policies.kv.mosaic import ClusterIndex
from mmaccel.policies.kv.store.host import HostStore
from mmaccel.policies.kv.store.slabs import Slabs

SPARE_MS, LATE_MS = 3.0, 60.0
LARGEST = 8
WAITS = "waits"
PARTS: dict[str, list[tuple[Any, str]]] = {
    WAITS: [(FairLock, "_aside"), (FairLock, "_acquire")],
    "clip": [(StreamRunner, "add_frames")],
    "pixels": [(HFStreamAdapter, "features")],
    "tower": [(StreamForwardPasses, "encode_prompt_video")],
    "layers": [(StreamRunner, "run_units")],
    "token": [(QuestionRunner, "step")],
    "question": [(QuestionRunner, "prefill")],
    "evidence": [(StreamMemory, "evidence")],
    "parts": [(SharedArchive, "_part")],
    "begins": [(SharedArchive, "begin_pass")],
    "ends": [(StreamMemory, "end_pass")],
    "end_ingest": [(SharedArchive, "end_ingest")],
    "marks": [(StreamRunner, "checkpoint"), (SharedArchive, "forget_old_units")],
    "clusters": [
        (ClusterIndex, "cluster_units"),
        (ClusterIndex, "cluster_some_units"),
        (ClusterIndex, "refresh"),
        (Index, "prepare"),
    ],
    "brings": [(Prefetcher, one) for one in ("retrieve", "update_counters")],
    "slabs": [(Slabs, "add_slab")],
    "puts": [(HostStore, "put_layers")],
    "captures": [(replay, "capture_graph")],
}
"""What a gap is made of: functions by the name under which their time is counted."""


class Trace:
    """What each thread does when, by the names of `PARTS`, while it is entered: [(begin, end, name)], innermost names."""

    def __init__(self) -> None:
        self.segments: list[tuple[float, float, str, int]] = []
        self._own, self._undo = threading.local(), list[Callable[[], None]]()

    def __enter__(self) -> Trace:
        kernels = [one for one in [jit_function()] if one is not None]
        for name, places in {**PARTS, "compiles": [(one, "_do_compile") for one in kernels]}.items():
            for owner, method in places:
                self._wrap(owner, method, name)
        self._wrap(StreamForwardPasses, "_hooked", "hooks", around=True)
        gc.callbacks.append(self._collects)
        self._undo.append(lambda: gc.callbacks.remove(self._collects))
        return self

    def __exit__(self, *error: object) -> None:
        for back in reversed(self._undo):
            back()

    def _wrap(self, owner: Any, method: str, name: str, around: bool = False) -> None:
        plain = vars(owner)[method]

        def named(*given: Any, **more: Any) -> Any:
            self.enter(name)
            try:
                made = plain(*given, **more)
                return Named(self, made, name) if around else made
            finally:
                self.leave()

        setattr(owner, method, named)
        self._undo.append(lambda: setattr(owner, method, plain))

    def _collects(self, phase: str, _: Any) -> None:
        self.enter("gc") if phase == "start" else self.leave()

    def enter(self, name: str) -> None:
        """The thread does from now on what has this name."""
        self._cut()
        self._own.names.append(name)

    def leave(self) -> None:
        """The thread goes on with what it did before."""
        self._cut()
        self._own.names.pop()

    def _cut(self) -> None:
        own, now = self._own, time.perf_counter()
        if not hasattr(own, "names"):
            own.names, own.since = ["other"], now
        self.segments.append((own.since, now, own.names[-1], threading.get_ident()))
        own.since = now

    def within(self, begin: float, end: float, thread: int | None = None) -> dict[str, float]:
        """Milliseconds by name between two times, of all threads or of one, largest first; waiting is left out."""
        found: Counter[str] = Counter()
        for first, last, name, who in self.segments:
            inside = min(last, end) - max(first, begin)
            if inside > 0 and name != WAITS and thread in (None, who):
                found[name] += 1e3 * inside
        return {name: round(ms, 2) for name, ms in found.most_common() if ms >= 0.05}


class Named:
    """A context manager whose entry and exit count under a name."""

    def __init__(self, trace: Trace, inner: Any, name: str) -> None:
        self.trace, self.inner, self.name = trace, inner, name

    def __enter__(self) -> Any:
        self.trace.enter(self.name)
        try:
            return self.inner.__enter__()
        finally:
            self.trace.leave()

    def __exit__(self, *error: Any) -> Any:
        self.trace.enter(self.name)
        try:
            return self.inner.__exit__(*error)
        finally:
            self.trace.leave()


def jit_function() -> Any:
    """The class whose `_do_compile` compiles kernels, if there is one."""
    with suppress(ImportError):
        from triton.runtime.jit import JITFunction

        return JITFunction if "_do_compile" in vars(JITFunction) else None
    return None


class Clock:
    """The pieces of a thread's turns, in seconds, by kind: what it gives way after; and when its tokens came."""

    def __init__(self, turns: FairLock) -> None:
        self._turns, self._give_way = turns, turns.yield_lock
        self.pieces: dict[str, list[float]] = {"slice": [], "step": []}
        self.gaps: list[tuple[float, float]] = []
        self._thread, self._last, self._token = 0, 0.0, 0.0
        turns.yield_lock = self.yield_lock  # type: ignore[method-assign]

    def begin(self) -> None:
        """A question has its turn."""
        self._thread, self._last, self._token = threading.get_ident(), time.perf_counter(), 0.0

    def end(self) -> None:
        """Its answer is over, and so is the last piece."""
        self.pieces["slice"].append(time.perf_counter() - self._last)
        self._thread = 0

    def token(self) -> None:
        """A token of the answer is there, or some at once."""
        now = time.perf_counter()
        if self._token:
            self.gaps.append((self._token, now))
        self._token = now

    def yield_lock(self, inside: bool = False) -> None:
        if threading.get_ident() == self._thread:
            # What follows a token's pause is a step.
            kind = "slice" if inside or not self.pieces["slice"] else "step"
            self.pieces[kind].append(time.perf_counter() - self._last)
        self._give_way(inside)
        self._last = time.perf_counter() if threading.get_ident() == self._thread else self._last


def words(count: int) -> str:
    """A question of `count` words that the tiny models know."""
    some = ["what", "colour", "was", "the", "star", "before", "the", "red", "square", "left", "?"]
    return " ".join(some[i % len(some)] for i in range(count))


def measured(
    session: mmaccel.VideoSession,
    frames: torch.Tensor,
    *,
    fps: float,
    seconds: float,
    count: int,
    tokens: int,
) -> dict[str, Any]:
    """One run over a session that has watched something: all figures of the table, and `ok`."""
    turns = session._stream_adapter.turns
    clock, over, passes = Clock(turns), threading.Event(), list[float]()
    behind, sent, check = 0, 0, session._check
    session._stream_adapter.end_token_ids = frozenset  # type: ignore[method-assign]

    def begun(question: str) -> Any:
        if threading.current_thread() is asking:
            clock.begin()
        return check(question)

    def feed() -> None:
        nonlocal behind, sent
        due = time.perf_counter()
        while not over.is_set():
            due += 1 / fps
            time.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            session.watch(frames[sent % len(frames)][None], fps=fps)
            passes.append(time.perf_counter() - began)
            sent, behind = sent + 1, behind + (time.perf_counter() > due + 1 / fps)

    asking, answers, plain = threading.current_thread(), 0, Meter.count_tokens

    def token(meter: Meter, count: int = 1) -> None:
        clock.token()
        plain(meter, count)

    session._check, Meter.count_tokens = begun, token  # type: ignore[method-assign]
    feeder = threading.Thread(target=feed)
    live = session._live
    assert live is not None
    live.waits.clear()
    began = time.perf_counter()
    try:
        with Trace() as trace:
            feeder.start()
            while time.perf_counter() < began + seconds:
                session._answering(words(count), tokens, session._deadline(None))(lambda _: None)
                clock.end()
                answers += 1
            over.set()
            feeder.join()
    finally:
        Meter.count_tokens = plain  # type: ignore[method-assign]
        del session._check, turns.yield_lock  # type: ignore[attr-defined]
    end, waits = time.perf_counter(), list(live.waits)
    taken = [max(0.0, whole - wait) for whole, wait in zip(passes, waits, strict=False)]
    gaps = [last - first for first, last in clock.gaps]
    row: dict[str, Any] = {"answers": answers, "frames": sent, "behind": behind, "words": count}
    for name, one in {"wait": waits, **clock.pieces, "pass": taken, "gap": gaps}.items():
        row |= {
            f"{name} {at}": 1e3 * quantile(one, share)
            for at, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        }
    row["late"] = sum(1e3 * gap > LATE_MS for gap in gaps)
    row["ok"] = row["wait p99"] <= max(row["slice max"], row["step max"]) + SPARE_MS
    whole = trace.within(began, end, feeder.ident)
    row["frame"] = {name: round(ms / max(1, sent), 2) for name, ms in whole.items() if name != "other"}
    row["largest"] = [
        {"ms": round(1e3 * (last - first), 1), "at": round(first - began, 2), **trace.within(first, last)}
        for first, last in sorted(clock.gaps, key=lambda one: one[0] - one[1])[:LARGEST]
    ]
    return row


def alone(session: mmaccel.VideoSession, frames: torch.Tensor, fps: float) -> dict[str, Any]:
    """Calls of `watch` with one frame and nothing beside them: ms, parts, and how long the device works for one."""
    device, taken = session._stream_adapter.device, list[float]()
    with Trace() as trace:
        first = time.perf_counter()
        for frame in frames[:20].split(1):
            began = time.perf_counter()
            session.watch(frame, fps=fps)
            taken.append(time.perf_counter() - began)
        parts = trace.within(first, time.perf_counter())
    row: dict[str, Any] = {"alone p50": 1e3 * quantile(taken, 0.5), "alone max": 1e3 * max(taken)}
    row["alone"] = {name: round(ms / len(taken), 2) for name, ms in parts.items() if name != "other"}
    if device.type == "cuda":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as told:
            session.watch(frames[:1], fps=fps)
            torch.cuda.synchronize()
        row["alone device"] = sum(one.self_device_time_total for one in told.key_averages()) / 1e3
        row["launches"] = sum(one.count for one in told.key_averages() if "Launch" in one.key)
    return row


def profiled(session: mmaccel.VideoSession, frames: torch.Tensor, fps: float) -> None:
    """Print the functions in which the host spends its time in 20 calls of `watch` with one frame each."""
    with cProfile.Profile() as told:
        for frame in frames[:20].split(1):
            session.watch(frame, fps=fps)
    for order in ("tottime", "cumtime"):
        pstats.Stats(told).sort_stats(order).print_stats(40)


def quantile(values: list[float], share: float) -> float:
    """The value that `share` of all do not pass."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="on the CPU the model is tiny-ov")
    parser.add_argument("--kv", nargs="+", default=["mosaic", "rekv", "full", "livevlm"])
    parser.add_argument("--fps", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--words", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--before", type=int, default=100, help="frames watched before the first question")
    parser.add_argument("--profile", action="store_true", help="print where the host's time of frames goes")
    parser.add_argument("--out", type=Path, help="rows, as JSON lines")
    args = parser.parse_args()
    small = args.device == "cpu"
    model, processor = build(args.device, small)
    size = (84, 140) if small else (384, 384)
    frames = torch.randint(0, 256, (32, 3, *size), dtype=torch.uint8)
    for kv in args.kv:
        with mmaccel.VideoSession(model, processor, None, kv=kv) as session:
            session.watch(frames.repeat(-(-args.before // 32), 1, 1, 1)[: args.before], fps=args.fps)
            with tune_python_for_streams():
                row = {"kv": kv, **alone(session, frames, args.fps)}
            if args.profile:
                profiled(session, frames, args.fps)
            session.ask(words(args.words), args.tokens)  # what a question needs is made and captured
            given = {"fps": args.fps, "seconds": args.seconds, "count": args.words, "tokens": args.tokens}
            with tune_python_for_streams():  # as `mmaccel serve` and `mmaccel watch` do
                row |= measured(session, frames, **given)
        for name, value in row.items():
            if isinstance(value, list | dict):
                for one in value if isinstance(value, list) else [value]:
                    print(f"  {name}: " + "  ".join(f"{k} {v:g}" for k, v in one.items()))
        told = ((k, f"{v:.1f}" if isinstance(v, float) else v) for k, v in row.items())
        print("  ".join(f"{k} {v}" for k, v in told if k not in ("alone", "frame", "largest")), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | measurement_conditions(args.device)) + "\n")


if __name__ == "__main__":
    main()
