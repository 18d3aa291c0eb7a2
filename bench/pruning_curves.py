"""Pictures from rows of `bench/pruning.py`: what a draft loses as it sees less, and where its tokens lie.

    python bench/pruning_curves.py --rows bench/results/pruning_tiny-ov_cpu_202611.jsonl --picture docs/pruning_tiny-ov.svg
    python bench/pruning_curves.py --rows ... --ratios bench/results/latency_32b_h200_202611.jsonl --picture ...

Panels: accepted length by pruner and share pruned (ParallelVLM's Figures 6, 9 and Table 7); kept tokens by place in the
video at one share (Figures 4 and 7a; a uniform choice is level). With `--ratios`, rows of `decode_gpu.py ratios`: what the
measured share kept is worth at the measured T_p / T_q by the exact chain, each at its best window (the speed-up of Figure 6
and Table 7). Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmaccel.core.errors import MmaccelError
from mmaccel.figure import figure, save
from mmaccel_lab.eval import simulate

SHOWN = ("uv", "uv, no variation", "attention", "attention, variation", "uniform", "random")
"""Pruners that are drawn; the rows hold more."""
Row = Mapping[str, Any]
Curves = dict[str, list[tuple[float, float]]]


def lengths(rows: Iterable[Row]) -> Curves:
    """Accepted length by pruner: (share pruned, mean), in order of the share."""
    found: Curves = defaultdict(list)
    for row in rows:
        if row.get("what") == "draft" and row["pruner"] in SHOWN:
            found[row["pruner"]].append((1 - row["retention"], row["accepted"]))
    return {name: sorted(points) for name, points in found.items()}


def gains(rows: Iterable[Row], ratios: Iterable[Row]) -> Curves:
    """Speed-up by pruner: (share pruned, gain over the target alone), where both kinds of row have that share."""
    costs = {
        row["retention"]: simulate.Costs(step=row["step_s"], draft=row["draft_step_s"])
        for row in ratios
        if row.get("case") == "ratios"
    }
    found: Curves = defaultdict(list)
    for row in rows:
        if row.get("what") == "draft" and row["pruner"] in SHOWN and row["retention"] in costs:
            _, gain = simulate.best(row["rate"], costs[row["retention"]], parallel=True)
            found[row["pruner"]].append((1 - row["retention"], gain))
    return {name: sorted(points) for name, points in found.items()}


def places(rows: Iterable[Row], share: float) -> dict[str, list[float]]:
    """By pruner, kept tokens in equal stretches of the video over what a uniform choice has there."""
    return {
        row["pruner"]: [one * len(row["kept"]) for one in row["kept"]]
        for row in rows
        if row.get("what") == "frames" and row["pruner"] in SHOWN and row["retention"] == share
    }


def draw(rows: Sequence[Row], ratios: Sequence[Row], share: float, path: Path) -> None:
    """Write the picture. Raises `MmaccelError` where the rows hold nothing to draw."""
    by_share, worth, lying = lengths(rows), gains(rows, ratios), places(rows, share)
    if not by_share or not lying:
        raise MmaccelError(f"no rows of drafts, or none of where tokens lie at a share of {share:g}.")
    drawn = figure(5.0 * (3 if worth else 2), 4.0)
    panels = drawn.subplots(1, 3 if worth else 2, squeeze=False)[0]
    for axes, curves, up in zip(panels, (by_share, worth), ("accepted tokens a round", "gain"), strict=False):
        if curves:
            for name, points in curves.items():
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
            axes.set(xlabel="share of the video pruned", ylabel=up)
            axes.legend(fontsize=7)
    for name, level in lying.items():
        panels[-1].plot(range(len(level)), level, label=name)
    panels[-1].set(xlabel="stretch of the video", ylabel=f"kept over uniform, {share:.0%} kept")
    panels[-1].legend(fontsize=7)
    save(drawn, path)


def read(paths: Sequence[str]) -> list[Row]:
    return [
        json.loads(line) for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", required=True, help="files of bench/pruning.py, of one model")
    parser.add_argument("--ratios", nargs="*", default=[], help="files of bench/decode_gpu.py ratios")
    parser.add_argument("--share", type=float, default=0.1, help="share kept where places are drawn")
    parser.add_argument("--picture", type=Path, required=True)
    given = parser.parse_args(argv)
    draw(read(given.rows), read(given.ratios), given.share, given.picture)


if __name__ == "__main__":
    main()
