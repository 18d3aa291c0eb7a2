"""Other families beside Qwen2.5-VL-7B at published shapes with random weights, on one GPU: prefill, decode, questions.

    python bench/families.py --out bench/results/families_h100_202611.jsonl
    python bench/families.py --out rows.jsonl --device cpu --shrink 256      # does it run at all?

Steps of each shape, Qwen2.5-VL-7B's first:

prefill   the language model reads 131,072 embeddings in chunks, grid and vertical-slash heads mixed as in `prefill.py`
decode    a step of one token after 25,088 columns; `captured`: it is one CUDA graph, which nothing kept from being captured
question  to the first token of a question on a planted stream under mosaic, which recalls 64 units

`ratio` is a shape's seconds over `scaled_s`, Qwen2.5-VL-7B's seconds times what the shape has to do more (`work`). Prefill:
products, 2 for each weight of the layers and token, 4 for each number of a head and pair in listed blocks. Decode: bytes of
weights, columns and running states. A question: bytes read as by a step that sees what it recalls, and what crosses the wire
at the rate that Qwen2.5-VL-7B's questions had there.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from asking import some_questions
from pair import tell, timed_step
from prefill import mixed_heads, timed_prefill
from replayed import cache_bytes
from scenes import Scenes
from steps import Step, parser_of, run_steps
from timing import Log, read_rows

import mmaccel
from mmaccel.cli import answer
from mmaccel.core.attach import adapter_for
from mmaccel.core.recipe import Recipe
from mmaccel.models import shapes
from mmaccel.models.letters import CharProcessor
from mmaccel.models.tiny import WORDS, TinyModels

BASE = "qwen2.5-vl-7b"
OTHERS = ("qwen3-vl-8b", "qwen3.5-9b", "internvl3.5-8b", "glm-4.1v-9b")
PREFILL, COLUMNS = 1 << 17, 25_088
UNITS, WINDOW, RECALLED, LOCAL, KINDS = 440, 40, 64, 8, 24
"""Of the stream, its memory and its scenes."""


class Sized(CharProcessor):
    """A processor whose units have as many tokens as at the published sizes: 196, or the 256 of InternVL."""

    def _made(self, frames: Tensor) -> tuple[list[int], dict[str, Tensor]]:
        config, vision = self.config, self.config.vision_config
        if config.model_type == "internvl":
            unit = [7, 8, *[config.image_token_id] * 256]
            return unit * len(frames), {"pixel_values": torch.zeros(len(frames), 3, 448, 448)}
        units = len(frames) // vision.temporal_patch_size
        row = 3 * vision.temporal_patch_size * vision.patch_size**2
        made = {"video_grid_thw": torch.tensor([[units, 28, 28]])}
        made["pixel_values_videos"] = torch.zeros(units * 28 * 28, row)
        if config.model_type == "glm4v":
            unit = [config.image_start_token_id, *[config.image_token_id] * 196, config.image_end_token_id]
            return unit * units, made
        return self.family.video_ids(config, [config.video_token_id] * 196, units), made


class Built:
    """The model of the shape at hand."""

    def __init__(self) -> None:
        self.name, self.model, self.rate = "", torch.nn.Module(), 0.0

    def of(self, name: str, options: argparse.Namespace) -> Any:
        if name == self.name:
            return self.model
        self.name, self.model = "", torch.nn.Module()
        gc.collect()
        cuda = torch.device(options.device).type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
        self.rate = self.rate or answer.memory_bandwidth(options.device, 1 << (31 if cuda else 24))
        if options.shrink > 1:
            outline = shapes.build_model(name, 1, 1, device="meta")
            self.model = TinyModels(adapter_for(outline), type(outline)).model().to(options.device)
        else:
            self.model = shapes.build_model(name, vision_layers=1, device=options.device)
        self.name = name
        return self.model


BUILT = Built()


def written(log: Log, case: str, name: str, seconds: float, work: float, **row: Any) -> None:
    """The row of a shape, beside that of Qwen2.5-VL-7B in the same file."""
    rows = [one for one in read_rows([log.path]) if (one.get("case"), one.get("shape")) == (case, BASE)]
    if rows:
        scaled = rows[-1]["seconds"] * work / rows[-1]["work"]
        row |= {"scaled_s": scaled, "ratio": seconds / scaled}
    tell(log, case=case, shape=name, seconds=seconds, work=work, **row)


def prefill(name: str, options: argparse.Namespace, log: Log) -> None:
    model, tokens = BUILT.of(name, options), max(512, PREFILL // options.shrink)
    family: Any = adapter_for(model)
    shape = family.geometry(model)
    heads = mixed_heads(shape.heads, 64, min(1.0, tokens / PREFILL))
    table = dict.fromkeys(range(shape.layers), heads)
    recipe = Recipe.load(sparse={"name": "per_head", "table": table}, chunk=options.chunk or None)
    row = timed_prefill(model, tokens, lambda _: recipe, options)
    weights = sum(p.numel() for p in family.layers(model).parameters())
    pairs = row["kept"] * tokens * (tokens + 1) / 2 * shape.layers * shape.heads
    work = 2.0 * weights * tokens + 4 * shape.head_dim * pairs
    written(log, "prefill", name, row["median_s"], work, tokens=tokens, chunk=options.chunk, **row)


def decode(name: str, options: argparse.Namespace, log: Log) -> None:
    model, columns = BUILT.of(name, options), max(64, COLUMNS // options.shrink)
    bench: Any = SimpleNamespace(rate=BUILT.rate, given=options)
    (row,) = timed_step(bench, model, columns, (1,))
    written(log, "decode", name, row["median_s"], row["floor_s"] * BUILT.rate, **row)


def question(name: str, options: argparse.Namespace, log: Log) -> None:
    model = BUILT.of(name, options)
    family: Any = adapter_for(model)
    small, pace = options.shrink > 1, family.frames_per_unit(model)
    units, kinds = (60, 3) if small else (UNITS, KINDS)
    window, recalled, local = (max(2, n // options.shrink) for n in (WINDOW, RECALLED, LOCAL))
    kv: dict[str, Any] = {"window": window * pace, "frames": recalled * pace, "local": local * pace}
    kv |= {"index": {"name": "clusters", "init": 16}} if small else {}
    model.generation_config.eos_token_id = -1
    processor = (CharProcessor if small else Sized)(family, model.config, WORDS)
    scenes = Scenes(model, units, kinds)
    with mmaccel.VideoSession(model, processor, None, kv={"name": "mosaic", **kv}) as session:
        scenes.open(session, (392, 392))
        sizes: Any = SimpleNamespace(kinds=kinds)
        row = some_questions(session, scenes, sizes, options.questions, {})
        unit = session._live.info.tokens_per_unit  # type: ignore[union-attr]
    if not row["bytes_in"]:
        raise RuntimeError("the questions recalled nothing from the host.")
    row |= {"model": name, "units": units, "unit": unit, "recalled": recalled}
    read = answer.min_decode_step_s(model, cache_bytes(model, unit * (recalled + local)), BUILT.rate)
    first = [one for one in read_rows([log.path]) if one.get("case") == "question"] or [row]
    wire = first[0]["seconds_in"] / first[0]["bytes_in"]
    written(log, "question", name, row["p50_s"], read + row["bytes_in"] * wire, read_s=read, **row)


def steps() -> list[Step]:
    parts = {"prefill": (prefill, 60.0), "decode": (decode, 15.0), "question": (question, 45.0)}

    def step(name: str, part: str) -> Step:
        run, seconds = parts[part]
        return Step(f"{part}:{name}", seconds, lambda options, log: run(name, options, log))

    return [step(name, part) for name in (BASE, *OTHERS) for part in parts]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--questions", type=int, default=15)
    parser.add_argument("--chunk", type=int, default=1 << 15, help="tokens of a piece of a prefill; 0: all")
    parser.add_argument(
        "--shrink", type=int, default=1, help="tiny models, and all lengths divided: a smoke test"
    )
    run_steps(steps(), parser.parse_args(argv))


if __name__ == "__main__":
    main()
