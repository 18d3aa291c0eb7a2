"""What pruners cost on the trained tiny pairs: drafts that see less, lossy targets, and where the kept tokens lie.

    python bench/pruning.py --model tiny-ov --captions 100 --jobs 12 --out bench/results/pruning_tiny-ov_202611.jsonl

Rows of `what`: "draft" (accepted lengths and rate of a draft whose prompt is pruned, by pruner and share kept, with paired
intervals against uv), "lossy" (the share of a pruned model's own text that the whole model would have written, beside the
measured share of the video that its decoded tokens have `seen`, see lossy.py, and what all layers hold on average), "frames"
(kept tokens by frame, in 32 stretches of the video, and how many times their share the outermost frames hold); with
--positions also "positions" (accepted length of a pruned draft whose tokens keep their own coordinates, of one that numbers
them anew on every rotary axis, as SpecVLM does, and by how much the second is longer, with paired intervals).
Text is the target's greedy caption; every way sees the same captions.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from lossy import lossy
from timing import Log

from mmaccel import load_model, load_processor
from mmaccel.core.attach import adapter_for
from mmaccel.core.prune import TokenPruner
from mmaccel.core.recipe import Recipe
from mmaccel.eval.answer import prompt
from mmaccel.eval.caption import caption_cases
from mmaccel.eval.cases import Film
from mmaccel.eval.pruning import (
    agrees,
    at_ends,
    by_frame,
    chosen,
    draft_agrees,
    left,
    paired,
    rounds,
    seen_share,
    write,
)
from mmaccel.policies.prune import AttentionPrune, RandomPrune, UniformPrune, UVPrune

KEPT = (1.0, 0.5, 0.1, 0.05, 0.01)
STRETCHES = 32
POSITIONED = ("uv", "attention", "uniform", "random")
"""Pruners of which both ways of numbering what is kept are told."""


def drafts(share: float, depth: int) -> dict[str, TokenPruner]:
    """The pruners of a draft that keep `share` of the video, for a target of `depth` layers."""
    late = {
        f"uv, layer {layer}{', no variation' * (not variation)}{', contrast' * contrast}": UVPrune(
            retention=share, layer=layer, variation=variation, contrast=contrast
        )
        for layer in (depth * 3 // 4, depth)
        for variation in (True, False)
        for contrast in (False, True)
    }
    return {
        **late,
        "uv": UVPrune(retention=share),
        "uv, no variation": UVPrune(retention=share, variation=False),
        "uv from the first layer": UVPrune(retention=share, base=1),
        "uv, contrast": UVPrune(retention=share, contrast=True),
        "uv, no variation, contrast": UVPrune(retention=share, variation=False, contrast=True),
        "attention": AttentionPrune(retention=share),
        "attention alone": AttentionPrune(retention=share, mass=1.0),
        "attention, variation": AttentionPrune(retention=share, mass=1.0, variation=True),
        "uniform": UniformPrune(retention=share),
        "random": RandomPrune(retention=share),
    }


class Share:
    """The captions of one process: its models, and what came of each way and share kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, device = options, torch.device(options.device)
        self.target = load_model(options.model, device=device, dtype=torch.float32)
        name = options.draft or f"{options.model}-draft"
        self.draft = load_model(name, device=device, dtype=torch.float32)
        self.processor = load_processor(options.model)

    def caption(self, number: int) -> Found:
        """What came of caption `number`."""
        options, found = self.options, Found()
        case = next(islice(caption_cases(options.frames, options.captions, options.seed), number, None))
        with Film() as film:
            inputs = prompt(self.processor, case.content(film.watch(case.world)), self.target)
        said, _ = write(self.target, inputs, None, options.tokens)
        for share in options.kept:
            _draft(self.target, self.draft, inputs, said, share, options, found)
        for share in options.lossy:
            _lossy(self.target, inputs, share, options.tokens, found)
        return found


@dataclass
class Found:
    """Of one caption, by way and share: accepted length and rate; tokens, agreed, shares seen and held; kept by frame;
    accepted length of compact drafts."""

    speculated: dict[tuple[str, float], tuple[float, float]] = field(default_factory=dict)
    judged: dict[tuple[str, float], tuple[int, int, float, float]] = field(default_factory=dict)
    lying: dict[tuple[str, float], list[int]] = field(default_factory=dict)
    compact: dict[tuple[str, float], float] = field(default_factory=dict)


_share: Share | None = None


def _begin(options: argparse.Namespace) -> None:
    global _share
    torch.set_num_threads(1)
    _share = Share(options)


def _caption(number: int) -> tuple[int, Found]:
    assert _share is not None
    return number, _share.caption(number)


def captions(options: argparse.Namespace) -> Iterator[tuple[int, Found]]:
    """What came of each caption, as it comes; several processes, one thread each, where `jobs` is more than 1."""
    if options.jobs == 1:
        share = Share(options)
        yield from ((number, share.caption(number)) for number in range(options.captions))
        return
    with multiprocessing.get_context("spawn").Pool(options.jobs, _begin, (options,)) as pool:
        yield from pool.imap_unordered(_caption, range(options.captions))


