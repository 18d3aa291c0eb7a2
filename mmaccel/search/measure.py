"""Measurements of the pattern search (MMInference, Algorithm 4).

A model reads one sample prompt. For each layer the attention inputs are captured, and each candidate pattern's time and
error against dense attention are measured; then each head gets its best candidate.

A boundary type divides the query-key pairs into slots: by modality of the queries, of the keys, or of both. For each head,
each slot of each boundary type takes the candidate whose output, over the slot's rows and keys, is nearest to that of dense
attention. Then the head takes the boundary type whose whole output, with these candidates, is nearest. The choice depends on
the stored figures alone, so that a table can be recomputed from itself.
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
from mmaccel.core.prefill.plan import AttentionPlan
from mmaccel.core.prefill.prune import NOTE, ForwardPassInfo, ForwardProbe, PrefillPass
from mmaccel.core.prefill.sparse import SparsePattern, attend_plan
from mmaccel.policies.sparse.per_head import LayerHeadPatterns
from mmaccel.search.space import (
    ModalityPairSlot,
    PatternCandidate,
    Tick,
    build_pattern,
    recipe_for_slot,
    recipe_from_slots,
    slots_of_boundary_type,
)

R = TypeVar("R")
Space = Mapping[str, Sequence[PatternCandidate]]
"""The candidates of each boundary type."""
Row = Mapping[str, Any]

ROWS = 4096
"""Rows of outputs compared at a time."""
TINY = 1e-9
SLACK, NOISE = 0.01, 1e-6
"""Errors are equal when they differ by no more than this share, or by what rounding makes."""


@dataclass(frozen=True, eq=False)
class CapturedLayer:
    """Attention inputs of one layer, captured in a forward pass: query [1, H, S, D], key and value [1, G, S, D] after RoPE,
    the softmax `scale`, and the tokens' layout."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    layout: TokenLayout


class _Enough(Exception):
    """No layer further down is wanted."""


def visit_attention_inputs(
    model: nn.Module,
    inputs: Mapping[str, Any],
    visit: Callable[[CapturedLayer], None],
    layers: set[int] | None = None,
) -> None:
    """Run the prompt through `model` with dense attention; call `visit` with each layer's attention inputs (or of `layers`).

    One layer's tensors are in memory at a time, while `visit` runs; no KV cache and no logits are made. Raises `ModelError`
    for a batch of several prompts.
    """
    if inputs["input_ids"].shape[0] != 1:
        raise ModelError("input_ids: the search looks at one prompt; give a batch of one.")
    if layers is not None and not layers:
        return

    class Visit(ForwardProbe):
        def read_attention_inputs(
            self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
        ) -> None:
            if layers is None or layer in layers:
                visit(CapturedLayer(layer, query, key, value, scale, run.layout))
            if layers is not None and layer == max(layers):
                raise _Enough

    with accelerate(model, "dense"):
        note = {NOTE: ForwardPassInfo(probes=(Visit(),))}
        try:
            with torch.no_grad():
                adapter_for(model).multimodal(model)(**inputs, **note, use_cache=False)
        except _Enough:
            pass


def max_frame_tokens(layout: TokenLayout) -> int:
    """Return the number of tokens of a prompt's largest frame; 0 if it has none."""
    return int((layout.cell.amax() + 1).item())


def sample_prompt_facts(inputs: Mapping[str, Any], layout: TokenLayout) -> dict[str, Any]:
    """Return facts of a sample prompt to store in the table: tokens by modality, frames, and a checksum of all inputs."""
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
        **{f"{MODALITIES[m]}_tokens": layout.max_tokens_by_modality[m] for m in MODALITIES},
        "frames": int(layout.frame.amax()) + 1,
        "tokens_a_frame": max_frame_tokens(layout),
        "digest": digest.hexdigest()[:16],
    }


