"""How long a frame waits while questions are answered, and how long the model works without a break.

    python bench/live.py                                   # tiny model, on the CPU
    python bench/live.py --device cuda --fps 2 --tokens 200 --seconds 60    # LLaVA-OneVision-7B's shape, random weights

Frames come at `--fps` while questions of `--words` words are asked one after another. The row has, in ms: what frames
waited for their turn; the slices of a question, of which the first reads it in and the last weighs its evidence; the steps
of tokens; the passes of frames; what lay between two tokens of an answer; and how many frames were `behind`, taken in after
the next one had come. A frame is to wait no longer than the longest slice or step, plus 3 ms (`ok`).
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from scenes import build

import mmaccel
from mmaccel.core.report import environment
from mmaccel.core.streams.parts import Turns

SPARE_MS = 3.0


class Clock:
    """The pieces of a thread's turns, in seconds, by kind: what it gives way after; and what lies between two tokens."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._give_way, self._hold = turns, turns.give_way, turns.holding
        self.pieces: dict[str, list[float]] = {"slice": [], "step": []}
        self.gaps: list[float] = []
        self._thread, self._last, self._token = 0, 0.0, 0.0
        turns.give_way = self.give_way  # type: ignore[method-assign]

    def begin(self) -> None:
        """A question has its turn."""
        self._thread, self._last, self._token = threading.get_ident(), time.perf_counter(), 0.0

    def end(self) -> None:
        """Its answer is over, and so is the last piece."""
        self.pieces["slice"].append(time.perf_counter() - self._last)
        self._thread = 0

    def give_way(self, inside: bool = False) -> None:
        if threading.get_ident() == self._thread:
            # What follows a token's pause is a step.
            kind = "slice" if inside or not self.pieces["slice"] else "step"
            now = time.perf_counter()
            self.pieces[kind].append(now - self._last)
            if not inside:
                if self._token:
                    self.gaps.append(now - self._token)
                self._token = now
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
    session._stream_adapter.ends = frozenset  # type: ignore[method-assign]

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

    asking, answers = threading.current_thread(), 0
    session._check = begun  # type: ignore[method-assign]
    feeder = threading.Thread(target=feed)
    live = session._live
    assert live is not None
    live.waits.clear()
    feeder.start()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        session._answering(words(count), tokens, True, session._deadline(None))(lambda _: None)
        clock.end()
        answers += 1
    over.set()
    feeder.join()
    del session._check, turns.give_way  # type: ignore[attr-defined]
    waits = list(live.waits)
    taken = [max(0.0, whole - wait) for whole, wait in zip(passes, waits, strict=False)]
    row = {"answers": answers, "frames": sent, "behind": behind, "words": count}
    for name, one in {"wait": waits, **clock.pieces, "pass": taken, "gap": clock.gaps}.items():
        row |= {
            f"{name} {at}": 1e3 * quantile(one, share)
            for at, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        }
    row["ok"] = row["wait p99"] <= max(row["slice max"], row["step max"]) + SPARE_MS
    return row


def quantile(values: list[float], share: float) -> float:
    """The value that `share` of all do not pass."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="on the CPU the model is tiny-ov")
    parser.add_argument("--kv", nargs="+", default=["mosaic", "rekv", "full", "livevlm"])
    parser.add_argument("--fps", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--words", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--before", type=int, default=100, help="frames watched before the first question")
    parser.add_argument("--out", type=Path, help="rows, as JSON lines")
    args = parser.parse_args()
    small = args.device == "cpu"
    model, processor = build(args.device, small)
    size = (84, 140) if small else (384, 384)
    frames = torch.randint(0, 256, (32, 3, *size), dtype=torch.uint8)
    for kv in args.kv:
        with mmaccel.VideoSession(model, processor, None, kv=kv) as session:
            session.watch(frames.repeat(-(-args.before // 32), 1, 1, 1)[: args.before], fps=args.fps)
            session.ask(words(args.words), 2)
            given = {"fps": args.fps, "seconds": args.seconds, "count": args.words, "tokens": args.tokens}
            row = {"kv": kv, **measured(session, frames, **given)}
        print(
            "  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
            flush=True,
        )
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | environment(args.device)) + "\n")


if __name__ == "__main__":
    main()
