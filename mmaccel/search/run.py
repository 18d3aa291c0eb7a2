"""The search from a model and a prompt to a table of head patterns, and the table again from its own figures."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mmaccel.backends import select
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError, RecipeError, UnknownName
from mmaccel.core.layout import MODALITIES
from mmaccel.core.report import peak_bytes
from mmaccel.core.rows import environment, write_whole
from mmaccel.policies.sparse.head_table import KIND, SCHEMA
from mmaccel.search.algorithm import kinds_of, levelled, scored, ticks
from mmaccel.search.kinds import KINDS
from mmaccel.search.measure import Bench
from mmaccel.search.parts import Parts, parts_of
from mmaccel.search.sample import Inside, described, frame_tokens, present, watch
from mmaccel.search.space import Candidate, Scale, rows
from mmaccel.search.table import Ledger, assembled

Progress = Callable[[str, int, int | None], None]
PACKAGES = ("mmaccel", "torch", "transformers", "triton")
"""Packages whose versions a search depends on."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to search.

    context    the length the table is for: budgets are Table 3's from 64k on and in proportion below; None: the sample's
    boundaries which types to consider
    tolerance  how near to the target's cost a row is brought, as a share of it
    cost       "seconds" that attention takes on the device, measured, or "pairs" in listed blocks, counted
    repeats    timed runs of each measurement, and of the target's beside it
    extended   whether rows of ours are candidates beside and instead of Table 3's (`space.py`)
    backend    the backend whose costs count; "auto": the first that can run on the device
    """

    context: int | None = None
    boundaries: Sequence[str] = KINDS
    tolerance: float = 0.05
    cost: Literal["seconds", "pairs"] = "seconds"
    repeats: int = 3
    block: int = 64
    backend: str = "auto"
    extended: bool = False

    def __post_init__(self) -> None:
        for name in self.boundaries:
            if name not in KINDS:
                raise UnknownName("boundary type", name, KINDS)
        if not self.boundaries:
            raise RecipeError(f"boundaries: none is named; give some of {', '.join(KINDS)}.")
        if self.context is not None and self.context < 256:
            raise RecipeError(f"context: {self.context}; give at least 256 tokens.")
        if not 0 < self.tolerance < 1:
            raise RecipeError(f"tolerance: {self.tolerance}; give a share between 0 and 1.")
        if self.cost not in ("seconds", "pairs"):
            raise RecipeError(f"cost: {self.cost!r}; give 'seconds' or 'pairs'.")
        if self.block < 16 or self.block & (self.block - 1):
            raise RecipeError(f"block: {self.block}; give a power of two, at least 16.")
        if self.repeats < 1:
            raise RecipeError(f"repeats: {self.repeats}; give at least 1.")


def search(
    model: nn.Module,
    inputs: Mapping[str, Any],
    out: str | Path,
    settings: Settings | None = None,
    *,
    sample: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Choose a pattern for each head of `model` by one prompt, write the table to `out`, and return it.

    inputs: keyword arguments of the model, a batch of one prompt; `sample` goes into the table beside what is known of
    it. One forward pass stops at the layer in the middle, on which costs are measured; a second goes over all layers, one
    held at a time. Outputs and lists are as long as the prompt; scores of all pairs are never held. What is done lies in
    the file `out`.parts until the table is whole: a search that was stopped goes on from there.

    Raises `RecipeError` or `ModelError` in one sentence.
    """
    settings = settings or Settings()
    out = Path(out)
    if not out.parent.is_dir():
        raise RecipeError(f"the folder {out.parent} does not exist; create it first.")
    if out.is_dir():
        raise RecipeError(f"{out} is a folder; give the name of a file in it.")
    parts = Parts(parts_of(out))
    with parts.alone():
        return _search(model, inputs, out, settings, parts, sample, progress)


