"""The search of MMInference (Algorithm 4), split into what is measured and what follows from it.

For each head of a layer: in each slot of each boundary type the candidate whose output is nearest to dense attention's,
over the slot's rows and keys (intra-modality slots, then pairs); then, with those in place, the type whose whole output is
nearest. What is chosen depends on the stored figures alone, so that a table can be made again from itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mmaccel.policies.sparse.per_head import LayerHeads
from mmaccel.search.kinds import KINDS, alone, composed, everywhere, slots
from mmaccel.search.measure import Bench, brief, relative_error
from mmaccel.search.space import Candidate, Cost, Scale, built, level, merged, rows

Space = Mapping[str, Sequence[Candidate]]
"""The candidates of each boundary type."""
Tick = Callable[[], None]
SLACK, NOISE = 0.01, 1e-6
"""Errors are equal when they differ by no more than this share, or by what rounding makes."""


def kinds_of(wanted: Sequence[str], modalities: Sequence[int]) -> list[str]:
    """The boundary types that mean something: one modality has no boundary."""
    return [k for k in KINDS if k in wanted] if len(modalities) > 1 else ["no_boundary"]


def levelled(
    scale: Scale,
    kinds: Sequence[str],
    modalities: Sequence[int],
    cost: Cost,
    tolerance: float,
    tick: Tick = lambda: None,
) -> dict[str, list[Candidate]]:
    """For each type the rows of Table 3 at the cost of the target, each row in every slot of the type.

    A type whose every row stays dearer is left out (on short prompts its extra parts alone cost too much).
    """
    found = rows(scale)
    first = [0] * len(found)
    space = {}
    for kind in kinds:

        def taken(pattern: Mapping[str, Any], kind: str = kind) -> float:
            return cost(everywhere(kind, pattern, modalities, scale.block))

        reached: list[tuple[int, Candidate]] = []
        for row, start in zip(found, first, strict=True):
            reached += level([row], taken, tolerance, [start])
            tick()
        candidates = merged([candidate for _, candidate in reached])
        if any(one.state != "dear" for one in candidates):
            space[kind] = candidates
        elif kind == kinds[0]:
            # Nothing came down to the target's cost; the target itself is what is left.
            space[kind] = [Candidate(("target",), scale.target(), 1.0, "level")]
        # The other types cost much the same: they begin where the first one ended.
        first = [steps for steps, _ in reached]
    return space


def scored(
    bench: Bench, space: Space, modalities: Sequence[int], block: int, tick: Tick = lambda: None
) -> list[dict[str, Any]]:
    """What was measured for each head of the layer at hand: `scores` (type -> slot -> an error a candidate, null for one
    left out), and, for each type with its best candidates in place, the `errors` of the whole output and the share `kept`.
    """
    heads: list[dict[str, Any]] = [{"scores": {}, "errors": {}, "kept": {}} for _ in range(bench.heads)]
    for kind, candidates in space.items():
        for slot in slots(kind, modalities):
            columns: list[list[float | None]] = []
            for candidate in candidates:
                errors: list[float | None] = [None] * bench.heads
                if candidate.state != "dear":
                    pattern = alone(kind, slot, candidate.pattern, block)
                    errors = [brief(e) for e in bench.errors(pattern, slot).tolist()]
                columns.append(errors)
                tick()
            for head, mine in zip(heads, zip(*columns, strict=True), strict=True):
                head["scores"].setdefault(kind, {})[slot.name] = list(mine)
    for kind in space:
        named = {h: built(arranged(kind, space, head["scores"], block)) for h, head in enumerate(heads)}
        plan = bench.plan(LayerHeads(block=block, named=named))
        whole = relative_error(bench.attend(plan)[0], bench.dense(None)[0], None)
        for head, error, kept in zip(heads, whole.tolist(), bench.kept(plan).tolist(), strict=True):
            head["errors"][kind], head["kept"][kind] = brief(error), brief(kept)
        tick()
    return heads


def ticks(space: Space, modalities: Sequence[int]) -> int:
    """How often `scored` calls its tick."""
    return sum(len(found) * len(slots(kind, modalities)) + 1 for kind, found in space.items())


def arranged(kind: str, space: Space, scores: Mapping[str, Any], block: int) -> dict[str, Any]:
    """The pattern of a type with the best candidate in each slot, for one head; of equals the cheapest."""
    chosen = {}
    for slot, mine in scores[kind].items():
        there = {n: score for n, score in enumerate(mine) if score is not None}
        enough = good(there.values())
        best = min((n for n in there if there[n] <= enough), key=lambda n: (space[kind][n].cost, n))
        chosen[slot] = space[kind][best].pattern
    return composed(kind, chosen, block)


def good(errors: Iterable[float]) -> float:
    """Errors up to this are equal to the least of `errors`."""
    return min(errors) * (1 + SLACK) + NOISE


def decided(space: Space, head: Mapping[str, Any], block: int) -> dict[str, Any]:
    """What was measured for a head, with what follows from it: the boundary type, the pattern and its score and share.

    The first of equals wins, and no boundary comes first.
    """
    enough = good(head["errors"][k] for k in space)
    kind = next(k for k in space if head["errors"][k] <= enough)
    return {
        "pattern": arranged(kind, space, head["scores"], block),
        "kind": kind,
        "score": head["errors"][kind],
        "share": head["kept"][kind],
        "errors": head["errors"],
        "kept": head["kept"],
        "scores": head["scores"],
    }
