"""Memories of streams compared: the same frames, windows and budgets for all, and questions with known evidence.

A stream is a world of many frames, with scenes that cut and return and stretches in which nothing moves. It is rendered, and
seen by the vision tower, once for all memories, which watch or ingest it one after the other and are asked when it is over:
by one watch at every budget that changes nothing of what is kept. Every question goes to every memory, so that they are
compared question by question. A memory may have the other parts of a recipe beside it, a pattern and a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from torch import nn

from mmaccel.core.decoding.generate import Answer
from mmaccel.core.errors import RecipeError
from mmaccel.core.memory.kv import StreamPolicy
from mmaccel.core.recipe import Recipe, stream_policy
from mmaccel.core.registry import policy, registry
from mmaccel.models.shipped import CAPTION_REQUEST
from mmaccel_lab.eval.cases import tokens_per_frame
from mmaccel_lab.eval.footage import Footage, Viewing
from mmaccel_lab.eval.purity import Clustering, clusterings
from mmaccel_lab.world import World
from mmaccel_lab.world.questions import PAIRS, checked_kinds
from mmaccel_lab.world.records import Question

KINDS = ("needle", "scene", "order", "combine")
NO_BUDGET = ("full", "offload")
"""Memories that see everything whatever the budget; they run once."""
NAMED = 3
"""Moments that are told of an answer, when it is counted whether they are the right ones."""


@dataclass(frozen=True)
class Entry:
    """A memory in the comparison: the name it is shown under, its budget in frames (None: it has none), its recipe, and
    whether it is given the film as a stored video (`VideoSession.ingest`)."""

    name: str
    budget: int | None
    recipe: Recipe
    ingest: bool = False

    @property
    def kv(self) -> StreamPolicy:
        return stream_policy(self.recipe)


@dataclass(frozen=True)
class Shot:
    """One question to one memory.

    recall  of the frames without which it cannot be answered, the share of layers that saw each, mean over the frames
    alone   of these frames, the share that at least half of the layers saw
    named   whether one of these frames, or the one beside it, is among the first `NAMED` moments that the answer is based on
            (`Answer.top`); None where the memory does not tell
    seen    frames that a layer saw, mean over the layers: local ones are on top of most budgets. A frame of which a memory
            of tokens keeps one counts whole
    off     of the stream's units, the share whose keys were not on the device before it was asked: on the host, or gone
    device_bytes, host_bytes  that the memory held when it had answered (its counters)
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
    named: bool | None = None
    device_bytes: float = 0.0
    host_bytes: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True)
class Watch:
    """A stream watched by a memory, and asked about at one or more budgets; of several memories it has the first one's name.

    seconds   that the watching took, without the vision tower, which looks at a stream once for all memories
    counters  of the memory when the questions at `budget`, the last one, were asked
    clusters  before any question, by level; empty for a memory without
    device_bytes, host_bytes  that the stream took (`Viewing.device_bytes`, `Viewing.host_bytes`)
    kept      by the pattern, of an ingestion (`Report.kept`)
    caption, tokens_per_s, steps  of a caption asked for last: its text, tokens a second, and the target's steps a token
    """

    memory: str
    budget: int | None
    seed: int
    frames: int
    seconds: float
    counters: dict[str, float]
    clusters: dict[str, Clustering]
    device_bytes: int | None = None
    host_bytes: float = 0.0
    kept: float | None = None
    caption: str = ""
    tokens_per_s: float | None = None
    steps: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def entries(
    names: Sequence[str | Mapping[str, Any]], budgets: Sequence[int], window: int, tokens: int
) -> list[Entry]:
    """Memories by name, or a mapping of fields, at each budget; all encode under one `window`, in frames of `tokens` tokens.

    A field that a mapping gives stays; its `beside` are other fields of a recipe, its `ingest` is the entry's. "recent" and
    "window" see the last frames: as many as the budget, if the window has them. Raises `RecipeError` for what is no memory
    of streams.
    """
    found: list[Entry] = []
    for one in names:
        given = {"name": one} if isinstance(one, str) else dict(one)
        name = str(given.get("name"))
        known = getattr(registry("kv").get(name), "__dataclass_fields__", {})
        label, ingest = str(given.pop("label", name)), bool(given.pop("ingest", False))
        beside = given.pop("beside", None)
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
            found.append(Entry(label, budget, Recipe.load(beside, kv=made), ingest))
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
    call: int | None = None,
    most: int | None = None,
    told: int = 0,
    progress: Callable[[int], None] | None = None,
    watched: Callable[[Watch], None] | None = None,
) -> Iterator[Shot]:
    """Every question of `kinds` about each world, to every memory. At most `most` questions of a kind and world.

    `still` of the frames stand still; a memory is given `call` frames at a time (None: many), and asked for a caption of at
    most `told` tokens last; `progress` is told of each frame watched and each question asked, `watched` of each watch when
    its questions are asked.
    """
    wanted = checked_kinds(kinds, KINDS)
    watches = together(memories)
    for world in worlds:
        asked = _questions(world, wanted, most)
        if not asked or not watches:
            continue
        footage = _footage(model, processor, world, still)
        for entries in watches:
            with Viewing(model, processor, entries[0].recipe) as session:
                seconds = session.show(footage, fps, progress, call, entries[0].ingest)
                found = clusterings(world, session.clusters(), session.frames_per_unit)
                for entry in entries:
                    session.under(entry.kv)
                    for question in asked:
                        yield _shot(session, entry, world, question)
                        if progress is not None:
                            progress(1)
                if watched is not None:
                    watched(_watch(session, entries, world, seconds, found, told))


