"""The search space of MMInference: boundary types (section 2.3), candidate rows (Table 3), and how each row's budget is
levelled, that is brought to one common cost (C.5).

Rows are budgets in tokens for contexts of 64k and more. For a shorter context all budgets shrink in proportion (columns,
diagonals and sinks in tokens, windows in whole frames), and so does the target, an A-shape of 1k global and 4k local tokens;
strides, which are frame sizes, stay. A row fixes some fields of its pattern. Levelling changes the others until attention of
all heads takes as long as the target's on the device: the sinks of an A-shape, whose window is fixed; the columns and
diagonals of a vertical-slash, whose ratio is fixed; the local window of a grid, whose lines are fixed. The last number of
Table 3's grids, 1024, is that window (microsoft/MInference, `minference/ops/grid_attention.py`, `n_local`). Each grid is
also a candidate without window, as in Algorithm 1; it costs what its lines cost, often less than the target. Rows whose
smallest budget costs more than the target are left out.

With `BudgetScale.extended` there are rows of our own, labelled "ours". Each vertical-slash also keeps the `FIRST` tokens.
One new row (first block and diagonals) is levelled at several shares of the target's cost (`SHARES`). Levelling uses the
mean cost over heads, so a head for which the row costs more than this mean can still take it at a lower share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mmaccel.core.layout import MODALITIES
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.registry import policy

KINDS = ("no_boundary", "k_boundary", "q_boundary", "boundary_2d")
"""The types of modality boundary, the simplest first."""
LONG = 1 << 16
"""Contexts from here on take Table 3 as it is."""
TARGET = (1024, 4096)
"""Global and local tokens of the A-shape whose cost is the target."""
LINES = ("horizontal", "vertical", "slash")
LOCAL, FIRST_OF_GRID = 1024, 128
"""The local window of Table 3's grids, and the first tokens that they see, as many as its A-shapes."""
_GRIDS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 1, 1))
_WINDOWS = ((128, 1024), (128, 2048), (128, 4096))
_COLUMNS = (
    *((1000, 1024), (1000, 2048), (2000, 2048), (1000, 3096), (2000, 3096)),
    *((1000, 4096), (2000, 4096), (3500, 200), (1000, 2500)),
)
STEP = 2 ** (1 / 16)
"""Budgets change by powers of this."""
REACH = 128
"""And by no more of them than this, up or down."""
FAR = 64
"""Nor by more of them at a time."""
ROUNDS = 6
"""A row is measured at most so often."""
FIRST = 7
"""First tokens that vertical-slashes keep in an extended space, as many as appendix C.3 says an A-shape has."""
SHARES = (1.0, 0.92, 0.84, 0.76, 0.68)
"""Shares of the target's cost to which our row is brought: one tolerance and more apart."""
_OTHERS = {"image": ("video", "text"), "video": ("image", "text"), "text": ("video", "image")}


# --- Boundary types as slots that take an intra-modality pattern ------------------------------------------------------


@dataclass(frozen=True)
class ModalityPairSlot:
    """The queries of modality `query` with the keys of modality `key`: one pattern is chosen for them. None means all."""

    name: str
    query: int | None
    key: int | None


def applicable_boundary_types(wanted: Sequence[str], modalities: Sequence[int]) -> list[str]:
    """Return those of the `wanted` boundary types that fit a prompt's `modalities`: of one modality, "no_boundary" alone."""
    return [k for k in KINDS if k in wanted] if len(modalities) > 1 else ["no_boundary"]


def slots_of_boundary_type(kind: str, modalities: Sequence[int]) -> list[ModalityPairSlot]:
    """Return the slots of boundary type `kind` (of `KINDS`) in a prompt with these modalities: one for everything, one for
    each modality of queries or of keys, or one for each pair of both."""
    if kind == "no_boundary":
        return [ModalityPairSlot("all", None, None)]
    if kind == "q_boundary":
        return [ModalityPairSlot(MODALITIES[m], m, None) for m in modalities]
    if kind == "k_boundary":
        return [ModalityPairSlot(MODALITIES[m], None, m) for m in modalities]
    return [
        ModalityPairSlot(f"{MODALITIES[q]}>{MODALITIES[k]}", q, k) for q in modalities for k in modalities
    ]


