"""The search of MMInference (Algorithm 4), split into what is measured and what follows from it.

For each head of a layer: in each slot of each boundary type the candidate whose output is nearest to dense attention's,
over the slot's rows and keys (intra-modality slots, then pairs); then, with those in place, the type whose whole output is
nearest. What is chosen depends on the stored figures alone, so that a table can be made again from itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmaccel.policies.sparse.per_head import LayerHeads
from mmaccel.search.kinds import KINDS, alone, composed, everywhere, slots
from mmaccel.search.measure import Bench, brief, relative_error
from mmaccel.search.space import Candidate, Cost, Scale, built, level, merged, rows

Space = Mapping[str, Sequence[Candidate]]
"""The candidates of each boundary type."""
Tick = Callable[[], None]
TINY = 1e-9
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
    share: Cost = lambda pattern: 1.0,
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
            listed = [share(everywhere(kind, one.pattern, modalities, scale.block)) for one in candidates]
            space[kind] = [replace(one, share=kept) for one, kept in zip(candidates, listed, strict=True)]
        elif kind == kinds[0]:
            # Nothing came down to the target's cost; the target itself is what is left.
            cost(scale.target())
            space[kind] = [Candidate(("target",), scale.target(), 1.0, "level", share(scale.target()))]
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
        for slot in slots(kind, modalities):
            found: dict[str, list[Sequence[float | None]]] = {"scores": [], "shares": []}
            for candidate in candidates:
                errors: Sequence[float | None] = [None] * bench.heads
                shares = errors
                if candidate.state != "dear":
                    pattern = alone(kind, slot, candidate.pattern, block)
                    wrong, kept = bench.errors(pattern, slot)
                    errors, shares = ([brief(x) for x in one.tolist()] for one in (wrong, kept))
                found["scores"].append(errors)
                found["shares"].append(shares)
                tick()
            for name, columns in found.items():
                for head, mine in zip(heads, zip(*columns, strict=True), strict=True):
                    head[name].setdefault(kind, {})[slot.name] = list(mine)
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
    return sum(len(found) * len(slots(kind, modalities)) + 1 for kind, found in space.items())


def arranged(
    kind: str, space: Space, head: Mapping[str, Any], block: int, tolerance: float
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
    chosen = {slot: _best(there, there) for slot, there in options.items()}

    def cost() -> float:
        return sum(options[slot][n][1] for slot, n in chosen.items())

    while cost() > 1 + tolerance:
        swaps = [
            ((there[n][0] - there[now][0]) / (there[now][1] - there[n][1]), slot, n)
            for slot, there in options.items()
            for now in [chosen[slot]]
            for n in there
            if there[n][1] < there[now][1]
        ]
        if not swaps:
            break
        _, slot, n = min(swaps)
        chosen[slot] = n
    for slot, there in options.items():
        room = 1 + tolerance - cost() + there[chosen[slot]][1]
        chosen[slot] = _best(there, [n for n in there if there[n][1] <= room] or [chosen[slot]])
    return composed(kind, {slot: candidates[n].pattern for slot, n in chosen.items()}, block), brief(cost())


def _best(there: Mapping[int, tuple[float, float]], among: Iterable[int]) -> int:
    """Of some candidates (error, cost) the one of the least error, of equals the cheapest."""
    among = list(among)
    enough = good(there[n][0] for n in among)
    return min((n for n in among if there[n][0] <= enough), key=lambda n: (there[n][1], n))


def good(errors: Iterable[float]) -> float:
    """Errors up to this are equal to the least of `errors`."""
    return min(errors) * (1 + SLACK) + NOISE


def decided(space: Space, head: Mapping[str, Any], block: int, tolerance: float) -> dict[str, Any]:
    """What was measured for a head, with what follows from it: the boundary type, the pattern, its score, cost and share.

    The first of equals wins, and no boundary comes first.
    """
    enough = good(head["errors"][k] for k in space)
    kind = next(k for k in space if head["errors"][k] <= enough)
    pattern, cost = arranged(kind, space, head, block, tolerance)
    measured = {name: head[name] for name in ("errors", "kept", "scores", "shares")}
    chosen = {"score": head["errors"][kind], "cost": cost, "share": head["kept"][kind]}
    return {"pattern": pattern, "kind": kind, **chosen, **measured}
