"""Kill a watching, saving process at random moments, and go on with what it saved.

    python bench/kills.py --kills 200 --out bench/results/kills_cpu_202611.jsonl

A child process resumes the saved stream, takes in clips of a camera as they come, and saves every `--every` seconds, by what
`mmaccel watch --save` saves by. It is ended by SIGKILL after a random time; in half of the kills the child ends itself by a
signal that strikes within a save after its first, at a random part of what the longest save took. Then the stream is resumed
and compared with one that nobody killed, which has taken in the same frames: all that is stored, the first token of a
question bit for bit, its evidence, and the memory's figures. The row has the kills, how many struck in a save, how many were
`damaged`, and the seconds of frames that were lost, beside their `bound`: the seconds between two saves (`--every`, or ten
times what the longest save took, where that is more) with those of one save and of two clips. A lost frame is one that the
killed process had taken in.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log, documented_parser, told

import mmaccel
from mmaccel.cli.journal import PeriodicSaver
from mmaccel.core.errors import MmaccelError
from mmaccel.core.streams.asking import run_question
from mmaccel_lab.world import World, render

QUESTION = "what colour was the star ?"
CLIP, FPS, POOL = 4, 16.0, 200
"""Frames of a clip, their rate, and how many there are before they come again."""
TAKEN, SAVES, BEGUN, LONGEST, READY, STRIKE = range(6)
"""What the child tells: frames taken in, saves that ended and began, how long the longest took, whether it watches. And what
it is told: at which part of the longest save, above 0, its next save ends the process."""


class Camera:
    """Frames of a world at a rate; one that is gone with the process that watched is gone."""

    def __init__(self, seed: int = 3) -> None:
        self.frames = render(World.generate(seed, POOL).table(), 42, 70)

    def clip(self, number: int) -> torch.Tensor:
        """[CLIP, 3, H, W] of a clip."""
        at = torch.arange(number * CLIP, (number + 1) * CLIP) % len(self.frames)
        return self.frames[at]


def watch(parts: tuple[Any, Any, Any], camera: Camera, folder: Path, every: float, told: Any) -> None:
    """The child: resume, watch and save until it is killed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process at once, as SIGKILL does
    session = resumed(parts, folder)
    keeper = PeriodicSaver(session, folder, None, None, every)
    save = session.save

    def noted(path: str | Path) -> None:
        began = time.monotonic()
        told[BEGUN] += 1
        if told[STRIKE]:
            signal.setitimer(signal.ITIMER_REAL, max(1e-4, told[STRIKE] * told[LONGEST]))
        save(path)
        told[SAVES] += 1
        told[LONGEST] = max(told[LONGEST], time.monotonic() - began)

    session.save = noted  # type: ignore[method-assign]
    number, due = session.frames // CLIP, time.monotonic()
    told[TAKEN], told[READY] = session.frames, 1
    while True:
        due += CLIP / FPS
        time.sleep(max(0.0, due - time.monotonic()))
        session.watch(camera.clip(number), fps=FPS)
        number, told[TAKEN] = number + 1, session.frames
        keeper.save_if_due()


def resumed(parts: tuple[Any, Any, Any], folder: Path) -> mmaccel.VideoSession:
    """The saved stream, or a new one where nothing was saved."""
    model, processor, kv = parts
    if (folder / "session.json").exists():
        return mmaccel.VideoSession.resume(model, processor, folder)
    return mmaccel.VideoSession(model, processor, None, kv=kv)