def recipe_from_slots(kind: str, chosen: Mapping[str, Mapping[str, Any]], block: int) -> dict[str, Any]:
    """Build the `sparse` part of a recipe: boundary type `kind` (of `KINDS`), with the pattern `chosen` for each slot, which
    is a modality, a pair "query>key" of modalities, or "all".

    Modalities that the sample lacks take the pattern of one that it has: images that of videos, if there are any.
    """
    if kind == "no_boundary":
        return dict(chosen["all"])
    present = {name.partition(">")[0] for name in chosen}
    of = {m: next(one for one in (m, *_OTHERS[m]) if one in present) for m in MODALITIES.values()}
    if kind != "boundary_2d":
        return {"name": kind, "block": block, **{m: dict(chosen[of[m]]) for m in of}}
    pairs = {f"{q}>{k}": dict(chosen[f"{of[q]}>{of[k]}"]) for q in of for k in of}
    return {"name": kind, "block": block, "pairs": pairs}


def recipe_for_slot(
    kind: str, slot: ModalityPairSlot, pattern: Mapping[str, Any], block: int
) -> dict[str, Any]:
    """Build the `sparse` part of a recipe: boundary type `kind`, where only the pairs of `slot` attend, by `pattern`."""
    if kind == "no_boundary":
        return dict(pattern)
    if kind == "boundary_2d":
        return {"name": kind, "block": block, "default": None, "pairs": {slot.name: dict(pattern)}}
    rest = dict.fromkeys(MODALITIES.values(), None)
    return {"name": kind, "block": block, **rest, slot.name: dict(pattern)}


def recipe_for_all_slots(
    kind: str, pattern: Mapping[str, Any], modalities: Sequence[int], block: int
) -> dict[str, Any]:
    """Build the `sparse` part of a recipe: boundary type `kind`, with `pattern` in every slot."""
    return recipe_from_slots(
        kind, {slot.name: pattern for slot in slots_of_boundary_type(kind, modalities)}, block
    )


# --- Rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetScale:
    """Scales token budgets that were published for long prompts to prompts of `context` tokens, and rounds them.

    Frames have `frame` tokens (0: none), blocks `block` tokens. extended: vertical-slashes also keep first tokens, and a row
    of our own is added to those of Table 3.
    """

    context: int
    frame: int
    block: int
    extended: bool = False

    def scale_tokens(self, count: float) -> int:
        """Scale a token budget of MMInference's Table 3 to this context length."""
        return max(1, round(count * min(1.0, self.context / LONG)))

    def scale_window(self, count: int) -> int:
        """Scale a window of MMInference's Table 3 to this context and round it to whole frames (unchanged from 64k on)."""
        tokens = self.scale_tokens(count)
        if self.context >= LONG or not self.frame:
            return tokens
        return max(1, round(tokens / self.frame)) * self.frame

    def target_pattern(self) -> dict[str, Any]:
        """Return, as a recipe mapping, the A-shape pattern whose cost is the target for all candidates."""
        return self._a_shape(*TARGET, step=0)

    def _a_shape(self, sink: int, window: int, step: int) -> dict[str, Any]:
        return self._made(
            "a_shape", sink=self.scale_tokens(sink * STEP**step), window=self.scale_window(window)
        )

    def _grid(self, lines: Sequence[int], stride: str, local: int, step: int) -> dict[str, Any]:
        fields: dict[str, Any] = {line: bool(flag) for line, flag in zip(LINES, lines, strict=True)}
        if local:
            fields |= {
                "window": self.scale_tokens(local * STEP**step),
                "sink": self.scale_tokens(FIRST_OF_GRID),
            }
        return self._made("grid", stride=stride, max_stride=1024, **fields)

    def _vertical_slash(self, vertical: int, slash: int, step: int) -> dict[str, Any]:
        columns, diagonals = (self.scale_tokens(n * STEP**step) for n in (vertical, slash))
        first = {"sink": FIRST} if self.extended else {}
        return self._made("vertical_slash", vertical=columns, slash=diagonals, **first)

    def _first_and_slash(self, step: int) -> dict[str, Any]:
        """The first block of tokens, and all else in diagonals: an A-shape whose window lies where the head looks.

        A head without columns spends those of a vertical-slash of Table 3 on what its diagonals hold already, and where
        rows before the last see the first tokens, which its last queries do not choose, these rows are wrong
        (`VerticalSlash.sink`).
        """
        diagonals = self.scale_tokens(TARGET[1] * STEP**step)
        return self._made("vertical_slash", vertical=self.block, slash=diagonals, sink=self.block)

    def _made(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"name": name, "block": self.block, **fields}


