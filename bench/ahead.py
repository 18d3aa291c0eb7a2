"""How much of what a question needs is fetched ahead, on the trained tiny models.

    python bench/ahead.py --out bench/results/ahead_cpu_202611.jsonl

A stream of a world is watched under mosaic with a window of 16 frames, all its questions of four kinds are asked, the
cluster cache flushed before each, and entries are counted: `covered` crossed the wire before their layer asked, `missing`
after it.

later  covered / (covered + missing) of the layers after the first: the counter `prefetch_coverage`
all    the same of all layers: nothing can be fetched ahead for the first
extra  entries fetched ahead that nobody asked for, over those needed
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import torch
from timing import Log

import mmaccel
from mmaccel_lab.world import World, render

KINDS = ("needle", "scene", "order", "combine")
WINDOW, STILL = 16, 0.3


def measured(model: str, budget: int, frames: int, seed: int, slack: float, device: str) -> dict[str, Any]:
    """A row: one stream, and all its questions."""
    world = World.generate(seed, frames)
    own = {"name": "mosaic", "window": WINDOW, "frames": budget, "slack": slack}
    loaded, processor = mmaccel.load_model(model, dtype=torch.float32), mmaccel.load_processor(model)
    with mmaccel.VideoSession(loaded.to(device), processor, None, kv=own) as session:
        film = world.table(STILL)
        for start in range(0, frames, 64):
            part = {name: column[start : start + 64] for name, column in film.items()}
            session.watch(render(part, 112, 112).to(device), fps=0.5)
        questions = world.questions(KINDS)
        for question in questions:
            session._live.state.fetcher.cache.flush()  # type: ignore[union-attr]
            session.ask(question.text, 4)
        told = session.counters()
    covered, missing, guessed = (told[f"fetch_{name}"] for name in ("covered", "missing", "guessed"))
    return {
        "model": model, "budget": budget, "frames": frames, "seed": seed, "slack": slack, "questions": len(questions),
        "later": told["prefetch_coverage"], "all": covered / max(1.0, covered + missing),
        "extra": (guessed - covered) / max(1.0, told["fetch_needed"]), "covered": covered, "missing": missing,
        "off": 1 - told["resident"] / told["units"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--models", nargs="+", default=["tiny-ov", "tiny-qwen"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--seeds", nargs="+", type=int, default=[9100, 9101])
    parser.add_argument(
        "--slacks", nargs="+", type=float, default=[1.25], help="how many budgets are fetched ahead"
    )
    options = parser.parse_args()
    log = Log(options.out, options.device)
    for model in options.models:
        for budget in options.budgets:
            for slack, seed in product(options.slacks, options.seeds):
                row = measured(model, budget, options.frames, seed, slack, options.device)
                log.row(case="ahead", **row)
                print(
                    f"{model:10} {budget:3} frames, {slack:g} ahead: {row['later']:.3f} of layers after the first, "
                    f"{row['all']:.3f} of all, {row['questions']} questions, {row['off']:.1%} off the device",
                    flush=True,
                )


if __name__ == "__main__":
    main()