@dataclass(eq=False)
class LayerBenchmark:
    """Measures errors and costs of candidate patterns on one captured layer; caches dense outputs for each key modality."""

    inside: CapturedLayer
    backend: str
    _dense: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def num_heads(self) -> int:
        """Number of query heads of the layer."""
        return self.inside.query.shape[1]

    def plan(self, pattern: SparsePattern) -> AttentionPlan | None:
        """Plan `pattern` on this layer's queries and keys; None: it attends densely."""
        layout = self.inside.layout
        return pattern.plan(self.inside.query, self.inside.key, layout, layout)

    def attend(self, plan: AttentionPlan | None) -> Tensor:
        """Compute attention output [1, H, S, D] of this layer under `plan`; dense attention if None."""
        if plan is None:
            return self.dense_attention(None)
        one = self.inside
        kernel = select.get_op(self.backend, one.query.device)
        return attend_plan(plan, one.query, one.key, one.value, one.scale, kernel)[0]

    def dense_attention(self, modality: int | None) -> Tensor:
        """Compute dense attention output [1, H, S, D] of this layer over the keys of one modality; None: over all keys."""
        if modality not in self._dense:
            one, column = self.inside, None
            key, value = one.key, one.value
            if modality is not None:
                column = (one.layout.modality[0] == modality).nonzero()[:, 0]
                key, value = key[:, :, column], value[:, :, column]
            self._dense[modality] = dense_attend(one.query, key, value, one.scale, column=column)
        return self._dense[modality]

    def head_errors(self, pattern: Mapping[str, Any], slot: ModalityPairSlot) -> tuple[Tensor, Tensor]:
        """Return two tensors [H] float64: relative error of the pattern's output against dense attention over the rows and
        keys of `slot`, and the share of causal query-key pairs in the blocks that the pattern lists."""
        plan = self.plan(build_pattern(pattern))
        out = self.attend(plan)
        rows = None
        if slot.query is not None:
            rows = (self.inside.layout.modality[0] == slot.query).nonzero()[:, 0]
        return relative_error(out[0], self.dense_attention(slot.key)[0], rows), self.kept_share(plan)

    def measure_cost(
        self, pattern: Mapping[str, Any], target: Mapping[str, Any], repeats: int = 3
    ) -> dict[str, Any]:
        """Measure the cost of the candidate `pattern` for all heads of this layer, and that of the reference `target`.

        seconds, target_seconds  time of attention, minimum of `repeats` alternating runs, so that disturbances hit both;
                                 None for no repeats
        index_seconds            time to make the plan
        pairs, target_pairs      query-key pairs in the blocks that the plan lists, mean over heads
        share                    pairs over causal pairs
        """
        device = self.inside.query.device
        plan, index = _time_call(partial(self.plan, build_pattern(pattern)), device)
        plans = [plan, self.plan(build_pattern(target))]
        if device.type == "cuda" and repeats:
            for each in plans:  # the first run compiles
                self.attend(each)
        taken = [
            [_time_call(partial(self.attend, each), device)[1] for each in plans] for _ in range(repeats)
        ]
        seconds = (
            [round_significant_figures(min(column)) for column in zip(*taken, strict=True)]
            if taken
            else (None, None)
        )
        whole = self.inside.layout.length * (self.inside.layout.length + 1) / 2
        pairs = [round_significant_figures(float(self.kept_share(each).mean()) * whole) for each in plans]
        return {
            "pattern": dict(pattern),
            "seconds": seconds[0],
            "target_seconds": seconds[1],
            "index_seconds": round_significant_figures(index),
            "pairs": pairs[0],
            "target_pairs": pairs[1],
            "share": round_significant_figures(pairs[0] / whole),
        }

    def kept_share(self, plan: AttentionPlan | None) -> Tensor:
        """Return the share of causal query-key pairs in the blocks that `plan` lists, [H] float64."""
        length = self.inside.layout.length
        if plan is None:
            return torch.ones(self.num_heads, dtype=torch.float64)
        return (plan.count_listed_pairs()[0] / (length * (length + 1) / 2)).cpu()


def relative_error(out: Tensor, exact: Tensor, rows: Tensor | None) -> Tensor:
    """Compute norm(out - exact) / norm(exact) of each head [H], over `rows`; `out` and `exact` are [H, S, D]."""
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


def round_significant_figures(value: float) -> float:
    """Round to six significant figures, as stored in tables; candidates are compared by stored values."""
    return float(f"{value:.6g}")


def _time_call(run: Callable[[], R], device: torch.device) -> tuple[R, float]:
    """Run `run` and return its result and seconds: synchronized wall-clock time on CUDA; process CPU time on a CPU, which
    other processes do not affect."""
    if device.type != "cuda":
        begin = time.process_time()
        return run(), time.process_time() - begin
    torch.cuda.synchronize(device)
    begin, result = time.perf_counter(), run()
    torch.cuda.synchronize(device)
    return result, time.perf_counter() - begin