def _watch(
    session: Viewing,
    entries: Sequence[Entry],
    world: World,
    seconds: float,
    clusters: dict[str, Clustering],
    told: int,
) -> Watch:
    name, budget = entries[0].name, entries[-1].budget
    counters, caption, rate, steps = session.counters(), "", None, None
    # Twice: on CUDA steps are captured when they are first run.
    for _ in range(2 if told else 0):
        answer = session.ask(CAPTION_REQUEST, told, evidence=False)
        report = session.report()
        caption, rate = answer.text, answer.tokens_per_s
        steps = report.draft["target_steps"] / max(1, report.new_tokens - 1)
    held = session.device_bytes, session.host_bytes, session.report().kept
    return Watch(
        name, budget, world.seed, world.frames, seconds, counters, clusters, *held, caption, rate, steps
    )


_footage = lru_cache(maxsize=1)(Footage)


def together(memories: Iterable[Entry]) -> list[list[Entry]]:
    """Those that one watch of a stream serves: alike but for what matters at a question alone."""
    found: dict[Any, list[Entry]] = {}
    for entry in memories:
        kept = [
            (field.name, repr(getattr(entry.kv, field.name)))
            for field in fields(entry.kv)
            if field.name not in entry.kv.query_time_fields
        ]
        beside = entry.ingest, repr({**entry.recipe.to_dict(), "kv": None})
        found.setdefault((type(entry.kv), *kept, *beside), []).append(entry)
    return list(found.values())


def _questions(world: World, kinds: Sequence[str], most: int | None) -> list[Question]:
    found = []
    for kind in kinds:
        some = world.questions([kind], max(PAIRS, most or 0))
        found += some if most is None else some[:most]
    return found


def _shot(session: Viewing, entry: Entry, world: World, question: Question) -> Shot:
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
        named=_named(answer, question),
        device_bytes=told.get("bytes", 0.0),
        host_bytes=told.get("host_bytes", 0.0),
    )


def _named(answer: Answer, question: Question) -> bool | None:
    first = [one for one in answer.top(NAMED) if one.score is not None]
    near = {frame + step for frame in question.frames for step in (-1, 0, 1)}
    return any(near & set(range(one.frames[0], one.frames[1] + 1)) for one in first) if first else None


def worlds_of(frames: int, count: int, seed: int) -> list[World]:
    """`count` worlds of `frames` frames with seeds from `seed` on."""
    return [World.generate(number, frames) for number in range(seed, seed + count)]


def memories_for(
    processor: Any, names: Sequence[str | Mapping[str, Any]], budgets: Sequence[int], window: int
) -> list[Entry]:
    """`entries` with the tokens that `processor` makes of a frame of `SIDES`."""
    return entries(names, budgets, window, tokens_per_frame(processor))
