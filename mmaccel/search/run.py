"""The search from a model and a prompt to a table of head patterns, and functions on such tables. Progress is stored in a
file, so that an interrupted search continues."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mmaccel.backends import select
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError, RecipeError, UnknownName
from mmaccel.core.layout import MODALITIES
from mmaccel.core.registry import FieldLimit, at_least, check_field_values, limited
from mmaccel.core.report import peak_bytes
from mmaccel.core.rows import JsonlFile, measurement_conditions, write_atomically
from mmaccel.policies.sparse.per_head import KIND, SCHEMA, patterns_by_layer_and_head
from mmaccel.search import measure as figures
from mmaccel.search.measure import (
    CapturedLayer,
    LayerBenchmark,
    Row,
    Space,
    choose_head_pattern,
    measure_candidates,
    round_significant_figures,
)
from mmaccel.search.space import (
    KINDS,
    BudgetScale,
    PatternCandidate,
    PatternCostTable,
    Tick,
    applicable_boundary_types,
    budget_rows,
    build_pattern,
    find_candidates_at_target_cost,
)

Progress = Callable[[str, int, int | None], None]
PACKAGES = ("mmaccel", "torch", "transformers", "triton")
"""Packages whose versions a search depends on."""
_OPTIONS = ("cost", "model", "block", "context", "boundaries", "extended", "backend", "device", "dtype")
OPTIONS = {name: f"--{name}" for name in _OPTIONS}
OPTIONS |= {"model": "model", "tolerance": "tolerance", "versions": "version of a package"}
"""What a user gives, by its name in what a search is about; all else there follows from these and from the sample."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of the search.

    context    prompt length the table is for (None: the sample's). From 64k tokens on, budgets are those of MMInference's
               Table 3; for less they shrink in proportion
    boundaries boundary types to consider
    tolerance  largest difference of a candidate's cost from the target pattern's, as a share of the target's
    cost       "seconds" of attention, measured on the device, or "pairs" in listed blocks, counted
    repeats    timed runs of each measurement, alternating with runs of the target
    block      tokens of a block
    backend    the backend whose costs count; "auto": the first that can run on the device
    extended   whether to try patterns of our own too, some of them in place of Table 3's (see `space.py`)
    """

    context: int | None = limited(None, at_least(256, " tokens"))
    boundaries: Sequence[str] = KINDS
    tolerance: float = limited(0.05, FieldLimit(lambda share: 0 < share < 1, "a share between 0 and 1"))
    cost: Literal["seconds", "pairs"] = "seconds"
    repeats: int = limited(3, at_least(1))
    block: int = limited(64, FieldLimit(lambda n: n >= 16 and not n & (n - 1), "a power of two, at least 16"))
    backend: str = "auto"
    extended: bool = False

    def __post_init__(self) -> None:
        for name in self.boundaries:
            if name not in KINDS:
                raise UnknownName("boundary type", name, KINDS)
        if not self.boundaries:
            raise RecipeError(f"boundaries: none is named; give some of {', '.join(KINDS)}.")
        check_field_values("search", self)


def search(
    model: nn.Module,
    inputs: Mapping[str, Any],
    out: str | Path,
    settings: SearchSettings | None = None,
    *,
    sample: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Choose a pattern for each head of `model` by one prompt, write the table to `out`, and return it.

    inputs: keyword arguments of the model, a batch of one prompt; `sample` is stored in the table with the prompt's facts.
    One forward pass stops at the middle layer, on which costs are measured; a second visits all layers, one in memory at a
    time. Outputs and lists are linear in the prompt's length; full score matrices are never made. Progress is stored in the
    file `out`.parts until the table is complete; an interrupted search continues from it.

    Raises `RecipeError` or `ModelError`.
    """
    settings, out = settings or SearchSettings(), Path(out)
    if not out.parent.is_dir():
        raise RecipeError(f"the folder {out.parent} does not exist; create it first.")
    if out.is_dir():
        raise RecipeError(f"{out} is a folder; give the name of a file in it.")
    with SearchProgress.hold_lock(progress_path(out)) as parts:
        device = next(model.parameters()).device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        about, measured, space = _levelled(model, inputs, settings, sample or {}, parts, progress)
        depth, block, tolerance = about["model"]["layers"], settings.block, settings.tolerance
        modalities = [m for m, name in MODALITIES.items() if name in about["modalities"]]
        missing = set(range(depth)) - parts.layers().keys()
        tick = _ticking(progress, "score", figures.count_progress_ticks(space, modalities) * len(missing))

        def visit(inside: CapturedLayer) -> None:
            begin = time.perf_counter()
            heads = measure_candidates(
                LayerBenchmark(inside, about["backend"]), space, modalities, block, tolerance, tick
            )
            row = {"layer": inside.layer, "heads": heads, "seconds": time.perf_counter() - begin}
            parts.add({**row, "peak_bytes": peak_bytes(device)})

        figures.visit_attention_inputs(model, inputs, visit, missing)
        layers = parts.layers()
        seconds = sum(parts.stored_values("spent")) + sum(row["seconds"] for row in layers.values())
        table = _build_table(about, measured, space, [layers[n]["heads"] for n in range(depth)])
        table["seconds"] = round(seconds, 3)
        table["peak_bytes"] = max(row["peak_bytes"] for row in layers.values())
        write_atomically(out, json.dumps(table, indent=1, allow_nan=False) + "\n")
        parts.rows.clear()  # the table is written, and what was kept for it goes
        return table


def _levelled(
    model: nn.Module,
    inputs: Mapping[str, Any],
    settings: SearchSettings,
    sample: Mapping[str, Any],
    parts: SearchProgress,
    progress: Progress | None,
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, list[PatternCandidate]]]:
    """What the search is about, all costs, and the candidates at the target's cost, measured on the layer in the middle,
    whose tensors are gone by then."""
    begin, adapter = time.perf_counter(), adapter_for(model)
    device, fingerprint = next(model.parameters()).device, adapter.fingerprint(model)
    backend = select.default_backend(device) if settings.backend == "auto" else settings.backend
    select.get_op(backend, device)
    middle: list[CapturedLayer] = []

    def keep(one: CapturedLayer) -> None:
        # Tensors of a layer are gone when the pass goes on.
        middle.append(replace(one, query=one.query.clone(), key=one.key.clone(), value=one.value.clone()))

    figures.visit_attention_inputs(model, inputs, keep, {fingerprint["layers"] // 2})
    inside = middle.pop()
    layout = inside.layout
    if layout.length < 2 * settings.block:
        raise ModelError(
            f"the sample has {layout.length} tokens; give a longer video, {2 * settings.block} at least."
        )
    modalities = [m for m in MODALITIES if layout.max_tokens_by_modality[m]]
    scale = BudgetScale(
        settings.context or layout.length, figures.max_frame_tokens(layout), settings.block, settings.extended
    )
    kinds = applicable_boundary_types(settings.boundaries, modalities)
    here = measurement_conditions(device)
    about: dict[str, Any] = {
        "kind": KIND,
        "schema": SCHEMA,
        "model": fingerprint,
        "weights": adapter.qk_checksum(model),
        "block": settings.block,
        "context": scale.context,
        "target": scale.target_pattern(),
        "cost": settings.cost,
        "tolerance": settings.tolerance,
        "extended": scale.extended,
        "boundaries": kinds,
        "modalities": [MODALITIES[m] for m in modalities],
        "measured_layer": inside.layer,
        "objective": "norm of (sparse - dense) attention output over the norm of dense, over all rows of the sample",
        "sample": {**sample, **figures.sample_prompt_facts(inputs, layout)},
        "device": here["device"],
        "dtype": str(inside.query.dtype).removeprefix("torch."),
        "backend": backend,
        "versions": {name: here[name] for name in PACKAGES if here[name] is not None},
    }
    parts.begin_or_continue(about)
    bench = LayerBenchmark(inside, backend)

    def measure(pattern: Mapping[str, Any]) -> dict[str, Any]:
        repeats = settings.repeats if settings.cost == "seconds" else 0
        row = bench.measure_cost(pattern, about["target"], repeats)
        parts.add({"measured": row})
        return row

    ledger = PatternCostTable(settings.cost, parts.stored_values("measured"), measure)
    tick = _ticking(progress, "level", len(budget_rows(scale)) * len(kinds))
    space = find_candidates_at_target_cost(
        scale, kinds, modalities, ledger, settings.tolerance, tick, ledger.kept_share
    )
    parts.add({"spent": time.perf_counter() - begin})
    return about, list(ledger.rows.values()), space


def _ticking(progress: Progress | None, what: str, total: int) -> Tick:
    done = count(1)

    def tick() -> None:
        if progress is not None:
            progress(what, next(done), total)

    return tick


def progress_path(out: Path) -> Path:
    """Return the path of the progress file of a search for the table `out`."""
    return out.with_name(out.name + ".parts")


class SearchProgress(JsonlFile):
    """Stored progress of a search: a row of its settings, then a row for each cost, time and layer."""

    @classmethod
    @contextmanager
    def hold_lock(cls, path: Path) -> Iterator[SearchProgress]:
        """Context that locks the progress file against other searches and reads it. Raises `RecipeError` if another search
        holds the lock, or if the file is not of a search. The file is deleted if it has no row when the context ends.

        The lock is the operating system's and ends with the process.
        """
        with ExitStack() as stack:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                parts = cls(path, "about")
            except BlockingIOError as error:
                raise RecipeError(
                    f"another search is at work in {path}; wait for its end, or give another --out."
                ) from error
            except (IsADirectoryError, ValueError) as error:
                raise RecipeError(
                    f"{path} is there and holds no search that can go on; delete it, or give another --out."
                ) from error
            try:
                yield parts
            finally:
                if not parts.rows:
                    path.unlink(missing_ok=True)

    def begin_or_continue(self, about: Mapping[str, Any]) -> None:
        """Start a search, or continue the stored one if its settings are equal; `RecipeError` if they differ."""
        now = json.loads(json.dumps(about))
        known = self.stored_values("about")
        if not known:
            self.add({"about": about})
        elif known[0] != now:
            names = differing_options(known[0], now) if isinstance(known[0], dict) else ["beginning"]
            other = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
            raise RecipeError(
                f"{self.path} holds a search with another {other}; give what it was begun with, delete the file, or give "
                "another --out."
            )

    def stored_values(self, key: str) -> list[Any]:
        """Return the values of `key` in all stored rows that have it, in order."""
        return [row[key] for row in self.rows if key in row]

    def layers(self) -> dict[int, dict[str, Any]]:
        """Return layer index -> row, of completed layers: measurements of its heads, seconds, peak memory."""
        return {row["layer"]: row for row in self.rows if "layer" in row}


def differing_options(known: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the options in which two searches differ, videos first, then cost; stored values in brackets."""
    old, new = known.get("sample") or {}, now.get("sample") or {}
    names = [
        f"{option} ({', '.join(old.get(name, ()))})"
        for name, option in (("videos", "--video"), ("text", "--text"))
        if old.get(name) != new.get(name)
    ]
    if old != new and not names:
        names.append("sample (what is in --video, --fps or --max-tokens)")
    # What is not given follows the sample.
    follows = set()
    if known.get("context") == old.get("tokens") and now.get("context") == new.get("tokens"):
        follows.add("context")
    if known.get("modalities") != now.get("modalities"):
        follows.add("boundaries")
    for name, option in OPTIONS.items():
        value = known.get(name)
        if value != now.get(name) and name not in follows:
            names.append(f"{option} ({value})" if isinstance(value, str | int | float) else option)
    return names or [next(n for n in {**now, **known} if now.get(n) != known.get(n))]


def _build_table(
    about: Row, measured: Sequence[Row], space: Space, layers: Sequence[Sequence[Row]]
) -> dict[str, Any]:
    """Build the table: its settings, the measured costs, the candidates, and the choice for each head."""
    choose = partial(choose_head_pattern, space, block=about["block"], tolerance=about["tolerance"])
    return {
        **about,
        "measured": [dict(row) for row in measured],
        "space": {
            kind: [
                {**vars(one), "rows": list(one.rows), "cost": round_significant_figures(one.cost)}
                for one in some
            ]
            for kind, some in space.items()
        },
        "layers": [[choose(head) for head in layer] for layer in layers],
    }


def recompute_table(table: Row) -> dict[str, Any]:
    """Recompute a table's choices from its own costs and scores, with equal result. `RecipeError` if a cost is missing."""

    def missing(pattern: Row) -> dict[str, Any]:
        raise RecipeError(f"the table holds no cost of {dict(pattern)}; search again.")

    # Tables of before have the rows of Table 3 alone, and do not say so.
    extended = table.get("extended", False)
    scale = BudgetScale(table["context"], table["sample"]["tokens_a_frame"], table["block"], extended)
    ledger = PatternCostTable(table["cost"], table["measured"], missing)
    modalities = [m for name in table["modalities"] for m in MODALITIES if MODALITIES[m] == name]
    space = find_candidates_at_target_cost(
        scale, table["boundaries"], modalities, ledger, table["tolerance"], share=ledger.kept_share
    )
    return {
        **_build_table(table, table["measured"], space, table["layers"]),
        "target": scale.target_pattern(),
    }


def restrict_boundary_types(table: Row, kinds: Sequence[str]) -> dict[int, dict[int, dict[str, Any]]]:
    """Return layer -> head -> pattern, chosen among the boundary types `kinds` only, from the table's own measurements."""
    space = {
        kind: [PatternCandidate(**{**one, "rows": tuple(one["rows"])}) for one in table["space"][kind]]
        for kind in kinds
    }
    choose = partial(choose_head_pattern, space, block=table["block"], tolerance=table["tolerance"])
    return patterns_by_layer_and_head(
        {"layers": [[choose(head) for head in layer] for layer in table["layers"]]}
    )


def table_agreement(one: Row, other: Row) -> float:
    """Return the share of heads to which two tables of a model give the same boundary type and main pattern name."""
    told = [
        [(head["kind"], main_pattern_name(head["pattern"])) for layer in table["layers"] for head in layer]
        for table in (one, other)
    ]
    return sum(a == b for a, b in zip(*told, strict=True)) / len(told[0])


def head_pattern_names(table: Row) -> list[tuple[str, ...]]:
    """Return for each layer the names of its heads' patterns, as in a report."""
    return [
        tuple(build_pattern(head["pattern"]).head_pattern_names(1)[0] for head in layer)
        for layer in table["layers"]
    ]


def main_pattern_name(pattern: Row) -> str:
    """Return the name of the pattern that covers most of a head's pairs: with a boundary, that of video, or else of text."""
    for slot in ("video", "text"):
        inner = pattern.get(slot) or pattern.get("pairs", {}).get(f"{slot}>{slot}")
        if inner:
            return str(inner["name"])
    return str(pattern["name"])
