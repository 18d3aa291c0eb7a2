"""The curriculum: what a step trains on, from how much of the time is spent.

Captions of a few frames come first: naming every card teaches the eye, which questions alone never do. Then questions
of every kind, on videos whose greatest length grows; in the long phases half the steps are near that length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Plan:
    """One step: `rows` videos of `frames` frames.

    `kind` is "question", "caption" or "document". `segments`: videos a row (documents cut theirs). `questions`: at
    most so many a row; `chats`: how likely a question opens a conversation of two to four; `captions`: share of
    question rows that also tell the video; `max_words` bounds a long caption; `kinds`: question kinds, None is all.
    """

    phase: str
    kind: str
    frames: int
    rows: int
    segments: int = 1
    questions: int = 0
    chats: float = 0.0
    captions: float = 0.0
    max_words: int = 480
    kinds: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Phase:
    """Until `until` (fraction of the time), lengths up to `ceiling` frames, and the shares of the kinds of step."""

    name: str
    until: float
    ceiling: int
    question: float
    caption: float
    document: float


TARGET: tuple[Phase, ...] = (
    Phase("look", 0.06, 12, 0.0, 1.0, 0.0),
    Phase("ask-4", 0.09, 4, 0.7, 0.3, 0.0),
    Phase("ask-12", 0.16, 12, 0.55, 0.3, 0.15),
    Phase("ask-32", 0.40, 32, 0.4, 0.3, 0.3),
    Phase("ask-128", 0.50, 128, 0.25, 0.3, 0.45),
    Phase("ask-512", 0.64, 512, 0.45, 0.32, 0.23),
    Phase("ask-2048", 0.82, 2048, 0.54, 0.28, 0.18),
    Phase("ask-4096", 1.01, 4096, 0.62, 0.23, 0.15),
)
DRAFT: tuple[Phase, ...] = (
    Phase("look", 0.12, 12, 0.0, 1.0, 0.0),
    Phase("tell-32", 0.25, 32, 0.3, 0.7, 0.0),
    Phase("tell-128", 0.50, 128, 0.25, 0.72, 0.03),
    Phase("tell-512", 0.80, 512, 0.25, 0.72, 0.03),
    Phase("tell-2048", 1.01, 2048, 0.25, 0.72, 0.03),
)


def phase_at(phases: tuple[Phase, ...], progress: float) -> Phase:
    """The phase at a fraction of the time."""
    return next((phase for phase in phases if progress < phase.until), phases[-1])


def _log_uniform(rng: Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))


def draw(phases: tuple[Phase, ...], progress: float, budget: int, rng: Random, longest: int = 4096) -> Plan:
    """The plan of a step that shows about `budget` frames, none longer than `longest`."""
    phase = phase_at(phases, progress)
    ceiling = min(phase.ceiling, longest)
    if phase.name == "look":
        frames = rng.randint(1, ceiling)
        return Plan(phase.name, "caption", frames, _rows(budget, frames), max_words=120)
    kinds = {name: getattr(phase, name) for name in ("question", "caption", "document")}
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    if kind == "caption":
        return _caption(phase, ceiling, longest, budget, rng)
    if kind == "document":
        return _document(phase, min(ceiling, 1024), budget, rng)
    near = ceiling > 128 and rng.random() < 0.5
    frames = rng.randint(ceiling // 2, ceiling) if near else _log_uniform(rng, 2, ceiling)
    if near and rng.random() < 0.2:
        frames = ceiling
    return Plan(
        phase.name,
        "question",
        frames,
        _rows(budget, frames),
        questions=_questions(frames),
        chats=0.15,
        captions=0.5 if frames <= 128 else 0.3,
    )


def _rows(budget: int, frames: int) -> int:
    return max(1, min(256, budget // frames))


def _questions(frames: int) -> int:
    """More questions on a long video: its pixels are what a step pays for."""
    return 6 if frames <= 32 else 12 if frames <= 256 else 24 if frames <= 1024 else 32


def _caption(phase: Phase, ceiling: int, longest: int, budget: int, rng: Random) -> Plan:
    draw_ = rng.random()
    if draw_ < 0.25 or ceiling < 32:
        frames = _log_uniform(rng, 1, min(ceiling, 64))
    elif ceiling < 128:
        # A long caption wants more frames than a question of this phase.
        frames = rng.randint(min(16, longest), min(128, longest))
    elif draw_ < 0.75:
        frames = rng.randint(48, min(ceiling, 256))
    else:
        frames = _log_uniform(rng, 48, min(ceiling, 2048))
    words = 480 if rng.random() < 0.7 else rng.randint(40, 480)
    return Plan(phase.name, "caption", frames, _rows(budget, frames), max_words=words)


def _document(phase: Phase, ceiling: int, budget: int, rng: Random) -> Plan:
    segments = rng.choice([n for n in (1, 2, 3, 4, 6, 8, 12, 16) if 2 * n <= ceiling])
    near = ceiling > 128 and rng.random() < 0.5
    total = rng.randint(ceiling // 2, ceiling) if near else _log_uniform(rng, 2 * segments, ceiling)
    length = max(1, total // segments)
    frames = length * segments
    # Text makes a document a third longer than its video.
    rows = _rows(budget * 3 // 4, frames)
    return Plan(
        phase.name,
        "document",
        frames,
        rows,
        segments=segments,
        questions=_questions(frames),
        chats=0.1,
        kinds=("needle", "note") if rng.random() < 0.5 else None,
    )