def same(one: mmaccel.VideoSession, other: mmaccel.VideoSession) -> str:
    """What differs between two streams; "" for nothing."""
    figures, logits, stored = [], [], []
    for session in (one, other):
        live: Any = session._live
        with run_question(live, QUESTION, 4, concurrent=True) as turn:
            logits.append(turn.logits[0].clone())
        answer = session.ask(QUESTION, 4)
        figures.append((session.frames, session.shown, answer.ids, answer.evidence, session.clusters()))
        store, layers = live.state.store, range(live.state.geometry.layers)
        stored.append(
            [
                (unit, store.unit_views(layer, [unit])[0].clone())
                for layer in layers
                for unit in store.units(layer)
            ]
        )
    for name, a, b in zip(("frames", "times", "tokens", "evidence"), *figures, strict=False):
        if a != b:
            return name
    (*_, mine), (*_, theirs) = figures
    if mine.keys() != theirs.keys() or not all(torch.equal(mine[name], theirs[name]) for name in mine):
        return "clusters"
    if [unit for unit, _ in stored[0]] != [unit for unit, _ in stored[1]]:
        return "stored units"
    if not all(torch.equal(a, b) for (_, a), (_, b) in zip(*stored, strict=True)):
        return "stored keys and values"
    return "" if torch.equal(*logits) else "logits"


def killed(kills: int, every: float, kv: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The row of so many kills."""
    chance, camera = random.Random(seed), Camera()
    parts = mmaccel.load_model("tiny-ov", dtype=torch.float32), mmaccel.load_processor("tiny-ov"), kv
    torch.set_num_threads(1)  # threads do not outlive a fork
    lost, damaged, inside, longest, saves, lines = list[int](), list[str](), 0, 0.0, 0, 0
    with tempfile.TemporaryDirectory() as place, mmaccel.VideoSession(*parts[:2], None, kv=kv) as whole:
        folder = Path(place) / "session"
        for kill in range(kills):
            told = RawArray("d", 6)
            told[LONGEST] = longest
            if (child := os.fork()) == 0:
                try:
                    watch(parts, camera, folder, every, told)
                finally:
                    os._exit(1)
            awaited(child, lambda told=told: told[READY] > 0)
            time.sleep(chance.uniform(0.0, 3 * every))
            if kill % 2:
                awaited(child, lambda told=told: told[SAVES] > 0)
                told[STRIKE] = chance.uniform(1e-3, 0.9)
            else:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            inside += told[BEGUN] > told[SAVES]
            saves, longest, lines = saves + int(told[SAVES]), max(longest, told[LONGEST]), int(told[TAKEN])
            try:
                with resumed(parts, folder) as session:
                    if session.frames:
                        for number in range(whole.frames // CLIP, session.frames // CLIP):
                            whole.watch(camera.clip(number), fps=FPS)
                        if fault := same(session, whole):
                            damaged.append(fault)
                    lost.append(lines - session.frames)
            except MmaccelError as error:
                damaged.append(str(error))
            print(
                f"kill {kill + 1}: lost {lost[-1] / FPS:.2f} s of {lines / FPS:.0f} s; {len(damaged)} damaged",
                flush=True,
            )
        frames, bound = whole.frames, max(every, 10 * longest) + longest + 2 * CLIP / FPS
    seconds = sorted(count / FPS for count in lost)
    return {
        "case": "kills",
        "kills": kills,
        "in_a_save": inside,
        "damaged": damaged,
        "saves": saves,
        "every_s": every,
        "save_s_most": longest,
        "frames": frames,
        "lost_s_median": seconds[len(seconds) // 2],
        "lost_s_most": seconds[-1],
        "bound_s": bound,
        "ok": not damaged and seconds[-1] <= bound,
    }


def awaited(child: int, ready: Any, seconds: float = 120.0) -> None:
    """Wait until `ready`; raises where the child ends, or takes too long."""
    end = time.monotonic() + seconds
    while not ready():
        if os.waitpid(child, os.WNOHANG)[0] or time.monotonic() > end:
            raise RuntimeError("the child process ended by itself, or did not begin.")
        time.sleep(0.001)


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two saves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the row, as JSON lines")
    args = parser.parse_args()
    index = {"name": "clusters", "init": 16}
    kv = {"name": "mosaic", "window": 16, "local": 4, "frames": 16, "index": index, "keep_seconds": 20.0}
    row = killed(args.kills, args.every, kv, args.seed)
    print(told(row))
    if args.out:
        Log(args.out).row(**row)
    sys.exit(not row["ok"])


if __name__ == "__main__":
    main()
