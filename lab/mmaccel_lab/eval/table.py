"""The table of a model card: every figure a shipped model must reach, measured the way a user would meet it."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel_lab.eval.caption import agreement, caption_cases, caption_scores
from mmaccel_lab.eval.cases import DOCUMENT_KINDS, Film, cases, seed_at, tokens_per_frame
from mmaccel_lab.eval.needle import Tally, judge


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
    Entry("note", 4096, ("note",), 0.0, documents=4),
    Entry("caption", 2048, (), 0.90),
)
RATIO = (3.0, 6.0)
AGREEMENT = (0.5, 0.9)


@dataclass(frozen=True)
class Line:
    """One measured row: `value` over `asked` answers or caption tokens, the bounds it is held to, and where it was run."""

    task: str
    frames: int
    tokens: int
    value: float | None
    asked: int
    least: float
    most: float | None = None
    device: str = ""

    @property
    def met(self) -> bool:
        most = float("inf") if self.most is None else self.most
        return self.value is not None and self.least <= self.value <= most

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "met": self.met}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Line:
        """What `to_dict` gave."""
        return cls(**{name: value for name, value in row.items() if name != "met"})


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
    share: tuple[int, int] = (0, 1),
    done: Sequence[Line] = (),
) -> Iterator[Line]:
    """The lines of the table, one after the other; stop when you like. `progress(task, done, total)` is called often.

    Entries whose lines are among `done` are left out.
    `share` (i, n): only every nth question or caption from the ith on, and no draft step; see `mmaccel_lab.eval.jobs`.
    """
    per_frame, on = tokens_per_frame(processor), device_of(model)
    chosen = recipe if recipe is not None else Recipe()
    there = {(line.task, line.frames) for line in done}

    def told(entry: Entry, done: int, total: int) -> None:
        if progress is not None:
            progress(f"{entry.task} {entry.tokens}", done, total)

    def questions(entry: Entry, frames: int, count: int) -> Line:
        tally, done = Tally("measured"), 0
        more = {"documents": entry.documents, "tokens_per_frame": per_frame}
        asked = cases(frames, count, seed_at(seed, frames), entry.kinds, **more)
        mine = islice(asked, share[0], None, share[1])
        for done, judged in enumerate(judge(model, processor, {"measured": chosen}, mine, film), 1):
            tally.add(judged)
            told(entry, done, count * len(entry.kinds))
        rows = tally.rows()
        tokens = (rows[0]["tokens"] if rows else None) or entry.tokens
        return Line(entry.task, frames, tokens, tally.share(), done, entry.least, entry.most, on)

    def captions(entry: Entry, frames: int, count: int) -> Iterator[Line]:
        rows: list[Mapping[str, int]] = []
        mine = islice(caption_cases(frames, count, seed_at(seed, frames)), share[0], None, share[1])
        for row in caption_scores(model, processor, mine, film, recipe=chosen, draft=draft):
            rows.append(row)
            told(entry, len(rows), count)
        shares = agreement(rows)
        tokens = int(shares["tokens"] or 0)
        yield Line("caption", frames, entry.tokens, shares["accuracy"], tokens, entry.least, entry.most, on)
        if draft is not None:
            yield Line("draft agrees", frames, entry.tokens, shares["agreement"], tokens, *AGREEMENT, on)

    for entry in entries:
        count = samples if isinstance(samples, int) else samples(entry)
        frames = frames_of(entry, per_frame)
        task = entry.task if entry.kinds or draft is None else "draft agrees"
        if (task, frames) in there:
            continue
        if entry.kinds:
            yield questions(entry, frames, count)
        else:
            yield from captions(entry, frames, count)
    if draft is not None and share == (0, 1) and ("draft step", 0) not in there:
        yield step_line(model, draft)


def order(line: Line) -> tuple[int, int]:
    """Sorts lines into the order of the table."""
    tasks = [*dict.fromkeys(entry.task for entry in ENTRIES), "draft agrees", "draft step"]
    return tasks.index(line.task), line.frames


def device_of(model: nn.Module) -> str:
    """Where and in what a model runs, as a table tells it."""
    first = next(model.parameters())
    name = "CPU" if first.device.type == "cpu" else torch.cuda.get_device_name(first.device)
    return f"{name}, {str(first.dtype).removeprefix('torch.')}"


def step_line(target: nn.Module, draft: nn.Module) -> Line:
    """The line of `step_ratio`."""
    return Line("draft step", 0, 1024, step_ratio(target, draft), 1, *RATIO, "CPU, float32")


@torch.no_grad()
def step_ratio(
    target: nn.Module, draft: nn.Module, *, length: int = 1024, steps: int = 30, rounds: int = 3
) -> float:
    """How many draft decode steps one target step costs on two CPU threads in fp32: batch 1 after `length` tokens of text.

    The two take turns, and the lower quartile of each counts: what a step costs when nothing else runs. Models that are
    elsewhere are copied.
    """
    target, draft = _on_cpu(target), _on_cpu(draft)
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


def _on_cpu(model: nn.Module) -> nn.Module:
    first = next(model.parameters())
    if first.device.type == "cpu" and first.dtype == torch.float32:
        return model
    return copy.deepcopy(model).to("cpu", torch.float32)


def _steps(model: nn.Module, length: int, steps: int) -> list[float]:
    adapter = adapter_for(model)
    runner = adapter.runner(model)
    ids = torch.arange(length).remainder(200).add(16)[None]
    token = runner.prefill({"input_ids": ids}).argmax(-1, keepdim=True)
    taken = []
    for step in range(steps + 3):
        began = time.perf_counter()
        token = runner.step(token)[:, -1].argmax(-1, keepdim=True)
        if step >= 3:
            taken.append(time.perf_counter() - began)
    return taken


def markdown(lines: Sequence[Line]) -> str:
    """The table as Markdown, for the model card."""
    rows = [
        "| task | frames | tokens | measured | asked | required | on |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for line in lines:
        rows.append(
            f"| {line.task} | {line.frames or '-'} | {line.tokens} | {_value(line, line.value)} | {line.asked} | "
            f"{_required(line)}{'' if line.met else ' (missed)'} | {line.device} |"
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
