"""Drafts on streams: how many drafted tokens a target keeps, under each way of drafting, over one memory.

    python bench/stream_drafts.py --out bench/results/stream_drafts_cpu_202611.jsonl
    python bench/stream_drafts.py --rows bench/results/stream_drafts_cpu_202611.jsonl

Each way watches the same worlds under `--kv` and describes each, greedily; the text must be the one without a draft. A row
is written for each model, way and world; the same command with the same --out goes on where it stopped. --rows prints the
table of docs/parallelvlm.md: `kept`, of all drafted tokens those that the target kept, and `a_step`, tokens a target step,
its own counted. Both are to reach the marks, 63% and 4.27, for some way on each model. Times are not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log, read_rows

from mmaccel import VideoSession, load_model, load_processor
from mmaccel.models.shipped import CAPTION_REQUEST
from mmaccel_lab.eval.footage import SIDES
from mmaccel_lab.world import World, render

MODELS = ("tiny-ov", "tiny-qwen")
KEPT, A_STEP = 0.63, 4.27


def frames_kept(frames: int, **more: Any) -> dict[str, Any]:
    """A draft that keeps frames and reads those that the target's question attended to most."""
    kv = {"name": "no_cache", "frames": frames}
    return {"kv": kv, "prune": {"name": "attention", "retention": 1.0}, **more}


def ways(name: str) -> dict[str, Any]:
    """Name -> draft, of the target `name`."""
    one = {"model": f"{name}-draft"}
    chain, tree = {"name": "sequential", **one}, {"name": "tree", "shape": "dynamic", **one}
    sure = {"window": 8, "confidence": 0.6}
    half = {"name": "attention", "retention": 0.5}
    return {
        "off": "off",
        "prompt_lookup": "prompt_lookup",
        "sequential": chain,
        "sequential, pruned to a half": {**chain, "prune": half},
        "sequential, window 8, confidence 0.6": {**chain, **sure},
        "parallel": {"name": "parallel", "window": 5, "process": False, **one},
        "tree": tree,
        "16 frames evenly": {**chain, "kv": {"name": "no_cache", "frames": 16}},
        "16 retrieved frames": {**chain, **frames_kept(16)},
        "64 retrieved frames": {**chain, **frames_kept(64)},
        "64 retrieved frames, window 8, confidence 0.6": {**chain, **frames_kept(64, **sure)},
    }


def measured(
    model: Any, processor: Any, kv: str, draft: Any, film: torch.Tensor, tokens: int
) -> dict[str, Any]:
    """One description under one draft."""
    with VideoSession(model, processor, None, kv=kv, draft=draft) as session:
        session.watch(film, fps=2.0)
        answer = session.ask(CAPTION_REQUEST, tokens, evidence=False)
        told = session.report()
    return {
        "ids": list(answer.ids),
        "tokens": told.new_tokens,
        **{name: told.draft[name] for name in ("target_steps", "proposed", "accepted", "failed")},
    }


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each model and way over all worlds that every way has: kept, a_step, and whether all texts are those without."""
    found = {(row["model"], row["way"], row["seed"]): row for row in rows if "way" in row}
    made = []
    for model in dict.fromkeys(model for model, _, _ in found):
        names = list(dict.fromkeys(way for own, way, _ in found if own == model))
        seen = [{seed for own, way, seed in found if (own, way) == (model, name)} for name in names]
        seeds = sorted(set.intersection(*seen))
        for name in names:
            some = [found[model, name, seed] for seed in seeds]
            total = {
                key: sum(row[key] for row in some)
                for key in ("tokens", "target_steps", "proposed", "accepted")
            }
            kept = total["accepted"] / max(total["proposed"], 1)
            a_step = (total["tokens"] - len(some)) / max(total["target_steps"], 1)
            same = all(row["ids"] == found[model, "off", row["seed"]]["ids"] for row in some)
            failed = [row["failed"] for row in some if row["failed"]]
            reached = kept >= KEPT and a_step >= A_STEP
            made.append(
                {"model": model, "way": name, "worlds": len(some), "kept": kept, "a_step": a_step}
                | {"same": same, "failed": failed, "reached": reached}
            )
    return made


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each way, with each model's figures."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = ["| draft | " + " | ".join(f"{model}: kept | a step" for model in models) + " |"]
    lines.append("| --- |" + " ---: | ---: |" * len(models))
    for way in dict.fromkeys(row["way"] for row in rows if row["way"] != "off"):
        own = {row["model"]: row for row in rows if row["way"] == way}
        cells = [f"{own[m]['kept']:.0%} | {own[m]['a_step']:.2f}" if m in own else " | " for m in models]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    wrong = [f"{row['model']}, {row['way']}" for row in rows if not row["same"] or row["failed"]]
    return "\n".join([*lines, *([f"\nother texts, or failed: {'; '.join(wrong)}"] if wrong else [])])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--kv", default="mosaic")
    parser.add_argument("--frames", type=int, default=256)
    parser.add_argument("--worlds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=60, help="training has seen none below 2**31")
    parser.add_argument("--only", nargs="+", help="ways, and off")
    parser.add_argument("--out", type=Path, help="file of result rows")
    parser.add_argument(
        "--rows", nargs="+", type=Path, help="measure nothing: print the table of these files"
    )
    given = parser.parse_args(argv)
    if given.rows:
        print(shown(table(read_rows(given.rows))))
        return
    if given.out is None:
        parser.error("--out: give the file of result rows.")
    done = {
        (row["model"], row["way"], row["seed"], row["frames"], row["kv"])
        for row in (read_rows([given.out]) if given.out.exists() else [])
        if "way" in row
    }
    log = Log(given.out)
    loaded = {
        name: (load_model(name, dtype=torch.float32), load_processor(name), ways(name))
        for name in given.models
    }
    for seed in range(given.seed, given.seed + given.worlds):
        film = render(World.generate(seed, given.frames).table(), *SIDES)
        for name, (model, processor, drafts) in loaded.items():
            for way, draft in drafts.items():
                key = name, way, seed, given.frames, given.kv
                if key in done or (given.only and way not in (*given.only, "off")):
                    continue
                row = dict(zip(("model", "way", "seed", "frames", "kv"), key, strict=True))
                row |= {"draft": draft, **measured(model, processor, given.kv, draft, film, given.tokens)}
                log.row(**row)
                print(
                    name,
                    way,
                    seed,
                    row["accepted"],
                    row["proposed"],
                    row["tokens"],
                    row["target_steps"],
                    flush=True,
                )
    print(shown(table(read_rows([given.out]))))


if __name__ == "__main__":
    main()
