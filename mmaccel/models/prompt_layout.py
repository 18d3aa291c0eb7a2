"""Prompts: arguments of a call by name; how a family's processor makes inputs; modality and frame of each token.

The user's question is found from token ids alone: it is the words of a message with images or videos, without chat markup.
The config names the tokens that end a message (the model ends its answers with them) and those around images and videos.
Each message starts with a few markup tokens that name its role; their number is seen at the end of the prompt, where the
model's own message starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.errors import ModelError
from mmaccel.core.layout import IMAGE, TEXT, VIDEO, PositionIds
from mmaccel.models import deepstack

HEAD = 3
"""Most tokens of markup at the start of a message: its start token, the role, a line break."""


WIDE = 5
"""Characters of a time or a number."""

LAYERS = "mmaccel_layers"
"""The attribute of a config under which it keeps layer -> its number among those of attention; without it all have some."""


@dataclass(frozen=True)
class Grid:
    """The token grid of one image or video: `frames` x `rows` x `columns` tokens in order, then `marks` tokens of no frame.

    apart  whether text, such as a time, stands between the frames
    tiles  (rows, columns) of the high-resolution picture that an image's tiles form. Its tokens are then the `marks`, row by
           row, with a newline token after each row, which has no grid cell. None: no `marks` have a grid cell
    """

    frames: int
    rows: int
    columns: int
    marks: int = 0
    tiles: tuple[int, int] | None = None
    apart: bool = False

    @property
    def token_count(self) -> int:
        """Number of tokens of the image or video, `marks` included."""
        return self.frames * self.rows * self.columns + self.marks


Inputs = Mapping[str, Any]
"""Keyword arguments that a user gives a model: ids, mask, pixels, grids."""
ByFrame = tuple[Tensor, Callable[[Tensor], dict[str, Any]]]

A_TOKEN = "input_ids", "mm_token_type_ids", "token_type_ids", "position_ids"
"""The inputs whose last axis is the tokens of the prompt; `attention_mask` has those of the cache, too."""

Texts = Sequence[str | int]
"""Pieces of a prompt: text, and ids of tokens."""

PIXELS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}
"""The argument in which the pixels of each kind of visual come."""

Made = tuple[dict[str, Any], list[int]]
"""Inputs of a model, and how many tokens each image or video takes."""


@dataclass(frozen=True, kw_only=True)
class VideoBudget:
    """How many frames of a video file to sample by default, and at what size, as the model's own processor does.

    fps          frames to take per second, no frame twice; None: `most` evenly spaced frames whatever the length
    least, most  bounds of the number of frames at that rate; a video with fewer than `least` frames gives all
    multiple     the number of frames is a multiple of this
    factor       frame height and width are multiples of this; None: the processor chooses sizes, the next two are unused
    pixels       minimum and maximum pixels of a frame
    total        maximum pixels of the video, where `multiple` frames count as one; frames are scaled down to fit
    """

    fps: float | None = 2.0
    least: int = 1
    most: int = 4096
    multiple: int = 1
    factor: int | None = None
    pixels: tuple[int, int] = (0, 0)
    total: int = 0

    def frame_count(self, frames: int, rate: float) -> int:
        """Return how many frames to take of a file of `frames` frames at `rate` frames per second (0: unknown)."""
        whole = min(self.most, frames) // self.multiple * self.multiple
        if self.fps is None or not rate:
            return max(whole, 1)
        wanted = min(max(frames / rate * self.fps, self.least, self.multiple), whole, frames)
        return max(int(wanted // self.multiple * self.multiple), 1)

    def frame_size(self, frames: int, height: int, width: int) -> tuple[int, int] | None:
        """Return (height, width) to scale `frames` frames of `height` x `width` pixels to; None: the processor decides."""
        from mmaccel.media.preprocess import smart_resize

        if self.factor is None:
            return None
        least, most = self.pixels
        share = int(self.total / frames * self.multiple)
        return smart_resize(height, width, self.factor, least, max(min(most, share), int(least * 1.05)))


@dataclass(frozen=True, kw_only=True)
class ProcessorSpec:
    """How the processor of one model type makes inputs.

    processor, image, video      transformers' class names, as written in processor files
    image_token, video_token     placeholder tokens in a text
    images, videos               functions that make pixels and count each image's or video's tokens, from: the settings
                                 (`media.preprocess.PixelSettings`), the other entries of processor_config.json, the images
                                 [3, H, W] of each text or the videos [T, 3, H, W], and device and dtype of the pixels
    image_settings               transformers' defaults that a file may omit: fields of `media.preprocess.PixelSettings`
    video_settings               the same for the video processor
    type_ids                     whether the model takes `mm_token_type_ids`
    seconds                      whether it takes `second_per_grid_ts`, the seconds per time step of each video
    budget                       default frames and pixels to take of a video file
    """

    processor: str
    image: str
    video: str
    image_token: str
    video_token: str
    images: Callable[[Any, Mapping[str, Any], list[Any], Mapping[str, Any]], Made]
    videos: Callable[[Any, Mapping[str, Any], list[Any], Mapping[str, Any]], Made]
    image_settings: Mapping[str, Any] = field(default_factory=dict)
    video_settings: Mapping[str, Any] = field(default_factory=dict)
    type_ids: bool = False
    seconds: bool = False
    budget: VideoBudget = VideoBudget()


def format_time(time: float) -> str:
    """Format a time in exactly `WIDE` characters: from 100 to 999.9 s with one decimal, as processors write it; shorter
    times with more decimals, longer ones with none. From 100,000 s on it restarts at 0."""
    time %= 10**WIDE
    text = f"{time:.{max(WIDE - 1 - len(str(int(time))), 0)}f}"
    return (text + ".")[:WIDE]


def bind_args(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of `method` by name: `kwargs`, and the positional `args` bound to their names. Raises
    `TypeError` if they do not fit."""
    given = inspect.signature(method).bind_partial(*args).arguments
    if twice := sorted(given.keys() & kwargs.keys()):
        raise TypeError(f"multiple values for argument {twice[0]!r}")
    return {**given, **kwargs}


