"""Two or more processes that share one model, against one of them alone.

    torchrun --nproc-per-node 2 bench/context.py --out bench/results/context_h200x2_202601.jsonl
    torchrun --nproc-per-node 2 bench/context.py --way heads --tokens 524288 --model qwen2.5-vl-32b --layers 16 --out FILE
    torchrun --nproc-per-node 2 bench/context.py --out rows.jsonl --device cpu --shrink 2048      # does it run at all?

Ways to share, of a published shape with random weights, its heads under the patterns of `bench/prefill.py`:

rows    context parallelism: the prefill of the language model from embeddings
pixels  the same from a film's pixels, vision tower included, to the first token
heads   transformers' tensor parallelism: the prefill from embeddings, and a decoded token after 25,088 columns

The processes run a sixteenth of the prompt, then the prompt `--repeats` times. Then the first one runs it alone while the
others wait; a million tokens take it some 100 GB. Rows have the share kept, the peaks of memory, and the ratio of the
medians. `--sparse NAME` takes a preset or pattern for all heads.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prefill import SHAPE, Prompt, mixed_heads, seconds
from replayed import question
from timing import Log, Times
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel.models import shapes

COLUMNS, DECODED = 25_088, 64


def built(options: argparse.Namespace) -> Any:
    """The model on this process's device."""
    if options.shrink > 1:
        return mmaccel.load_model("tiny-qwen")
    vision = None if options.way == "pixels" else 1
    return shapes.build_model(options.model, options.layers, vision, device=options.device)


def sharded(options: argparse.Namespace) -> Any:
    """The model whose layers the processes share: from a file whose weights are holes, and random ones put in after."""
    from transformers import AutoModelForImageTextToText
    from transformers.distributed import DistributedConfig

    small = options.shrink > 1
    kind = torch.float32 if small else torch.bfloat16
    folder = Path(tempfile.gettempdir(), f"hollow-{options.model}")
    if options.rank == 0:
        config = built(options).config if small else shapes.model_config(options.model, options.layers, 1)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config, dtype=kind)
        end, header = 0, dict[str, Any]({"__metadata__": {"format": "pt"}})
        for name, x in model.state_dict().items():
            told = {"dtype": "F32" if small else "BF16", "shape": list(x.shape)}
            header[name] = {**told, "data_offsets": [end, end := end + x.nbytes]}
        text = json.dumps(header).encode()
        config.save_pretrained(folder)
        with open(folder / "model.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    dist.barrier()
    share = DistributedConfig(tp_size=dist.get_world_size())
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=kind, distributed_config=share).eval()
    with torch.no_grad():
        for one in model.parameters():
            held = one.to_local() if hasattr(one, "to_local") else one
            held.fill_(1.0) if held.ndim == 1 else held.normal_(0, 0.02)
    return model


def whole(model: Any, inputs: dict[str, Any], new: int = 1) -> Callable[[], None]:
    return lambda: model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)


def calls(
    options: argparse.Namespace, model: Any, fast: mmaccel.Accelerated
) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """What is timed, by name, with its tokens."""
    device = next(model.parameters()).device
    if options.way == "pixels":
        inputs = question(model.config, options.tokens, device)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.video_token_id).int() * 2
        yield "prefill", inputs["input_ids"].shape[1], whole(model, inputs)
    else:
        yield "prefill", options.tokens, Prompt(model, options.tokens).call(fast)
    if options.way == "heads":
        ids = torch.full((1, max(512, COLUMNS // options.shrink)), 7, device=device)
        for name, new in (("first token", 1), ("decode", DECODED + 1)):
            yield name, ids.shape[1], whole(model, {"input_ids": ids}, new)


def timed(
    options: argparse.Namespace, model: Any, mesh: DeviceMesh | None, told: dict[str, Any]
) -> list[Any]:
    """Rows of each call: seconds, the share kept, and the most bytes that were held."""
    device, found = next(model.parameters()).device, []
    view = adapter_for(model).geometry(model)
    heads = model.config.get_text_config().num_attention_heads
    table = dict.fromkeys(range(view.layers), mixed_heads(heads, 64, 1 / options.shrink))
    choice: dict[str, Any] = {"sparse": {"name": "per_head", "table": table}}
    recipe = Recipe.load(**({"recipe": options.sparse} if options.sparse else choice), chunk=options.chunk)
    with mmaccel.accelerate(model, recipe, context_mesh=mesh) as fast:
        for name, tokens, call in calls(options, model, fast):
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            taken = []
            for _ in range(options.repeats + 1):
                if told["way"] == "together":
                    dist.barrier()
                taken.append(seconds(call, device))
            before, *taken = taken * (1 if options.repeats else 2)
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
            if name == "decode":
                taken = [(x - found[-1]["median_s"]) / DECODED for x in taken]
            times = Times(tuple(taken)).row() if len(taken) > 1 else {"median_s": taken[0], "repeats": 1}
            times["before_s"] = before  # of the first run, which compiles and takes the memory
            kept = fast.report().kept
            found.append({**told, "tokens": tokens, "step": name, **times, "kept": kept, "peak_bytes": peak})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--way", default="rows", choices=("rows", "pixels", "heads"))
    parser.add_argument("--model", default=SHAPE, choices=sorted(shapes.SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--sparse", help="a pattern or preset; without it those of the heads")
    parser.add_argument("--chunk", type=int, help="tokens of a piece of the prompt")
    parser.add_argument("--no-single", action="store_true", help="leave out the process alone")
    options = parser.parse_args()
    options.tokens = max(512, options.tokens // options.shrink)
    kind, options.rank = options.device, int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        torch.cuda.set_device(options.rank)
        options.device = f"cuda:{options.rank}"
    # The others wait for the first one, which is alone for long.
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(hours=1))
    size, layers = dist.get_world_size(), options.way == "heads"
    mesh = None if layers else init_device_mesh(kind, (size,))
    model = sharded(options) if layers else built(options)
    told = dict(case="context", shared=options.way, model=options.model, layers=options.layers)
    told |= dict(chunk=options.chunk, recipe=options.sparse or "mixed heads", processes=size)

    together = timed(options, model, mesh, {**told, "way": "together"})
    peaks: list[Any] = [None] * size
    dist.all_gather_object(peaks, [row["peak_bytes"] for row in together])
    if options.rank == 0:
        log, alone = Log(options.out, options.device), []
        if not options.no_single:
            model = built(options) if layers else model
            alone = timed(options, model, None, {**told, "way": "alone"})
        for n, row in enumerate(together):
            log.row(**{**row, "peak_bytes": [each[n] for each in peaks]})
            ratio = row["median_s"] / alone[n]["median_s"] if alone else math.nan
            if alone:
                log.row(**alone[n], ratio=ratio)
            print(
                f"{options.way} {row['step']} {row['tokens']} tokens: {row['median_s']:.4f} s, ratio {ratio:.3f}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