@dataclass(frozen=True)
class BudgetTableRow:
    """One row of MMInference's Table 3, or one of ours: its label, `make` (budget step -> pattern, a recipe mapping; each
    step multiplies the budget by `STEP`), and `aim`, the share of the target's cost that its budget is chosen for."""

    label: str
    make: Callable[[int], dict[str, Any]]
    aim: float = 1.0


def budget_rows(scale: BudgetScale) -> list[BudgetTableRow]:
    """Return the 24 rows of Table 3 (12 grids, 3 A-shapes, 9 vertical-slashes), each grid also without window, and ours if
    `scale.extended`."""
    found = []
    for stride in ("frame", "free"):
        for lines in _GRIDS:
            on = "+".join(line for line, flag in zip(LINES, lines, strict=True) if flag)
            found.append(BudgetTableRow(f"grid ({stride}, {on})", partial(scale._grid, lines, stride, 0)))
            found.append(
                BudgetTableRow(f"grid ({stride}, {on}, {LOCAL})", partial(scale._grid, lines, stride, LOCAL))
            )
    found += [BudgetTableRow(f"a_shape {each}", partial(scale._a_shape, *each)) for each in _WINDOWS]
    for each in _COLUMNS:
        label = f"ours: vertical_slash {each}, first {FIRST}" if scale.extended else f"vertical_slash {each}"
        found.append(BudgetTableRow(label, partial(scale._vertical_slash, *each)))
    for share in SHARES if scale.extended else ():
        label = f"ours: first block and slash ({TARGET[1]}), {share:.0%}"
        found.append(BudgetTableRow(label, scale._first_and_slash, aim=share))
    return found


# --- Levelling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatternCandidate:
    """A pattern whose budget was changed until it costs what the search aims at, so that all candidates cost the same.

    rows   names of the rows of the search space that it came from
    cost   its measured cost over the target pattern's, when every slot of its boundary type uses it
    share  share of causal pairs in listed blocks, mean over heads
    state  "level" (within tolerance of the aim), "under" (cheaper, at its largest budget), "dear" (too costly, left out)
    """

    rows: tuple[str, ...]
    pattern: Mapping[str, Any]
    cost: float
    share: float
    state: str


Cost = Callable[[Mapping[str, Any]], float]
"""What a pattern (a mapping) takes for all heads of a layer, over what the target takes."""
Measure = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Makes the row of a pattern's costs, as `measure.LayerBenchmark.measure_cost` does."""
Tick = Callable[[], None]
"""Is called as often as a step of the search is done."""


def find_budget_step(
    row: BudgetTableRow, cost: Cost, tolerance: float, start: int = 0
) -> tuple[int, PatternCandidate]:
    """Search the size of a pattern at which its cost is that of the target pattern times `row.aim`, within `tolerance`.

    A pattern's sizes are numbered steps, of which ``row.make(step)`` makes the pattern; the search begins with `start`.
    Return the step and its `PatternCandidate`. The result depends on costs alone: equal costs give equal candidates.
    """
    tried: dict[int, float] = {}
    step: int | None = start
    while step is not None:
        tried[step] = cost(row.make(step)) / row.aim
        near = abs(tried[step] - 1) <= tolerance
        step = None if near or len(tried) == ROUNDS else _next(tried, row)
    # The dearest that is not too dear; if all are, the cheapest.
    fits = {s: t for s, t in tried.items() if t <= 1 + tolerance}
    best = max(fits, key=lambda s: (fits[s], -s)) if fits else min(tried, key=lambda s: (tried[s], s))
    state = "dear" if not fits else "under" if tried[best] < 1 - tolerance else "level"
    return best, PatternCandidate((row.label,), row.make(best), tried[best] * row.aim, 1.0, state)


