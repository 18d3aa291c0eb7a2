"""The measurements of the pattern search (MMInference, Algorithm 4).

A model reads one sample. For each layer the inputs of its attention are caught; for each candidate pattern its seconds and
the distance of its output from dense attention's are measured; then each head gets its best candidate.

For each head of a layer: in each slot of each boundary type the candidate whose output is nearest to dense attention's,
over the slot's rows and keys (intra-modality slots, then pairs); then, with those in place, the type whose whole output is
nearest. What is chosen depends on the stored figures alone, so that a table can be made again from itself.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mmaccel.backends import select
from mmaccel.backends.ops.dense_attend import dense_attend
from mmaccel.core.attach import accelerate, adapter_for
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import MODALITIES, TokenLayout
from mmaccel.core.prefill.attention import NOTE, Note
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.prune import PrefillPass, Probe
from mmaccel.core.prefill.sparse import SparsePattern, attend_plan
from mmaccel.policies.sparse.per_head import LayerHeads
from mmaccel.search.space import Candidate, Slot, Tick, alone, boundary_slots, built, composed

R = TypeVar("R")
Space = Mapping[str, Sequence[Candidate]]
"""The candidates of each boundary type."""
Row = Mapping[str, Any]

ROWS = 4096
"""Rows of outputs compared at a time."""
TINY = 1e-9
SLACK, NOISE = 0.01, 1e-6
"""Errors are equal when they differ by no more than this share, or by what rounding makes."""


@dataclass(frozen=True, eq=False)
class Inside:
    """The attention of one layer: query [1, H, S, D] and key, value [1, G, S, D] after rotation, and what the tokens are."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    layout: TokenLayout


class _Enough(Exception):
    """No layer further down is wanted."""


