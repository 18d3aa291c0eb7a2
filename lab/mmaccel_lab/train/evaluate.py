"""How often a model is right, by kind and length, on seeds that training never saw.

An answer is right under greedy decoding just when each of its tokens is the most likely one after the true ones; it counts
when all its words and the end after them are right. Captions count token by token under teacher forcing.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from mmaccel_lab.tiny.configs import Spec
from mmaccel_lab.train import pixels, step
from mmaccel_lab.train.data import KINDS, make_batch
from mmaccel_lab.train.dialect import Dialect
from mmaccel_lab.train.plan import Plan

Scores = dict[str, dict[str, list[int]]]  # kind -> length -> [right, asked]


@dataclass(frozen=True)
class Case:
    """`videos` videos of `frames` frames (of `segments` parts for a document) of one kind of step."""

    kind: str
    frames: int
    videos: int
    segments: int = 1


QUICK: tuple[Case, ...] = (
    Case("question", 8, 64),
    Case("question", 128, 32),
    Case("question", 512, 12),
    Case("question", 2048, 4),
    Case("caption", 12, 32),
    Case("caption", 128, 16),
    Case("document", 256, 8, segments=4),
)
DRAFT_QUICK: tuple[Case, ...] = (Case("caption", 12, 32), Case("caption", 128, 16))
FULL: tuple[Case, ...] = (
    *(Case("question", frames, count) for frames, count in ((8, 256), (32, 256), (128, 192), (512, 96))),
    *(Case("question", frames, count) for frames, count in ((1024, 48), (2048, 32), (4096, 20))),
    *(
        Case("caption", frames, count)
        for frames, count in ((12, 128), (64, 64), (128, 64), (256, 48), (1024, 12))
    ),
    *(Case("document", frames, count, 4) for frames, count in ((64, 64), (256, 48), (1024, 24))),
)


def _plans(case: Case, budget: int) -> list[Plan]:
    rows = max(1, budget // case.frames)
    return [
        Plan("test", case.kind, case.frames, min(rows, left), segments=case.segments, questions=64)
        for left in range(case.videos, 0, -rows)
    ]


@torch.no_grad()
def evaluate(
    model: Any,
    spec: Spec,
    dialect: Dialect,
    cases: Sequence[Case],
    *,
    seed: int = 0,
    budget: int = 2048,
    lossy: float = 0.0,
    deadline: float = math.inf,
) -> Scores:
    """Right and asked, by kind and number of frames.

    `lossy` in [0, 1]: how strong a codec loss the frames suffer first. No new batch is begun after `deadline`, a
    time of `time.monotonic`.
    """
    device = next(model.parameters()).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    scores: Scores = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for case in cases:
        rng = Random(f"{seed} {case.kind} {case.frames}")
        for plan in _plans(case, budget):
            if time.monotonic() > deadline:
                break
            batch = make_batch(plan, dialect, rng, training=False)
            feed = step.upload(batch, device)
            strength = torch.full_like(feed.codec, lossy) if lossy else None
            frames = pixels.draw(feed.table, spec, strength)
            logits = step.label_logits(model, feed, step.look(model, spec, feed, frames.to(dtype)))
            right = (logits.argmax(-1) == feed.labels).cpu().numpy()
            for number in range(batch.answers[-1] + 1):
                mine = batch.answers == number
                kind = KINDS[batch.kinds[mine][0]]
                tally = scores[kind if case.kind != "document" else f"doc-{kind}"][str(case.frames)]
                tally[0] += int(right[mine].sum()) if kind == "caption" else int(right[mine].all())
                tally[1] += int(mine.sum()) if kind == "caption" else 1
    return {kind: dict(lengths) for kind, lengths in scores.items()}


def table(scores: Scores) -> str:
    """Scores as text: a line a kind, a column a length, in percent."""
    lengths = sorted({length for row in scores.values() for length in row}, key=int)
    lines = ["kind        " + "".join(f"{length:>8}" for length in lengths)]
    for kind, row in scores.items():
        cells = [f"{100 * row[n][0] / row[n][1]:7.1f}%" if n in row else " " * 8 for n in lengths]
        lines.append(f"{kind:<12}" + "".join(cells))
    return "\n".join(lines)
