"""The methods a sparse prefill is compared with, each brought to one share of attention.

The rows of MMInference's Table 2, whose budgets stand for 128k tokens and more, and two that compute less by dropping
tokens: here the budgets of a method grow or shrink together until a prompt takes as much attention as it should. A method
without a budget (the strided and fixed patterns) stays as it is, and says what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mmaccel.core.errors import RecipeError
from mmaccel.core.report import Report

Fields = dict[str, Any]
ROUNDS = 12
NEAR = 0.02
"""A budget is good when the share it gives is this close, relative to the share wanted."""


def _tokens(count: float) -> int:
    return max(1, round(count))


def _a_shape(m: float) -> Fields:
    return {"sparse": {"name": "a_shape", "sink": _tokens(128 * m), "window": _tokens(4096 * m)}}


def _tri_shape(m: float) -> Fields:
    return {"sparse": {"name": "tri_shape", "sink": _tokens(128 * m), "window": _tokens(4096 * m)}}


def _minference(m: float) -> Fields:
    return {"sparse": {"name": "vertical_slash", "vertical": _tokens(1000 * m), "slash": _tokens(6144 * m)}}


def _block_topk(m: float) -> Fields:
    # The budget by weight is off: what is computed is then set by the number of blocks alone.
    return {"sparse": {"name": "block_topk", "budget": 1.0, "top": _tokens(64 * m), "sink": _tokens(128 * m)}}


def _visionzip(m: float) -> Fields:
    return {"prune": {"name": "visionzip", "retention": min(1.0, 64 / 196 * m)}}


def _fastv(m: float) -> Fields:
    return {"prune": {"name": "fastv", "retention": min(1.0, 0.5 * m)}}


@dataclass(frozen=True)
class Rival:
    """A method: the recipe's fields at a multiple of its budgets, and whether there is a budget at all."""

    make: Callable[[float], Fields]
    budget: bool = True


RIVALS: Mapping[str, Rival] = {
    "a_shape": Rival(_a_shape),
    "tri_shape": Rival(_tri_shape),
    "sf_fixed": Rival(lambda m: {"sparse": "sf_fixed"}, budget=False),
    "sf_strided": Rival(lambda m: {"sparse": "sf_strided"}, budget=False),
    "minference": Rival(_minference),
    "block_topk": Rival(_block_topk),
    "visionzip": Rival(_visionzip),
    "fastv": Rival(_fastv),
}
"""Name -> method."""


def computed(report: Report) -> float | None:
    """The share of a prompt's attention that a run computed: `kept`, and of that what a pruner left, layer by layer.

    Attention over r of n tokens counts (r / n)^2. None where nothing was counted.
    """
    if report.kept is None:
        return None
    whole = report.prompt_tokens
    left, area = float(whole), 0.0
    for layer in range(len(report.patterns)):
        if (video := report.kv.get(f"video from layer {layer}")) is not None:
            left = whole - report.kv["video"] + video
        area += (left / whole) ** 2
    return report.kept * area / len(report.patterns) if report.patterns else report.kept


def level(rival: Rival, wanted: float, measure: Callable[[Fields], float]) -> tuple[Fields, float]:
    """The fields of a rival whose measured share is nearest to `wanted`, and that share.

    measure   a recipe's fields -> the share of attention that a run under them computes

    Shares grow with budgets; the search halves the interval of their logarithms. Raises `RecipeError` for a share that is
    none.
    """
    if not 0 < wanted <= 1:
        raise RecipeError(f"share is {wanted}; give a share of attention above 0 and at most 1.")
    if not rival.budget:
        fields = rival.make(1.0)
        return fields, measure(fields)
    low, high = math.log(1 / 256), math.log(64.0)
    best: tuple[float, Fields, float] | None = None
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        fields = rival.make(math.exp(middle))
        share = measure(fields)
        gap = abs(share / wanted - 1)
        if best is None or gap < best[0]:
            best = gap, fields, share
        if gap <= NEAR:
            break
        low, high = (middle, high) if share < wanted else (low, middle)
    assert best is not None
    return best[1], best[2]
