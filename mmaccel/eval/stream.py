"""Memories of streams compared: the same frames, windows and budgets for all, and questions with known evidence.

A stream is a world of many frames, with scenes that cut and return and stretches in which nothing moves. It is rendered and
watched in pieces, and asked when it is over. Every question goes to every memory, so that they are compared question by
question.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from mmaccel.core.errors import RecipeError
from mmaccel.core.kv import StreamPolicy
from mmaccel.core.registry import policy, registry
from mmaccel.core.session import VideoSession
from mmaccel.eval.cases import tokens_per_frame
from mmaccel.world import World, render
from mmaccel.world.questions import checked_kinds
from mmaccel.world.records import Question

KINDS = ("needle", "scene", "order", "combine")
PIECE = 64
"""Frames rendered and watched at a time."""

SIDES = (168, 280)
"""Height and width of the frames."""

NO_BUDGET = ("full", "offload")
"""Memories that see everything whatever the budget; they run once."""


@dataclass(frozen=True)
class Entry:
    """A memory in the comparison: the name it is shown under, its budget in frames (None: it has none), and its policy."""

    name: str
    budget: int | None
    kv: StreamPolicy


@dataclass(frozen=True)
class Shot:
    """One question to one memory.

    recall  of the frames without which it cannot be answered, the share of layers that saw each, mean over the frames
    alone   of these frames, the share that at least half of the layers saw
    seen    frames that a layer saw, mean over the layers: local ones are on top of most budgets. A frame of which a memory
            of tokens keeps one counts whole
    off     of the stream's units, the share whose keys were not on the device before it was asked
    """

    memory: str
    budget: int | None
    seed: int
    frames: int
    kind: str
    question: str
    answer: str
    said: str
    right: bool
    recall: float
    alone: float
    seen: float
    off: float
    ttft_s: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def entries(
    names: Sequence[str | Mapping[str, Any]], budgets: Sequence[int], window: int, tokens: int
) -> list[Entry]:
    """Memories by name, or a mapping of fields, at each budget; all encode under one `window`, in frames of `tokens` tokens.

    A field that a mapping gives stays. "recent" and "window" see the last frames: as many as the budget, if the window
    has them. Raises `RecipeError` for what is no memory of streams.
    """
    found: list[Entry] = []
    for one in names:
        given = {"name": one} if isinstance(one, str) else dict(one)
        name = str(given.get("name"))
        known = getattr(registry("kv").get(name), "__dataclass_fields__", {})
        label = str(given.pop("label", name))
        for budget in [None] if name in NO_BUDGET else budgets:
            fields: dict[str, Any] = {}
            if "window" in known:
                fields["window"] = window
            if budget is not None and "frames" in known:
                fields["frames"] = budget
            if name == "recent" and budget is not None:
                fields["local"] = min(budget, window)
            elif "local" in known:
                # What a question sees of the window is not more than the window.
                fields["local"] = min(registry("kv").build(name).local, window)  # type: ignore[attr-defined]
            if name == "window" and budget is not None:
                fields["window"] = min(budget, window) * tokens
            if name == "no_cache" and budget is not None:
                fields["kept"] = max(4096, 2 * budget)
            made = policy("kv", {**fields, **given})
            if not isinstance(made, StreamPolicy):
                raise RecipeError(f"kv {name!r} cannot hold a stream; name another memory.")
            found.append(Entry(label, budget, made))
    return found


def shots(
    model: nn.Module,
    processor: Any,
    memories: Iterable[Entry],
    worlds: Iterable[World],
    *,
    kinds: Sequence[str] = KINDS,
    still: float = 0.3,
    fps: float = 1.0,
    chunk: int | None = None,
    most: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Shot]:
    """Every question of `kinds` about each world, to every memory. At most `most` questions of a kind and world.

    `still` of the frames stand still; `progress` is told of each frame watched and each question asked.
    """
    wanted = checked_kinds(kinds, KINDS)
    device = next(model.parameters()).device
    memories = list(memories)
    for world in worlds:
        asked = _questions(world, wanted, most)
        for entry in memories if asked else ():
            with VideoSession(model, processor, None, kv=entry.kv, chunk=chunk) as session:
                _watch(session, world, still, fps, device, progress)
                for question in asked:
                    yield _shot(session, entry, world, question)
                    if progress is not None:
                        progress(1)


def _questions(world: World, kinds: Sequence[str], most: int | None) -> list[Question]:
    found = []
    for kind in kinds:
        some = world.questions([kind])
        found += some if most is None else some[:most]
    return found


def _watch(
    session: VideoSession,
    world: World,
    still: float,
    fps: float,
    device: torch.device,
    progress: Callable[[int], None] | None,
) -> None:
    table = world.table(still)
    for begin in range(0, world.frames, PIECE):
        rows = {name: column[begin : begin + PIECE].to(device) for name, column in table.items()}
        frames = render(rows, *SIDES)
        session.watch(frames, fps=fps)
        if progress is not None:
            progress(len(frames))


def _shot(session: VideoSession, entry: Entry, world: World, question: Question) -> Shot:
    answer = session.ask(question.text, 8)
    share: dict[int, float] = {}
    for one in answer.evidence:
        for frame in range(one.frames[0], one.frames[1] + 1):
            share[frame] = max(share.get(frame, 0.0), one.share)
    seen = [share.get(frame, 0.0) for frame in question.frames]
    told = answer.counters
    units = told.get("units", 0.0)
    return Shot(
        memory=entry.name,
        budget=entry.budget,
        seed=world.seed,
        frames=world.frames,
        kind=question.kind,
        question=question.text,
        answer=question.answer,
        said=answer.text,
        right=answer.text.strip().lower() == question.answer,
        recall=sum(seen) / len(seen) if seen else 0.0,
        alone=sum(one >= 0.5 for one in seen) / len(seen) if seen else 0.0,
        seen=sum(share.values()),
        off=1 - told.get("resident", units) / units if units else 0.0,
        ttft_s=answer.ttft_s,
    )


def worlds_of(frames: int, count: int, seed: int) -> list[World]:
    """`count` worlds of `frames` frames with seeds from `seed` on."""
    return [World.generate(number, frames) for number in range(seed, seed + count)]


def memories_for(
    processor: Any, names: Sequence[str | Mapping[str, Any]], budgets: Sequence[int], window: int
) -> list[Entry]:
    """`entries` with the tokens that `processor` makes of a frame of `SIDES`."""
    return entries(names, budgets, window, tokens_per_frame(processor))


def rows(found: Sequence[Shot]) -> list[dict[str, Any]]:
    """Accuracy and recall of each memory, budget and kind, and over all kinds (``"all"``, each kind weighing the same).

    `low` and `high` are the 95% interval of the accuracy (Wilson; for all kinds, normal).
    """
    groups: dict[tuple[str, int | None], dict[str, list[Shot]]] = defaultdict(lambda: defaultdict(list))
    for shot in found:
        groups[shot.memory, shot.budget][shot.kind].append(shot)
    told = []
    for (memory, budget), kinds in groups.items():
        base = {"memory": memory, "budget": budget}
        parts: list[dict[str, Any]] = []
        for kind, some in kinds.items():
            right, n = sum(one.right for one in some), len(some)
            low, high = _wilson(right, n)
            row: dict[str, Any] = {
                "kind": kind,
                "questions": n,
                "accuracy": right / n,
                "low": low,
                "high": high,
                "recall": sum(one.recall for one in some) / n,
                "alone": sum(one.alone for one in some) / n,
                "seen": sum(one.seen for one in some) / n,
                "off": min(one.off for one in some),
                "ttft_s": sorted(one.ttft_s for one in some)[n // 2],
            }
            parts.append(row)
            told.append({**base, **row})
        mean = {
            name: sum(row[name] for row in parts) / len(parts)
            for name in ("accuracy", "recall", "alone", "seen")
        }
        spread = sum(row["accuracy"] * (1 - row["accuracy"]) / row["questions"] for row in parts)
        margin = 1.96 * math.sqrt(spread) / len(parts)
        told.append(
            {
                **base,
                "kind": "all",
                "questions": sum(row["questions"] for row in parts),
                **mean,
                "low": max(0.0, mean["accuracy"] - margin),
                "high": min(1.0, mean["accuracy"] + margin),
                "off": min(row["off"] for row in parts),
                "ttft_s": sum(row["ttft_s"] for row in parts) / len(parts),
            }
        )
    return told


def paired(found: Sequence[Shot], one: str, other: str) -> list[dict[str, Any]]:
    """How much more often `one` is right than `other`, at each budget and kind, on the same questions; 95% interval.

    A memory without a budget, whichever of the two, stands beside every budget of the other.
    """
    by: dict[tuple[str, int | None], dict[tuple[int, int, str], Shot]] = defaultdict(dict)
    for shot in found:
        by[shot.memory, shot.budget][shot.seed, shot.frames, shot.question] = shot
    told = []
    pairs = [
        (mine, theirs) for mine in by if mine[0] == one for theirs in by
        if theirs[0] == other and (mine[1] == theirs[1] or None in (mine[1], theirs[1]))
    ]  # fmt: skip
    for left, right in pairs:
        mine, rival = by[left], by[right]
        budget = right[1] if left[1] is None else left[1]
        gaps: dict[str, list[int]] = defaultdict(list)
        for key, shot in mine.items():
            if key in rival:
                gaps[shot.kind].append(int(shot.right) - int(rival[key].right))
        for kind, gap in gaps.items():
            n = len(gap)
            mean = sum(gap) / n
            spread = sum((g - mean) ** 2 for g in gap) / max(1, n - 1)
            margin = 1.96 * math.sqrt(spread / n)
            told.append(
                {
                    "memory": one,
                    "rival": other,
                    "budget": budget,
                    "kind": kind,
                    "questions": n,
                    "gain": mean,
                    "low": mean - margin,
                    "high": mean + margin,
                }
            )
    return told


def _wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    share = right / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    margin = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - margin), min(1.0, middle + margin)
