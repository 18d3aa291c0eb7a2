"""The table of a model card: every figure a shipped model must reach, measured the way a user would meet it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel.eval.caption import agreement, caption_cases, caption_scores
from mmaccel.eval.cases import DOCUMENT_KINDS, Film, cases, seed_at, tokens_per_frame
from mmaccel.eval.needle import Judged, Tally, judge


@dataclass(frozen=True)
class Entry:
    """One row to measure. `tokens` is the length asked for; `kinds` empty means captions; `least` and `most` are the
    bounds of the figure."""

    task: str
    tokens: int
    kinds: tuple[str, ...]
    least: float
    documents: int = 0
    most: float | None = None


NEEDLE_TOKENS = (128, 512, 2048, 8192, 32768, 65536)
DOCUMENT_TOKENS = (1024, 4096, 16384)

ENTRIES: tuple[Entry, ...] = (
    *(Entry("V-NIAH", tokens, ("needle",), 0.98 if tokens <= 32768 else 0.95) for tokens in NEEDLE_TOKENS),
    *(Entry("MM-NIAH", tokens, DOCUMENT_KINDS, 0.95, documents=4) for tokens in DOCUMENT_TOKENS),
    *(Entry(kind, 8192, (kind,), 0.90) for kind in ("order", "count", "combine")),
    *(Entry(kind, 8192, (kind,), 0.0) for kind in ("scene", "after")),
    Entry("caption", 2048, (), 0.90),
)
RATIO = (3.0, 6.0)
AGREEMENT = (0.5, 0.9)


@dataclass(frozen=True)
class Line:
    """One measured row: `value` over `asked` answers or caption tokens, and the bounds it is held to."""

    task: str
    frames: int
    tokens: int
    value: float | None
    asked: int
    least: float
    most: float | None = None

    @property
    def met(self) -> bool:
        return (
            self.value is not None
            and self.least <= self.value
            and (self.most is None or self.value <= self.most)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "met": self.met}


def frames_of(entry: Entry, per_frame: int) -> int:
    """How many frames make about the tokens of an entry; a document's text is a quarter of it."""
    share = 0.75 if entry.documents else 1.0
    frames = max(1, round(entry.tokens * share / per_frame))
    return max(entry.documents, frames // entry.documents * entry.documents) if entry.documents else frames


def measure(
    model: nn.Module,
    processor: Any,
    film: Film,
    *,
    samples: Callable[[Entry], int] | int = 50,
    seed: int = 0,
    recipe: Recipe | None = None,
    draft: nn.Module | None = None,
    entries: Sequence[Entry] = ENTRIES,
    progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[Line]:
    """The lines of the table, one after the other; stop when you like. `progress(task, done, total)` is called often."""
    per_frame = tokens_per_frame(processor)
    chosen = recipe if recipe is not None else Recipe()
    for entry in entries:
        count = samples if isinstance(samples, int) else samples(entry)
        frames = frames_of(entry, per_frame)
        if entry.kinds:
            yield _questions(model, processor, film, entry, frames, count, seed, chosen, per_frame, progress)
        else:
            yield from _captions(model, processor, film, entry, frames, count, seed, chosen, draft, progress)
    if draft is not None:
        yield Line("draft step", 0, 1024, step_ratio(model, draft), 1, *RATIO)


def _questions(
    model: nn.Module,
    processor: Any,
    film: Film,
    entry: Entry,
    frames: int,
    count: int,
    seed: int,
    recipe: Recipe,
    per_frame: int,
    progress: Callable[[str, int, int], None] | None,
) -> Line:
    tally = Tally("measured")
    asked = cases(
        frames,
        count,
        seed_at(seed, frames),
        entry.kinds,
        documents=entry.documents,
        tokens_per_frame=per_frame,
    )
    done = 0
    for judged in judge(model, processor, {"measured": recipe}, asked, film):
        tally.add(judged)
        done += 1
        if progress is not None:
            progress(f"{entry.task} {entry.tokens}", done, count * len(entry.kinds))
    rows = tally.rows()
    tokens = (rows[0]["tokens"] if rows else None) or entry.tokens
    return Line(entry.task, frames, tokens, tally.share(), done, entry.least, entry.most)


def _captions(
    model: nn.Module,
    processor: Any,
    film: Film,
    entry: Entry,
    frames: int,
    count: int,
    seed: int,
    recipe: Recipe,
    draft: nn.Module | None,
    progress: Callable[[str, int, int], None] | None,
) -> Iterator[Line]:
    rows: list[Mapping[str, int]] = []
    told = caption_cases(frames, count, seed_at(seed, frames))
    for row in caption_scores(model, processor, told, film, recipe=recipe, draft=draft):
        rows.append(row)
        if progress is not None:
            progress(f"caption {entry.tokens}", len(rows), count)
    shares = agreement(rows)
    tokens = int(shares["tokens"] or 0)
    yield Line("caption", frames, entry.tokens, shares["accuracy"], tokens, entry.least, entry.most)
    if draft is not None:
        yield Line("draft agrees", frames, entry.tokens, shares["agreement"], tokens, *AGREEMENT)


@torch.no_grad()
def step_ratio(
    target: nn.Module, draft: nn.Module, *, length: int = 1024, steps: int = 30, rounds: int = 3
) -> float:
    """How many draft decode steps one target step costs, on the models' own device: batch 1 after `length` tokens of text.

    On a CPU both run in two threads. The two take turns, and the lower quartile of each counts: what a step costs when
    nothing else runs.
    """
    taken: dict[str, list[float]] = {"target": [], "draft": []}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(rounds):
            for name, model in (("target", target), ("draft", draft)):
                taken[name] += _steps(model, length, steps)
    finally:
        torch.set_num_threads(threads)
    low = {name: statistics.quantiles(times, n=4)[0] for name, times in taken.items()}
    return low["target"] / low["draft"]


def _steps(model: nn.Module, length: int, steps: int) -> list[float]:
    adapter = adapter_for(model)
    runner = adapter.runner(model)
    device = next(model.parameters()).device
    ids = torch.arange(length, device=device).remainder(200).add(16)[None]
    token = runner.prefill({"input_ids": ids}).argmax(-1, keepdim=True)
    taken = []
    for step in range(steps + 3):
        _wait(device)
        began = time.perf_counter()
        token = runner.step(token)[:, -1].argmax(-1, keepdim=True)
        _wait(device)
        if step >= 3:
            taken.append(time.perf_counter() - began)
    return taken


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def markdown(lines: Sequence[Line]) -> str:
    """The table as Markdown, for the model card."""
    rows = [
        "| task | frames | tokens | measured | asked | required |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for line in lines:
        rows.append(
            f"| {line.task} | {line.frames or '-'} | {line.tokens} | {_value(line, line.value)} | {line.asked} | "
            f"{_required(line)}{'' if line.met else ' (missed)'} |"
        )
    return "\n".join(rows)


def _value(line: Line, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if line.task == "draft step" else f"{value:.1%}"


def _required(line: Line) -> str:
    if not line.least and line.most is None:
        return "-"
    if line.most is None:
        return f"at least {_value(line, line.least)}"
    return f"{_value(line, line.least)} to {_value(line, line.most)}"


__all__ = ["ENTRIES", "Entry", "Judged", "Line", "frames_of", "markdown", "measure", "step_ratio"]
