"""One attention layer by length of the prompt: four patterns beside dense attention, their indices apart (Figure 16).

    python bench/sweep.py --out bench/results/sweep_h200_202611.jsonl --picture docs/sweep.svg
    python bench/sweep.py --rows bench/results/sweep_h200_202611.jsonl --picture docs/sweep.svg

28 query heads, 4 key/value heads, head size 128. Dense attention is timed once a length, beyond `--dense-all` tokens on the
heads of one group, times the groups (`groups_timed`). Prints the table; `--picture` draws the curves, with matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from attend import NEAR, Case, bench_case, bench_dense, drawn, shortened
from timing import Log, environment

PATTERNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a_shape": (NEAR, {}),
    "vertical_slash": ({"name": "vertical_slash", "vertical": 1000, "slash": 1024}, {"lines": "frames"}),
    "grid": ({"name": "grid", "stride": "frame"}, {}),
    "boundary_2d": ({"name": "boundary_2d", "default": NEAR}, {"islands": 32}),
}
LENGTHS = [8, 16, 32, 64, 128, 256, 512, 1024]
"""Thousands of tokens."""


def bench_length(tokens: int, options: argparse.Namespace, log: Log) -> None:
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    how = dict(device=device, repeats=options.repeats, warmup=options.warmup)
    tensors = drawn(tokens, options.heads, options.size, dtype, device)
    told = dict(case="dense", tokens=tokens, heads=options.heads[0], groups=options.heads[1])
    bench_dense(dict(told, size=options.size, dtype=options.dtype), tensors, options, how, log)
    del tensors
    for name, (fields, more) in PATTERNS.items():
        case = Case(tokens, fields, **more)
        # Budgets are those of the table of the paper from 64k tokens on, and in proportion below.
        whole = max(tokens, 64 << 10)
        bench_case(
            name, shortened(Case(whole, fields, **more), tokens) if tokens < whole else case, options, log
        )


def seconds_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, tuple[float, float]]]:
    """Curve -> tokens -> seconds of attention and of the index: patterns, the fastest dense kernel, FlashAttention-2."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for row in rows:
        if "median_s" not in row or row["way"].startswith("index") or row["way"].endswith("and index"):
            continue
        taken = row["median_s"] * row["groups"] / row.get("groups_timed", row["groups"])
        names = [row["case"]] + (["FlashAttention-2"] if row["way"] == "dense_flash" else [])
        for name in names:
            least = found.setdefault(name, {}).get(row["tokens"], (float("inf"), 0.0))
            found[name][row["tokens"]] = min(least, (taken, row.get("index_s", 0.0)))
    return found


def show(curves: dict[str, dict[int, tuple[float, float]]]) -> None:
    print("tokens".rjust(9), *(name.rjust(22) for name in curves))
    for tokens in sorted({t for curve in curves.values() for t in curve}):
        cells = []
        for name, curve in curves.items():
            taken, index = curve.get(tokens, (float("nan"), 0.0))
            own = "" if name in ("dense", "FlashAttention-2") else f" + {index * 1e3:.2f}"
            cells.append(f"{taken * 1e3:.2f}{own} ms".rjust(22))
        print(str(tokens).rjust(9), *cells)


def picture(curves: dict[str, dict[int, tuple[float, float]]], path: Path) -> None:
    """Milliseconds of a layer against tokens, both by powers of two; the index counted."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("sweep: a picture needs matplotlib; install the 'plot' extra, or leave out --picture.")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        at = sorted(curve)
        style = dict(color="black" if name == "dense" else "grey", linestyle="--")
        style = style if name in ("dense", "FlashAttention-2") else {}
        axes.plot(at, [sum(curve[t]) * 1e3 for t in at], marker="o", markersize=3, label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms a layer, index counted")
    axes.set_xscale("log", base=2)
    ticks = sorted({t for curve in curves.values() for t in curve})
    axes.set_xticks(ticks, [f"{t >> 10}k" if t < 1 << 20 else f"{t >> 20}M" for t in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "sweep"
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="file of result rows; rows are added to it")
    parser.add_argument("--rows", nargs="+", type=Path, help="time nothing: show what these files hold")
    parser.add_argument("--picture", type=Path, help="SVG or PNG of the curves")
    parser.add_argument("--lengths", nargs="+", type=float, default=LENGTHS, help="thousands of tokens")
    parser.add_argument("--backends", nargs="+", help="default: triton on cuda, else the reference")
    parser.add_argument("--heads", nargs=2, type=int, default=(28, 4), metavar=("HEADS", "GROUPS"))
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dense-all", type=int, default=1 << 17)
    parser.set_defaults(ways=None, no_dense=True)
    options = parser.parse_args(argv)
    if (options.out is None) == (options.rows is None):
        parser.error("give --out to time, or --rows to show what was timed.")
    if options.backends is None:
        options.backends = ["triton"] if torch.device(options.device).type == "cuda" else ["reference"]
    if options.out is not None:
        log = Log(options.out, options.device)
        print(environment(options.device), flush=True)
        for length in options.lengths:
            bench_length(int(length * 1024), options, log)
    files = options.rows or [Path(options.out)]
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    curves = seconds_of([row for row in rows if "case" in row])
    show(curves)
    if options.picture is not None:
        picture(curves, options.picture)


if __name__ == "__main__":
    main()
