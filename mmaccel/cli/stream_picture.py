"""Pictures of a stream's memory: its clusters in time, and the frames that questions retrieved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmaccel.core.answer import Evidence
from mmaccel.figure import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = 40
"""Clusters of a level that get a lane of their own, the largest; the others share the lowest."""


@dataclass(frozen=True)
class Truth:
    """What is known of a stream, in seconds: scenes (begin, end, name), and the moments that each question rests on, by its
    `words`."""

    scenes: tuple[tuple[float, float, str], ...] = ()
    questions: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Truth:
        """From a world's own truth (`World.truth`)."""
        fps = told["fps"]
        scenes = tuple((one["start"] / fps, one["stop"] / fps, one["scene"]) for one in told["scenes"])
        asked = {words(one["text"]): tuple(n / fps for n in one["frames"]) for one in told["questions"]}
        return cls(scenes, asked)

    def moments(self, question: str) -> tuple[float, ...]:
        """What a question rests on, however it is capitalised and punctuated; nothing for one that is not known."""
        return self.questions.get(words(question), ())


def words(text: str) -> str:
    """The words of a text, in small letters."""
    return " ".join(re.findall(r"\w+", text.lower()))


def runs(cluster: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Of each cluster, in order of its first entry, the runs (begin, end) of entries that follow one another."""
    found: dict[int, list[tuple[int, int]]] = {}
    begin = 0
    for at in range(1, len(cluster) + 1):
        if at == len(cluster) or cluster[at] != cluster[begin]:
            found.setdefault(cluster[begin], []).append((begin, at))
            begin = at
    return found


def timeline(
    clusters: Mapping[str, Tensor], shown: Sequence[float], layer: int, truth: Truth | None = None
) -> Figure:
    """A lane for each cluster, from the top in the order in which they began: what was in it when.

    clusters  [L or 1, N] by level (`VideoSession.clusters`); of the levels that differ by layer, `layer` is drawn
    shown     seconds of each step of time, of which the N entries are equal parts
    """
    end = shown[-1] + (shown[-1] - shown[0]) / max(1, len(shown) - 1)
    owners = {name: rows[min(layer, len(rows) - 1)].tolist() for name, rows in clusters.items()}
    lanes = {name: _lanes(runs(owner)) for name, owner in owners.items()}
    heights = [0.5] * (truth is not None) + [0.4 + 0.09 * len(one) for one in lanes.values()]
    drawn = figure(9.0, 0.8 + sum(heights))
    plots = drawn.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    if truth is not None:
        _scenes(plots[0], truth)
    for axes, (name, told) in zip(plots[len(plots) - len(lanes) :], lanes.items(), strict=True):
        parts = len(owners[name]) // len(shown)
        times = [*shown, end]
        for lane, some in enumerate(told):
            spans = [(times[a // parts], times[-(-b // parts)] - times[a // parts]) for a, b in some]
            axes.broken_barh(spans, (lane - 0.45, 0.9), facecolors=f"C{lane % 10}")
        axes.set_ylim(len(told) - 0.5, -0.5)
        axes.set_yticks([])
        many = len(set(owners[name]))
        of = f" of layer {layer}" if len(clusters[name]) > 1 else ""
        axes.set_ylabel(f"{many} {name}\nclusters{of}", fontsize=8)
    plots[-1].set_xlim(shown[0], end)
    plots[-1].set_xlabel("seconds", fontsize=8)
    return drawn


def retrieved(
    answers: Sequence[tuple[str, str, Sequence[Evidence]]], end: float, truth: Truth | None = None
) -> Figure:
    """For each question, what was said and its evidence: the share of layers that looked at each frame, over time.

    What the question rests on, where `truth` knows it, is marked by a line.
    """
    drawn = figure(9.0, 0.7 + 0.9 * len(answers))
    plots = drawn.subplots(len(answers), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (question, said, evidence) in zip(plots, answers, strict=True):
        for moment in () if truth is None else truth.moments(question):
            axes.axvline(moment, color="C3", linewidth=0.8)
        axes.vlines([one.seconds for one in evidence], 0, [one.share for one in evidence], linewidth=0.8)
        axes.set_ylim(0, 1.05)
        axes.set_yticks([0, 1])
        axes.set_title(f"{question}  {said}", fontsize=8, loc="left")
    plots[-1].set_xlim(0, end)
    plots[-1].set_xlabel("seconds", fontsize=8)
    drawn.supylabel("share of layers", fontsize=8)
    return drawn


def _lanes(found: dict[int, list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """The runs of each lane."""
    largest = sorted(found, key=lambda one: sum(a - b for a, b in found[one]))
    few = set(largest[: LANES if len(found) <= LANES else LANES - 1])
    lanes = [some for one, some in found.items() if one in few]
    others = [run for one, some in found.items() if one not in few for run in some]
    return [*lanes, others] if others else lanes


def _scenes(axes: Axes, truth: Truth) -> None:
    names = list(dict.fromkeys(name for _, _, name in truth.scenes))
    for begin, end, name in truth.scenes:
        axes.broken_barh([(begin, end - begin)], (0, 1), facecolors=f"C{names.index(name) % 10}", alpha=0.5)
        axes.text((begin + end) / 2, 0.5, name, ha="center", va="center", fontsize=7)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("scenes", fontsize=8)
