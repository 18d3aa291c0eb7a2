"""The speed table of sparse prefill on one GPU, from single layers to a 7B model at a million tokens, in one run.

    python bench/prefill.py --out bench/results/prefill_h200_202601.jsonl
    python bench/prefill.py --out ... --only layer:grid model:1m
    python bench/prefill.py --out rows.jsonl --device cpu --shrink 1024 --quick      # does it run at all?

Steps, most telling first: `layer:*` are the cases of `bench/attend.py`; `model:*` the language model of a published 7B
shape (random weights) from embeddings, sparse and dense, with the peak of memory; `short:*` what "auto" makes of prompts
of 4k to 16k tokens, in turns with dense; `vision:*` that shape's vision tower alone, all its layers, on the frames of so
many tokens, some patches at a time as in an accelerated model (`--patches`, else its default), and at 128k also in one
call, with the peak of memory and what was held before; and of an hour at a frame a second (3,600 frames of 252 x 224
pixels), in turns with the modules' own products, norms, gates and rotations ("modules"). A step whose row is in the file
already is not run again, and none is begun that would not end within `--limit` seconds by its own estimate: run the same
command again for the rest. Dense attention that would take too long is timed on some layers, or on the heads of one group,
and scaled; its row says so (`layers_timed`, `groups_timed`). `--shrink` divides all lengths: a smoke test.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).parent))
from attend import CASES, FRAME, Case, GivenDiagonals, bench_case, layout_of, shortened
from steps import Step, parser_of, run_steps
from timing import Log, Times, compare

import mmaccel
from mmaccel.backends import flash
from mmaccel.backends.ops import dense_attend as dense
from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel.models import modules, shapes

SHAPE = "qwen2.5-vl-7b"
LAYERS = {"model:128k": 28, "model:512k": 2, "model:1m": 1}
"""Layers on which dense prefill is timed; the time of a layer is then counted for each."""

SECONDS = ("median_s", "low_s", "high_s")

NEVER = sys.maxsize

DENSE = {
    "dense": {"FLASH_FROM": NEVER, "OLDER_FROM": NEVER},
    "dense_flash_attn_4": {"FLASH_FROM": dense.FLASH_FROM},
    "dense_flash_2": {
        "FLASH_FROM": NEVER,
        "OLDER_FROM": NEVER,
        "FASTEST": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    },
}
"""Dense attention by PyTorch's fastest kernel, by flash-attn 4 where it is installed, and by FlashAttention-2: what of
`mmaccel.backends.ops.dense_attend` is changed for each. All but the first are timed on one layer."""


def layer_step(name: str, case: Case, seconds: float) -> Step:
    def run(options: argparse.Namespace, log: Log) -> None:
        told = shortened(case, max(case.tokens // options.shrink, 256)) if options.shrink > 1 else case
        bench_case(name, told, options, log)

    return Step(name, seconds, run)


def mixed_heads(heads: int, block: int, share: float) -> dict[int, Any]:
    """The patterns of a layer's heads: 40% grid, 40% vertical-slash at multiples of a frame, 20% A-shape, and every
    fourth of them within Q- or 2D-boundaries, turn about. Budgets are `share` of those of a full length."""

    def some(n: int) -> int:
        return max(4, int(n * share))

    found: dict[int, Any] = {}
    for head in range(heads):
        kind = head * 5 // heads  # fifths: two, two, one
        one: Any = {"name": "a_shape", "sink": some(128), "window": some(4096), "block": block}
        if kind < 2:
            one = {"name": "grid", "stride": "frame", "block": block}
        elif kind < 4:
            one = GivenDiagonals(vertical=some(1000), slash=some(1024), pitch=FRAME, block=block)
        if head % 8 == 3:
            one = {"name": "q_boundary", "text": one, "video": one, "image": None, "block": block}
        elif head % 8 == 7:
            one = {"name": "boundary_2d", "default": one, "block": block}
        found[head] = one
    return found


class Prompt:
    """Embeddings of a prompt with a quarter of text in 32 islands, and what goes with them."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.model, self.tokens, first = model, tokens, next(model.parameters())
        self.device = first.device
        self.layout = layout_of(Case(tokens, {}, islands=min(32, tokens // 64)), FRAME, first.device)
        generator = torch.Generator(first.device).manual_seed(0)
        self.family: Any = adapter_for(model)
        hidden = self.family.geometry(model).hidden
        self.embeds = torch.empty(1, tokens, hidden, dtype=first.dtype, device=first.device)
        self.embeds.normal_(0, 0.02, generator=generator)
        axes = (3,) if self.family.mrope else ()
        self.positions = torch.arange(tokens, device=first.device).expand(*axes, 1, tokens)

    def run(self, recipe: Recipe) -> tuple[Callable[[], None], mmaccel.Accelerated]:
        """A call that prefills the language model under a recipe, keys and values kept, and the handle to be detached."""
        fast = mmaccel.accelerate(self.model, recipe)
        return self.call(fast), fast

    def call(self, fast: mmaccel.Accelerated) -> Callable[[], None]:
        """The same under a recipe that is attached."""
        from mmaccel.models.attention import wrap_kv_cache
        from mmaccel.models.hf import NOTE, ForwardPassInfo

        text = fast.adapter.text_model(self.model)

        def run() -> None:
            cache = wrap_kv_cache(self.model, self.family, fast.open_kv_state())
            note = ForwardPassInfo(layout=self.layout, last_only=True)
            told = {NOTE: note, "past_key_values": cache, "use_cache": True}
            with torch.no_grad():
                text(inputs_embeds=self.embeds, position_ids=self.positions, **told)

        return run


LONG = 1 << 19
"""Tokens from which a run is long enough to be timed once."""


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of one run, the device waited for."""
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def shape(options: argparse.Namespace, layers: int | None = None) -> nn.Module:
    """The model; under `--shrink` a thin one of the same family."""
    if options.shrink > 1:
        return mmaccel.load_model("tiny-qwen")
    return shapes.build_model(SHAPE, layers=layers, vision_layers=1, device=options.device)


def timed_prefill(
    model: nn.Module,
    tokens: int,
    recipe_for: Callable[[int], Recipe],
    options: argparse.Namespace,
    *,
    compiles: bool = True,
) -> dict[str, Any]:
    """Times, peak of memory and share kept of a prompt's prefill; recipe_for gives the recipe of so many layers.

    What compiles for a length does so in a run before. A long prompt is timed once; the run before it is through one
    layer, or, where nothing `compiles` for a length, of a sixteenth of it.
    """
    count = adapter_for(model).geometry(model).layers
    long = tokens >= LONG and options.shrink == 1
    thin, layers = (model, count) if not long or count == 1 or not compiles else (shape(options, 1), 1)
    call, fast = Prompt(thin, tokens if not long or compiles else tokens // 16).run(recipe_for(layers))
    device = next(model.parameters()).device
    with fast:
        before = seconds(call, device)
    del thin, call, fast
    call, fast = Prompt(model, tokens).run(recipe_for(count))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with fast:
        taken = [seconds(call, device) for _ in range(1 if long else max(2, options.repeats // 3))]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        row = Times(tuple(taken)).row() if len(taken) > 1 else {"median_s": taken[0], "repeats": 1}
        return {**row, "before_s": before, "kept": fast.report().kept, "peak_bytes": peak}


def model_step(name: str, tokens: int, seconds: float) -> Step:
    def run(options: argparse.Namespace, log: Log) -> None:
        n = max(512, tokens // options.shrink)
        model = shape(options)
        view = adapter_for(model).geometry(model)
        told = dict(case=name, tokens=n, model=SHAPE, layers=view.layers)
        one = mixed_heads(view.heads, 64, min(1.0, n / tokens))

        def mixed(layers: int) -> Recipe:
            table = dict.fromkeys(range(layers), one)
            return Recipe.load(sparse={"name": "per_head", "table": table}, backend=options.backends[0])

        row = timed_prefill(model, n, mixed, options)
        log.row(**told, way="sparse", **row)
        sparse = row["median_s"]
        print(f"{name:24} {n} tokens, {sparse:8.2f} s sparse, {row['kept']:.3f} kept", flush=True)
        del model
        if options.no_dense:
            return
        for way, kernels in DENSE.items():
            if way == "dense_flash_attn_4" and flash.why_unusable(torch.device(options.device)) is not None:
                continue
            model = shape(options, LAYERS[name] if way == "dense" else 1)
            with patch.multiple(dense, **kernels):
                row = timed_prefill(model, n, lambda _: Recipe.load("dense"), options, compiles=False)
            count = adapter_for(model).geometry(model).layers
            del model
            row |= {name: row[name] * view.layers / count for name in SECONDS if name in row}
            taken = row["median_s"]
            row |= dict(layers_timed=count, speedup=taken / sparse)
            log.row(**told, way=way, **row)
            print(f"{name:24} {n} tokens, {taken:8.2f} s {way}, {taken / sparse:6.2f} x", flush=True)

    return Step(name, seconds, run)


def ratio_of(dense_s: Sequence[float], auto_s: Sequence[float]) -> tuple[float, float]:
    """Median of dense over median of auto, and the lower end of its interval of 95% (a bootstrap of both)."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.tensor(dense_s), torch.tensor(auto_s)

    def drawn(t: torch.Tensor) -> torch.Tensor:
        return t[torch.randint(len(t), (4000, len(t)), generator=generator)].median(1).values

    ratio = drawn(first) / drawn(second)
    return float(first.median() / second.median()), float(ratio.quantile(0.025))


def short_step(name: str, tokens: int, seconds: float) -> Step:
    def run(options: argparse.Namespace, log: Log) -> None:
        n = max(256, tokens // options.shrink)
        model = shape(options)
        view = adapter_for(model).geometry(model)
        table = dict.fromkeys(range(view.layers), mixed_heads(view.heads, 64, 1.0))
        prompt = Prompt(model, n)
        taken: dict[str, list[float]] = {"dense": [], "auto": []}
        recipes = {
            "dense": Recipe.load("dense"),
            "auto": Recipe.load(sparse={"name": "per_head", "table": table}),
        }
        for _ in range(max(3, 2 * options.repeats)):
            for way, recipe in recipes.items():
                call, fast = prompt.run(recipe)
                with fast:
                    taken[way] += compare({way: call}, warmup=1, repeats=2, device=prompt.device)[way].seconds
        middle, low = ratio_of(taken["dense"], taken["auto"])
        against = Times(tuple(taken["dense"])).median
        told = Times(tuple(taken["auto"])).row()
        log.row(case=name, tokens=n, way="auto", **told, against_s=against, speedup=middle, low=low)
        print(f"{name:24} {n} tokens, dense / auto {middle:.3f}, from {low:.3f} on", flush=True)

    return Step(name, seconds, run)


def vision_step(name: str, tokens: int, seconds: float, ways: Sequence[str], size: tuple[int, int]) -> Step:
    """The tower on frames of `size` rows and columns of patches; the ways take turns."""

    def run(options: argparse.Namespace, log: Log) -> None:
        small, device = options.shrink > 1, options.device
        model = mmaccel.load_model("tiny-qwen") if small else shapes.build_model(SHAPE, 1, device=device)
        tower, first = model.config.vision_config, next(model.parameters())
        each = math.prod(size) // tower.spatial_merge_size**2
        count = max(2, tokens // options.shrink // each)
        values = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        pixels = torch.empty(count * math.prod(size), values, dtype=first.dtype, device=first.device)
        pixels.normal_(generator=torch.Generator(first.device).manual_seed(0))
        most, none = options.patches or modules.PATCHES, lambda *_: None
        for way in ways:
            with (
                patch.object(modules, "PATCHES", len(pixels) if way == "whole" else most),
                patch.object(modules, "fuse_tower", none if way == "modules" else modules.fuse_tower),
                mmaccel.accelerate(model, "dense"),
            ):
                row = timed_tower(model, pixels, size)
            told = dict(case=name, way=way, tokens=count * each, patches=len(pixels), model=SHAPE)
            log.row(**told, layers=tower.depth, most=None if way == "whole" else most, **row)
            peak = row["peak_bytes"]
            held = (
                "" if peak is None else f", {(peak - row['held_bytes']) / 2**30:.2f} GB more held at the peak"
            )
            print(f"{name:24} {count * each} tokens, {row['median_s']:8.2f} s {way}{held}", flush=True)

    return Step(name, seconds, run)


@torch.no_grad()
def timed_tower(model: Any, pixels: Tensor, size: tuple[int, int]) -> dict[str, Any]:
    """Seconds and peak of memory of the tower on frames of `size` patches, after a run on a sixteenth of them."""

    def run(count: int) -> Callable[[], Any]:
        grid = torch.tensor([[count, *size]], device=pixels.device)
        return lambda: model.model.get_video_features(pixels[: count * math.prod(size)], grid)

    count, device = len(pixels) // math.prod(size), pixels.device
    before = seconds(run(max(1, count // 16)), device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device) if cuda else None
    taken = seconds(run(count), device)
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    return {"median_s": taken, "repeats": 1, "before_s": before, "held_bytes": held, "peak_bytes": peak}


def steps() -> list[Step]:
    seconds = {"grid": 40.0}
    first = [layer_step(f"layer:{name}", case, seconds.get(name, 15.0)) for name, case in CASES.items()]
    models = [
        model_step("model:128k", 1 << 17, 80.0),
        model_step("model:1m", 1 << 20, 180.0),
        model_step("model:512k", 1 << 19, 80.0),
    ]
    short = [short_step(f"short:{n}k", n << 10, 25.0) for n in (4, 8, 16)]
    side = 2 * math.isqrt(FRAME)
    tower = [
        vision_step("vision:128k", 1 << 17, 40.0, ("parts", "whole"), (side, side)),
        vision_step("vision:512k", 1 << 19, 60.0, ("parts",), (side, side)),
        vision_step("vision:1m", 1 << 20, 110.0, ("parts",), (side, side)),
        vision_step("vision:hour", 1800 * 72, 60.0, ("modules", "parts") * 3, (18, 16)),
    ]
    return [*first, *models, *short, *tower]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--backends", nargs="+", help="default: triton on cuda, else the reference")
    parser.add_argument("--heads", nargs=2, type=int, default=(28, 4), metavar=("HEADS", "GROUPS"))
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths: a smoke test")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--patches", type=int, help="patches of a call of the vision tower")
    parser.add_argument("--no-dense", action="store_true")
    parser.add_argument("--dense-all", type=int, default=1 << 18)
    # What the cases of `bench/attend.py` ask for beside these.
    parser.set_defaults(ways=None)
    options = parser.parse_args(argv)
    if options.quick:
        options.repeats, options.warmup = 3, 1
    if options.backends is None:
        options.backends = ["triton"] if torch.device(options.device).type == "cuda" else ["reference"]
    run_steps(steps(), options)


if __name__ == "__main__":
    main()
