"""Are the answers right? Questions with known answers, judged one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mmaccel.cli.answer import Answer, ask, prompt_inputs
from mmaccel.core.recipe import Recipe
from mmaccel_lab.eval.cases import Case, Film
from mmaccel_lab.eval.encoded import Encoded

MAX_NEW_TOKENS = 8
"""Answers have at most three words; a model that goes on is cut here and judged wrong."""


@dataclass(frozen=True)
class Judged:
    """The answers to one case, by the name of the recipe they were given under."""

    case: Case
    answers: Mapping[str, Answer]

    def right(self, recipe: str) -> bool:
        """Whether that answer is the true one; a special token inside it makes it wrong."""
        return self.case.right(self.answers[recipe].raw)


def judge(
    model: nn.Module,
    processor: Any,
    recipes: Mapping[str, Recipe],
    asked: Iterable[Case],
    film: Film,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    seen: Encoded | None = None,
) -> Iterator[Judged]:
    """Ask every case under every recipe, one after the other; the caller may stop at any time.

    `seen`: recipes share what the vision tower makes of a case, and none is charged for it (times mean nothing then).
    """
    for case in asked:
        inputs = prompt_inputs(processor, case.content(film.watch(case.world)), model)
        answers = {}
        for name, recipe in recipes.items():
            with contextlib.nullcontext() if seen is None else seen.shared(model, recipe):
                answers[name] = ask(model, processor, inputs, recipe, max_new_tokens=max_new_tokens)
        yield Judged(case, answers)


@dataclass
class Tally:
    """Right answers of one recipe, by number of frames and by kind, filled case by case.

    `rows` gives one mapping a length: frames, tokens (mean length of the prompt), accuracy, right, asked, kept (mean), and
    the right and asked of each kind. A length that was expected and never asked stays, with nothing right of 0 asked.
    """

    recipe: str
    _seen: dict[int, list[tuple[str, bool, int, float | None]]] = field(default_factory=dict)
    _wanted: dict[int, dict[str, int]] = field(default_factory=dict)

    def expect(self, frames: int, kinds: Iterable[str], count: int) -> None:
        """`count` questions of each kind are going to be asked at a length."""
        self._wanted.setdefault(frames, {}).update(dict.fromkeys(kinds, count))
        self._seen.setdefault(frames, [])

    def missing(self) -> list[dict[str, Any]]:
        """What was expected and not asked: frames, kind, asked, wanted."""
        return [
            {"frames": frames, "kind": kind, "asked": asked, "wanted": count}
            for frames, kinds in sorted(self._wanted.items())
            for kind, count in kinds.items()
            if (asked := sum(kind == one for one, *_ in self._seen[frames])) < count
        ]

    def add(self, judged: Judged) -> None:
        """Count one case."""
        report = judged.answers[self.recipe].report
        row = (judged.case.kind, judged.right(self.recipe), report.prompt_tokens, report.kept)
        self._seen.setdefault(judged.case.world.frames, []).append(row)

    def rows(self) -> list[dict[str, Any]]:
        """One mapping for each length, shortest first."""
        rows = []
        for frames, seen in sorted(self._seen.items()):
            kinds = {kind: {"right": 0, "asked": 0} for kind in self._wanted.get(frames, ())}
            for kind, right, _, _ in seen:
                tally = kinds.setdefault(kind, {"right": 0, "asked": 0})
                tally["right"] += right
                tally["asked"] += 1
            total = sum(tally["right"] for tally in kinds.values())
            rows.append(
                {
                    "frames": frames,
                    "tokens": round(sum(tokens for _, _, tokens, _ in seen) / len(seen)) if seen else None,
                    "accuracy": total / len(seen) if seen else None,
                    "right": total,
                    "asked": len(seen),
                    "kept": mean([kept for *_, kept in seen if kept is not None]),
                    "kinds": kinds,
                }
            )
        return rows

    def share(self) -> float | None:
        """The share right over everything; None before the first case."""
        return mean([right for seen in self._seen.values() for _, right, _, _ in seen])


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None
