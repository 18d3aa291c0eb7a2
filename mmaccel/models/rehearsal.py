"""Times short sessions of a model, to find costs that `costs.py` cannot predict from kernel rates: host time within and
between passes, and the extra time of the first questions.

A session runs some of the model's own layers with random weights. The seconds that sessions take beyond their prediction, at
two numbers of layers and two lengths of video, give a `MeasuredOverhead`, which is kept on disk for this device, model and
frame size.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core import costs, rates
from mmaccel.core.attach import accelerate, adapter_for
from mmaccel.core.errors import MmaccelError, MmaccelWarning, ModelError
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import policy
from mmaccel.core.streams.session import VideoSession
from mmaccel.models import loading, shapes, stock
from mmaccel.models.processor import Processor, processor_specs

DEPTHS = 4, 12
"""Decoder layers of the two models; of a model with fewer, half and all."""
UNITS, TOKENS = (84, 168, 320), 62_000
"""Units of the shorter video and of the longer one at least, more than a preset's window, and at most; tokens of the longer
one, which go through the layers in one pass where nothing says otherwise."""
QUESTIONS, FIRST, ANSWER = 5, 3, 16
"""Questions of a session, those that may still make something, and tokens of each answer."""
LIMIT_S = 30.0
"""Seconds that sessions may take by what is predicted of them without their own surplus: half of what they do take on a
GPU. Those beyond it are not run."""
SLOW = 3.0
"""A session that reads the video in so many times what is predicted is run again: something was compiled, or in its way."""
RATE = 0.5
QUESTION = "What happens in the video?"
"""Short where a tokenizer knows no word of it, too: more than 64 rows go another way."""


@dataclass(frozen=True)
class RunTimings:
    """Measured times of a run.

    read_s       seconds to read the video; in a `generate` call, seconds up to the first token
    asked        for each question (seconds to the first token, seconds per later token)
    step_tokens  mean number of tokens that one decode step of the model yields
    """

    read_s: float
    asked: tuple[tuple[float, float], ...]
    step_tokens: float


_Cases = dict[tuple[int, int], tuple[RunTimings, costs.PredictedCost]]
"""By layers and units, what a session took and what is predicted of it."""


def run_and_time(
    model: Any,
    processor: Any,
    recipe: Recipe,
    film: Tensor,
    work: costs.Workload,
    question: str = QUESTION,
    fps: float = RATE,
    clock: Callable[[], float] = time.perf_counter,
) -> RunTimings:
    """Read the frames `film` and answer ``work.questions`` times, each in ``work.answer`` tokens; return the measured times.
    It calls `generate` or opens a session, whichever `costs.predict_cost` assumes."""
    if not costs.needs_video_session(recipe, work):
        inputs = processor.chat(question, videos=film, fps=fps, device=model.device)
        with accelerate(model, recipe) as fast, torch.no_grad():
            began = clock(), time.perf_counter()
            model.generate(**inputs, max_new_tokens=work.answer, do_sample=False)
            read, rest = _split(began, clock, fast.report().ttft_s)
            draft = fast.report().draft
        asked = [(0.0, rest / work.answer)]
    else:
        with VideoSession(model, processor, recipe) as stream:
            begin = clock()
            (stream.watch if work.live else stream.ingest)(film, fps=fps)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            read, asked = clock() - begin, list[tuple[float, float]]()
            for _ in range(work.questions):
                began = clock(), time.perf_counter()
                answer = stream.ask(question, work.answer)
                if len(answer.ids) != work.answer:
                    raise ModelError(f"an answer ended after {len(answer.ids)} tokens of {work.answer}.")
                words, rest = _split(began, clock, answer.ttft_s)
                asked.append((words, rest / work.answer))
            draft = stream.report().draft
    told = (work.answer - 1) / draft["target_steps"] if draft["rounds"] else 1.0
    return RunTimings(read, tuple(asked), told)


def _split(
    began: tuple[float, float], clock: Callable[[], float], first: float | None
) -> tuple[float, float]:
    """Seconds by `clock` to the first token, which is reported by the wall's, and from there on."""
    taken, wall = clock() - began[0], time.perf_counter() - began[1]
    first = min(1.0, (first or 0.0) / max(wall, 1e-9)) * taken
    return first, taken - first


