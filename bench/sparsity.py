"""How sparse are real heads, and does the index of one request serve another? Layer by layer and head by head.

    python bench/sparsity.py --frames 512 --out bench/results/sparsity_cpu_202611.jsonl --picture docs/sparsity.svg

MMInference's Figures 2b and 2c on the tiny models. Two requests of one length ask the same of two videos. Of some rows of a
head, the fewest pairs that hold 95% of the row's weight are chosen in the first request: `share`, over all pairs of these
rows. `reused` is the weight that those very pairs hold in the second request, `own` what as many of the second's own hold,
row by row, and `chance` what as many pairs at random would (their share, mean over the rows).
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log

from mmaccel import load_model, load_processor
from mmaccel.cli.answer import prompt
from mmaccel.figure import figure, save
from mmaccel.search.measure import Inside, watch
from mmaccel.search.picture import CELLS, weights
from mmaccel_lab.eval.cases import Film
from mmaccel_lab.world import World

WEIGHT = 0.95
"""What the chosen pairs of a row hold of its weight."""

SAMPLED = 256
"""Rows of a head."""

FEW = 0.02
"""Heads that need less than this share of the pairs are counted, as the paper does in section 2.1."""

REQUEST = "Describe the video."


def fewest(high: Tensor) -> Tensor:
    """[rows]: how many of the heaviest pairs of each row hold `WEIGHT` of it. high [rows, S]: weights, heaviest first."""
    return (high.cumsum(1) - high < WEIGHT).sum(1)


def chosen(weight: Tensor) -> Tensor:
    """[rows, S] bool: the fewest pairs of each row that hold `WEIGHT` of it. weight [rows, S], of sum 1."""
    high, place = weight.sort(dim=1, descending=True)
    first = torch.arange(weight.shape[1], device=weight.device) < fewest(high)[:, None]
    return torch.zeros_like(first).scatter_(1, place, first)


def compared(weight: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """[rows] each: what the second request's weights [rows, S] put on the pairs of `mask`, and on as many of their own."""
    high = weight.sort(dim=1, descending=True).values
    count = mask.sum(1)
    own = high.cumsum(1).gather(1, count[:, None] - 1)[:, 0]
    return {"count": count, "count_second": fewest(high), "own": own, "reused": (weight * mask).sum(1)}


def pieces(inside: Inside, head: int) -> list[tuple[Tensor, Tensor]]:
    """(places [R], weights [R, S]) of `SAMPLED` rows of a head all over the prompt, so many at a time as may be held."""
    length = inside.layout.length
    key = inside.key[0, head * inside.key.shape[1] // inside.query.shape[1]].float()
    some = torch.randperm(length, generator=torch.Generator().manual_seed(0))[:SAMPLED].sort().values
    parts = some.to(key.device).split(max(1, CELLS // length))
    return [(rows, weights(inside, head, rows, key)) for rows in parts]


def judged(model: Any, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, float]]:
    """For each layer and head what is chosen in the first request, and what that holds in the second."""
    kept: dict[tuple[int, int], list[Tensor]] = {}
    found: list[dict[str, float]] = []

    def choose(inside: Inside) -> None:
        for head in range(inside.query.shape[1]):
            kept[inside.layer, head] = [chosen(weight).cpu() for _, weight in pieces(inside, head)]

    def reuse(inside: Inside) -> None:
        for head in range(inside.query.shape[1]):
            told: dict[str, list[Tensor]] = defaultdict(list)
            parts = zip(pieces(inside, head), kept.pop((inside.layer, head)), strict=True)
            for (rows, weight), mask in parts:
                for name, values in compared(weight, mask.to(weight.device)).items():
                    told[name].append(values.double().cpu())
                told["there"].append((rows + 1).double().cpu())
            of = {name: torch.cat(values) for name, values in told.items()}
            there = of["there"]
            row = {"layer": inside.layer, "head": head, "rows": len(there)}
            row |= {"share": float(of["count"].sum() / there.sum())}
            row |= {"share_second": float(of["count_second"].sum() / there.sum())}
            row |= {name: float(of[name].mean()) for name in ("own", "reused")}
            found.append({**row, "chance": float((of["count"] / there).mean())})

    watch(model, first, choose)
    watch(model, second, reuse)
    return found


def requests(name: str, model: Any, frames: int, seeds: Sequence[int]) -> list[dict[str, Tensor]]:
    """The inputs of the same request about the world of each seed, all of one length."""
    processor = load_processor(name)
    found = []
    with Film() as film:
        for seed in seeds:
            video = film.watch(World.generate(seed, frames))
            turn = [{"type": "video", "video": video}, {"type": "text", "text": REQUEST}]
            found.append(prompt(processor, turn, model))
    return found


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Each head by its layer: the share of pairs it needs, and what the second request gets from its own and the first's."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    drawn = figure(9.0, 2.9 * len(models))
    for (left, right), name in zip(drawn.subplots(len(models), 2, squeeze=False), models, strict=True):
        mine = [row for row in rows if row["model"] == name]
        layers = [row["layer"] for row in mine]
        left.plot(layers, [100 * row["share"] for row in mine], "o", markersize=5, alpha=0.7)
        left.set(ylabel="% of pairs", ylim=(0, None))
        left.set_title(f"{name}: pairs that hold {WEIGHT:.0%} of the weight", fontsize=9)
        for kind, colour, shift in (("own", "tab:blue", -0.1), ("reused", "tab:red", 0.1)):
            label = "the request's own" if kind == "own" else "those of another request"
            at = [layer + shift for layer in layers]
            held = [100 * row[kind] for row in mine]
            right.plot(at, held, "o", color=colour, markersize=5, alpha=0.7, label=label)
        right.set(ylabel="% of the weight", ylim=(0, 122))
        right.set_title(f"{name}: what so many pairs hold", fontsize=9)
        right.legend(fontsize=7, loc="upper center", ncols=2)
        for axes in (left, right):
            axes.set_xticks(sorted(set(layers)))
            axes.set_xlabel("layer", fontsize=8)
    save(drawn, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["tiny-ov", "tiny-qwen"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--picture", type=Path, help="SVG or PNG of the rows")
    parser.add_argument("--frames", type=int, default=512)
    parser.add_argument("--seeds", type=int, nargs=2, default=[31, 32], help="the worlds of the two requests")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    log, rows = Log(options.out, device), []
    for name in options.models:
        model = load_model(name, device=device, dtype=torch.float32)
        first, second = requests(name, model, options.frames, options.seeds)
        about = {"model": name, "frames": options.frames, "tokens": first["input_ids"].shape[1]}
        each = [{"case": "head", **about, **row} for row in judged(model, first, second)]
        for row in each:
            log.row(**row)
        rows += each
        told = ("share", "share_second", "own", "reused", "chance")
        mean = {key: sum(row[key] for row in each) / len(each) for key in told}
        few = sum(row["share"] < FEW for row in each) / len(each)
        log.row(case="mean", **about, heads=len(each), heads_under=few, under=FEW, **mean)
        print(f"{name:10} " + " ".join(f"{key} {value:.4f}" for key, value in mean.items()), flush=True)
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
