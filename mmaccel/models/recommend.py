"""Recommends a preset for a video and its questions, from predicted costs on a device (`core/costs.py`).

No weights are loaded: sizes are counted on a model on the meta device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmaccel.core import costs, rates
from mmaccel.core.adapter import home_device
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError
from mmaccel.core.layout import PositionIds
from mmaccel.core.memory.kv import Stream, StreamPass
from mmaccel.core.recipe import MAIN_PRESETS, Recipe, stream_policy
from mmaccel.core.registry import policy
from mmaccel.models import loading, shapes, stock
from mmaccel.models.prompt_layout import max_positions
from mmaccel.models.stream import StreamForwardPasses

LOSSLESS = ("exact", "captions")
"""Presets that say what the plain model says."""
SIZE = (252, 448)
"""Height and width of frames unless told otherwise: a film's at half the lines of a television picture's 504."""
FEW = "llava-onevision-0.5b"
"""The shape of which some layers are run as a session's captured steps run them."""
MARGIN = 1.1
"""A lossless preset is taken where it takes no longer than so many times the shortest."""


@dataclass(frozen=True)
class Recommendation:
    """The recommended preset: its `name` (None: none fits), `why` in a sentence, and the predicted `costs` of each preset.

    lacks  preset -> (device bytes, host bytes) that it needs beyond what there is; (0, 0) if it fits
    unfit  preset -> why it cannot serve this work at all
    """

    name: str | None
    why: str
    costs: dict[str, costs.PredictedCost]
    lacks: dict[str, tuple[int, int]]
    unfit: dict[str, str]


def model_sizes_of(
    model: str | Path | nn.Module,
    size: tuple[int, int] = SIZE,
    dtype: torch.dtype = torch.bfloat16,
    processor: Any = None,
) -> rates.ModelSizes:
    """Return the sizes of a model that costs depend on, for frames of `size` (height, width). `model`: a name in `shapes`, a
    saved model (only its config is read), or a loaded model with its `processor`. Raises `ModelError` as these loads do."""
    if isinstance(model, nn.Module):
        built: Any = model
    else:
        from transformers import AutoModelForImageTextToText

        known = str(model) in shapes.SHAPES
        config = shapes.model_config(str(model)) if known else loading.config_only_view(model).model.config
        processor = None if known else stock.load_processor(model)
        with torch.device("meta"):
            built = AutoModelForImageTextToText.from_config(config)
    family: Any = adapter_for(built)
    text, frames_per_unit, shape = (
        family.text_model(built),
        family.frames_per_unit(built),
        family.geometry(built),
    )
    kind = next(built.parameters()).dtype if isinstance(model, nn.Module) else dtype
    layers, head = family.layers(built), built.get_output_embeddings().weight
    weights = sum(p.numel() for p in built.parameters())
    inside = {id(p): p.numel() for p in [*text.parameters(), head]}
    vision: Any = built.config.vision_config
    depth = getattr(vision, "num_hidden_layers", None) or vision.depth
    # Qwen2-VL calls the output's width hidden_size.
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    wide = getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio)
    if processor is None:
        patches, tokens = shapes.count_patches_and_tokens(str(model), *size)
        side = vision.patch_size
        pixels = patches * 3 * (side[0] if isinstance(side, list | tuple) else side) ** 2 * frames_per_unit
    else:
        once, twice = (torch.zeros(n * frames_per_unit, 3, *size, dtype=torch.uint8) for n in (1, 2))
        made = next(x for name, x in processor.prepare_pixels(once).items() if name.startswith("pixel"))
        patches, pixels = family.count_patches(built, made), made.numel()
        lengths = [_tokens(processor, frames) for frames in (once, twice)]
        tokens = lengths[1] - lengths[0]
    return rates.ModelSizes(
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden=shape.hidden,
        inner=max(p.shape[0] for p in layers[0].parameters() if p.ndim == 2),
        weights=weights,
        layer_weights=sum(p.numel() for p in layers.parameters()),
        head_weights=head.numel(),
        tower_weights=weights - sum(inside.values()),
        tower_layers=depth,
        tower_width=width,
        tower_inner=wide,
        patch_row=_patch_row(family, built, (width, wide), depth, kind.itemsize),
        patches=patches,
        tokens=tokens,
        pixels=pixels,
        frames_per_unit=frames_per_unit,
        limit=max_positions(text.config) or 1 << 15,
        dtype=kind,
    )


