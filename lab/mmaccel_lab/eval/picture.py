"""Pictures of what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmaccel.figure import create_figure
from mmaccel_lab.eval.haystack import Haystack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4
"""Maps side by side."""


def haystack_maps(found: Haystack) -> Figure:
    """A map for each recipe: length across, depth down (the start of the video on top), the share right as a colour.

    The layout of MMInference's Figures 5 and 13. Cells that nothing was asked in stay empty.
    """
    names, lengths = found.recipes, found.lengths
    across = min(COLUMNS, len(names))
    down = -(-len(names) // across)
    drawn = create_figure(
        0.8 + max(1.9, 0.62 * len(lengths) + 0.5) * across, 0.7 + (0.36 * found.depths + 0.9) * down
    )
    for place, name in enumerate(names):
        axes = drawn.add_subplot(down, across, place + 1)
        cells = found.cells(name)
        grid = [[_share(cells.get((frames, depth))) for frames in lengths] for depth in range(found.depths)]
        axes.imshow(grid, cmap="RdYlGn", vmin=0.0, vmax=1.0, aspect="auto")
        for depth, row in enumerate(grid):
            for column, share in enumerate(row):
                if share == share:
                    axes.text(column, depth, f"{share:.0%}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(lengths)), [str(frames) for frames in lengths], fontsize=7)
        axes.set_yticks(
            range(found.depths),
            [f"{(depth + 0.5) / found.depths:.0%}" for depth in range(found.depths)],
            fontsize=7,
        )
        mean, kept = found.mean(name), found.kept(name, lengths[-1])
        told = [] if mean is None else [f"{mean:.1%} right"]
        told += [] if kept is None else [f"{kept:.0%} computed"]
        axes.set_title(f"{name}\n{', '.join(told)}", fontsize=8)
        if place % across == 0:
            axes.set_ylabel("depth", fontsize=8)
        if place >= len(names) - across:
            axes.set_xlabel("frames", fontsize=8)
    return drawn


def _share(cell: tuple[int, int] | None) -> float:
    """The share right of (right, asked); not a number where nothing was asked."""
    return float("nan") if cell is None or not cell[1] else cell[0] / cell[1]