def padded_length(kwargs: Mapping[str, Any]) -> int:
    """Return the length of the prompts of a `generate` call, padding included; 0 without `input_ids`."""
    ids = kwargs.get("input_ids")
    return ids.shape[1] if isinstance(ids, Tensor) else 0


def rope_parameters_of(config: Any) -> Mapping[str, Any]:
    """Return the RoPE parameters of a text model's config; those of full attention, if layer types have their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)  # type: ignore[no-any-return]


def max_positions(config: Any) -> int | None:
    """Return the number of positions a text model supports, RoPE scaling included; None if `config` does not say."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    rope = rope_parameters_of(config)
    before = rope.get("original_max_position_embeddings") or most
    return max(most, int(before * (rope.get("factor") or 1)))


def derive_stream_positions(
    family: Any, model: nn.Module, prompts: Sequence[tuple[Any, Tensor, Tensor, int]], alone: bool
) -> PositionIds:
    """Return rotary positions of a video stream of any length, extrapolated from `prompts` with one, two and three units
    (frames): each (inputs, positions of the tokens before the video, of the units, of the first text token after). `alone`:
    no text stands around a unit. Raises `ModelError` where positions do not grow evenly."""
    (inputs, head, unit, text), (*_, second), (_, _, three, third) = prompts
    slope, limit = second - text, max_positions(family.text_model(model).config) or 1 << 15

    def steps(units: int) -> Tensor:
        return family.time_step_positions(model, inputs, units)  # type: ignore[no-any-return]

    if alone:
        made = PositionIds(head, unit, steps, text, slope, limit, family.stream_time_scale(model, inputs))
    else:
        made = PositionIds.evenly_spaced(head, unit, text, slope, limit)
    wanted = three[0] if made.axes == 1 else three
    if third - second != slope or not torch.equal(made.position_range(0, 3), wanted):
        raise ModelError(
            f"{family.name}: the installed transformers gives positions that do not grow evenly, so streams cannot follow."
        )
    return made


def has_sliding_window(config: Any) -> bool:
    """Whether a text model of `config` has sliding-window layers."""
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else bool(getattr(config, "sliding_window", None))


def inputs_after_past(kwargs: Inputs, past: int) -> dict[str, Any]:
    """Return the arguments of a call without their first `past` tokens, and without attention mask."""
    length = kwargs["input_ids"].shape[1]
    new = {name: value for name, value in kwargs.items() if name != "attention_mask"}
    for name in A_TOKEN:
        value = new.get(name)
        if isinstance(value, Tensor) and value.shape[-1] == length:
            new[name] = value[..., past:]
    return new


