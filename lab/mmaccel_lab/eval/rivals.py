"""The methods a sparse prefill is compared with, each brought to one share of attention.

The rows of MMInference's Table 2, whose budgets stand for 128k tokens and more, and two that compute less by dropping
tokens: here the budgets of a method grow or shrink together until a prompt takes as much attention as it should. A method
without a budget (the strided pattern) stays as it is, and says what it computes. The last rows of a prompt are dense for
all methods alike: a rival leaves `dense_tail` to whoever compares (`Methods.more`). What a searched table loses without its
boundaries, or without that tail, is a rival too (`ablated`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmaccel.core.errors import RecipeError
from mmaccel.core.layout import TokenLayout
from mmaccel.core.prefill.prune import (
    ScorePruner,
    TokenPruner,
    candidate_columns,
    columns_by_frame_size,
    share_token_count,
)
from mmaccel.core.report import Report
from mmaccel.policies.prune import VisionZip

Fields = dict[str, Any]
ROUNDS = 12
LEAST, MOST = math.log(1 / 256), math.log(64.0)
"""Logarithms of the smallest and the largest multiple of a budget that is tried."""
NEAR = 0.02
"""A budget is good when the share it gives is this close, relative to the share wanted."""
BUDGETS = ("sink", "window", "vertical", "slash")
"""The fields of a searched pattern that grow and shrink; the lines of a grid are on or off."""


def _tokens(count: float) -> int:
    return max(1, round(count))


def _sparse(name: str, **fields: Any) -> Fields:
    return {"sparse": {"name": name, **fields}}


def _prune(name: str, retention: float) -> Fields:
    return {"prune": {"name": name, "retention": min(1.0, retention)}}


def _ends(name: str, m: float) -> Fields:
    return _sparse(name, sink=_tokens(128 * m), window=_tokens(4096 * m))


def _minference(m: float) -> Fields:
    # The released code keeps the first 30 columns and the nearest 100 diagonals, and no fewer than 30 and 50 of each.
    vertical, slash = max(30, _tokens(1000 * m)), max(50, _tokens(6144 * m))
    return _sparse("vertical_slash", vertical=vertical, slash=slash, sink=30, nearest=100)


def _block_topk(m: float) -> Fields:
    # The budget by weight is off: what is computed is then set by the number of blocks alone.
    return _sparse("block_topk", budget=1.0, top=_tokens(64 * m), sink=_tokens(128 * m))


@dataclass(frozen=True)
class Rival:
    """A method: the recipe's fields at a multiple of its budgets, and whether there is a budget at all."""

    make: Callable[[float], Fields]
    budget: bool = True


RIVALS: Mapping[str, Rival] = {
    "a_shape": Rival(lambda m: _ends("a_shape", m)),
    "tri_shape": Rival(lambda m: _ends("tri_shape", m)),
    # Table 2 has one column a frame, the least there is; more of them are what Child et al. grow it by.
    "sf_fixed": Rival(lambda m: _sparse("sf_fixed", summary=_tokens(m))),
    "sf_strided": Rival(lambda m: _sparse("sf_strided"), budget=False),
    "minference": Rival(_minference),
    "block_topk": Rival(_block_topk),
    "visionzip": Rival(lambda m: _prune("visionzip", 64 / 196 * m)),
    "fastv": Rival(lambda m: _prune("fastv", 0.5 * m)),
}
"""Name -> method."""

PRUNERS = tuple(name for name, rival in RIVALS.items() if "prune" in rival.make(1.0))
"""Those that drop tokens."""

Table = Mapping[int, Mapping[int, Mapping[str, Any]]]
"""Layer -> head -> pattern."""


def ablated(own: Table, bare: Table, block: int, tail: int) -> dict[str, Rival]:
    """Ours, less something: `own` is the searched table, `bare` the one that the same search gives without boundaries.

    without_boundaries  the bare table, its budgets grown or shrunk together; the last `tail` rows dense, as ours
    without_tail        the searched table on every row, as it is
    without_both        the bare table on every row
    """

    def fields(table: Table, m: float, rows: int) -> Fields:
        grown = {
            layer: {head: _grown(pattern, m) for head, pattern in heads.items()}
            for layer, heads in table.items()
        }
        return {"sparse": {"name": "per_head", "block": block, "table": grown}, "dense_tail": rows}

    return {
        "without_boundaries": Rival(lambda m: fields(bare, m, tail)),
        "without_tail": Rival(lambda m: fields(own, 1.0, 0), budget=False),
        "without_both": Rival(lambda m: fields(bare, m, 0)),
    }


