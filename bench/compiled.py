"""Eager, compiled by inductor and captured as a CUDA graph: planners, layers, the decode step, acceptance, clusters.

    python bench/compiled.py --device cuda --out bench/results/compiled_h200_202611.jsonl

Each way runs on the same tensors, in turns; the host knows the layout, as it does from a prompt's first layer on. Inductor
compiles with `fullgraph`. A row has the times of each way (`eager`, `compiled`, `captured`), and `warmup_s`, what compiling
took; `compiled_failed` and `captured_failed` say why one has no time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import replayed
from timing import Log, compare

from mmaccel.backends import select
from mmaccel.core.decoding.draft import judge_chain
from mmaccel.core.decoding.replay import capture_graph
from mmaccel.core.decoding.trees import judge_tree
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.sparse import attend_plan
from mmaccel.core.recipe import Recipe
from mmaccel.models import decode
from mmaccel.policies.kv.mosaic.clusters import insert

PATTERNS: dict[str, dict[str, Any]] = {
    "a_shape": {"name": "a_shape", "sink": 128, "window": 4096},
    "vertical_slash": {"name": "vertical_slash", "vertical": 1000, "slash": 64},
    "block_topk": {"name": "block_topk"},
    "grid": {"name": "grid", "stride": "frame"},
    "q_boundary": {"name": "q_boundary"},
    "boundary_2d": {"name": "boundary_2d"},
    "per_head": {
        "name": "per_head",
        "table": {0: {0: {"name": "a_shape", "sink": 128, "window": 4096}, 1: "grid"}},
    },
}
Case = tuple[Callable[..., Any], tuple[Tensor, ...]]
"""A function and its tensors."""


def layers(given: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Each pattern's plan, and its plan with the attention of one layer."""
    gpu = given.device != "cpu"
    n, heads, groups, size = (1 << 15, 28, 4, 128) if gpu else (1 << 12, 4, 2, 64)
    tensors = tuple(
        torch.randn(1, count, n, size, device=given.device, dtype=torch.bfloat16 if gpu else torch.float32)
        for count in (heads, groups, groups)
    )
    column = torch.arange(n, device=given.device)[None]
    modality = torch.where(column % 4096 < 64, TEXT, VIDEO)
    layout = TokenLayout.build(modality, frame=torch.where(modality == TEXT, -1, column // 256))
    kernel = select.get("triton" if gpu else "reference", given.device)
    for name, fields in PATTERNS.items():
        pattern = Recipe.load(sparse=fields).sparse

        def plan(query: Tensor, key: Tensor, value: Tensor, pattern: Any = pattern) -> Any:
            made = pattern.plan(query, key, layout, layout)
            return [
                (part.q_row, [(s.k_row, s.q_pos, s.k_pos, s.lists.row) for s in part.spans])
                for part in made.parts
            ]

        def layer(query: Tensor, key: Tensor, value: Tensor, pattern: Any = pattern) -> Tensor:
            made = pattern.plan(query, key, layout, layout)
            return attend_plan(made, query, key, value, size**-0.5, kernel)[0]

        yield f"plan {name}", (plan, tensors)
        yield f"layer {name}", (layer, tensors)


def steps(given: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """A decode step of one row after 4096 columns, by the layers of a 7B shape (of two on a CPU)."""
    gpu = given.device != "cpu"
    runner = replayed.after(
        replayed.model_of("qwen2.5-vl-7b", given.device, None if gpu else 2), 4096 if gpu else 256
    )
    seen: list[Any] = []
    call = decode.DeviceStep.__call__
    decode.DeviceStep.__call__ = lambda part, *rest: seen.append((part, rest)) or call(part, *rest)  # type: ignore[method-assign, func-returns-value]
    try:
        runner.step(torch.ones(1, 1, dtype=torch.long, device=given.device))
    finally:
        decode.DeviceStep.__call__ = call  # type: ignore[method-assign]
    if seen:
        part, rest = seen[0]
        tensors = tuple(one for one in rest if one is not None)
        yield "decode step", (lambda *tensors: call(part, *tensors), tensors)


def small(given: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Acceptance on the device, and a unit's nearest cluster, which is always found on the host."""
    torch.manual_seed(0)
    n, vocab = 8, 151_936
    p = torch.randn(n + 1, vocab, device=given.device).softmax(-1)
    ids, u = p[:n].multinomial(1)[:, 0], torch.rand(n, device=given.device)
    yield "acceptance", (judge_chain, (ids, p, p[:n].clone(), u))
    parents = torch.tensor([-1, 0, 1, 2, 3, 0, 1, 2, -1, 8, 9, -1, 11, 12, 13])
    sees = torch.rand(16, 16) > 0.5
    yield "acceptance of a tree", (judge_tree, (torch.arange(15), parents, sees, torch.arange(16)))
    centroid, unit = torch.randn(28, 64, 513), torch.randn(28, 513)

    def assign(
        centroid: Tensor, variance: Tensor, size: Tensor, unit: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        cosine = (centroid @ unit[:, :, None])[:, :, 0] / centroid.norm(dim=-1).clamp_min(1e-12)
        near = cosine.argmax(1)
        row = torch.arange(len(unit))
        return near, *insert(centroid[row, near], variance[row, near], size[row, near], unit)

    yield "cluster assignment", (assign, (centroid, torch.rand(28, 64), torch.randint(1, 9, (28, 64)), unit))


def ways(
    work: Callable[..., Any], tensors: tuple[Tensor, ...], row: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """Each way that runs; what fails, and how long compiling took, goes into the row."""
    found: dict[str, Callable[[], Any]] = {"eager": lambda: work(*tensors)}
    found["eager"]()
    torch._dynamo.reset()
    began = time.perf_counter()
    try:
        compiled = torch.compile(work, fullgraph=True, dynamic=False)
        compiled(*tensors)
        compiled(*tensors)
        found["compiled"] = lambda: compiled(*tensors)
    except Exception as error:
        row["compiled_failed"] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    row["warmup_s"] = time.perf_counter() - began
    if tensors[0].is_cuda:
        for _ in range(3):
            work(*tensors)
        try:
            graph, kept = capture_graph(
                lambda: work(*tensors), tensors[0].device, torch.cuda.graph_pool_handle()
            )
            found["captured"] = lambda kept=kept: graph.replay()
        except RuntimeError as error:
            row["captured_failed"] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return found


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--repeats", type=int, default=21)
    given = parser.parse_args(argv)
    log = Log(given.out, given.device)
    for made in (small, layers, steps):
        for name, (work, tensors) in made(given):
            if given.only not in name:
                continue
            row: dict[str, Any] = {"case": name}
            times = compare(ways(work, tensors, row), repeats=given.repeats, device=given.device)
            for way, one in times.items():
                row |= one.row(f"{way}_")
            log.row(**row)
            print(
                name,
                *(f"{way} {one.median * 1e6:.0f} us" for way, one in times.items()),
                f"warm-up {row['warmup_s']:.1f} s",
                *(v for k, v in row.items() if "failed" in k),
                flush=True,
            )


if __name__ == "__main__":
    main()
