"""Curves of memories of streams from rows that are there: accuracy, time to the first token and memory.

    python bench/memory_curves.py --rows bench/results/memories_tiny-{ov,qwen}_202611.jsonl --picture docs/memories.svg
    python bench/memory_curves.py --rows bench/results/stream_h200_202611.jsonl --picture docs/stream.svg

Panels, of what the files hold: accuracy by retrieved frames and by length of the stream (the paper's Figures 10, 12; rows of
`bench/memories.py`, a panel a file, with 95% intervals); time to the first token by retrieved frames and by length, device
memory by length, the plain model's beside (Figures 10, 11, 12, Table I; rows of `bench/stream.py`). Of a case that was
measured again the last row counts; dashed lines, of memories whose time depends on neither, name the tree they are of. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timing import read_rows

from mmaccel.core.errors import MmaccelError
from mmaccel.figure import figure, save

Points = dict[float, tuple[float, float, float]]
"""Place on the axis to value, low and high."""


@dataclass
class Panel:
    """What is drawn in one frame: curves by name, and values that hold everywhere."""

    title: str
    across: str
    up: str
    curves: dict[str, Points] = field(default_factory=lambda: defaultdict(dict))
    lines: dict[str, float] = field(default_factory=dict)


def accuracy(rows: Iterable[Mapping[str, Any]], name: str) -> list[Panel]:
    """Over all kinds of question: by budget of all lengths together, and by length at the budget nearest to 64."""
    means = [row for row in rows if row.get("what") == "mean" and row["kind"] == "all"]
    lengths = {row["length"] for row in means}
    budgets = sorted({row["budget"] for row in means if row["budget"] is not None})
    if not budgets:
        return []
    every = "all" if "all" in lengths else next(iter(lengths))
    by_budget = Panel(name, "frames retrieved", "right, %")
    by_length = Panel(name, "frames watched", "right, %")
    at = min(budgets, key=lambda budget: abs(budget - 64))
    for row in means:
        told = tuple(100 * row[one] for one in ("accuracy", "low", "high"))
        if row["length"] == every and row["budget"] is None:
            by_budget.lines[row["memory"]] = told[0]
        elif row["length"] == every:
            by_budget.curves[row["memory"]][row["budget"]] = told  # type: ignore[assignment]
        if row["length"] != "all" and row["budget"] in (None, at):
            by_length.curves[row["memory"]][row["length"]] = told  # type: ignore[assignment]
    by_length.title += f", {at} retrieved"
    return [panel for panel in (by_budget, by_length) if any(len(one) > 1 for one in panel.curves.values())]


def latency(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """To the first token, median to 95th percentile; and peak memory."""
    found = []
    for case, key, across in (
        ("budgets", "budget", "frames retrieved"),
        ("lengths", "frames", "frames watched"),
    ):
        panel, rivals = Panel("to the first token", across, "ms"), dict[str, tuple[str, float]]()
        for row in rows:
            if row.get("case") == case:
                p50, p95 = row["p50_s"] * 1e3, row["p95_s"] * 1e3
                panel.curves[row["way"]][row[key]] = p50, p50, p95
            if row.get("case") == "rivals" and case == "budgets" and row["way"] in ("livevlm", "streammem"):
                rivals[row["way"]] = f"{row['way']}, {row['tree']}", row["p50_s"] * 1e3
        panel.lines |= dict(rivals.values())
        found.append(panel)
    memory = Panel("device memory, peak", "frames watched", "GiB")
    for row in rows:
        if row.get("case") in ("memory", "whole") and row.get("peak_bytes"):
            size = row["peak_bytes"] / 2**30
            memory.curves[row["way"]][row["frames"]] = size, size, size
    return [panel for panel in (*found, memory) if panel.curves]


def read(paths: Sequence[Path]) -> list[Panel]:
    panels = []
    for path in paths:
        rows, tree = list[dict[str, Any]](), ""
        for row in read_rows([path]):
            tree = row.get("environment", {}).get("commit", tree)
            rows.append({**row, "tree": tree})
        panels += accuracy(rows, path.stem) + latency(rows)
    return panels


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Two panels a row; a name has one colour in all, told once beside them."""
    rows = -(-len(panels) // 2)
    drawn = figure(5.0 * min(len(panels), 2) + 1.8, 3.4 * rows)
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    told: dict[str, Any] = {}
    for number, panel in enumerate(panels):
        axes = drawn.add_subplot(rows, min(len(panels), 2), number + 1)
        for name, points in panel.curves.items():
            at, colour = sorted(points), f"C{names.index(name) % 10}"
            (told[name],) = axes.plot(
                at, [points[one][0] for one in at], marker="o", markersize=3, color=colour
            )
            low, high = ([points[one][side] for one in at] for side in (1, 2))
            axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
        for name, value in panel.lines.items():
            axes.axhline(value, color="grey", linestyle="--", linewidth=1)
            axes.annotate(name, (0.01, value), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
        ticks = sorted({one for points in panel.curves.values() for one in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{one:g}" for one in ticks])
        axes.minorticks_off()
        axes.set(title=panel.title, xlabel=panel.across, ylabel=panel.up)
        axes.grid(alpha=0.3)
    drawn.legend(told.values(), told.keys(), loc="outside right upper", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(drawn, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=Path, required=True, help="files of result rows")
    parser.add_argument("--picture", type=Path, required=True, help="SVG, PNG or PDF")
    options = parser.parse_args(argv)
    panels = read(options.rows)
    if not panels:
        sys.exit(
            "memory_curves: no row of these files is a point of a curve; give those of memories.py or stream.py."
        )
    try:
        draw(panels, options.picture)
    except MmaccelError as error:
        sys.exit(f"memory_curves: {error}")


if __name__ == "__main__":
    main()
