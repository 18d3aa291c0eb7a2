"""What a stream's memory holds and what questions retrieve from it: the rows of docs/pictures/stream.svg.

    python bench/timeline.py --out bench/results/timeline_cpu_202611.jsonl

A film of 512 frames at one frame a second (world 7), tiny-ov, `mosaic` with a window of 16 frames and 16 retrieved ones, in
float32. One row has the scenes, one the clusters of every frame (visual, and those of one layer), and one each question: its
answer, the frames it is about, and for each frame how much of what the first token draws from frames comes from it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from timing import Log

import mmaccel
from mmaccel_lab.world import World, write_mp4

LAYER = 4
QUESTIONS = (
    "What colour was the hourglass?",
    "What colour was the star?",
    "Which came first, the diamond or the star?",
    "Which scene came just before the forest?",
)


def words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="file of rows")
    parser.add_argument("--frames", type=int, default=512)
    given = parser.parse_args(argv)
    world = World.generate(7, given.frames)
    truth = world.truth()
    asked = {" ".join(words(one["text"])): one for one in truth["questions"]}
    model, processor = mmaccel.load_model("tiny-ov"), mmaccel.load_processor("tiny-ov")
    log = Log(given.out)
    log.row(case="scenes", scenes=[[one["start"], one["stop"], one["scene"]] for one in truth["scenes"]])
    with tempfile.TemporaryDirectory() as folder:
        film = Path(folder) / "film.mp4"
        write_mp4(world, film)
        kv = {"name": "mosaic", "window": 16, "frames": 16}
        with mmaccel.VideoSession(model, processor, None, kv=kv) as session:
            for clip in mmaccel.media.clips(film, fps=1, frames_per_clip=16):
                session.watch(clip)
            for name, rows in session.clusters().items():
                owner = rows[min(LAYER, len(rows) - 1)].tolist()
                log.row(case="clusters", name=name, layer=LAYER if len(rows) > 1 else None, owner=owner)
            for question in QUESTIONS:
                answer = session.ask(question)
                about = asked.get(" ".join(words(question)))
                evidence = [[one.seconds, round(one.score or 0.0, 4)] for one in answer.evidence]
                log.row(
                    case="question", question=question, answer=answer.text.strip(), evidence=evidence,
                    about=about and about["frames"], expected=about and about["answer"],
                )  # fmt: skip


if __name__ == "__main__":
    main()