def remove_padding(inputs: Inputs) -> dict[str, Any]:
    """Return the inputs of one sequence without its padding tokens, and without attention mask."""
    inputs = dict(inputs)
    mask = inputs.pop("attention_mask", None)
    if mask is None or bool(mask.all()):
        return inputs
    ids = inputs["input_ids"]
    keep = mask[0].bool()
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape[-1] == ids.shape[1] and name in A_TOKEN:
            inputs[name] = value[..., keep]
    return inputs


def is_nonempty(value: Any) -> bool:
    """Whether an input is neither None nor an empty list."""
    return value is not None and (isinstance(value, Tensor) or bool(value))


def token_grid_fields(modality: Tensor, queue: Mapping[int, Iterator[Grid]]) -> dict[str, Tensor]:
    """Return segment, frame, grid row and grid column of each token, from its modality [B, S]; -1 where it has none. A video
    and the text between its frames are one segment. Raises `ModelError` if placeholders and grids do not match.

    queue  modality -> the grids of its images or videos, in order of appearance over the batch
    """
    fields = {name: torch.full_like(modality, -1) for name in ("segment", "frame", "row", "column")}
    for b, kinds in enumerate(modality.tolist()):
        begin = segment = frame = 0
        while begin < len(kinds):
            kind = kinds[begin]
            if kind == TEXT:
                stop = next((n for n in range(begin, len(kinds)) if kinds[n] != TEXT), len(kinds))
            else:
                grid = next(queue[kind], None)
                at = None if grid is None else _columns_of(grid, kind, kinds, begin)
                if grid is None or at is None:
                    raise ModelError(
                        f"input_ids has {'image' if kind == IMAGE else 'video'} placeholders that do not match the pixels "
                        "given; build the inputs with the model's processor."
                    )
                stop = at[-1].stop
                columns = torch.cat([torch.arange(one.start, one.stop) for one in at]).to(modality.device)
                inside, marks = columns.split([grid.token_count - grid.marks, grid.marks])
                place = torch.arange(len(inside), device=modality.device)
                fields["frame"][b, inside] = frame + place // (grid.rows * grid.columns)
                fields["row"][b, inside] = place // grid.columns % grid.rows
                fields["column"][b, inside] = place % grid.columns
                if grid.tiles is not None:
                    place, wide = torch.arange(grid.marks, device=modality.device), grid.tiles[1] + 1
                    celled = place % wide < grid.tiles[1]
                    fields["row"][b, marks] = torch.where(celled, place // wide, -1)
                    fields["column"][b, marks] = torch.where(celled, place % wide, -1)
                frame += grid.frames
            fields["segment"][b, begin:stop] = segment
            segment, begin = segment + 1, stop
    for kind, rest in queue.items():
        if next(rest, None) is not None:
            raise ModelError(
                f"input_ids has fewer {'image' if kind == IMAGE else 'video'} placeholders than the pixels given; "
                "build the inputs with the model's processor."
            )
    return fields


def _columns_of(grid: Grid, kind: int, kinds: list[int], begin: int) -> list[range] | None:
    """The runs of columns of the tokens of `grid`, the first at `begin`; None where `kinds` has others there."""
    runs = [grid.rows * grid.columns] * grid.frames if grid.apart else [grid.token_count]
    found: list[range] = []
    for size in runs:
        while found and begin < len(kinds) and kinds[begin] == TEXT:
            begin += 1
        if kinds[begin : begin + size].count(kind) != size:
            return None
        found.append(range(begin, begin + size))
        begin += size
    return found


def slice_inputs(kwargs: Mapping[str, Any], columns: slice | Tensor, past: int = 0) -> dict[str, Any]:
    """Return a text model's forward arguments for new tokens at `columns` (a slice or indices [n]) after `past` others."""
    part = dict(kwargs)
    if isinstance(columns, slice) and part.get("attention_mask") is not None:
        part["attention_mask"] = part["attention_mask"][:, : past + columns.stop]
    for name in ("inputs_embeds", "input_ids", "position_ids"):
        if part.get(name) is not None:
            part[name] = part[name][..., columns, :] if name == "inputs_embeds" else part[name][..., columns]
    if part.get(deepstack.EACH) is not None:
        part[deepstack.EACH] = part[deepstack.EACH][:, columns]
    return part if part.get(deepstack.WHERE) is None else {**part, **deepstack.slice_features(part, columns)}


def question_token_indices(
    ids: list[int], at: list[int], visual: list[int], ends: Collection[int], marks: Collection[int]
) -> list[int]:
    """Return columns of the question: words of messages with images or videos. [] if there are none or markup is unknown.

    ids     token ids of the prompt's text [n]
    at      their columns (indices in the prompt) [n], ascending
    visual  columns at which images and videos begin and end, ascending
    ends    ids that end a message
    marks   ids around images and videos
    """
    if not ids or not visual:
        return []
    stops = [n for n, token in enumerate(ids) if token in ends]
    if not stops or at[stops[-1]] < visual[-1]:
        return []
    tail = ids[stops[-1] + 1 :]
    if ids[0] not in tail:
        return []
    before = tail.index(ids[0])
    head = min(len(tail), before + HEAD)
    words: list[int] = []
    later = False
    for begin, end in pairwise([-1, *stops]):
        skipped = head if begin >= 0 else head - before
        own = [n for n in range(begin + 1 + skipped, end) if ids[n] not in marks]
        later = later or any(at[n] > visual[-1] for n in own)
        first, last = (at[begin] if begin >= 0 else -1), at[end]
        if any(first < column < last for column in visual):
            words += [at[n] for n in own if at[n] < visual[-1]]
    if not words:
        return []
    return words + [column for column in at if later and column > visual[-1]]


def last_message_span(
    ids: list[int], text: list[bool], ends: Collection[int], marks: Collection[int], first: int
) -> tuple[int, int]:
    """Return (begin, end) of the words of the last complete message among the last tokens `ids` [n] of a prompt; (0, n) if
    there is none.

    text    which tokens [n] are neither image nor video; the words come after the last visual token
    ends    ids that end a message
    marks   ids around images and videos
    first   the id that begins a message
    """
    stops = [n for n, token in enumerate(ids) if token in ends]
    end = stops[-1] if stops else len(ids)
    begin = max((n + 1 for n, own in enumerate(text) if not own), default=0)
    if len(stops) > 1 and stops[-2] >= begin:
        # Behind the end of one message begins the next, as the model's own does behind the last.
        tail = ids[end + 1 :]
        before = tail.index(first) if first in tail else 0
        begin = stops[-2] + 1 + min(len(tail), before + HEAD)
    while begin < end and ids[begin] in marks:
        begin += 1
    return (begin, end) if begin < end else (0, len(ids))


def markup_token_ids(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return the token ids that end a message of `model`, and those that mark start and end of its images and videos."""
    config: Any = model.config
    configs = (getattr(model, "generation_config", None), config.get_text_config(decoder=True))
    names = ("vision_start_token_id", "vision_end_token_id")
    ends = {n for one in configs for n in token_ids(getattr(one, "eos_token_id", None))}
    return ends, {n for name in names for n in token_ids(getattr(config, name, None))}


def question_token_mask(model: nn.Module, ids: Tensor, modality: Tensor, segment: Tensor) -> Tensor:
    """Return a mask [B, S] of the tokens of the prompts `ids` [B, S] that are words of the question: `TokenLayout.asked`."""
    ends, marks = markup_token_ids(model)
    # What stands between the frames of a video is no word of a question.
    modality = torch.zeros_like(modality).scatter_reduce(1, segment, modality, "amax").gather(1, segment)
    found = torch.zeros_like(modality, dtype=torch.bool)
    for row, kinds, out in zip(ids, modality, found, strict=True):
        text, visual = (kinds == TEXT).nonzero()[:, 0], (kinds != TEXT).nonzero()[:, 0]
        # Of each run of neighbours the first and the last.
        apart, end = visual.diff() > 1, torch.ones_like(visual[:1], dtype=torch.bool)
        edges = visual[torch.cat([end, apart]) | torch.cat([apart, end])]
        at = question_token_indices(row[text].tolist(), text.tolist(), edges.tolist(), ends, marks)
        out[torch.tensor(at, dtype=torch.long, device=ids.device)] = True
    return found


def token_ids(entry: Any) -> list[int]:
    """Return a config entry (a token id, several, or None) as a list of token ids."""
    return [] if entry is None else list(entry) if isinstance(entry, list | tuple) else [entry]