def _patch_row(family: Any, model: Any, vision: tuple[int, int], depth: int, itemsize: int) -> int:
    """Elements that a patch holds in the tower at most: states and the gate; queries and keys where they are turned, in
    float32; the states of all layers, in releases of transformers that keep them to choose from."""
    width, wide = vision
    row = 4 * width + 2 * wide
    if family.window_attention_tower(model) is not None:
        row = max(row, (8 + 16 // itemsize) * width)
    features = inspect.signature(family.multimodal(model).get_video_features).parameters
    keeps = hasattr(model.config, "vision_feature_layer") and "output_hidden_states" in features
    return int(row + keeps * (depth + 1) * width)


def _tokens(processor: Any, frames: torch.Tensor) -> int:
    made = processor(processor.video_token, videos=[frames], add_special_tokens=False)
    return int(made["input_ids"].shape[1])


def device_rates_of(name: str, sizes: rates.ModelSizes, **how: Any) -> rates.DeviceRates:
    """Return the `DeviceRates` of `name`: known ones if it names a GPU model; those of a device of this machine are measured
    now, with the options `how`. Raises `ModelError` for any other name."""
    if name in rates.DEVICES:
        # Their pairs are of heads of 128.
        known = rates.DEVICES[name]
        return replace(known, attend=known.attend.scale_attention(sizes.head_dim / 128))
    try:
        place = loading.check_device(name, "--device")
    except ModelError as error:
        raise ModelError(f"{error} Devices known by name are {', '.join(rates.DEVICES)}.") from error
    # Weights are drawn, and those of a shape by a seed: the caller's random numbers stay as they are.
    with torch.random.fork_rng([place] if place.type == "cuda" else []):
        return _measured(place, sizes, **how)


def _measured(place: torch.device, sizes: rates.ModelSizes, **how: Any) -> rates.DeviceRates:
    from transformers import Qwen2Config, Qwen2Model

    small: dict[int, Any] = {}
    for count in rates.STEP_LAYERS:
        config = Qwen2Config(
            vocab_size=8, hidden_size=64, intermediate_size=64, num_hidden_layers=count, num_attention_heads=2,
            num_key_value_heads=2,
        )  # fmt: skip
        small[count] = Qwen2Model(config).to(place).eval()  # type: ignore[arg-type]
    ids = torch.zeros(1, 1, dtype=torch.long, device=place)
    streams: dict[int, Callable[[], Any]] = {}

    def few(layers: int) -> Any:
        if layers not in streams:
            streams[layers] = _few_rows(shapes.build_model(FEW, layers, 1, sizes.dtype, place))
        return streams[layers]()

    def step(layers: int) -> Any:
        with torch.no_grad():
            return small[layers](ids)

    # Presets that plan each layer by its content do so by grids.
    return rates.measure_device(place, sizes, step, few, policy("sparse", "grid"), **how)


def _few_rows(model: nn.Module) -> Callable[[], Any]:
    """A step of one row of a session that keeps all, after a prompt of one token and a frame of one."""
    family: Any = adapter_for(model)
    passes, line = StreamForwardPasses(model, family), torch.arange(2, device=home_device(model))[None]
    positions = PositionIds.evenly_spaced(line[:, :1], line[:, 1:], 2, 1, 1 << 15)
    told = Stream(tokens_per_unit=1, head=1, frames_per_unit=1, positions=positions, dtype=passes.dtype)
    state = stream_policy(Recipe()).open_stream(told, family.geometry(model), passes.view, passes.device)
    word = passes.embed_tokens(line[0, :1])

    def step(kind: Any = "answer", **more: Any) -> Any:
        length = state.length()
        state.begin_pass(StreamPass(kind=kind, rows=1, **more))
        passes.run_layers(state, word, few=kind == "answer")
        state.end_pass()
        if kind == "answer":
            state.truncate(length)

    step("head")
    step("units", count=1, times=[0.0])
    return step


def recommend(
    sizes: rates.ModelSizes,
    work: costs.Workload,
    device: rates.DeviceRates,
    *,
    lossless: bool = False,
    draft: rates.ModelSizes | None = None,
    presets: Sequence[str] = MAIN_PRESETS,
) -> Recommendation:
    """Choose the fastest preset for `work` among those that fit ``work.memory`` and ``work.host`` bytes; a lossless preset
    is preferred if its time is within a factor `MARGIN` of the fastest.

    draft     sizes of a draft model; without one, presets that need it are unfit
    lossless  consider only presets that give the same tokens as the plain model
    """
    found: dict[str, costs.PredictedCost] = {}
    unfit: dict[str, str] = {}
    lacks: dict[str, tuple[int, int]] = {}
    for name in presets:
        recipe = Recipe.load(name)
        why = _unfit(name, recipe, sizes, work, lossless, draft)
        if why:
            unfit[name] = why
            continue
        own = draft if "model" in recipe.draft.needs else None
        one = found[name] = costs.predict_cost(recipe, sizes, work, device, own)
        room = work.memory if device.cuda else min(work.memory, work.host)
        # A CPU has one memory: what it lacks is counted once.
        lacks[name] = max(0, one.device_bytes - room), device.cuda * max(0, one.host_bytes - work.host)
    fits = [name for name in found if lacks[name] == (0, 0)]
    if not fits:
        return Recommendation(None, _none(lacks), found, lacks, unfit)
    best = min(fits, key=lambda name: found[name].total_s)
    near = [name for name in fits if name in LOSSLESS and found[name].total_s <= MARGIN * found[best].total_s]
    name = min(near, key=lambda one: found[one].total_s) if near else best
    if len(fits) == 1:
        why = "no other fits"
    elif name == best:
        why = "it takes the least time of those that fit"
    else:
        why = f"it says what the plain model says, and takes little longer than {best}"
    return Recommendation(name, f"{why}: {format_seconds(found[name].total_s)} in all.", found, lacks, unfit)


def candidate_recipes(
    sizes: rates.ModelSizes,
    work: costs.Workload,
    *,
    lossless: bool = False,
    draft: rates.ModelSizes | None = None,
    presets: Sequence[str] = MAIN_PRESETS,
) -> list[Recipe]:
    """Return the recipes of `presets` whose costs `recommend` would predict with the same arguments."""
    made = [(name, Recipe.load(name)) for name in presets]
    return [one for name, one in made if not _unfit(name, one, sizes, work, lossless, draft)]


def _unfit(
    name: str,
    recipe: Recipe,
    sizes: rates.ModelSizes,
    work: costs.Workload,
    lossless: bool,
    draft: rates.ModelSizes | None,
) -> str | None:
    """Why a preset cannot serve, whatever the memory."""
    kept = recipe.kv.footprint(sizes.tokens, sizes.frames_per_unit)
    if lossless and name not in LOSSLESS:
        return "it may answer otherwise than the plain model"
    if work.live and kept.shown is None:
        return "a question sees all frames, and a camera has no end"
    if work.live and not recipe.sparse.dense:
        return "its pattern acts on stored videos"
    if "model" in recipe.draft.needs and draft is None:
        return "it takes a draft model; name one by --draft"
    if not work.live and kept.evicts:
        return "it is for live cameras; film-many-questions keeps all of a stored film"
    columns = -(-work.frames // sizes.frames_per_unit) * sizes.tokens + work.words + work.answer
    if (recipe.kv.sequences or kept.shown is None) and columns > sizes.limit:
        return f"the video takes {columns} of the model's {sizes.limit} positions"
    return None


def format_seconds(seconds: float) -> str:
    """Return a time as words: 93 s, 4.2 min, 18.3 h."""
    for unit, size in ("h", 3600), ("min", 60):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _none(lacks: dict[str, tuple[int, int]]) -> str:
    if not lacks:
        return "No preset can serve this."
    name = min(lacks, key=lambda one: sum(lacks[one]))
    return f"Nothing fits; {name} comes nearest: it needs {sum(lacks[name]) / 1e9:.3g} GB more."
