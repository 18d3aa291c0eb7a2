"""Does an index carry over from one modality to another? What it recalls, segment by segment of a mixed prompt.

    python bench/extrapolate.py --model tiny-ov --frames 512 --out bench/results/extrapolate_tiny-ov_202611.jsonl

The experiment of MMInference §E.2 (Figure 12) on real heads: a vertical-slash index of one budget is built from the last
queries of the prompt, which are text, or from the last queries of each modality (a Q-boundary), and its recall (the softmax
weight on what it lists) is taken over the rows of each segment, mean over all heads of all layers.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from recall import exact
from timing import Log, environment

from mmaccel import load_model, load_processor
from mmaccel.backends import select
from mmaccel.cli.answer import prompt
from mmaccel.core.layout import MODALITIES
from mmaccel.core.lower import attend_plan
from mmaccel.core.recipe import Recipe
from mmaccel.search.sample import Inside, watch
from mmaccel_lab.eval.cases import Film, cases, tokens_per_frame

SAMPLED = 256
"""Rows of each segment."""


def indices(length: int) -> dict[str, dict[str, object]]:
    """The ways to build one index, at budgets of Table 3 in proportion to the prompt."""
    share = min(1.0, length / (1 << 16))
    inner = {
        "name": "vertical_slash",
        "vertical": max(8, round(1000 * share)),
        "slash": max(8, round(1024 * share)),
    }
    return {
        "from the last rows (text)": inner,
        "from each modality's last rows": {"name": "q_boundary", "text": inner, "video": inner},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-ov")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--frames", type=int, default=512)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    kernel = select.get(select.choose(device), device)
    model = load_model(options.model, device=device, dtype=torch.float32)
    processor = load_processor(options.model)
    log = Log(options.out, device)
    print(environment(device))
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    kinds: dict[int, str] = {}
    with Film() as film:
        per_frame = tokens_per_frame(processor)
        case = next(
            cases(
                options.frames,
                1,
                options.seed,
                ("needle",),
                documents=options.segments,
                tokens_per_frame=per_frame,
            )
        )
        inputs = prompt(processor, case.content(film.watch(case.world)), model)

    def visit(inside: Inside) -> None:
        group = inside.query.shape[1] // inside.key.shape[1]
        spread = {name: getattr(inside, name).repeat_interleave(group, 1) for name in ("key", "value")}
        segment, n = inside.layout.segment[0], inside.layout.length
        rng = torch.Generator().manual_seed(0)
        for name, fields in indices(n).items():
            plan = Recipe.load(sparse=fields).sparse.plan(
                inside.query, inside.key, inside.layout, inside.layout
            )
            assert plan is not None
            lse = attend_plan(plan, inside.query, inside.key, inside.value, inside.scale, kernel)[1]
            kept = float(plan.listed_pairs().mean()) / (n * (n + 1) / 2)
            for number in segment.unique().tolist():
                rows = (segment == number).nonzero()[:, 0]
                kinds[number] = MODALITIES[int(inside.layout.modality[0, rows[0]])]
                some = rows[torch.randperm(len(rows), generator=rng)[:SAMPLED].to(rows.device)].sort().values
                dense = exact(replace(inside, **spread), some)[1]
                found[name, number].append(
                    (float((lse[0][:, some].float() - dense).exp().clamp(max=1).mean()), kept)
                )

    watch(model, inputs, visit)
    for (name, number), each in sorted(found.items()):
        recall, kept = (sum(column) / len(each) for column in zip(*each, strict=True))
        row = {"case": name, "segment": number, "of": kinds[number], "recall": recall, "kept": kept}
        log.row(model=options.model, frames=options.frames, tokens=inputs["input_ids"].shape[1], **row)
        print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
