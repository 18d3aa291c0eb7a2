"""What pruners cost on the trained tiny pairs: drafts that see less, lossy targets, and where the kept tokens lie.

    python bench/pruning.py --model tiny-ov --captions 100 --jobs 12 --out pruning.jsonl
    python bench/pruning.py --rows one.jsonl other.jsonl --out all.jsonl --brief bench/results/pruning_tiny-ov_202611.jsonl

The last puts the captions of several runs together; --brief leaves them out.

Processes take captions in turns, on all visible devices with --device cuda. What came of each caption is written when it is
there, so that a run that is broken off, by --seconds or an interrupt too, has lost no more than those at work. The same
command with the same --out goes on with the captions that are not there yet.

Rows of `what`: "caption" (what came of a world's, by pruner and share), and at the end, over all captions of the file:
"draft" (accepted lengths and rate of a draft whose prompt is pruned, by pruner and share kept, with paired intervals against
uv), "lossy" (the share of a pruned model's own text that the whole model would have written, beside the measured share of
the video that its decoded tokens have `seen`, see lossy.py, and what all layers hold on average), "frames" (kept tokens by
frame, in 32 stretches of the video, and how many times their share the outermost frames hold); with --positions also
"positions" (accepted length of a pruned draft whose tokens keep their own coordinates, of one that numbers them anew on
every rotary axis, as SpecVLM does, and by how much the second is longer, with paired intervals).
Text is the target's greedy caption; every way sees the same captions.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import jobs
from lossy import lossy
from timing import Log, read_rows, write_rows

from mmaccel import load_model, load_processor
from mmaccel.cli.answer import prompt
from mmaccel.core.attach import adapter_for
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.core.recipe import Recipe
from mmaccel.policies.prune import AttentionPrune, RandomPrune, UniformPrune, UVPrune
from mmaccel_lab.eval.caption import caption_cases
from mmaccel_lab.eval.cases import Film
from mmaccel_lab.eval.pruning import (
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

KEPT = (1.0, 0.5, 0.1, 0.05, 0.01)
STRETCHES = 32
SETTINGS = ("model", "draft", "frames", "tokens", "window", "kept", "lossy", "positions", "pruners")
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
        "uv from the embeddings": UVPrune(retention=share, base=0),
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
        self.draft = load_model(settings(options)["draft"], device=device, dtype=torch.float32)
        self.processor = load_processor(options.model)

    def __call__(self, world: int) -> Iterator[dict[str, Any]]:
        """The row of the caption of `world`."""
        options, found = self.options, Found()
        (case,) = caption_cases(options.frames, 1, world)
        with Film() as film:
            inputs = prompt(self.processor, case.content(film.watch(case.world)), self.target)
        said, _ = write(self.target, inputs, None, options.tokens)
        for share in options.kept:
            _draft(self.target, self.draft, inputs, said, share, options, found)
        for share in options.lossy:
            _lossy(self.target, inputs, share, options.tokens, found)
        yield {"what": "caption", "world": world, **settings(options), **found.to_dict()}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What captions must have in common to be taken together."""
    own = {**vars(options), "draft": options.draft or f"{options.model}-draft", "pruners": meant()}
    return {name: own[name] for name in SETTINGS}


def meant(depth: int = 20) -> dict[str, str]:
    """What each label stands for: a pruner, and what its defaults come to on a target of `depth` layers."""
    every: dict[str, TokenPruner] = {**drafts(0.1, depth), **lossy(0.1, depth)}
    return {label: f"{pruner}: {pruner.stages(depth)}" for label, pruner in every.items()}


@dataclass
class Found:
    """Of one caption, by way and share: accepted length and rate; tokens, agreed, shares seen and held; kept by frame;
    accepted length of compact drafts."""

    speculated: dict[tuple[str, float], tuple[float, float]] = field(default_factory=dict)
    judged: dict[tuple[str, float], tuple[int, int, float, float]] = field(default_factory=dict)
    lying: dict[tuple[str, float], list[int]] = field(default_factory=dict)
    compact: dict[tuple[str, float], float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, list[Any]]:
        """JSON-ready: of each, a list of pruner, share and what came of them."""
        return {name: [[*key, told] for key, told in by.items()] for name, by in vars(self).items()}


