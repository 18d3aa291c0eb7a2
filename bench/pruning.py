"""What pruners cost on the trained tiny pairs: drafts that see less, lossy targets, and where the kept tokens lie.

    python bench/pruning.py --model tiny-ov --captions 100 --frames 128 --out bench/results/pruning_tiny-ov_202611.jsonl

Rows of `what`: "draft" (accepted lengths and rate of a draft whose prompt is pruned, by pruner and share kept, with paired
intervals against uv), "lossy" (the share of a pruned model's own text that the whole model would have written), "frames"
(kept tokens by frame, in 32 stretches of the video, and how many times their share the outermost frames hold).
Text is the target's greedy caption; every way sees the same captions.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from timing import Log

from mmaccel import load_model, load_processor
from mmaccel.core.attach import adapter_for
from mmaccel.core.prune import TokenPruner
from mmaccel.core.recipe import Recipe
from mmaccel.eval.answer import prompt
from mmaccel.eval.caption import caption_cases
from mmaccel.eval.cases import Film
from mmaccel.eval.pruning import agrees, at_ends, by_frame, chosen, draft_agrees, left, paired, rounds, write
from mmaccel.policies.prune import (
    AttentionPrune,
    DyCoke,
    FastV,
    PyramidDrop,
    RandomPrune,
    SparseVLM,
    UniformPrune,
    UVPrune,
    VisionZip,
)

KEPT = (1.0, 0.5, 0.1, 0.05, 0.01)
STRETCHES = 32


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


def lossy(share: float) -> dict[str, TokenPruner]:
    """The pruners of a target, at about `share` of the video on average over eight layers, where they go so low."""
    return {
        "fastv": FastV(layer=1, retention=max(0.0, (8 * share - 1) / 7)),
        "pyramid_drop": PyramidDrop(retention=max(share, 0.05) ** 0.5, stages_at=(0.125, 0.25)),
        "sparsevlm": SparseVLM(retention=(share, share / 2), layers=(0, 2)),
        "dycoke": DyCoke(drop=min(1.0, (1 - share) * 4 / 3)),
        "visionzip": VisionZip(retention=share),
    }


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
    parser.add_argument("--kept", type=float, nargs="+", default=list(KEPT), help="shares of the video kept")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    target = load_model(options.model, device=device, dtype=torch.float32)
    draft = load_model(options.draft or f"{options.model}-draft", device=device, dtype=torch.float32)
    processor = load_processor(options.model)
    log = Log(options.out, device)
    # By way and share kept, for each caption: accepted length, rate; or tokens, agreed; frames and shares.
    speculated: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    judged: dict[tuple[str, float], list[tuple[int, int, float]]] = defaultdict(list)
    lying: dict[tuple[str, float], list[list[int]]] = defaultdict(list)
    with Film() as film:
        for number, case in enumerate(caption_cases(options.frames, options.captions, options.seed)):
            inputs = prompt(processor, case.content(film.watch(case.world)), target)
            said, _ = write(target, inputs, None, options.tokens)
            for share in options.kept:
                _draft(target, draft, inputs, said, share, options.window, speculated, lying)
                _lossy(target, inputs, share, options.tokens, judged, lying)
            print(f"caption {number + 1} of {options.captions}: {len(said)} tokens", flush=True)
    common = {
        "model": options.model,
        "frames": options.frames,
        "captions": options.captions,
        "seed": options.seed,
    }
    for (name, share), found in speculated.items():
        lengths, rates = zip(*found, strict=True)
        row = {"pruner": name, "retention": share, "window": options.window}
        row |= {"accepted": sum(lengths) / len(lengths), "rate": sum(rates) / len(rates)}
        row["over uv"] = paired(lengths, [length for length, _ in speculated["uv", share]])
        _tell(log, what="draft", **common, **row)
    for (name, share), texts in judged.items():
        tokens, agreed, held = (sum(column) for column in zip(*texts, strict=True))
        row = {"pruner": name, "asked": share, "average retention": held / len(texts)}
        row |= {"tokens": tokens, "accepted": agreed / tokens}
        row["by caption"] = paired([a / t for t, a, _ in texts], [0.0] * len(texts))
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
    window: int,
    found: Any,
    lying: Any,
) -> None:
    depth = len(adapter_for(target).layers(target))
    layout, kept = chosen(target, inputs, drafts(share, depth))
    for name, agree in draft_agrees(draft, inputs, said, kept).items():
        lengths = rounds(agree, window)
        found[name, share].append((sum(lengths) / len(lengths), float(agree.float().mean())))
        lying[name, share].append(by_frame(layout, kept[name]))


def _lossy(target: nn.Module, inputs: Any, share: float, limit: int, judged: Any, lying: Any) -> None:
    for name, pruner in lossy(share).items():
        text, _ = write(target, inputs, Recipe(prune=pruner), limit)
        layout, columns, held = left(target, inputs, pruner)
        judged[name, share].append((len(text), int(agrees(target, inputs, text).sum()), held))
        lying[name, share].append(by_frame(layout, columns))


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