def measure_candidates(
    bench: LayerBenchmark,
    space: Space,
    modalities: Sequence[int],
    block: int,
    tolerance: float,
    tick: Tick = lambda: None,
) -> list[dict[str, Any]]:
    """Measure all candidate patterns for each head of a layer; return for each head a mapping of measurements:

    scores, shares  boundary type -> slot -> list, by candidate, of its error and of its share of causal pairs; None for a
                    candidate that is left out
    errors, kept    boundary type -> error of the whole output with each slot's best candidate, and share of causal pairs
    """
    heads: list[dict[str, Any]] = [
        {"scores": {}, "shares": {}, "errors": {}, "kept": {}} for _ in range(bench.num_heads)
    ]
    for kind, candidates in space.items():
        for slot, candidate in product(slots_of_boundary_type(kind, modalities), candidates):
            figures: list[list[float | None]] = [[None] * bench.num_heads] * 2
            if candidate.state != "dear":
                pattern = recipe_for_slot(kind, slot, candidate.pattern, block)
                figures = [
                    list(map(round_significant_figures, t.tolist())) for t in bench.head_errors(pattern, slot)
                ]
            for head, *pair in zip(heads, *figures, strict=True):
                for name, value in zip(("scores", "shares"), pair, strict=True):
                    head[name].setdefault(kind, {}).setdefault(slot.name, []).append(value)
            tick()
    for kind in space:
        named = {
            h: build_pattern(choose_slot_patterns(kind, space, head, block, tolerance)[0])
            for h, head in enumerate(heads)
        }
        plan = bench.plan(LayerHeadPatterns(block=block, named=named))
        whole = relative_error(bench.attend(plan)[0], bench.dense_attention(None)[0], None)
        for head, error, kept in zip(heads, whole.tolist(), bench.kept_share(plan).tolist(), strict=True):
            head["errors"][kind], head["kept"][kind] = (
                round_significant_figures(error),
                round_significant_figures(kept),
            )
        tick()
    return heads


def count_progress_ticks(space: Space, modalities: Sequence[int]) -> int:
    """Return how many times `measure_candidates` calls `tick`."""
    return sum(len(some) * len(slots_of_boundary_type(kind, modalities)) + 1 for kind, some in space.items())


def choose_slot_patterns(
    kind: str, space: Space, head: Row, block: int, tolerance: float
) -> tuple[dict[str, Any], float]:
    """Choose a candidate for each slot of boundary type `kind`, by the measurements `head` of one head
    (`measure_candidates`). Return the pattern (recipe mapping) and its cost over the target's, at most 1 + `tolerance` where
    possible.

    Each slot takes its candidate of least error; of equal ones, the cheapest. Candidates have equal cost as a mean over
    heads, so the choice may cost this head more than the target. Then slots switch to cheaper candidates where the error
    grows least per saving, and switch back where the cost allows it. A candidate's cost for one head is estimated from its
    mean cost, in proportion to the pairs that it lists for the head.
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
    return recipe_from_slots(
        kind, {slot: candidates[n].pattern for slot, n in chosen.items()}, block
    ), round_significant_figures(cost())


def _best(options: Mapping[int, tuple[float, float]], among: Collection[int]) -> int:
    """Of some candidates (error, cost) the one of the least error, of equals the cheapest."""
    enough = _tie_limit(options[n][0] for n in among)
    return min((n for n in among if options[n][0] <= enough), key=lambda n: (options[n][1], n))


def _tie_limit(errors: Iterable[float]) -> float:
    """The largest error that counts as equal to the least of `errors`."""
    return min(errors) * (1 + SLACK) + NOISE


def choose_head_pattern(space: Space, head: Row, block: int, tolerance: float) -> dict[str, Any]:
    """Choose a boundary type and a pattern for one head by its measurements `head` (`measure_candidates`). Return both, the
    choice's score (error of the whole output), cost (over the target's) and share (of causal pairs), and the measurements.

    Of boundary types with equal errors the first is chosen; "no_boundary" comes first.
    """
    enough = _tie_limit(head["errors"][k] for k in space)
    kind = next(k for k in space if head["errors"][k] <= enough)
    pattern, cost = choose_slot_patterns(kind, space, head, block, tolerance)
    measured = {name: head[name] for name in ("errors", "kept", "scores", "shares")}
    chosen = {"score": head["errors"][kind], "cost": cost, "share": head["kept"][kind]}
    return {"pattern": pattern, "kind": kind, **chosen, **measured}
