"""Prompts: the arguments of a call by name, how a processor makes its inputs, and what each token is.

The question is the words of a message with images or videos, without the chat's markup. It is found in token ids alone.
Known are the tokens that end a message (the model ends its answers with them) and those around images and videos. A message
begins with a few tokens of markup that name who speaks; how many is seen at the end of the prompt, where the model's own
message begins and nothing follows.
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
from mmaccel.core.layout import IMAGE, TEXT, VIDEO
from mmaccel.models import deepstack

HEAD = 3
"""Most tokens of markup at the start of a message: its start token, the role, a line break."""


WIDE = 5
"""Characters of a time or a number."""

LAYERS = "mmaccel_layers"
"""The attribute of a config under which it keeps layer -> its number among those of attention; without it all have some."""


@dataclass(frozen=True)
class Grid:
    """The tokens of one image or video: `frames` x `rows` x `columns` in order, then `marks` tokens of no frame.

    apart  whether text stands between the frames, such as the time of each
    tiles  (rows, columns) of the finer picture that an image's tiles make together. Its tokens are the `marks`: row by row,
           each of them with a cell, and after each row one token that has none. None: no mark has a cell
    """

    frames: int
    rows: int
    columns: int
    marks: int = 0
    tiles: tuple[int, int] | None = None
    apart: bool = False

    @property
    def tokens(self) -> int:
        return self.frames * self.rows * self.columns + self.marks


Inputs = Mapping[str, Any]
"""Keyword arguments that a user gives a model: ids, mask, pixels, grids."""

A_TOKEN = "input_ids", "mm_token_type_ids", "token_type_ids", "position_ids"
"""The inputs whose last axis is the tokens of the prompt; `attention_mask` has those of the cache, too."""

Words = Sequence[str | int]
"""Pieces of a prompt: text, and ids of tokens."""

PIXELS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}
"""The argument in which the pixels of each kind of visual come."""

Made = tuple[dict[str, Any], list[int]]
"""Inputs of a model, and how many tokens each image or video takes."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Frames, rate and pixels that a model's own users take of a video file, unless others are asked for.

    fps          frames a second, and never a frame twice; None: `most` evenly spaced ones, however long the video is
    least, most  frames at that rate, where the video has so many
    multiple     the number is a multiple of this
    factor       both sides of a frame are multiples of this; None: sizes are the processor's choice, and the next two unused
    pixels       the least and the most pixels of a frame
    total        the most pixels of the whole video, where `multiple` frames count as one; frames are made smaller for it
    """

    fps: float | None = 2.0
    least: int = 1
    most: int = 4096
    multiple: int = 1
    factor: int | None = None
    pixels: tuple[int, int] = (0, 0)
    total: int = 0

    def count(self, frames: int, rate: float) -> int:
        """How many of `frames` frames, at `rate` a second on average (0: unknown), are taken."""
        whole = min(self.most, frames) // self.multiple * self.multiple
        if self.fps is None or not rate:
            return max(whole, 1)
        wanted = min(max(frames / rate * self.fps, self.least), whole, frames)
        return max(int(wanted // self.multiple * self.multiple), 1)

    def size(self, frames: int, height: int, width: int) -> tuple[int, int] | None:
        """(height, width) of `frames` frames that are `height` x `width` in the file; None: as they are."""
        from mmaccel.media.preprocess import smart_resize

        if self.factor is None:
            return None
        least, most = self.pixels
        share = int(self.total / frames * self.multiple)
        return smart_resize(height, width, self.factor, least, max(min(most, share), int(least * 1.05)))


@dataclass(frozen=True, kw_only=True)
class ProcessorStyle:
    """How the processor of one model type makes inputs.

    processor, image, video      names of the stock classes, which the files of a processor name
    image_token, video_token     placeholders of a text
    images, videos               make the pixels, and count the tokens of each visual: of the settings
                                 (`media.preprocess.Pixels`), the entries of processor_config.json beside them, the images
                                 [3, H, W] of each text or the videos [T, 3, H, W], and device and dtype of the pixels
    image_settings               of the stock image class where a file is silent: fields of `media.preprocess.Pixels`
    video_settings               of the stock video class
    type_ids                     whether the model takes `mm_token_type_ids`
    seconds                      whether it takes `second_per_grid_ts`, the seconds of a step of each video
    budget                       what is taken of a video file where nothing is asked for
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
    budget: Budget = Budget()


def in_seconds(time: float) -> str:
    """A time in `WIDE` characters: with one decimal, as processors write it, from 100 to 999.9 s; with more before, and with
    none after. Past 99 999 s it begins again."""
    time %= 10**WIDE
    text = f"{time:.{max(WIDE - 1 - len(str(int(time))), 0)}f}"
    return (text + ".")[:WIDE]


def by_name(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `method` by their names; raises `TypeError` for `args` that it cannot have."""
    given = inspect.signature(method).bind_partial(*args).arguments
    if twice := sorted(given.keys() & kwargs.keys()):
        raise TypeError(f"multiple values for argument {twice[0]!r}")
    return {**given, **kwargs}


def columns(kwargs: Mapping[str, Any]) -> int:
    """The length of the prompts of a call of `generate`, with their padding."""
    ids = kwargs.get("input_ids")
    return ids.shape[1] if isinstance(ids, Tensor) else 0


def rope_of(config: Any) -> Mapping[str, Any]:
    """The rotary settings of a text model; those of full attention, where each kind of layer has its own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)  # type: ignore[no-any-return]


