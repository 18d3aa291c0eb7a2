"""The style of all pictures: colours by name, panels with a title that says the finding, cells, spans and layers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any

ROOT = Path(__file__).parents[1]
MODELS = ("tiny-ov", "tiny-qwen")
MEMORIES = {
    "full": "full (keeps everything)",
    "streammem": "StreamMem",
    "mosaic, retrieves while watching": "mosaic",
    "mosaic": "mosaic",
    "rekv": "ReKV",
    "livevlm": "LiveVLM",
    "no_cache": "no cache",
    "recent": "the last frames",
}

LIGHT = {
    "paper": "#fffffe", "ink": "#1f2329", "muted": "#6e7782", "grid": "#d8dee5", "blue": "#0a69db", "orange": "#c2610a",
    "green": "#1a7f38", "violet": "#8250e0", "red": "#d1242d",
}  # fmt: skip
DARK = {
    "paper": "#0d1118", "ink": "#e6edf4", "muted": "#9198a2", "grid": "#30363e", "blue": "#58a6fe", "orange": "#f0883f",
    "green": "#3fb951", "violet": "#bc8cfe", "red": "#ff7b73",
}  # fmt: skip
COLOURS = LIGHT
"""Names of colours; each value is one that nothing else in an SVG has, so that `themed` finds it."""
STYLE = {
    "font.size": 10.5, "font.family": "DejaVu Sans", "text.color": LIGHT["ink"], "axes.labelcolor": LIGHT["ink"],
    "axes.edgecolor": LIGHT["muted"], "xtick.color": LIGHT["ink"], "ytick.color": LIGHT["ink"], "axes.grid": True,
    "grid.color": LIGHT["grid"], "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "figure.facecolor": LIGHT["paper"], "axes.facecolor": LIGHT["paper"],
    "legend.facecolor": LIGHT["paper"], "legend.edgecolor": LIGHT["grid"], "legend.framealpha": 1.0,
}  # fmt: skip


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of bench/results, each with the `tree` (commit) that was measured."""
    found, tree = [], None
    for line in (ROOT / "bench" / "results" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "environment" in row:
            tree = row["environment"].get("commit")
        found.append({**row, "tree": tree})
    return found


def style(name: str) -> Any:
    """A context in which a picture is drawn and saved; the ids in its SVG are the same each time."""
    import matplotlib

    return matplotlib.rc_context({**STYLE, "svg.hashsalt": name})


def themed(svg: str, facts: str) -> str:
    """An SVG whose colours are variables, light or dark as the reader's page is, with the digest of its facts."""
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{name})")
    sheets = ["".join(f"--{name}:{colour};" for name, colour in one.items()) for one in (LIGHT, DARK)]
    style = f"<style>:root{{{sheets[0]}}}@media(prefers-color-scheme:dark){{:root{{{sheets[1]}}}}}</style>"
    svg = re.sub(r"(?m)[ \t]+$", "", svg)
    return re.sub(r"(<svg [^>]*>)", rf"\1\n<!-- facts {facts} -->\n{style}", svg, count=1)


def panel(
    width: float,
    height: float,
    title: str,
    below: str,
    *,
    columns: int = 1,
    rows: int = 1,
    heights: Any = None,
) -> tuple[Figure, Any]:
    """A figure (inches) with a title that says what is found, a line of conditions below it, and axes: one or a list."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    drawn.get_layout_engine().set(rect=(0.005, 0.005, 0.99, 1 - 0.72 / height))
    drawn.text(
        0.012, 1 - 0.12 / height, title, fontsize=12.2, fontweight="bold", va="top", color=COLOURS["ink"]
    )
    drawn.text(0.012, 1 - 0.42 / height, below, fontsize=8.9, va="top", color=COLOURS["muted"])
    plots = drawn.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    return drawn, plots[0] if columns * rows == 1 else list(plots)


def tick(tokens: int) -> str:
    return f"{tokens >> 10}k" if tokens < 1 << 20 else f"{tokens >> 20}M"


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def cell(axes: Axes, x: float, y: float, colour: str, alpha: float, text: str) -> None:
    """A square of a map, with its figure."""
    axes.add_patch(_box(x - 0.47, y - 0.47, 0.94, 0.94, colour, alpha))
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=COLOURS["ink"])


def cells(
    axes: Axes, values: Sequence[Sequence[float]], form: str, texts: Sequence[Sequence[str]] | None = None
) -> None:
    """A map of percentages: the more, the fuller."""
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            cell(
                axes,
                x,
                y,
                COLOURS["blue"],
                0.05 + 0.55 * value / 100,
                texts[y][x] if texts else form.format(value),
            )
    square(axes, len(values[0]), len(values))


def square(axes: Axes, width: int, height: int) -> None:
    """Axes of a map of `width` by `height` cells, the first row at the top."""
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)
    axes.grid(False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def span(
    axes: Axes, start: float, stop: float, low: float, high: float, colour: str, alpha: float, text: str = ""
) -> None:
    """A stretch of time, with a word in it where it fits."""
    axes.add_patch(_box(start, low, stop - start, high - low, colour, alpha))
    if text and stop - start > 9 * len(text) ** 0.5:
        axes.text((start + stop) / 2, (low + high) / 2, text, ha="center", va="center", fontsize=8.5)


def key(drawn: Figure, colours: Mapping[str, str]) -> None:
    """A legend of filled squares below everything."""
    from matplotlib.patches import Patch

    drawn.legend(
        handles=[Patch(color=colour, alpha=0.55, label=name) for name, colour in colours.items()],
        loc="outside lower center", ncols=len(colours), frameon=False,
    )  # fmt: skip


def note(drawn: Figure, axes: Axes) -> None:
    """The legend of one of several axes, below all."""
    handles, labels = axes.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)


def boxes(axes: Axes, boxes: Sequence[Sequence[Any]], arrows: Sequence[Sequence[Any]]) -> None:
    """Boxes (name, left, bottom, width, height, colour, text) and arrows down (x, from, to, text)."""
    for name, left, bottom, width, height, colour, text in boxes:
        axes.add_patch(_box(left, bottom, width, height, COLOURS[colour], 0.2))
        axes.text(
            left + 0.12,
            bottom + height - 0.12,
            name,
            va="top",
            fontsize=12,
            fontweight="bold",
            color=COLOURS[colour],
        )
        axes.text(left + 1.05, bottom + height - 0.14, text, va="top", fontsize=9.6, linespacing=1.5)
    for x, start, stop, text in arrows:
        axes.annotate(
            "", (x, stop + 0.03), (x, start - 0.03), arrowprops={"arrowstyle": "-|>", "color": COLOURS["ink"]}
        )
        axes.text(x + 0.1, (start + stop) / 2, text, va="center", fontsize=9.2, color=COLOURS["muted"])
    axes.set_xlim(-0.02, 6.02)
    axes.set_ylim(0.4, 5)
    axes.axis("off")


def _box(x: float, y: float, width: float, height: float, colour: str, alpha: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, alpha=alpha, linewidth=0)
