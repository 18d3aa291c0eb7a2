"""The prefill of a language model from embeddings by the processes of a mesh, against one of them alone.

    torchrun --nproc-per-node 2 bench/context.py --out bench/results/context_h200x2_202601.jsonl
    torchrun --nproc-per-node 2 bench/context.py --out rows.jsonl --device cpu --shrink 2048      # does it run at all?

A published 7B shape with random weights, its heads under the patterns of `bench/prefill.py`. The processes run a sixteenth
of the prompt, then the prompt `--repeats` times. Then the first one runs it alone while the others wait; a million tokens
take it some 100 GB. Rows have the share kept, the peaks of memory, and the ratio of the medians. `--sparse NAME` takes a
preset or pattern for all heads.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).parent))
from prefill import SHAPE, Prompt, mixed_heads, seconds, shape
from timing import Log, Times

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe


def timed(
    model: torch.nn.Module, recipe: Recipe, options: argparse.Namespace, mesh: DeviceMesh | None
) -> tuple[Times, float, int]:
    """Seconds of a prompt's prefill, the share kept, and the most bytes that were held."""
    device = next(model.parameters()).device
    with mmaccel.accelerate(model, recipe, context_mesh=mesh) as fast:
        seconds(Prompt(model, max(512, options.tokens // 16)).call(fast), device)
        call = Prompt(model, options.tokens).call(fast)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        taken = []
        for _ in range(options.repeats):
            if mesh is not None:
                dist.barrier(mesh.get_group())
            taken.append(seconds(call, device))
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return Times(tuple(taken)), fast.report().kept or 0.0, peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--sparse", help="a pattern or preset; without it those of the heads")
    parser.add_argument("--chunk", type=int, help="tokens of a piece of the prompt")
    parser.add_argument("--no-single", action="store_true", help="leave out the process alone")
    options = parser.parse_args()
    options.tokens = max(512, options.tokens // options.shrink)
    kind, rank = options.device, int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        torch.cuda.set_device(rank)
        options.device = f"cuda:{rank}"
    # The others wait for the first one, which is alone for long.
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(hours=1))
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    model = shape(options)
    view = adapter_for(model).geometry(model)
    table = dict.fromkeys(range(view.layers), mixed_heads(view.heads, 64, 1 / options.shrink))
    choice = (
        {"recipe": options.sparse} if options.sparse else {"sparse": {"name": "per_head", "table": table}}
    )
    recipe = Recipe.load(**choice, chunk=options.chunk)
    told = dict(case="context", tokens=options.tokens, model=SHAPE, layers=view.layers, chunk=options.chunk)
    told |= dict(recipe=options.sparse or "mixed heads", processes=mesh.size())

    together, kept, peak = timed(model, recipe, options, mesh)
    peaks: list[int] = [0] * mesh.size()
    dist.all_gather_object(peaks, peak)
    log = Log(options.out, options.device) if rank == 0 else None
    if log is not None:
        log.row(**told, way="together", **together.row(), kept=kept, peak_bytes=peaks)
        print(f"{options.tokens} tokens, {together.median:8.2f} s together, {kept:.3f} kept", flush=True)
    if log is not None and not options.no_single:
        alone, kept, peak = timed(model, recipe, options, None)
        ratio = together.median / alone.median
        log.row(**told, way="alone", **alone.row(), kept=kept, peak_bytes=[peak], ratio=ratio)
        print(
            f"{options.tokens} tokens, {alone.median:8.2f} s alone, together / alone {ratio:.3f}", flush=True
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
