"""Standing questions on planted events: how many are told of, how many of those told of were there, and how late.

    python bench/standing.py --out bench/results/standing_cpu_202611.jsonl

A stream is a world whose cards last one frame each. Under every memory of `--kv` tiny-ov watches it frame by frame, while
`session.on("describe the video .", says=SHAPE, every=..., last=...)` stands for the shapes that it shows most. The frames
wait until a question that is due has been answered, so that what is told does not depend on the machine. An event is a card
of the shape; two of them less than `last` + `every` seconds apart are one, for the answer need not turn between them. A
change is right if a card of the shape was shown within the seconds that were asked about, and no change before had that card
in its seconds. The row has `recall` of events, `precision` of changes, the seconds from the card to the change, and what the
askings cost: seconds of one, and the share of it that goes by before the model runs (the words of the question: template,
tokens, embeddings). That share is all that could be kept from one asking to the next, for what the layers compute of the
words depends on the frames before them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log

import mmaccel
from mmaccel.core.streams.standing import AnswerChange
from mmaccel.models.shipped import CAPTION_REQUEST
from mmaccel_lab.world import World, render

FPS, SHAPES, TOKENS = 1.0, 2, 64


def events(world: World, shape: str, apart: float) -> list[list[float]]:
    """The seconds of the cards of a shape; those of one event together."""
    found: list[list[float]] = []
    for card in world.cards:
        if card.shape == shape:
            now = card.frame / FPS
            if found and now - found[-1][-1] < apart:
                found[-1].append(now)
            else:
                found.append([now])
    return found


def matched(cards: list[list[float]], told: list[float], last: float) -> tuple[int, list[float]]:
    """How many changes were right, and of each event that was told of how many seconds after its first card."""
    known, right, late = set[float](), 0, dict[float, float]()
    for now in told:
        seen = [(event[0], second) for event in cards for second in event if now - last <= second <= now]
        fresh = [one for one in seen if one[1] not in known]
        right += bool(fresh)
        known.update(second for _, second in seen)
        for first, _ in fresh:
            late.setdefault(first, now - first)
    return right, [*late.values()]


def watched(parts: tuple[Any, Any], kv: Any, world: World, every: float, last: float) -> dict[str, Any]:
    """One stream under a memory: counts of events and changes, and what askings cost."""
    frames = render(world.table(), 112, 112)
    shapes = [shape for shape, _ in Counter(card.shape for card in world.cards).most_common(SHAPES)]
    told: dict[str, list[float]] = {shape: [] for shape in shapes}
    with mmaccel.VideoSession(*parts, None, kv=kv) as session:
        made, words, asks = session._stream_adapter, list[float](), list[float]()
        question, ask = made.make_question, session.ask

        def timed(call: Any, log: list[float]) -> Any:
            def run(*given: Any, **named: Any) -> Any:
                began = time.perf_counter()
                found = call(*given, **named)
                log.append(time.perf_counter() - began)
                return found

            return run

        made.make_question, session.ask = timed(question, words), timed(ask, asks)  # type: ignore[method-assign]

        def note(shape: str) -> Any:
            def call(change: AnswerChange) -> None:
                told[shape].append(change.seconds)

            return call

        how = {"every": every, "last": last, "max_new_tokens": TOKENS}
        standing = [session.on(CAPTION_REQUEST, note(shape), says=shape, **how) for shape in shapes]
        for frame in frames:
            session.watch(frame[None], fps=FPS)
            for one in standing:
                while one.failed is None and (one.asked is None or session.seconds - one.asked >= every):
                    time.sleep(0.002)
                if one.failed is not None:
                    raise one.failed
    counts: dict[str, Any] = Counter()
    late: list[float] = []
    for shape in shapes:
        cards = events(world, shape, last + every)
        right, seconds = matched(cards, told[shape], last)
        counts.update(events=len(cards), told=len(told[shape]), right=right, found=len(seconds))
        late += seconds
    return {**counts, "late": late, "asks": asks, "words": words}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kv", nargs="+", default=["rekv", "mosaic", "full"])
    parser.add_argument(
        "--window", type=int, default=8, help="frames that a frame sees as it comes, of the first two"
    )
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument(
        "--words", type=int, default=260, help="of a stream's caption: how many cards there are"
    )
    parser.add_argument("--every", type=float, nargs="+", default=[2.0])
    parser.add_argument("--last", type=float, default=7.0, help="seconds that are asked about")
    parser.add_argument(
        "--seed", type=int, default=900, help="of the first world; training saw none of these"
    )
    parser.add_argument("--out", type=Path, help="rows, as JSON lines")
    args = parser.parse_args()
    parts = mmaccel.load_model("tiny-ov", dtype=torch.float32), mmaccel.load_processor("tiny-ov")
    log = None if args.out is None else Log(args.out)
    for every in args.every:
        for kv in args.kv:
            fields = {"name": kv} | ({} if kv == "full" else {"window": args.window})
            made = range(args.seed, args.seed + args.streams)
            worlds = [World.generate(seed, args.frames, "caption", args.words) for seed in made]
            runs = [watched(parts, fields, world, every, args.last) for world in worlds]
            row = summed(runs) | {"kv": fields, "every": every, "last": args.last, "frames": args.frames}
            print(
                "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
                flush=True,
            )
            if log is not None:
                log.row(**row)


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of several streams."""
    total = {name: sum(run[name] for run in runs) for name in ("events", "told", "right", "found")}
    late, asks, words = (sorted(s for run in runs for s in run[name]) for name in ("late", "asks", "words"))
    return {
        "case": "standing",
        "streams": len(runs),
        **total,
        "recall": total["found"] / max(1, total["events"]),
        "precision": total["right"] / max(1, total["told"]),
        "late_s_median": late[len(late) // 2] if late else None,
        "late_s_most": late[-1] if late else None,
        "ask_s_median": asks[len(asks) // 2],
        "words_share": sum(words) / sum(asks),
    }


if __name__ == "__main__":
    main()