def measured(options: argparse.Namespace) -> None:
    """Have the captions that are not in the file, of as many as `seconds` leave time for, and write each as it comes."""
    before = read([options.out] if options.out.exists() else [])
    have = {row["world"] for row in alike([settings(options), *before]) if "world" in row}
    left = [n for n in range(options.seed, options.seed + options.captions) if n not in have]
    log, began, many = Log(options.out, torch.device(options.device)), time.monotonic(), len(have)
    with contextlib.closing(jobs.rows(Share, options, left, options.jobs)) as coming:
        for row in coming:
            told = time.monotonic() - began
            if row is not None:
                log.row(**row)
                many += 1
                print(f"caption {many}, of world {row['world']}, after {told:.0f} s", flush=True)
            if options.seconds is not None and told > options.seconds:
                print(f"the time is up after {options.seconds:g} s", flush=True)
                return


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The environments and captions of some files. Raises `SystemExit` for one that has summaries alone."""
    found = []
    for path in paths:
        rows = read_rows([path])
        own = [row for row in rows if row.get("what") == "caption" or "environment" in row]
        if len(own) < len(rows) and not any("what" in row for row in own):
            raise SystemExit(f"{path} has summaries without their captions; give another file.")
        found += own
    return found


def alike(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with settings. Raises `SystemExit` where they differ in one."""
    rows = [row for row in found if "environment" not in row]
    for row in rows:
        for name in SETTINGS:
            one, other = (told.get(name) for told in (rows[0], row))
            if one == other:
                continue
            if name == "pruners":
                labels = sorted({*(one or {}), *(other or {})})
                odd = [label for label in labels if (one or {}).get(label) != (other or {}).get(label)]
                raise SystemExit(
                    f"pruners: {odd[0]!r} is not the same pruner in all captions (of {len(odd)} labels that differ); give "
                    "another file."
                )
            raise SystemExit(
                f"{name}: captions of {one} and of {other} cannot be taken together; give other files, or the same options."
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-ov")
    parser.add_argument("--draft", help="default: the model's own draft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, type=Path, help="file of result rows")
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
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes, which take captions, and visible devices, in turns"
    )
    parser.add_argument("--seconds", type=float, help="no more captions are waited for after that")
    parser.add_argument(
        "--rows", nargs="+", type=Path, help="measure nothing: put the captions of these files together"
    )
    parser.add_argument("--brief", type=Path, help="a second file, of the summaries alone")
    options = parser.parse_args(argv)
    with jobs.interruptible(options.out):
        if not options.rows:
            measured(options)
        found = read(options.rows or [options.out])
        concluded = list(conclusions(alike(found)))
        write_rows(options.out, [*found, *concluded])
        if options.brief is not None:
            write_rows(options.brief, [row for row in [*found, *concluded] if row.get("what") != "caption"])
        for row in concluded:
            print(" ".join(f"{key} {value}" for key, value in row.items()))


def conclusions(found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The summaries of captions, in the order of their worlds; one that is there twice counts once."""
    every = [row for _, row in sorted({row["world"]: row for row in found}.items())]
    if not every:
        return
    common = {name: every[0][name] for name in ("model", "frames")}
    common |= {"captions": len(every), "seed": every[0]["world"]}
    window = {"window": every[0]["window"]}
    speculated, judged = by_way(every, "speculated"), by_way(every, "judged")
    for (name, share), pairs in speculated.items():
        lengths, rates = zip(*pairs, strict=True)
        row = {"pruner": name, "retention": share, **window}
        row |= {"accepted": sum(lengths) / len(lengths), "rate": sum(rates) / len(rates)}
        row["over uv"] = paired(lengths, [length for length, _ in speculated["uv", share]])
        yield {"what": "draft", **common, **row}
    for (name, share), short in by_way(every, "compact").items():
        own = [length for length, _ in speculated[name, share]]
        row = {"pruner": name, "retention": share, **window}
        row |= {
            "kept": sum(own) / len(own),
            "compact": sum(short) / len(short),
            "over kept": paired(short, own),
        }
        yield {"what": "positions", **common, **row}
    for (name, share), texts in judged.items():
        tokens, agreed, seen, held = (sum(column) for column in zip(*texts, strict=True))
        row = {"pruner": name, "asked": share, "seen": seen / len(texts)}
        row["average retention"] = held / len(texts)
        row |= {"tokens": tokens, "accepted": agreed / tokens}
        row["by caption"] = paired([a / t for t, a, *_ in texts], [0.0] * len(texts))
        yield {"what": "lossy", **common, **row}
    for (name, share), each in by_way(every, "lying").items():
        total = [sum(column) for column in zip(*each, strict=True)]
        ends = [at_ends(counts) for counts in each]
        row = {"pruner": name, "retention": share, "ends": sum(ends) / len(ends), "kept": _stretches(total)}
        yield {"what": "frames", **common, **row}


def by_way(every: Sequence[dict[str, Any]], what: str) -> dict[tuple[str, float], list[Any]]:
    """Of each pruner and share, what came of every caption."""
    found: dict[tuple[str, float], list[Any]] = defaultdict(list)
    for row in every:
        for name, share, told in row[what]:
            found[name, share].append(told)
    return found


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


if __name__ == "__main__":
    main()
