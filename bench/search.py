"""The search of head patterns (Algorithm 4) at a 7B shape: its time, its memory, and whether it finds the same again.

    python bench/search.py --out bench/results/search_h200_202611.jsonl
    python bench/search.py --out ... --layers 4 --again

One row a search: seconds of the levelling (the candidates brought to one measured cost, on one layer) and of each layer's
scores, and the peak of memory. Under `--layers` the model has only so many, and `all_layers_s` is the time with the mean
layer counted for each of the shape's. `--again` measures a second time, from nothing, and tells the share of heads that get
the same pattern. Random weights: the heads have no structure, so candidates lie close to each other.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from replayed import question
from timing import Log

from mmaccel.core.attach import adapter_for
from mmaccel.models import shapes
from mmaccel.search import Settings, agreement, search

SHAPE = "qwen2.5-vl-7b"


def searched(
    model: Any, inputs: dict[str, Any], settings: Settings, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table of one search from nothing, and what it took."""
    layers = adapter_for(model).geometry(model).layers
    began = time.perf_counter()
    marks = [began]

    def progress(what: str, done: int, total: int | None) -> None:
        # Layers make as many steps each; the levelling ends before the first of them.
        if what == "score" and total and done % (total // layers) == 0:
            marks.append(time.perf_counter())
        elif what == "level":
            marks[0] = time.perf_counter()

    with tempfile.TemporaryDirectory(dir=folder) as own:
        table = search(model, inputs, Path(own) / "table.json", settings, progress=progress)
    each = [b - a for a, b in itertools.pairwise(marks)]
    depth = shapes.SHAPES[SHAPE].layers
    level = marks[0] - began
    return table, {
        "level_s": level,
        "layer_s": each,
        "all_layers_s": level + depth * statistics.mean(each),
        "layers": layers,
        "peak_bytes": table["peak_bytes"],
        "tokens": table["sample"]["tokens"],
        "measured": len(table["measured"]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--layers", type=int, help="layers of the model; default: all")
    parser.add_argument("--tokens", type=int, default=25_000)
    parser.add_argument("--again", action="store_true", help="search twice")
    options = parser.parse_args(argv)
    log = Log(options.out, options.device)
    model = shapes.build(SHAPE, options.layers, vision_layers=1, device=options.device)
    inputs = question(SHAPE, options.tokens, options.device)
    settings = Settings(context=1 << 17)
    tables = []
    for _ in range(1 + options.again):
        table, row = searched(model, inputs, settings, Path(options.out).parent)
        tables.append(table)
        more = {"agreement": agreement(tables[0], table)} if len(tables) > 1 else {}
        log.row(case="search", model=SHAPE, **row, **more)
        print(
            f"search: {row['all_layers_s']:.0f} s for all layers, {row['peak_bytes']} bytes {more}",
            flush=True,
        )


if __name__ == "__main__":
    main()
