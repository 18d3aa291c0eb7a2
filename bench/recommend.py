"""What `mmaccel recommend` predicts beside what is measured: seconds of a film with its questions, and the most memory.

    python bench/recommend.py --device cuda --out bench/results/recommend_h100_202611.jsonl
    python bench/recommend.py --device cpu --out rows.jsonl        # the tiny models, without a cap; CPU seconds

Twelve settings, on a GPU fitted to nothing: a model's shape (random weights), minutes at half a frame a second, questions,
and a preset, on a device capped at `--memory` GB. The short sessions from which `mmaccel recommend` predicts too are run
before (`--kernels`: none is). Each setting runs once with two questions, which compiles, then is measured: as in a process
that has compiled, whose host memory is not pinned yet. A row has both figures, the device's rates, `time_error` and
`peak_error` (predicted over measured, less 1), and whether they are within 25% and 10%.
Tokens that a step of the target gave are the run's own, which no cost model can know.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))
from scenes import QUESTION
from steps import Step, parser_of, run_steps
from timing import Log
from watching import noise

import mmaccel
from mmaccel.backends.select import CostFile
from mmaccel.core import costs
from mmaccel.core.rates import DeviceRates, MeasuredOverhead
from mmaccel.core.recipe import Recipe
from mmaccel.models import rehearsal, shapes
from mmaccel.models.processor import Processor
from mmaccel.models.recommend import SIZE, device_rates_of, model_sizes_of
from mmaccel.models.rehearsal import add_measured_overheads
from mmaccel_lab.tiny.tokenizer import build_tokenizer
from mmaccel_lab.world import vocabulary

TOKENS, RATE = 32, 0.5
TIME, PEAK = 0.25, 0.10
OV, SMALL_OV, QWEN = "llava-onevision-7b", "llava-onevision-0.5b", "qwen2.5-vl-7b"
SETTINGS: tuple[tuple[str, float, int, str], ...] = (
    (OV, 3, 1, "exact"), (OV, 12, 1, "exact"), (OV, 8, 5, "exact"), (OV, 25, 1, "long-video"), (OV, 15, 6, "long-video"),
    (OV, 20, 4, "film-many-questions"), (OV, 60, 20, "film-many-questions"), (OV, 12, 3, "stream"),
    (OV, 6, 1, "captions"), (OV, 15, 4, "everything"), (QWEN, 20, 1, "exact"), (QWEN, 45, 8, "film-many-questions"),
)  # fmt: skip
TINY = {OV: "tiny-ov", SMALL_OV: "tiny-ov-draft", QWEN: "tiny-qwen"}
HELD: dict[str, tuple[Any, Any]] = {}


class Held(TorchDispatchMode):
    """Counts the bytes of the weights of `models`, and of the tensors made while inside that are still there.

    most  the largest sum there was
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.now = 0
        for model in models:
            for one in (*model.parameters(), *model.buffers()):
                self._count(one.untyped_storage())
        self.most = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor):
                self._count(one.untyped_storage())
        self.most = max(self.most, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


FOLDER = Path(tempfile.mkdtemp())
STORE = CostFile(FOLDER / "rates.json", DeviceRates.from_dict)
SESSIONS = CostFile(FOLDER / "sessions.json", MeasuredOverhead.from_dict)


def cpu_seconds(work: Any, device: torch.device) -> float:
    """The median CPU time of five runs after two, which other programs on the machine do not lengthen."""
    taken = []
    for _ in range(7):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return statistics.median(taken[2:])


def build(shape: str, device: str) -> tuple[Any, Any]:
    """A model of a shape and a processor of its family, kept until another is asked for; on a CPU the tiny one."""
    if shape not in HELD:
        if shape != SMALL_OV:
            HELD.clear()
            gc.collect()
        name = TINY[shape]
        stock = mmaccel.load_processor(name)
        if device == "cpu":
            model: Any = mmaccel.load_model(name, dtype=torch.float32)
            processor = stock
        else:
            model = shapes.build_model(shape, device=device)
            kind, settings, extra = model.config.model_type, stock.video.to_dict(), dict(stock.extra)
            if kind == "llava_onevision":
                settings["size"], extra["num_image_tokens"] = {"height": 384, "width": 384}, 729
            else:
                settings |= {"temporal_patch_size": 2, "patch_size": 14, "merge_size": 2}
                settings["size"] = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
            words = build_tokenizer(vocabulary(), kind)
            told = {
                "image": settings,
                "video": settings,
                "extra": extra,
                "config": {"vision_config": model.config.vision_config.to_dict()},
            }
            processor = Processor(kind, words, **told, chat_template=stock.chat_template)
            model.config.video_token_id = processor.video_token_id
            model.config.image_token_id = processor.image_token_id
        model.generation_config.eos_token_id = -1
        HELD[shape] = model, processor
    return HELD[shape]


Parts = dict[str, float]
"""Seconds measured of a session: `read_s`, medians of its questions, `question_s` and `token_s`, and of all of the first,
`first_s`; of a call its first token's, the video read in them, as `read_s`."""


def run(
    model: Any, processor: Any, recipe: Recipe, film: torch.Tensor, work: costs.Workload
) -> tuple[float, Parts]:
    """The film and all its questions, as `predict_cost` takes them; gives the tokens that a step of the target gave."""
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    taken = rehearsal.run_and_time(model, processor, recipe, film, work, QUESTION, RATE, clock)
    question, token = (statistics.median(some) for some in zip(*taken.asked, strict=True))
    if not costs.needs_video_session(recipe, work):
        return taken.step_tokens, {"read_s": taken.read_s, "token_s": token}
    first = taken.asked[0][0] + work.answer * taken.asked[0][1]
    parts = {"read_s": taken.read_s, "question_s": question, "token_s": token, "first_s": first}
    return taken.step_tokens, parts


def setting(options: argparse.Namespace, log: Log, told: tuple[str, float, int, str]) -> None:
    """Measure one setting beside its prediction."""
    shape, minutes, questions, preset = told
    model, processor = build(shape, options.device)
    recipe, draft = Recipe.load(preset), None
    if hasattr(recipe.draft, "model"):
        draft, reader = build(SMALL_OV, options.device)
        draft = draft.to(next(model.parameters()).dtype)
        recipe = replace(recipe, draft=replace(recipe.draft, model=draft))  # type: ignore[type-var]
    else:
        HELD.pop(SMALL_OV, None)
    size = (112, 112) if options.device == "cpu" else SIZE
    sizes = model_sizes_of(model, size, processor=processor)
    other = None if draft is None else model_sizes_of(draft, size, processor=reader)
    cuda = options.device != "cpu"
    place = torch.device(options.device)
    measured = {} if cuda else {"bench": cpu_seconds, "store": STORE}
    device = device_rates_of(options.device, sizes, **measured)
    memory = int(options.memory * 1e9) if cuda else device.memory
    frames = int(minutes * 60 * RATE / options.shrink)
    asked: dict[str, int] = dict(questions=questions, answer=TOKENS, memory=memory, host=int(1e12))
    work = costs.Workload(frames=frames, live=preset == "stream", **asked)
    if not options.kernels:
        how: dict[str, Any] = {} if cuda else {"clock": time.process_time, "store": SESSIONS}
        how |= {"processor": processor, "say": partial(print, flush=True)}
        device = add_measured_overheads(device, place, sizes, model, size, [recipe], work, **how)
    if cuda:
        torch.cuda.set_per_process_memory_fraction(
            memory / torch.cuda.get_device_properties(place).total_memory
        )
    film = noise(max(size), frames, torch.device("cpu"))[:, :, : size[0], : size[1]].contiguous()
    if cuda or not options.shrink > 8:
        run(model, processor, recipe, film, replace(work, questions=min(2, questions)))
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # what the session before has pinned
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    clock = time.perf_counter if cuda else time.process_time
    began = clock()
    gave, parts = run(model, processor, recipe, film, work)
    if cuda:
        torch.cuda.synchronize()
    seconds = clock() - began
    if cuda:
        peak = torch.cuda.max_memory_allocated()
    else:  # counted in a run of its own, which counting slows down
        held = Held([model] if draft is None else [model, draft])
        held._known.add(film.untyped_storage()._cdata)
        with held:
            run(model, processor, recipe, film, work)
        peak = held.most
    cost = costs.predict_cost(recipe, sizes, replace(work, step_tokens=gave), device, other)
    errors = cost.total_s / seconds - 1, cost.device_bytes / peak - 1
    log.row(
        case="recommend", model=TINY[shape] if not cuda else shape, frames=frames, questions=questions, preset=preset,
        memory=memory, told=gave, seconds=seconds, predicted_s=cost.total_s, read_s=cost.read_s, question_s=cost.question_s,
        token_s=cost.token_s, once_s=cost.once_s,
        peak_bytes=peak, predicted_bytes=cost.device_bytes, time_error=errors[0], peak_error=errors[1],
        time_reached=abs(errors[0]) <= TIME, peak_reached=abs(errors[1]) <= PEAK, measured=parts, rates=asdict(device),
    )  # fmt: skip
    print(
        f"{shape:20} {frames:5} frames, {questions:2} questions, {preset:20} {seconds:7.2f} s, predicted "
        f"{cost.total_s:7.2f} ({errors[0]:+.0%}); {peak / 1e9:6.3f} GB, predicted {cost.device_bytes / 1e9:6.3f} "
        f"({errors[1]:+.0%})",
        flush=True,
    )
    of = {**asdict(cost), "first_s": cost.question_and_answer_s + sum(cost.once_s[:1])}
    told = {name: f"{parts[name]:.4f}, {of[name]:.4f}" for name in parts}
    print("   measured, predicted:", "; ".join(f"{name} {both}" for name, both in told.items()), flush=True)


def main() -> None:
    """The command."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--memory", type=float, default=64.0, help="GB of the device that may be used; on a CPU no cap"
    )
    parser.add_argument("--kernels", action="store_true", help="predict from kernels alone, without sessions")
    parser.add_argument("--shrink", type=int, default=1, help="divide the minutes: a smoke test")
    options = parser.parse_args()
    steps = []
    for told in SETTINGS:
        name = f"{told[3]}:{told[0]}:{told[1]:g}:{told[2]}"
        steps.append(Step(name, 40.0, lambda given, log, told=told: setting(given, log, told)))
    run_steps(steps, options)


if __name__ == "__main__":
    main()
