"""What a pattern takes and what it gives at one layer: seconds, and how far its output is from dense attention's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmaccel.backends import select
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.execute import attend_plan
from mmaccel.core.plan import AttentionPlan
from mmaccel.core.sparse import SparsePattern
from mmaccel.search.kinds import Slot
from mmaccel.search.sample import Inside
from mmaccel.search.space import built

R = TypeVar("R")

ROWS = 4096
"""Rows of outputs compared at a time."""


@dataclass(eq=False)
class Bench:
    """One layer at hand; dense outputs are made once for each modality of keys, and kept while the layer is."""

    inside: Inside
    backend: str
    _dense: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        return self.inside.query.shape[1]

    def plan(self, pattern: SparsePattern) -> AttentionPlan | None:
        layout = self.inside.layout
        return pattern.plan(self.inside.query, self.inside.key, layout, layout)

    def attend(self, plan: AttentionPlan | None) -> Tensor:
        """[1, H, S, D]."""
        one = self.inside
        if plan is None:
            return self.dense(None)
        kernel = select.get(self.backend, one.query.device)
        return attend_plan(plan, one.query, one.key, one.value, one.scale, kernel)[0]

    def dense(self, key: int | None) -> Tensor:
        """[1, H, S, D]: exact attention over the keys of one modality, or over all."""
        if key not in self._dense:
            one = self.inside
            if key is None:
                out = dense_attend(one.query, one.key, one.value, one.scale)
            else:
                column = (one.layout.modality[0] == key).nonzero()[:, 0]
                keys, values = one.key[:, :, column], one.value[:, :, column]
                out = dense_attend(one.query, keys, values, one.scale, column=column)
            self._dense[key] = out
        return self._dense[key]

    def errors(self, pattern: Mapping[str, Any], slot: Slot) -> tuple[Tensor, Tensor]:
        """[H] float64, twice: how far the output over the rows and keys of `slot` is from dense, relative to dense's size,
        and the share of causal pairs that are listed.
        """
        plan = self.plan(built(pattern))
        out = self.attend(plan)
        rows = None
        if slot.query is not None:
            rows = (self.inside.layout.modality[0] == slot.query).nonzero()[:, 0]
        return relative_error(out[0], self.dense(slot.key)[0], rows), self.kept(plan)

    def cost(self, pattern: Mapping[str, Any], target: Mapping[str, Any], repeats: int = 3) -> dict[str, Any]:
        """What all heads take, and what they take under `target`.

        seconds, target_seconds  attention, the least of `repeats` runs that take turns, so that what slows one slows both;
                                 None for no repeats
        index_seconds            to make the plan
        pairs, target_pairs      in listed blocks, the mean over heads
        share                    `pairs` over all causal ones
        """
        device = self.inside.query.device
        one = built(pattern)
        plan, index = timed(lambda: self.plan(one), device)
        plans = [plan, self.plan(built(target))]
        if device.type == "cuda" and repeats:
            for each in plans:  # the first run compiles
                self.attend(each)
        runs = [partial(self.attend, each) for each in plans]
        taken = [[timed(run, device)[1] for run in runs] for _ in range(repeats)]
        mine, its = (brief(min(column)) for column in zip(*taken, strict=True)) if taken else (None, None)
        length = self.inside.layout.length
        whole = length * (length + 1) / 2
        pairs, target_pairs = (brief(float(self.kept(each).mean()) * whole) for each in plans)
        return {
            "pattern": dict(pattern),
            "seconds": mine,
            "target_seconds": its,
            "index_seconds": brief(index),
            "pairs": pairs,
            "target_pairs": target_pairs,
            "share": brief(pairs / whole),
        }

    def kept(self, plan: AttentionPlan | None) -> Tensor:
        """[H] float64: listed over causal pairs."""
        length = self.inside.layout.length
        if plan is None:
            return torch.ones(self.heads, dtype=torch.float64)
        return (plan.listed_pairs()[0] / (length * (length + 1) / 2)).cpu()


def relative_error(out: Tensor, exact: Tensor, rows: Tensor | None) -> Tensor:
    """[H]: the norm of the difference over the norm of `exact` [H, S, D], over `rows`, a few thousand at a time."""
    wrong = torch.zeros(out.shape[0], dtype=torch.float64, device=out.device)
    size = torch.zeros_like(wrong)
    count = out.shape[1] if rows is None else rows.shape[0]
    for begin in range(0, count, ROWS):
        some: Any = slice(begin, begin + ROWS) if rows is None else rows[begin : begin + ROWS]
        a, b = out[:, some].double(), exact[:, some].double()
        wrong += (a - b).square().sum((1, 2))
        size += b.square().sum((1, 2))
    # Where there is nothing to get right, everything is.
    return torch.where(size > 0, (wrong / size.clamp(min=torch.finfo(size.dtype).tiny)).sqrt(), 0.0).cpu()


def brief(value: float) -> float:
    """Six figures are written down, and what is written is what is compared."""
    return float(f"{value:.6g}")


def timed(run: Callable[[], R], device: torch.device) -> tuple[R, float]:
    """What `run` gives, and its seconds: on CUDA by the clock, the device waited for; on a CPU those that the process had,
    which do not grow when others want the processor too.
    """
    if device.type != "cuda":
        begin = time.process_time()
        return run(), time.process_time() - begin
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    result = run()
    torch.cuda.synchronize(device)
    return result, time.perf_counter() - begin