def watch(
    model: nn.Module,
    inputs: Mapping[str, Any],
    visit: Callable[[Inside], None],
    layers: set[int] | None = None,
) -> None:
    """Run the prompt through `model` densely and call `visit` at each layer, or at those of `layers`, on the way.

    One layer is held at a time, and its tensors only while `visit` runs; nothing is cached and no logits are made. Raises
    `ModelError` for a batch of several prompts.
    """
    if inputs["input_ids"].shape[0] != 1:
        raise ModelError("input_ids: the search looks at one prompt; give a batch of one.")
    if layers is not None and not layers:
        return

    class Visit(Probe):
        def attending(
            self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> None:
            if layers is None or layer in layers:
                visit(Inside(layer, query, key, value, scale, run.layout))
            if layers is not None and layer == max(layers):
                raise _Enough

    with accelerate(model, "dense"):
        note = {NOTE: Note(probes=(Visit(),))}
        try:
            with torch.no_grad():
                adapter_for(model).multimodal(model)(**inputs, **note, use_cache=False)
        except _Enough:
            pass


def frame_tokens(layout: TokenLayout) -> int:
    """Tokens of the largest frame of a prompt; 0 where there is none."""
    return int((layout.cell.amax() + 1).item())


def present(layout: TokenLayout) -> list[int]:
    """The modalities that a prompt has."""
    return [m for m in MODALITIES if layout.census[m]]


def described(inputs: Mapping[str, Any], layout: TokenLayout) -> dict[str, Any]:
    """Facts of a sample for its table: tokens of each modality, frames, and a digest of all inputs."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        value = inputs[name]
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return {
        "tokens": layout.length,
        **{f"{MODALITIES[m]}_tokens": layout.census[m] for m in MODALITIES},
        "frames": int(layout.frame.amax()) + 1,
        "tokens_a_frame": frame_tokens(layout),
        "digest": digest.hexdigest()[:16],
    }


@dataclass(eq=False)
class Bench:
    """Measures candidates on one layer. Dense outputs are computed once for each modality of keys, and kept while the
    layer is."""

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
        if plan is None:
            return self.dense(None)
        one = self.inside
        kernel = select.get(self.backend, one.query.device)
        return attend_plan(plan, one.query, one.key, one.value, one.scale, kernel)[0]

    def dense(self, modality: int | None) -> Tensor:
        """[1, H, S, D]: exact attention over the keys of one modality, or over all."""
        if modality not in self._dense:
            one, column = self.inside, None
            key, value = one.key, one.value
            if modality is not None:
                column = (one.layout.modality[0] == modality).nonzero()[:, 0]
                key, value = key[:, :, column], value[:, :, column]
            self._dense[modality] = dense_attend(one.query, key, value, one.scale, column=column)
        return self._dense[modality]

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
        """Cost of all heads, and their cost under `target`.

        seconds, target_seconds  attention, the least of `repeats` runs that take turns, so that what slows one slows both;
                                 None for no repeats
        index_seconds            to make the plan
        pairs, target_pairs      in listed blocks, the mean over heads
        share                    pairs over causal pairs
        """
        device = self.inside.query.device
        plan, index = timed(partial(self.plan, built(pattern)), device)
        plans = [plan, self.plan(built(target))]
        if device.type == "cuda" and repeats:
            for each in plans:  # the first run compiles
                self.attend(each)
        taken = [[timed(partial(self.attend, each), device)[1] for each in plans] for _ in range(repeats)]
        seconds = [brief(min(column)) for column in zip(*taken, strict=True)] if taken else (None, None)
        whole = self.inside.layout.length * (self.inside.layout.length + 1) / 2
        pairs = [brief(float(self.kept(each).mean()) * whole) for each in plans]
        return {
            "pattern": dict(pattern),
            "seconds": seconds[0],
            "target_seconds": seconds[1],
            "index_seconds": brief(index),
            "pairs": pairs[0],
            "target_pairs": pairs[1],
            "share": brief(pairs[0] / whole),
        }

    def kept(self, plan: AttentionPlan | None) -> Tensor:
        """[H] float64: listed over causal pairs."""
        length = self.inside.layout.length
        if plan is None:
            return torch.ones(self.heads, dtype=torch.float64)
        return (plan.count_listed_pairs()[0] / (length * (length + 1) / 2)).cpu()


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
    """Round to six significant figures. Tables store rounded figures, and candidates are compared by what is stored."""
    return float(f"{value:.6g}")


def timed(run: Callable[[], R], device: torch.device) -> tuple[R, float]:
    """Run `run` and return its result and seconds: on CUDA wall-clock time with the device waited for; on a CPU the
    process's own time, which does not grow when other processes run."""
    if device.type != "cuda":
        begin = time.process_time()
        return run(), time.process_time() - begin
    torch.cuda.synchronize(device)
    begin, result = time.perf_counter(), run()
    torch.cuda.synchronize(device)
    return result, time.perf_counter() - begin


def scored(
    bench: Bench,
    space: Space,
    modalities: Sequence[int],
    block: int,
    tolerance: float,
    tick: Tick = lambda: None,
) -> list[dict[str, Any]]:
    """The measurements of each head of this layer.

    scores, shares  boundary type -> slot -> for each candidate its error, and the share of causal pairs it computes; null
                    for a candidate that was left out
    errors, kept    boundary type with its best candidates -> error of the whole output, and the share it computes
    """
    heads: list[dict[str, Any]] = [
        {"scores": {}, "shares": {}, "errors": {}, "kept": {}} for _ in range(bench.heads)
    ]
    for kind, candidates in space.items():
        for slot, candidate in product(boundary_slots(kind, modalities), candidates):
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
    return sum(len(some) * len(boundary_slots(kind, modalities)) + 1 for kind, some in space.items())


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
    """The measurements of a head with what follows from them: boundary type, pattern, score, cost and share.

    The first of equals wins, and no boundary comes first.
    """
    enough = good(head["errors"][k] for k in space)
    kind = next(k for k in space if head["errors"][k] <= enough)
    pattern, cost = arranged(kind, space, head, block, tolerance)
    measured = {name: head[name] for name in ("errors", "kept", "scores", "shares")}
    chosen = {"score": head["errors"][kind], "cost": cost, "share": head["kept"][kind]}
    return {"pattern": pattern, "kind": kind, **chosen, **measured}