def _next(tried: Mapping[int, float], row: BudgetTableRow) -> int | None:
    """The step to try after those tried: between a cheaper and a dearer one in proportion, outside them by their ratio."""
    below = max((s for s, t in tried.items() if t < 1), default=None)
    above = min((s for s, t in tried.items() if t >= 1 and (below is None or s > below)), default=None)
    if below is None or above is None:
        edge = below if above is None else above
        assert edge is not None
        # At first in proportion to the cost, and at least half as much again; then along the line through the last two.
        move = max(abs(math.log(tried[edge]) / math.log(STEP)), 10.0)
        if len(tried) > 1:
            last, before = sorted(tried, key=lambda s: abs(tried[s] - 1))[:2]
            slope = (tried[last] - tried[before]) / (STEP**last - STEP**before)
            wanted = STEP**last + (1 - tried[last]) / slope if slope > 0 else 0.0
            move = min(max(abs(math.log(wanted) / math.log(STEP) - edge), move), FAR) if wanted > 0 else move
        step = min(max(edge + round(move if above is None else -move), -REACH), REACH)
        return step if step not in tried and row.make(step) != row.make(edge) else None
    low, high = STEP**below, STEP**above
    share = (1 - tried[below]) / (tried[above] - tried[below])
    step = round(math.log(low + share * (high - low)) / math.log(STEP))
    step = min(max(step, below + 1), above - 1)
    return step if below < step < above else None


def merge_equal_candidates(candidates: Collection[PatternCandidate]) -> list[PatternCandidate]:
    """Merge candidate patterns that are equal into one that lists all their rows of Table 3."""
    known: dict[str, PatternCandidate] = {}
    for one in candidates:
        first = known.setdefault(pattern_json_key(one.pattern), one)
        if first is not one:
            known[pattern_json_key(one.pattern)] = replace(first, rows=(*first.rows, *one.rows))
    return list(known.values())


class PatternCostTable:
    """Costs of patterns relative to that of the target pattern, in "seconds" or "pairs"; each pattern is measured once."""

    def __init__(self, cost: str, measured: Sequence[Mapping[str, Any]], measure: Measure) -> None:
        self.rows = {pattern_json_key(row["pattern"]): dict(row) for row in measured}
        self.cost, self.measure = cost, measure

    def __call__(self, pattern: Mapping[str, Any]) -> float:
        name = pattern_json_key(pattern)
        if name not in self.rows:
            self.rows[name] = self.measure(pattern)
        row = self.rows[name]
        ratio: float = row[self.cost] / row[f"target_{self.cost}"]
        return ratio

    def kept_share(self, pattern: Mapping[str, Any]) -> float:
        """Return the share of causal query-key pairs that the measured `pattern` (its name and fields) lists."""
        share: float = self.rows[pattern_json_key(pattern)]["share"]
        return share


def find_candidates_at_target_cost(
    scale: BudgetScale,
    kinds: Sequence[str],
    modalities: Sequence[int],
    cost: Cost,
    tolerance: float,
    tick: Tick = lambda: None,
    share: Cost = lambda pattern: 1.0,
) -> dict[str, list[PatternCandidate]]:
    """Return, for each boundary type in `kinds`, the candidates of Table 3. Each has the budget at which it costs as much as
    the target pattern, when every slot of the boundary type uses it.

    `cost` returns a pattern's cost over the target's, `share` its share of causal pairs. A type is left out if even its
    smallest budgets cost too much (on short prompts); the first type then has the target pattern as its only candidate.
    """
    table = budget_rows(scale)
    first = [0] * len(table)
    space = {}
    for kind in kinds:
        whole = partial(recipe_for_all_slots, kind, modalities=modalities, block=scale.block)

        def taken(pattern: Mapping[str, Any], whole: Callable[..., dict[str, Any]] = whole) -> float:
            return cost(whole(pattern))

        reached: list[tuple[int, PatternCandidate]] = []
        for row, start in zip(table, first, strict=True):
            reached.append(find_budget_step(row, taken, tolerance, start))
            tick()
        candidates = merge_equal_candidates([candidate for _, candidate in reached])
        if any(one.state != "dear" for one in candidates):
            space[kind] = [replace(one, share=share(whole(one.pattern))) for one in candidates]
        elif kind == kinds[0]:
            # Nothing came down to the target's cost; the target itself is what is left.
            cost(scale.target_pattern())
            space[kind] = [
                PatternCandidate(
                    ("target",), scale.target_pattern(), 1.0, share(scale.target_pattern()), "level"
                )
            ]
        # The other types cost much the same: they begin where the first one ended.
        first = [steps for steps, _ in reached]
    return space


def pattern_json_key(pattern: Mapping[str, Any]) -> str:
    """Return a string that identifies a pattern mapping."""
    return json.dumps(pattern, sort_keys=True)


def build_pattern(pattern: Mapping[str, Any]) -> SparsePattern:
    """Build a sparse pattern from its recipe mapping."""
    made: SparsePattern = policy("sparse", pattern)
    return made
