"""What MMInference leaves open, one by one: what each choice recalls of planted grid heads, and what it computes.

    python bench/ablate.py --tokens 16384 --draws 8 --out bench/results/ablate_cpu_202611.jsonl
    python bench/ablate.py --tokens 6144 --frame 49 --gains 0.5 --draws 16 --out bench/results/ablate_cpu_202611.jsonl

The second has lines so faint that an estimate may miss them; of the first it misses none. `recall_error` is the standard
error of the mean over draws.

Heads are those of `bench/recall.py` with lines of the frame's stride, two query heads to a key head, whose slashes have
phases of their own. The stride is searched ("free") where its choice is the question. Chunks: the prompt in pieces, each
planned by its own last queries, against the whole.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from heads import SIZE, Canvas, common, layout_of, periods, placed
from recall import SAMPLED, exact
from timing import Log, environment

from mmaccel.backends import select
from mmaccel.core.lower import attend_plan
from mmaccel.policies.sparse import Grid
from mmaccel.search.sample import Inside

BASE = Grid(stride="free")
CHOICES: dict[str, dict[str, Grid]] = {
    "score of a stride": {name: replace(BASE, score=name) for name in ("contrast", "mean", "sum")},  # type: ignore[arg-type]
    "slack among harmonics": {str(slack): replace(BASE, slack=slack) for slack in (0.0, 0.02, 0.1, 0.3)},
    "phase of horizontal lines": {
        name: replace(BASE, horizontal_phase=name)  # type: ignore[arg-type]
        for name in ("keys", "queries")
    },
    "estimate under shared keys": {
        name: replace(BASE, estimate=name)  # type: ignore[arg-type]
        for name in ("head", "group")
    },
    "queries of the estimate": {str(rows): replace(BASE, last_q=rows) for rows in (16, 64, 256)},
    "source of the stride": {name: replace(BASE, stride=name) for name in ("free", "frame")},  # type: ignore[arg-type]
}
CHUNKS = (1, 4, 16)


def draw(n: int, frame: int, gain: float, seed: int, device: torch.device) -> Inside:
    """Two query heads over one key head: columns in common, slashes of different phases; `gain` is the height of a line."""
    rng = torch.Generator().manual_seed(seed)
    layout = layout_of(n, frame, False, False, device)
    place = placed(layout, frame)
    key: Tensor | None = None
    queries = []
    waves_rng = rng.get_state()
    for head in range(2):
        rng.set_state(waves_rng)  # the same waves, so that the keys come out the same
        canvas = Canvas(n, rng, device)
        common(canvas, place, 4.0, 16.0)
        column = int(canvas.draw(1) * frame)
        phases = (canvas.draw(2) * frame).long().tolist()
        row = (place.at % frame == column).float()
        canvas.query *= (1 - row)[:, None]
        waves = periods(40, frame, canvas)
        before = canvas.used
        canvas.line(place.at, waves, gain, 0.0, 1 - row, torch.ones_like(row))
        shifted = Canvas(n, rng, device)
        # Seen from there, a distance of 0 is the distance of the phase.
        shifted.line(place.at - phases[head], waves, gain, 0.0, 1 - row, torch.ones_like(row))
        canvas.query[:, before : canvas.used] = shifted.query[:, : shifted.used]
        canvas.add(1 - row, 0.8 * gain * (place.at % frame == column))
        query, same = canvas.finish()
        queries.append(query)
        key = same if key is None else key
    assert key is not None
    value = torch.randn(1, 1, n, SIZE, generator=rng).to(device)
    return Inside(0, torch.stack(queries)[None], key[None, None], value, SIZE**-0.5, layout)


def judged(
    pattern: Grid, inside: Inside, rows: Tensor, dense: tuple[Tensor, Tensor], chunks: int, kernel: Any
) -> dict[str, float]:
    """Share listed, recall and error, the prompt in so many pieces."""
    n = inside.layout.length
    outs, lses, listed = [], [], 0.0
    for i in range(chunks):
        some = slice(i * n // chunks, (i + 1) * n // chunks)
        query, key, value = (
            inside.query[:, :, some],
            inside.key[:, :, : some.stop],
            inside.value[:, :, : some.stop],
        )
        plan = pattern.plan(query, key, inside.layout.take(some), inside.layout.take(slice(0, some.stop)))
        assert plan is not None
        out, lse = attend_plan(plan, query, key, value, inside.scale, kernel)
        outs.append(out)
        lses.append(lse)
        listed += float(plan.listed_pairs().mean())
    out, lse = torch.cat(outs, 2)[0][:, rows].float(), torch.cat(lses, 2)[0][:, rows].float()
    return {
        "kept": listed / (n * (n + 1) / 2),
        "recall": float(torch.exp(lse - dense[1]).clamp(max=1).mean()),
        "error": float(((out - dense[0]).flatten(1).norm(dim=1) / dense[0].flatten(1).norm(dim=1)).mean()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True, help="file of result rows; rows are added to it")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--frame", type=int, default=196, help="tokens of a frame")
    parser.add_argument(
        "--gains", nargs="+", type=float, default=[3.0, 6.0, 9.0], help="heights of a line, in the exponent"
    )
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    kernel = select.get(select.choose(device), device)
    log = Log(options.out, device)
    print(environment(device))
    rows = (
        torch.randperm(options.tokens, generator=torch.Generator().manual_seed(2))[:SAMPLED]
        .sort()
        .values.to(device)
    )
    for gain in options.gains:
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for seed in range(options.draws):
            inside = draw(options.tokens, options.frame, gain, seed, device)
            shared = replace(
                inside, key=inside.key.expand(-1, 2, -1, -1), value=inside.value.expand(-1, 2, -1, -1)
            )
            dense = exact(shared, rows)
            for question, variants in CHOICES.items():
                for name, pattern in variants.items():
                    found.setdefault((question, name), []).append(
                        judged(pattern, inside, rows, dense, 1, kernel)
                    )
            for chunks in CHUNKS:
                row = judged(BASE, inside, rows, dense, chunks, kernel)
                found.setdefault(("pieces of the prompt", str(chunks)), []).append(row)
        for (question, name), each in found.items():
            mean = {k: sum(row[k] for row in each) / len(each) for k in each[0]}
            about = dict(case=question, choice=name, gain=gain, tokens=options.tokens, frame=options.frame)
            if len(each) > 1:
                mean["recall_error"] = statistics.stdev(row["recall"] for row in each) / len(each) ** 0.5
            log.row(**about, draws=len(each), **mean)
            print(
                f"{gain:4} {question:28} {name:10} " + " ".join(f"{k} {v:.4f}" for k, v in mean.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