def _grown(pattern: Mapping[str, Any], m: float) -> Fields:
    # The lines of a grid share a name with budgets, and are on or off.
    counts = {name for name, value in pattern.items() if name in BUDGETS and not isinstance(value, bool)}
    return {name: _tokens(value * m) if name in counts else value for name, value in pattern.items()}


def computed(report: Report) -> float | None:
    """The share of a prompt's attention that a run computed: `kept`, and of that what a pruner left, layer by layer.

    Attention over r of n tokens counts (r / n)^2. None where nothing was counted.
    """
    if report.kept is None:
        return None
    whole = report.prompt_tokens
    left, area = float(whole), 0.0
    for layer in range(len(report.patterns)):
        if (video := report.kv.get(f"visual from layer {layer}")) is not None:
            left = whole - report.kv["visual"] + video
        area += (left / whole) ** 2
    return report.kept * area / len(report.patterns) if report.patterns else report.kept


def level(rival: Rival, wanted: float, measure: Callable[[Fields], float]) -> tuple[Fields, float]:
    """The fields of a rival whose measured share is nearest to `wanted`, and that share.

    measure   a recipe's fields -> the share of attention that a run under them computes

    Shares grow with budgets, nearly in proportion: where no two budgets enclose the share, the next is where a line through
    the last two has it, and between two it is that of their line and of the middle in turns, all in logarithms. Raises
    `RecipeError` for a share that is none.
    """
    if not 0 < wanted <= 1:
        raise RecipeError(f"share is {wanted}; give a share of attention above 0 and at most 1.")
    if not rival.budget:
        fields = rival.make(1.0)
        return fields, measure(fields)
    # Where the shares of two budgets lie: logarithm of the multiple, logarithm of the share over the one wanted.
    under: tuple[float, float] | None = None
    over: tuple[float, float] | None = None
    known: list[tuple[Fields, float]] = []
    at, slope = math.log(wanted), 1.0
    for turn in range(ROUNDS):
        at = min(max(at, LEAST), MOST)
        fields = rival.make(math.exp(at))
        # Small budgets are whole tokens: many multiples are one recipe.
        share = next((share for one, share in known if one == fields), None)
        if share is None:
            share = measure(fields)
            known.append((fields, share))
        off = math.log(max(share, wanted * 1e-6) / wanted)
        if abs(share / wanted - 1) <= NEAR or (off < 0 and at >= MOST) or (off > 0 and at <= LEAST):
            break
        before = under if off < 0 else over
        if off < 0:
            under = at, off
        else:
            over = at, off
        if under is not None and over is not None:
            part = -under[1] / (over[1] - under[1]) if turn % 2 else 0.5
            at = under[0] + min(max(part, 0.1), 0.9) * (over[0] - under[0])
        else:
            if before is not None:
                slope = max((off - before[1]) / (at - before[0]), 0.1)
            at -= off / slope + math.copysign(0.05, off)
    return min(known, key=lambda one: abs(one[1] / wanted - 1))


def left(pruner: TokenPruner, layout: TokenLayout, depth: int) -> float | None:
    """The share of a prompt's attention that a dense model of `depth` layers computes under a pruner, by counting; None for
    a pruner that cannot be counted."""
    total = int(candidate_columns(layout).numel())
    if isinstance(pruner, VisionZip):
        kept = sum(sum(pruner.kept_tokens_per_frame(*same.shape)) for same in columns_by_frame_size(layout))
        counts = {stage.layer: kept for stage in pruner.pruning_stages(depth)}
    elif isinstance(pruner, ScorePruner):
        counts = {
            stage.layer: min(share_token_count(stage.share, total), total)
            for stage in pruner.pruning_stages(depth)
        }
    else:
        return None
    held, area = total, 0.0
    for layer in range(depth):
        held = counts.get(layer, held)
        area += ((layout.length - total + held) / layout.length) ** 2
    return area / depth