def add_measured_overheads(
    device: rates.DeviceRates,
    place: torch.device,
    sizes: rates.ModelSizes,
    model: str | Path | nn.Module,
    size: tuple[int, int],
    recipes: Sequence[Recipe],
    work: costs.Workload,
    *,
    processor: Any = None,
    store: Any = None,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda text: None,
) -> rates.DeviceRates:
    """Return `device` with each recipe's `MeasuredOverhead` for `work`: the seconds that short sessions take beyond their
    prediction. They are read from `store`, or measured now and stored.

    `model`: a name or model, as `recommend.model_sizes_of` takes it, for frames of `size` (height, width). A recipe with a
    draft model gets the overhead of the same recipe without it. What would take more than `LIMIT_S`, or more memory than is
    free, is not measured.
    """
    kept = rates.OverheadFile(place, sizes, f"sessions of {DEPTHS} layers", store)
    found, missing = dict(device.sessions), dict[str, Recipe]()
    for recipe in recipes:
        way = costs.overhead_key(recipe, work)
        if (one := kept.get(way)) is not None:
            found[way] = one
        else:
            if "model" in recipe.draft.needs:
                recipe = replace(recipe, draft=policy("draft", "off"))
            missing.setdefault(way, recipe)
    plan = _Plan.of(sizes, work)
    missing = {} if plan is None else plan.affordable(device, place, missing)
    if plan is None or not missing:
        return replace(device, sessions=found)
    say(f"measuring {len(missing)} kinds of sessions on {device.name}, once for this model and frame size")
    began, done = time.perf_counter(), 0
    taken: dict[str, _Cases] = {way: {} for way in missing}
    try:
        with _quiet(place):
            draw = torch.Generator().manual_seed(0)
            count = plan.lengths[1] * sizes.frames_per_unit
            film = torch.randint(256, (count, 3, *size), generator=draw, dtype=torch.uint8)
            for layers in plan.depths:
                built = _reduced(model, layers, sizes.dtype, place, processor)
                for way, recipe in missing.items():
                    taken[way] |= plan.cases(built, replace(device, sessions={}), recipe, layers, film, clock)
                    done += 1
                    say(f"{done} of {2 * len(missing)} measured, {time.perf_counter() - began:.0f} s")
                del built
                _tidy(place)
    except (MmaccelError, torch.OutOfMemoryError) as error:
        say(f"sessions are not measured: {str(error).splitlines()[0]}")
        return replace(device, sessions=found)
    for way, recipe in missing.items():
        footprint = recipe.kv.footprint(sizes.tokens, sizes.frames_per_unit)
        window = -(-(footprint.window or 0) // sizes.frames_per_unit)
        window = window if window < plan.lengths[0] else 0
        found[way] = _surplus(taken[way], footprint.shown is None, window, place.type == "cuda")
        kept.put(way, found[way])
    return replace(device, sessions=found)


@contextmanager
def _quiet(place: torch.device) -> Iterator[None]:
    """The caller's random numbers stay as they are, and nothing warns of a model of a few layers."""
    with torch.random.fork_rng([place] if place.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore", MmaccelWarning)
        try:
            yield
        finally:
            _tidy(place)


def _tidy(place: torch.device) -> None:
    """A session is to begin as in a process whose memory is not pinned yet."""
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()
        empty: Any = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        empty()
        torch.cuda.synchronize(place)


@dataclass(frozen=True)
class _Plan:
    """Which sessions are run: `depths` times `lengths`, in units."""

    sizes: rates.ModelSizes
    work: costs.Workload
    depths: tuple[int, int]
    lengths: tuple[int, int]

    @classmethod
    def of(cls, sizes: rates.ModelSizes, work: costs.Workload) -> _Plan | None:
        """None where the model has a single layer, or no positions for a video longer than a window."""
        least, longer, most = UNITS
        depths = DEPTHS if sizes.layers > DEPTHS[1] else (max(1, sizes.layers // 2), sizes.layers)
        long = min(max(longer, TOKENS // sizes.tokens), most)
        if depths[0] == depths[1] or long * sizes.tokens + 1024 > sizes.limit:
            return None
        return cls(sizes, work, depths, (max(least, 3 * long // 10), long))

    def _case(self, recipe: Recipe, layers: int, units: int) -> tuple[rates.ModelSizes, costs.Workload]:
        """The sizes of the reduced model, and the work of one session."""
        part = self.sizes.layer_weights * layers // self.sizes.layers
        weights = self.sizes.weights - self.sizes.layer_weights + part
        sizes = replace(self.sizes, layers=layers, layer_weights=part, weights=weights)
        # A call answers one question.
        asked = QUESTIONS if costs.needs_video_session(recipe, self.work) else 1
        work = replace(self.work, frames=units * sizes.frames_per_unit, questions=asked, answer=ANSWER)
        return sizes, replace(work, step_tokens=None)

    def affordable(
        self, device: rates.DeviceRates, place: torch.device, recipes: Mapping[str, Recipe]
    ) -> dict[str, Recipe]:
        """Those, in turn, whose sessions find memory and end in time, as far as that is predicted."""
        free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else device.memory
        taken, found = 0.0, dict[str, Recipe]()
        for way, recipe in recipes.items():
            cases = [self._case(recipe, layers, units) for layers in self.depths for units in self.lengths]
            told = [costs.predict_cost(recipe, *case, device) for case in cases]
            more = sum(one.total_s for one in told)
            if taken + more <= LIMIT_S and all(one.device_bytes <= 0.9 * free for one in told):
                taken, found[way] = taken + more, recipe
        return found

    def cases(
        self,
        built: tuple[Any, Any],
        device: rates.DeviceRates,
        recipe: Recipe,
        layers: int,
        film: Tensor,
        clock: Callable[[], float],
    ) -> _Cases:
        """Sessions of a recipe on the model of so many layers, beside what `device` says of them."""
        found: _Cases = {}
        for units in self.lengths:
            sizes, work = self._case(recipe, layers, units)
            frames = film[: work.frames]
            if built[0].device.type == "cuda" and not found:  # what compiles is not measured
                run_and_time(*built, recipe, frames, replace(work, questions=min(2, work.questions)))
            _tidy(built[0].device)
            taken = run_and_time(*built, recipe, frames, work, clock=clock)
            told = costs.predict_cost(recipe, sizes, replace(work, step_tokens=taken.step_tokens), device)
            if taken.read_s > SLOW * told.read_s:
                _tidy(built[0].device)
                again = run_and_time(*built, recipe, frames, work, clock=clock)
                taken = min(taken, again, key=lambda one: one.read_s)
            found[layers, units] = taken, told
        return found


def _surplus(found: _Cases, grows: bool, window: int, captures: bool) -> rates.MeasuredOverhead:
    """`grows`: whether a question and a token see all of the video; `window`: units before any leaves."""
    read, question, step = (dict[tuple[int, int], float]() for _ in range(3))
    first = [dict[tuple[int, int], float]() for _ in range(FIRST)]
    for at, (taken, told) in found.items():
        later = taken.asked[FIRST:]
        if not later:  # of a call: what captures its steps on CUDA comes once, however long the answer is
            read[at] = taken.read_s - told.read_s - told.question_s
            more = taken.asked[0][1] - told.token_s
            question[at], step[at] = 0.0, 0.0 if captures else more * taken.step_tokens
            first[0][at] = told.work.answer * more * captures
            continue
        words, token = (statistics.median(some) for some in zip(*later, strict=True))
        read[at] = taken.read_s - told.read_s
        question[at], step[at] = words - told.question_s, (token - told.token_s) * taken.step_tokens
        for number, (one, each) in enumerate(taken.asked[:FIRST]):
            first[number][at] = one - words + told.work.answer * (each - token)
    once = [rates.fit_cost_plane(one, grows=False)[::3] for one in first if one]
    return rates.MeasuredOverhead(
        read=rates.fit_cost_plane(read, least=window, pairs=not window),
        question=rates.fit_cost_plane(question, grows),
        step=rates.fit_cost_plane(step, grows),
        first=tuple((base, layer) for base, layer in once),
    )


def _reduced(
    model: str | Path | nn.Module, layers: int, dtype: torch.dtype, place: torch.device, processor: Any
) -> tuple[Any, Any]:
    """The model with so many layers and random weights, and a processor of its family."""
    if str(model) in shapes.SHAPES:
        config = shapes.model_config(str(model), layers)
    else:
        given: Any = model if isinstance(model, nn.Module) else loading.config_only_view(model).model
        config = copy.deepcopy(given.config)
        config._name_or_path = ""  # what lies in its folder, such as a table of heads, is of all layers
        text: Any = config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        if processor is None:
            processor = stock.load_processor(model)  # type: ignore[arg-type]
    built: Any = shapes.build_from_config(config, dtype, place)
    family: Any = adapter_for(built)
    if family.recurrent_layers(built):
        raise ModelError(f"models of the family {family.name!r} have recurrent layers.")
    if processor is None:
        processor = _processor(built.config)
    built.config.video_token_id, built.config.image_token_id = (
        processor.video_token_id,
        processor.image_token_id,
    )
    # No answer ends before its time.
    built.generation_config.eos_token_id = built.config.get_text_config().eos_token_id = None
    return built, processor


def _processor(config: Any) -> Processor:
    """A processor for a shape, which comes without one: a token a byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (style := processor_specs().get(config.model_type)) is None:
        raise ModelError(f"a shape of model type {config.model_type!r} has no processor; give a folder.")
    marks = ("<|vision_start|>", "<|vision_end|>") if style.type_ids else ("", "")
    special = dict.fromkeys([style.image_token, style.video_token, *filter(None, marks), "<|im_start|>"])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {token: number for number, token in enumerate([*special, *letters])}
    inner = Tokenizer(models.BPE(vocab=table, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    template = (
        "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + ' ' }}"
        "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
        "{%- for piece in message['content'] %}{%- if piece['type'] == 'video' %}{{- '" + style.video_token.join(marks)
        + "' }}{%- elif piece['type'] == 'text' %}{{- piece['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant ' }}{%- endif %}"
    )  # fmt: skip
    told = {"vision_config": config.vision_config.to_dict(), **_select(config)}
    words = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template)
    return Processor(config.model_type, words, config=told)


def _select(config: Any) -> dict[str, Any]:
    names = "vision_feature_select_strategy", "vision_aspect_ratio"
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
