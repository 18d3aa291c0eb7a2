"""The table of head patterns: put together from what was measured, and made again from its own figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import MODALITIES
from mmaccel.search.algorithm import Space, decided, levelled
from mmaccel.search.measure import brief
from mmaccel.search.space import Candidate, Scale, built, key


class Ledger:
    """What patterns cost, in "seconds" or "pairs", over what the target does; each is measured once."""

    def __init__(
        self,
        cost: str,
        measured: Sequence[Mapping[str, Any]],
        measure: Callable[[Mapping[str, Any]], dict[str, Any]],
    ) -> None:
        self.rows = {key(row["pattern"]): dict(row) for row in measured}
        self.cost, self.measure = cost, measure

    def __call__(self, pattern: Mapping[str, Any]) -> float:
        name = key(pattern)
        if name not in self.rows:
            self.rows[name] = self.measure(pattern)
        row = self.rows[name]
        taken: float = row[self.cost] / row[f"target_{self.cost}"]
        return taken

    def share(self, pattern: Mapping[str, Any]) -> float:
        """The share of causal pairs that a pattern lists; it was measured."""
        listed: float = self.rows[key(pattern)]["share"]
        return listed


def assembled(
    about: Mapping[str, Any],
    measured: Sequence[Mapping[str, Any]],
    space: Space,
    layers: Sequence[Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """The table: what it is about, what was measured, the candidates that followed, the choice for each head."""
    return {
        **about,
        "measured": [dict(row) for row in measured],
        "space": {kind: [_row(one) for one in found] for kind, found in space.items()},
        "layers": [
            [decided(space, head, about["block"], about["tolerance"]) for head in layer] for layer in layers
        ],
    }


def replayed(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table made again from its own costs and scores; equal to it. Raises `RecipeError` where a cost is missing."""

    def missing(pattern: Mapping[str, Any]) -> dict[str, Any]:
        raise RecipeError(f"the table holds no cost of {dict(pattern)}; search again.")

    numbers = {name: m for m, name in MODALITIES.items()}
    # Tables of before have the rows of Table 3 alone, and do not say so.
    extended = table.get("extended", False)
    scale = Scale(table["context"], table["sample"]["tokens_a_frame"], table["block"], extended)
    ledger = Ledger(table["cost"], table["measured"], missing)
    modalities = [numbers[name] for name in table["modalities"]]
    space = levelled(scale, table["boundaries"], modalities, ledger, table["tolerance"], share=ledger.share)
    again = assembled(table, table["measured"], space, table["layers"])
    return {**again, "target": scale.target()}


def narrowed(table: Mapping[str, Any], kinds: Sequence[str]) -> dict[int, dict[int, dict[str, Any]]]:
    """Layer -> head -> pattern: what the table's own figures choose among some of its boundary types alone."""
    space = {
        kind: [
            Candidate(tuple(one["rows"]), one["pattern"], one["cost"], one["state"], one["share"])
            for one in table["space"][kind]
        ]
        for kind in kinds
    }
    block, tolerance = table["block"], table["tolerance"]
    return {
        number: {h: decided(space, head, block, tolerance)["pattern"] for h, head in enumerate(layer)}
        for number, layer in enumerate(table["layers"])
    }


def agreement(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The share of heads to which two tables of a model give the same boundary type and the same main pattern, by name."""
    pairs = [
        (a, b) for x, y in zip(one["layers"], other["layers"], strict=True) for a, b in zip(x, y, strict=True)
    ]
    same = [
        a["kind"] == b["kind"] and main_pattern(a["pattern"]) == main_pattern(b["pattern"]) for a, b in pairs
    ]
    return sum(same) / len(pairs)


def labels(table: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """For each layer the names of its heads' patterns, as a report has them."""
    return [tuple(built(head["pattern"]).per_head(1)[0] for head in layer) for layer in table["layers"]]


def main_pattern(pattern: Mapping[str, Any]) -> str:
    """The intra-modality pattern that most of a head's pairs follow: within a boundary, that of videos, or of text."""
    for slot in ("video", "text"):
        inner = pattern.get(slot) or pattern.get("pairs", {}).get(f"{slot}>{slot}")
        if inner:
            return str(inner["name"])
    return str(pattern["name"])


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        "rows": list(candidate.rows),
        "pattern": dict(candidate.pattern),
        "cost": brief(candidate.cost),
        "share": candidate.share,
        "state": candidate.state,
    }
