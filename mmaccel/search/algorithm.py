"""The search of MMInference (Algorithm 4), split into what is measured and what follows from it, and the table of both.

For each head of a layer: in each slot of each boundary type the candidate whose output is nearest to dense attention's,
over the slot's rows and keys (intra-modality slots, then pairs); then, with those in place, the type whose whole output is
nearest. What is chosen depends on the stored figures alone, so that a table can be made again from itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import MODALITIES
from mmaccel.policies.sparse.per_head import LayerHeads
from mmaccel.search.measure import Bench, brief, relative_error
from mmaccel.search.space import (
    KINDS,
    Candidate,
    Cost,
    Scale,
    alone,
    built,
    composed,
    everywhere,
    key,
    level,
    merged,
    rows,
    slots,
)

Space = Mapping[str, Sequence[Candidate]]
"""The candidates of each boundary type."""
Tick = Callable[[], None]
Row = Mapping[str, Any]
TINY = 1e-9
SLACK, NOISE = 0.01, 1e-6
"""Errors are equal when they differ by no more than this share, or by what rounding makes."""


def kinds_of(wanted: Sequence[str], modalities: Sequence[int]) -> list[str]:
    """The boundary types that mean something: one modality has no boundary."""
    return [k for k in KINDS if k in wanted] if len(modalities) > 1 else ["no_boundary"]


class Ledger:
    """What patterns cost, in "seconds" or "pairs", over what the target does; each is measured once."""

    def __init__(self, cost: str, measured: Sequence[Row], measure: Callable[[Row], dict[str, Any]]) -> None:
        self.rows = {key(row["pattern"]): dict(row) for row in measured}
        self.cost, self.measure = cost, measure

    def __call__(self, pattern: Row) -> float:
        name = key(pattern)
        if name not in self.rows:
            self.rows[name] = self.measure(pattern)
        row = self.rows[name]
        ratio: float = row[self.cost] / row[f"target_{self.cost}"]
        return ratio

    def share(self, pattern: Row) -> float:
        """The share of causal pairs that a pattern lists; it was measured."""
        share: float = self.rows[key(pattern)]["share"]
        return share


def levelled(
    scale: Scale,
    kinds: Sequence[str],
    modalities: Sequence[int],
    cost: Cost,
    tolerance: float,
    tick: Tick = lambda: None,
    share: Cost = lambda pattern: 1.0,
) -> dict[str, list[Candidate]]:
    """For each type the rows of Table 3 at the cost of the target, each row in every slot of the type.

    A type whose every row stays dearer is left out (on short prompts its extra parts alone cost too much).
    """
    table = rows(scale)
    first = [0] * len(table)
    space = {}
    for kind in kinds:
        whole = partial(everywhere, kind, modalities=modalities, block=scale.block)

        def taken(pattern: Row, whole: Callable[..., dict[str, Any]] = whole) -> float:
            return cost(whole(pattern))

        reached: list[tuple[int, Candidate]] = []
        for row, start in zip(table, first, strict=True):
            reached.append(level(row, taken, tolerance, start))
            tick()
        candidates = merged([candidate for _, candidate in reached])
        if any(one.state != "dear" for one in candidates):
            space[kind] = [replace(one, share=share(whole(one.pattern))) for one in candidates]
        elif kind == kinds[0]:
            # Nothing came down to the target's cost; the target itself is what is left.
            cost(scale.target())
            space[kind] = [Candidate(("target",), scale.target(), 1.0, share(scale.target()), "level")]
        # The other types cost much the same: they begin where the first one ended.
        first = [steps for steps, _ in reached]
    return space


def scored(
    bench: Bench,
    space: Space,
    modalities: Sequence[int],
    block: int,
    tolerance: float,
    tick: Tick = lambda: None,
) -> list[dict[str, Any]]:
    """What was measured for each head of the layer at hand: `scores` and `shares` (type -> slot -> a candidate's error, and
    the share of causal pairs it lists, null for one left out), and, for each type with its best candidates in place, the
    `errors` of the whole output and the share `kept`.
    """
    heads: list[dict[str, Any]] = [
        {"scores": {}, "shares": {}, "errors": {}, "kept": {}} for _ in range(bench.heads)
    ]
    for kind, candidates in space.items():
        for slot, candidate in product(slots(kind, modalities), candidates):
            figures: list[list[float | None]] = [[None] * bench.heads] * 2
            if candidate.state != "dear":
                pattern = alone(kind, slot, candidate.pattern, block)
                figures = [list(map(brief, t.tolist())) for t in bench.errors(pattern, slot)]
            for head, *pair in zip(heads, *figures, strict=True):
                for name, value in zip(("scores", "shares"), pair, strict=True):
                    head[name].setdefault(kind, {}).setdefault(slot.name, []).append(value)
            tick()
    for kind in space:
        named = {h: built(arranged(kind, space, head, block, tolerance)[0]) for h, head in enumerate(heads)}
        plan = bench.plan(LayerHeads(block=block, named=named))
        whole = relative_error(bench.attend(plan)[0], bench.dense(None)[0], None)
        for head, error, kept in zip(heads, whole.tolist(), bench.kept(plan).tolist(), strict=True):
            head["errors"][kind], head["kept"][kind] = brief(error), brief(kept)
        tick()
    return heads


def ticks(space: Space, modalities: Sequence[int]) -> int:
    """How often `scored` calls its tick."""
    return sum(len(some) * len(slots(kind, modalities)) + 1 for kind, some in space.items())


def arranged(
    kind: str, space: Space, head: Row, block: int, tolerance: float
) -> tuple[dict[str, Any], float]:
    """The pattern of a type with a candidate in each slot, for one head, and what it costs over the target.

    Each slot takes its best candidate, of equals the cheapest. Candidates are level in all slots together and on the mean
    of heads; where those chosen cost this head more than the target, slots give way where an error grows least for what it
    saves, and then take back what fits. A candidate costs a head what it lists for it, at its own rate.
    """
    candidates = space[kind]
    options = {
        slot: {
            n: (error, candidates[n].cost * head["shares"][kind][slot][n] / max(candidates[n].share, TINY))
            for n, error in enumerate(errors)
            if error is not None
        }
        for slot, errors in head["scores"][kind].items()
    }
    chosen = {slot: _best(some, some) for slot, some in options.items()}

    def cost() -> float:
        return sum(options[slot][n][1] for slot, n in chosen.items())

    while cost() > 1 + tolerance:
        swaps = [
            ((some[n][0] - some[now][0]) / (some[now][1] - some[n][1]), slot, n)
            for slot, some in options.items()
            for now in [chosen[slot]]
            for n in some
            if some[n][1] < some[now][1]
        ]
        if not swaps:
            break
        _, slot, n = min(swaps)
        chosen[slot] = n
    for slot, some in options.items():
        room = 1 + tolerance - cost() + some[chosen[slot]][1]
        chosen[slot] = _best(some, [n for n in some if some[n][1] <= room] or [chosen[slot]])
    return composed(kind, {slot: candidates[n].pattern for slot, n in chosen.items()}, block), brief(cost())


def _best(options: Mapping[int, tuple[float, float]], among: Collection[int]) -> int:
    """Of some candidates (error, cost) the one of the least error, of equals the cheapest."""
    enough = good(options[n][0] for n in among)
    return min((n for n in among if options[n][0] <= enough), key=lambda n: (options[n][1], n))


def good(errors: Iterable[float]) -> float:
    """Errors up to this are equal to the least of `errors`."""
    return min(errors) * (1 + SLACK) + NOISE


def decided(space: Space, head: Row, block: int, tolerance: float) -> dict[str, Any]:
    """What was measured for a head, with what follows from it: the boundary type, the pattern, its score, cost and share.

    The first of equals wins, and no boundary comes first.
    """
    enough = good(head["errors"][k] for k in space)
    kind = next(k for k in space if head["errors"][k] <= enough)
    pattern, cost = arranged(kind, space, head, block, tolerance)
    measured = {name: head[name] for name in ("errors", "kept", "scores", "shares")}
    chosen = {"score": head["errors"][kind], "cost": cost, "share": head["kept"][kind]}
    return {"pattern": pattern, "kind": kind, **chosen, **measured}


# --- The table --------------------------------------------------------------------------------------------------------


def assembled(
    about: Row, measured: Sequence[Row], space: Space, layers: Sequence[Sequence[Row]]
) -> dict[str, Any]:
    """The table: what it is about, what was measured, the candidates that followed, the choice for each head."""
    choose = partial(decided, space, block=about["block"], tolerance=about["tolerance"])
    return {
        **about,
        "measured": [dict(row) for row in measured],
        "space": {
            kind: [{**vars(one), "rows": list(one.rows), "cost": brief(one.cost)} for one in some]
            for kind, some in space.items()
        },
        "layers": [[choose(head) for head in layer] for layer in layers],
    }


def replayed(table: Row) -> dict[str, Any]:
    """The table made again from its own costs and scores; equal to it. Raises `RecipeError` where a cost is missing."""

    def missing(pattern: Row) -> dict[str, Any]:
        raise RecipeError(f"the table holds no cost of {dict(pattern)}; search again.")

    # Tables of before have the rows of Table 3 alone, and do not say so.
    extended = table.get("extended", False)
    scale = Scale(table["context"], table["sample"]["tokens_a_frame"], table["block"], extended)
    ledger = Ledger(table["cost"], table["measured"], missing)
    modalities = [m for name in table["modalities"] for m in MODALITIES if MODALITIES[m] == name]
    space = levelled(scale, table["boundaries"], modalities, ledger, table["tolerance"], share=ledger.share)
    return {**assembled(table, table["measured"], space, table["layers"]), "target": scale.target()}


def narrowed(table: Row, kinds: Sequence[str]) -> dict[int, dict[int, dict[str, Any]]]:
    """Layer -> head -> pattern: what the table's own figures choose among some of its boundary types alone."""
    space = {
        kind: [Candidate(**{**one, "rows": tuple(one["rows"])}) for one in table["space"][kind]]
        for kind in kinds
    }
    choose = partial(decided, space, block=table["block"], tolerance=table["tolerance"])
    return {
        number: {h: choose(head)["pattern"] for h, head in enumerate(layer)}
        for number, layer in enumerate(table["layers"])
    }


def agreement(one: Row, other: Row) -> float:
    """The share of heads to which two tables of a model give the same boundary type and the same main pattern, by name."""
    told = [
        [(head["kind"], main_pattern(head["pattern"])) for layer in table["layers"] for head in layer]
        for table in (one, other)
    ]
    return sum(a == b for a, b in zip(*told, strict=True)) / len(told[0])


def labels(table: Row) -> list[tuple[str, ...]]:
    """For each layer the names of its heads' patterns, as a report has them."""
    return [tuple(built(head["pattern"]).per_head(1)[0] for head in layer) for layer in table["layers"]]


def main_pattern(pattern: Row) -> str:
    """The intra-modality pattern that most of a head's pairs follow: within a boundary, that of videos, or of text."""
    for slot in ("video", "text"):
        inner = pattern.get(slot) or pattern.get("pairs", {}).get(f"{slot}>{slot}")
        if inner:
            return str(inner["name"])
    return str(pattern["name"])
