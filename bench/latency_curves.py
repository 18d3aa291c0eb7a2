"""A picture from rows of `bench/decode_gpu.py prefill flash ratios`: latency by video tokens, of a target and of its draft.

    python bench/decode_gpu.py prefill flash ratios --target qwen2.5-vl-32b --draft qwen2.5-vl-7b --out FILE
    python bench/decode_gpu.py prefill flash --target qwen2.5-vl-7b --out FILE2
    python bench/latency_curves.py --rows FILE FILE2 --target qwen2.5-vl-32b --draft qwen2.5-vl-7b --picture docs/latency.svg

Panels (ParallelVLM's Figure 3): seconds to read a video, and milliseconds of a decode step after it: captured, by
transformers' own code with a flash kernel (dashed), and, from `ratios`, the draft's after a tenth of the video (a star).
Needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pruning_curves import read

from mmaccel.core.errors import MmaccelError
from mmaccel.figure import figure, save

Row = Mapping[str, Any]
Points = list[tuple[int, float]]
TENTH = 0.1


def prefill(rows: Iterable[Row], shape: str) -> Points:
    """(tokens of the prompt, seconds to read it), ascending; of rows of one length the last."""
    told = (row for row in rows if row.get("case") == "prefill" and row.get("shape") == shape)
    return sorted({row["prompt"]: row["prefill_s"] for row in told}.items())


def steps(rows: Iterable[Row], shape: str, way: str = "captured_s") -> Points:
    """(columns before it, milliseconds of a step of one row), ascending; `way` "with_s": by transformers with a flash
    kernel. Of rows of one length the last."""
    told = (row for row in rows if row.get("case") == "flash" and row["shape"] == shape and row["rows"] == 1)
    return sorted({row["columns"]: 1e3 * row[way] for row in told}.items())


def pruned(rows: Iterable[Row], target: str, draft: str) -> Points:
    """(columns of the target, milliseconds of a step of the draft that keeps a tenth of them)."""
    told = (row for row in rows if row.get("case") == "ratios" and row["retention"] == TENTH)
    return sorted(
        (row["columns"], 1e3 * row["draft_step_s"])
        for row in told
        if (row["target"], row["draft"]) == (target, draft)
    )


def draw(rows: Sequence[Row], target: str, draft: str, path: Path) -> None:
    """Write the picture. Raises `MmaccelError` where the rows of a model are missing."""
    for shape in (target, draft):
        if not prefill(rows, shape) or not steps(rows, shape):
            raise MmaccelError(f"no rows of both prefill and flash for {shape}; run decode_gpu.py with them.")
    drawn = figure(9.0, 3.8)
    reading, decoding = drawn.subplots(1, 2)
    for shape, part, colour in ((target, "target", "tab:red"), (draft, "draft", "tab:blue")):
        label = f"{part}, {shape}"
        reading.plot(*zip(*prefill(rows, shape), strict=True), marker="o", color=colour, label=label)
        decoding.plot(*zip(*steps(rows, shape), strict=True), marker="o", color=colour, label=label)
        plain = steps(rows, shape, "with_s")
        decoding.plot(
            *zip(*plain, strict=True), "--", color=colour, label=f"{part}, transformers", linewidth=1
        )
    if stars := pruned(rows, target, draft):
        decoding.plot(
            *zip(*stars, strict=True), "*", color="tab:blue", markersize=12, label="draft, a tenth kept"
        )
    for axes, up in ((reading, "prefill, seconds"), (decoding, "decode step, milliseconds")):
        axes.set(xlabel="video tokens", ylabel=up)
        axes.set_ylim(0, 1.35 * axes.get_ylim()[1])  # room for the names
        axes.legend(fontsize=7)
    save(drawn, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", required=True, help="files of bench/decode_gpu.py")
    parser.add_argument("--target", default="qwen2.5-vl-32b")
    parser.add_argument("--draft", default="qwen2.5-vl-7b")
    parser.add_argument("--picture", type=Path, required=True)
    given = parser.parse_args(argv)
    draw(read(given.rows), given.target, given.draft, given.picture)


if __name__ == "__main__":
    main()