def collect(options: argparse.Namespace) -> list[Found]:
    """What came of the captions, in their order, of as many as `seconds` leave time for."""
    began, found = time.monotonic(), {}
    coming = captions(options)
    for number, one in coming:
        found[number] = one
        told = time.monotonic() - began
        print(f"caption {number + 1}, {len(found)} of {options.captions} after {told:.0f} s", flush=True)
        if options.seconds is not None and told > options.seconds:
            break
    coming.close()
    return [found[number] for number in sorted(found)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-ov")
    parser.add_argument("--draft", help="default: the model's own draft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--captions", type=int, default=100)
    parser.add_argument("--frames", type=int, default=128)
    parser.add_argument("--seed", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=512, help="the longest caption")
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument(
        "--kept", type=float, nargs="+", default=list(KEPT), help="shares of the video kept, for drafts"
    )
    parser.add_argument(
        "--lossy", type=float, nargs="*", default=[0.1], help="the same, for the target itself"
    )
    parser.add_argument(
        "--positions", action="store_true", help="compact drafts beside those at their places"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, which take captions in turns")
    parser.add_argument("--seconds", type=float, help="no more captions are waited for after that")
    options = parser.parse_args(argv)
    log = Log(options.out, torch.device(options.device))
    every = collect(options)
    speculated: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    judged: dict[tuple[str, float], list[tuple[int, int, float, float]]] = defaultdict(list)
    lying: dict[tuple[str, float], list[list[int]]] = defaultdict(list)
    compact: dict[tuple[str, float], list[float]] = defaultdict(list)
    for one in every:
        for whole, part in (
            (speculated, one.speculated),
            (judged, one.judged),
            (lying, one.lying),
            (compact, one.compact),
        ):
            for key, value in part.items():
                whole[key].append(value)  # type: ignore[attr-defined]
    common = {
        "model": options.model,
        "frames": options.frames,
        "captions": len(every),
        "seed": options.seed,
    }
    for (name, share), found in speculated.items():
        lengths, rates = zip(*found, strict=True)
        row = {"pruner": name, "retention": share, "window": options.window}
        row |= {"accepted": sum(lengths) / len(lengths), "rate": sum(rates) / len(rates)}
        row["over uv"] = paired(lengths, [length for length, _ in speculated["uv", share]])
        _tell(log, what="draft", **common, **row)
    for (name, share), short in compact.items():
        own = [length for length, _ in speculated[name, share]]
        row = {"pruner": name, "retention": share, "window": options.window}
        row |= {
            "kept": sum(own) / len(own),
            "compact": sum(short) / len(short),
            "over kept": paired(short, own),
        }
        _tell(log, what="positions", **common, **row)
    for (name, share), texts in judged.items():
        tokens, agreed, seen, held = (sum(column) for column in zip(*texts, strict=True))
        row = {"pruner": name, "asked": share, "seen": seen / len(texts)}
        row["average retention"] = held / len(texts)
        row |= {"tokens": tokens, "accepted": agreed / tokens}
        row["by caption"] = paired([a / t for t, a, *_ in texts], [0.0] * len(texts))
        _tell(log, what="lossy", **common, **row)
    for (name, share), each in lying.items():
        total = [sum(column) for column in zip(*each, strict=True)]
        ends = [at_ends(counts) for counts in each]
        row = {"pruner": name, "retention": share, "ends": sum(ends) / len(ends), "kept": _stretches(total)}
        _tell(log, what="frames", **common, **row)


def _draft(
    target: nn.Module,
    draft: nn.Module,
    inputs: Any,
    said: Any,
    share: float,
    options: argparse.Namespace,
    found: Found,
) -> None:
    depth = len(adapter_for(target).layers(target))
    layout, kept = chosen(target, inputs, drafts(share, depth))
    for name, agree in draft_agrees(draft, inputs, said, kept).items():
        lengths = rounds(agree, options.window)
        found.speculated[name, share] = sum(lengths) / len(lengths), float(agree.float().mean())
        found.lying[name, share] = by_frame(layout, kept[name])
    if options.positions:
        some = {name: kept[name] for name in POSITIONED}
        for name, agree in draft_agrees(draft, inputs, said, some, compact=True).items():
            lengths = rounds(agree, options.window)
            found.compact[name, share] = sum(lengths) / len(lengths)


def _lossy(target: nn.Module, inputs: Any, share: float, limit: int, found: Found) -> None:
    depth = len(adapter_for(target).layers(target))
    for name, pruner in lossy(share, depth).items():
        text, report = write(target, inputs, Recipe(prune=pruner), limit)
        layout, columns, held = left(target, inputs, pruner)
        agreed, seen = int(agrees(target, inputs, text).sum()), seen_share(report.kv, pruner, depth)
        found.judged[name, share] = len(text), agreed, seen, held
        found.lying[name, share] = by_frame(layout, columns)


def _stretches(counts: Sequence[int]) -> list[float]:
    """Shares of the kept in equal stretches of the video."""
    total, among = max(sum(counts), 1), [0.0] * min(STRETCHES, len(counts))
    for frame, count in enumerate(counts):
        among[frame * len(among) // len(counts)] += count / total
    return [round(share, 5) for share in among]


def _tell(log: Log, **row: Any) -> None:
    log.row(**row)
    print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