def _search(
    model: nn.Module,
    inputs: Mapping[str, Any],
    out: Path,
    settings: Settings,
    parts: Parts,
    sample: Mapping[str, Any] | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """`search`, with a file of parts that is its own."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    backend = select.choose(device) if settings.backend == "auto" else settings.backend
    select.get(backend, device)
    depth = adapter_for(model).geometry(model).layers
    began = time.perf_counter()

    held: list[Inside] = []
    watch(model, inputs, lambda one: held.append(_kept(one)), {depth // 2})
    layout = held[0].layout
    if layout.length < 2 * settings.block:
        raise ModelError(
            f"the sample has {layout.length} tokens; give a longer video, {2 * settings.block} at least."
        )
    modalities = present(layout)
    context = settings.context or layout.length
    scale = Scale(context, frame_tokens(layout), settings.block, settings.extended)
    kinds = kinds_of(settings.boundaries, modalities)
    here = environment(device)
    about: dict[str, Any] = {
        "kind": KIND,
        "schema": SCHEMA,
        "model": adapter_for(model).fingerprint(model),
        "weights": adapter_for(model).weights_digest(model),
        "block": settings.block,
        "context": scale.context,
        "target": scale.target(),
        "cost": settings.cost,
        "tolerance": settings.tolerance,
        "extended": scale.extended,
        "boundaries": kinds,
        "modalities": [MODALITIES[m] for m in modalities],
        "measured_layer": depth // 2,
        "objective": "norm of (sparse - dense) attention output over the norm of dense, over all rows of the sample",
        "sample": {**(sample or {}), **described(inputs, layout)},
        "device": here["device"],
        "dtype": str(held[0].query.dtype).removeprefix("torch."),
        "backend": backend,
        "versions": {name: here[name] for name in PACKAGES if here[name] is not None},
    }
    parts.begin(about)
    space, measured = _levelled(held[0], scale, about, settings, parts, progress)
    held.clear()
    parts.spent(time.perf_counter() - began)

    missing = set(range(depth)) - parts.layers().keys()
    tell = _Counter(progress, "score", ticks(space, modalities) * len(missing))

    def visit(inside: Inside) -> None:
        start = time.perf_counter()
        heads = scored(Bench(inside, backend), space, modalities, settings.block, settings.tolerance, tell)
        parts.layer(inside.layer, heads, time.perf_counter() - start, peak_bytes(device))

    watch(model, inputs, visit, missing)
    done = [parts.layers()[n] for n in range(depth)]
    table = assembled(about, measured, space, [layer["heads"] for layer in done])
    table |= {"seconds": round(parts.seconds(), 3), "peak_bytes": max(layer["peak_bytes"] for layer in done)}
    write_whole(out, json.dumps(table, indent=1, allow_nan=False) + "\n")
    parts.remove()
    return table


def _levelled(
    inside: Inside,
    scale: Scale,
    about: Mapping[str, Any],
    settings: Settings,
    parts: Parts,
    progress: Progress | None,
) -> tuple[dict[str, list[Candidate]], list[dict[str, Any]]]:
    """The candidates at the target's cost, and all measurements, on the layer at hand."""
    bench = Bench(inside, about["backend"])

    def measure(pattern: Mapping[str, Any]) -> dict[str, Any]:
        repeats = settings.repeats if settings.cost == "seconds" else 0
        return parts.note(bench.cost(pattern, about["target"], repeats))

    ledger = Ledger(settings.cost, parts.measured(), measure)
    kinds, modalities = about["boundaries"], present(inside.layout)
    tell = _Counter(progress, "level", len(rows(scale)) * len(kinds))
    space = levelled(scale, kinds, modalities, ledger, settings.tolerance, tell, ledger.share)
    return space, list(ledger.rows.values())


class _Counter:
    def __init__(self, progress: Progress | None, what: str, total: int) -> None:
        self.progress, self.what, self.total, self.done = progress, what, total, 0

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.what, self.done, self.total)


def _kept(inside: Inside) -> Inside:
    """The same with tensors of its own: those of a layer are gone when the pass goes on."""
    query, key, value = (t.clone() for t in (inside.query, inside.key, inside.value))
    return dataclasses.replace(inside, query=query, key=key, value=value)
