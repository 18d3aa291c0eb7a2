"""What the answers of memories of streams come to: rows of accuracy and recall, and memories against one another."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mmaccel_lab.eval.haystack import Gap, interval
from mmaccel_lab.eval.needle import mean
from mmaccel_lab.eval.stream import Shot, Watch

Ask = tuple[int, int, str]
HELD = ("device_bytes", "host_bytes")


def rows(found: Sequence[Shot]) -> list[dict[str, Any]]:
    """Accuracy and recall of each memory, budget and kind, and over all kinds (``"all"``, each kind weighing the same).

    `low` and `high` are the 95% interval of the accuracy (Wilson; for all kinds, `mean_interval`). `named` is of right
    answers; None where no memory tells it, or none is right; for all kinds, where one of them has None.
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
            low, high = interval(right, n)
            row: dict[str, Any] = {
                "kind": kind,
                "questions": n,
                "accuracy": right / n,
                "low": low,
                "high": high,
                **{name: sum(getattr(one, name) for one in some) / n for name in ("recall", "alone", "seen")},
                "off": min(one.off for one in some),
                **{name: max(getattr(one, name) for one in some) for name in HELD},
                "ttft_s": sorted(one.ttft_s for one in some)[n // 2],
                "named": mean([float(one.named) for one in some if one.right and one.named is not None]),
            }
            parts.append(row)
            told.append({**base, **row})
        means = {
            name: sum(row[name] for row in parts) / len(parts)
            for name in ("accuracy", "recall", "alone", "seen")
        }
        low, high = mean_interval(parts)
        named = [row["named"] for row in parts if row["named"] is not None]
        told.append(
            {
                **base,
                "kind": "all",
                "questions": sum(row["questions"] for row in parts),
                **means,
                "low": low,
                "high": high,
                "off": min(row["off"] for row in parts),
                **{name: max(row[name] for row in parts) for name in HELD},
                "ttft_s": sum(row["ttft_s"] for row in parts) / len(parts),
                "named": mean(named) if len(named) == len(parts) else None,
            }
        )
    return told


def mean_interval(parts: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The 95% interval of the mean accuracy of some rows: the distances from each one's accuracy to its `low` and to its
    `high` are added as squares (MOVER; Zou and Donner, 2008), so that it has a width also where all are 0 or 1."""
    middle = sum(row["accuracy"] for row in parts) / len(parts)
    down, up = (
        math.sqrt(sum((row[end] - row["accuracy"]) ** 2 for row in parts)) / len(parts)
        for end in ("low", "high")
    )
    return max(0.0, middle - down), min(1.0, middle + up)


def paired(found: Sequence[Shot], one: str, other: str) -> list[dict[str, Any]]:
    """How much more often `one` is right than `other`, at each budget and kind, on the same questions; 95% interval.

    The kind ``"all"`` is the mean over the kinds, each weighing the same. A memory without a budget, whichever of the two,
    stands beside every budget of the other.
    """
    by: dict[tuple[str, int | None], dict[Ask, Shot]] = defaultdict(dict)
    for shot in found:
        by[shot.memory, shot.budget][_ask(shot)] = shot
    told = []
    pairs = [
        (mine, theirs) for mine in by if mine[0] == one for theirs in by
        if theirs[0] == other and (mine[1] == theirs[1] or None in (mine[1], theirs[1]))
    ]  # fmt: skip
    for left, right in pairs:
        mine, rival = by[left], by[right]
        base = {"memory": one, "rival": other, "budget": right[1] if left[1] is None else left[1]}
        outcomes: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
        for key, shot in mine.items():
            if key in rival:
                outcomes[shot.kind].append((shot.right, rival[key].right))
        gaps = {kind: Gap.of(some) for kind, some in outcomes.items()}
        for kind, gap in gaps.items():
            told.append({**base, "kind": kind, "questions": gap.asked, **_gain(gap.mean, gap.low, gap.high)})
        if gaps:
            # Each interval is a centre and a half width; those of different kinds of question are independent.
            centre = sum(gap.low + gap.high for gap in gaps.values()) / 2 / len(gaps)
            half = math.sqrt(sum((gap.high - gap.low) ** 2 for gap in gaps.values())) / 2 / len(gaps)
            mean = sum(gap.mean for gap in gaps.values()) / len(gaps)
            count = sum(gap.asked for gap in gaps.values())
            told.append(
                {**base, "kind": "all", "questions": count, **_gain(mean, centre - half, centre + half)}
            )
    return told


def whole(found: Sequence[Shot]) -> list[Shot]:
    """Of answers that were broken off, those to questions that every memory was asked at each of its budgets."""
    by: dict[Ask, list[Shot]] = defaultdict(list)
    for shot in found:
        by[_ask(shot)].append(shot)
    most = len({(shot.memory, shot.budget) for shot in found})
    full = {key for key, some in by.items() if len({(shot.memory, shot.budget) for shot in some}) == most}
    return [shot for shot in found if _ask(shot) in full]


def watches(found: Sequence[Watch]) -> list[dict[str, Any]]:
    """Means over the streams, of each memory and budget: seconds, counters, and the clusters of each level."""
    groups: dict[tuple[str, int | None], list[Watch]] = defaultdict(list)
    for one in found:
        groups[one.memory, one.budget].append(one)
    told = []
    for (memory, budget), some in groups.items():
        row: dict[str, Any] = {"memory": memory, "budget": budget, "streams": len(some)}
        row["frames"] = sum(one.frames for one in some) / len(some)
        row["ms_per_frame"] = 1000 * sum(one.seconds for one in some) / sum(one.frames for one in some)
        row["counters"] = _means([one.counters for one in some])
        row["clusters"] = {
            level: _means([asdict(one.clusters[level]) for one in some if level in one.clusters])
            for level in {name: None for one in some for name in one.clusters}
        }
        told.append(row)
    return told


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in rows[0]}


def _ask(shot: Shot) -> Ask:
    return shot.seed, shot.frames, shot.question


def _gain(gain: float, low: float, high: float) -> dict[str, float]:
    return {"gain": gain, "low": low, "high": high}