def positions_of(config: Any) -> int | None:
    """How many positions a text model of `config` has, with rotary scaling; None if the config does not say."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    rope = rope_of(config)
    before = rope.get("original_max_position_embeddings") or most
    return max(most, int(before * (rope.get("factor") or 1)))


def windowed(config: Any) -> bool:
    """Whether a text model of `config` has layers that see its last tokens alone."""
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else bool(getattr(config, "sliding_window", None))


def new_inputs(kwargs: Inputs, past: int) -> dict[str, Any]:
    """The arguments of a call for the columns after the first `past`, without a mask."""
    length = kwargs["input_ids"].shape[1]
    new = {name: value for name, value in kwargs.items() if name != "attention_mask"}
    for name in A_TOKEN:
        value = new.get(name)
        if isinstance(value, Tensor) and value.shape[-1] == length:
            new[name] = value[..., past:]
    return new


def is_given(value: Any) -> bool:
    """Whether an input is there, and not an empty list."""
    return value is not None and (isinstance(value, Tensor) or bool(value))


def cells(modality: Tensor, queue: Mapping[int, Iterator[Grid]]) -> dict[str, Tensor]:
    """Segments, frames, rows and columns of the tokens of `modality` [B, S]; each -1 where there is none. Text between the
    frames of a video is of its segment.

    queue  the images and the videos, each in order of appearance over the batch
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
                inside, marks = columns.split([grid.tokens - grid.marks, grid.marks])
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
    runs = [grid.rows * grid.columns] * grid.frames if grid.apart else [grid.tokens]
    found: list[range] = []
    for size in runs:
        while found and begin < len(kinds) and kinds[begin] == TEXT:
            begin += 1
        if kinds[begin : begin + size].count(kind) != size:
            return None
        found.append(range(begin, begin + size))
        begin += size
    return found


def of_columns(kwargs: Mapping[str, Any], columns: slice | Tensor, past: int = 0) -> dict[str, Any]:
    """The arguments of a text model's forward for some of its new `columns` alone, after `past`: a slice, or numbers [n]."""
    part = dict(kwargs)
    if isinstance(columns, slice) and part.get("attention_mask") is not None:
        part["attention_mask"] = part["attention_mask"][:, : past + columns.stop]
    for name in ("inputs_embeds", "input_ids", "position_ids"):
        if part.get(name) is not None:
            part[name] = part[name][..., columns, :] if name == "inputs_embeds" else part[name][..., columns]
    if part.get(deepstack.EACH) is not None:
        part[deepstack.EACH] = part[deepstack.EACH][:, columns]
    return part if part.get(deepstack.WHERE) is None else {**part, **deepstack.of_columns(part, columns)}


def question_columns(
    ids: list[int], at: list[int], visual: list[int], ends: Collection[int], marks: Collection[int]
) -> list[int]:
    """The columns of the question, where a message has words before its last image or video; [] where it has none, or where
    the markup is not known.

    ids     the tokens of text [n] of the prompt
    at      their columns [n], ascending
    visual  columns at which an image or a video begins and ends, ascending
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


def last_words(
    ids: list[int], text: list[bool], ends: Collection[int], marks: Collection[int], first: int
) -> tuple[int, int]:
    """(begin, end) of the words of the last complete message among the last tokens `ids` [n] of a prompt; (0, n) if it
    has no words there.

    text    which tokens [n] are neither image nor video; the words follow the last visual token
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


def markup_ids(model: nn.Module) -> tuple[set[int], set[int]]:
    """The tokens that end a message of `model`, and those around its images and videos."""
    config: Any = model.config
    configs = (getattr(model, "generation_config", None), config.get_text_config(decoder=True))
    names = ("vision_start_token_id", "vision_end_token_id")
    ends = {n for one in configs for n in token_ids(getattr(one, "eos_token_id", None))}
    return ends, {n for name in names for n in token_ids(getattr(config, name, None))}


def question_mask(model: nn.Module, ids: Tensor, modality: Tensor, segment: Tensor) -> Tensor:
    """[B, S] bool, for prompts `ids` [B, S] of tokens of `modality` and `segment` [B, S]: see `TokenLayout.asked`."""
    ends, marks = markup_ids(model)
    # What stands between the frames of a video is no word of a question.
    modality = torch.zeros_like(modality).scatter_reduce(1, segment, modality, "amax").gather(1, segment)
    found = torch.zeros_like(modality, dtype=torch.bool)
    for row, kinds, out in zip(ids, modality, found, strict=True):
        text, visual = (kinds == TEXT).nonzero()[:, 0], (kinds != TEXT).nonzero()[:, 0]
        # Of each run of neighbours the first and the last.
        apart, end = visual.diff() > 1, torch.ones_like(visual[:1], dtype=torch.bool)
        edges = visual[torch.cat([end, apart]) | torch.cat([apart, end])]
        at = question_columns(row[text].tolist(), text.tolist(), edges.tolist(), ends, marks)
        out[torch.tensor(at, dtype=torch.long, device=ids.device)] = True
    return found


def token_ids(entry: Any) -> list[int]:
    """Token ids of a configuration entry as a tuple; the entry may be one id, several or None."""
    return [] if entry is None else list(entry) if isinstance(entry, list | tuple) else [entry]
