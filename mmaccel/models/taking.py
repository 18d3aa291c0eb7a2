"""Chooses how many frames of a video file to take, at what rate and size: the model's defaults, the user's request, or as
many as fit."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import home_device, unwrap
from mmaccel.core.attach import adapter_for, attached
from mmaccel.core.errors import VideoError, warn
from mmaccel.core.memory.buffers import free_host_bytes
from mmaccel.core.recipe import Recipe
from mmaccel.core.report_page import plural
from mmaccel.models.prompt_layout import VideoBudget, max_positions
from mmaccel.models.shipped import WORLD

if TYPE_CHECKING:
    from mmaccel.media import Video

RESERVE = 1024
"""Positions left for the words of a prompt and its answer, but at most an eighth of the model's."""
SHARE = 0.8
"""Part of the free memory that a prompt may take."""
STATES = 12
"""Vectors of the hidden size that a layer holds of each token while it runs, with its feed-forward block."""


def processor_frame_budget(processor: Any) -> VideoBudget:
    """Return the family's default `VideoBudget`, updated by the video settings in the model's own folder."""
    known = VideoBudget() if processor.style is None else processor.style.budget
    settings = processor.video_processor if processor.video is None else processor.video
    names = "fps", "num_frames", "min_frames", "max_frames"
    fps, number, least, most = (getattr(settings, name, None) for name in names)
    if fps is not None:
        known = replace(known, fps=fps, most=VideoBudget.most if known.fps is None else known.most)
    elif number is not None:
        known = replace(known, fps=None, most=number)
    known = replace(known, multiple=getattr(settings, "temporal_patch_size", None) or known.multiple)
    if known.fps is not None:
        known = replace(known, least=least or known.least, most=most or known.most)
    return known


def default_frame_count(processor: Any, usual: VideoBudget, frames: int, rate: float) -> int:
    """Return how many of `frames` frames at `rate` per second (0: unknown) to take: what `usual` says if the family has a
    `ProcessorSpec`; else as many as transformers' processor samples, at most ``usual.most``, if it samples frames."""
    stock: Any = None if processor.video is not None else processor.video_processor
    if not getattr(stock, "do_sample_frames", None) or not rate:
        return usual.frame_count(frames, rate)
    from transformers.video_utils import VideoMetadata

    try:
        told = VideoMetadata(total_num_frames=frames, fps=rate, duration=frames / rate)
        taken = min(len(stock.sample_frames(told)), usual.most, frames)
    except (ValueError, TypeError):  # of a video that is too short for it
        return usual.frame_count(frames, rate)
    return max(taken // usual.multiple * usual.multiple, 1)


def budgeted_frame_size(processor: Any, frames: int, height: int, width: int) -> tuple[int, int] | None:
    """Return the (height, width) to which `frames` frames of a file are scaled by the model's `VideoBudget`; None if the
    processor's own settings decide."""
    from mmaccel.media import preprocess

    wanted = processor_frame_budget(processor).frame_size(frames, height, width)
    if wanted is None or not processor.own_video_settings:
        return wanted
    own = preprocess.resized_size(processor.video, frames, height, width)
    return wanted if own[0] * own[1] > wanted[0] * wanted[1] else None


def warn_tiny_model_video(processor: Any, path: Any, device: bool = False) -> None:
    """Warn, once for each processor, that a tiny model understands only videos of `mmaccel-lab world`. No warning if there
    is no file `path`, since the reader raises then. `device`: `path` names a camera, not a file."""
    from mmaccel.media.address import is_url
    from mmaccel.media.reader import read_metadata_comment

    if not (device or is_url(os.fspath(path)) or os.path.lexists(path)):
        return
    if processor.tiny is not None and read_metadata_comment(path) != WORLD:
        name, processor.tiny = processor.tiny, None
        warn(f"{name} knows only the world of `mmaccel-lab world`; what it says of {path} means nothing.")


def read_sampled_video(
    processor: Any,
    path: str | os.PathLike[str],
    *,
    fps: float | None = None,
    frames: int | None = None,
    max_frames: int | None = None,
    **how: Any,
) -> Video:
    """Read a video file: at `fps`, or `frames` evenly spaced ones, or by the model's default budget; at most `max_frames`.
    `how` are further arguments of `media.read`."""
    from mmaccel import media
    from mmaccel.media import preprocess

    def fit(count: int, height: int, width: int) -> tuple[int, int]:
        found = budgeted_frame_size(processor, count, height, width)
        if found is None and processor.video is not None:
            found = preprocess.resized_size(processor.video, count, height, width)
        return found or (height, width)

    warn_tiny_model_video(processor, path)
    usual = processor_frame_budget(processor)
    if max_frames is not None:
        usual = replace(usual, most=max_frames, multiple=min(usual.multiple, max_frames) or 1)
    if frames is None and fps is None:
        rule = functools.partial(default_frame_count, processor, usual)
        how.update(frames=rule, fps=usual.fps, max_frames=usual.most)
    else:
        how.update(frames=frames, fps=fps, max_frames=max_frames)
    video = media.read(path, fit=fit, **how)
    size = budgeted_frame_size(processor, len(video), *video.frames.shape[-2:])
    if size is None or size == tuple(video.frames.shape[-2:]):
        return video
    # Through floats, as qwen_vl_utils resizes; few at a time.
    parts = (preprocess.resize_in_float(part, size, "bicubic") for part in video.frames.split(8))
    return replace(video, frames=torch.cat(list(parts)))


def read_prompt_video(
    processor: Any, path: str | os.PathLike[str], rate: float | None, frames: Any, model: Any, videos: int = 1
) -> tuple[Tensor, float | None]:
    """Return the frames [T, 3, H, W] of a video file for a prompt, and their rate; `videos`: the number of videos in the
    call. The other arguments are as in `Processor.__call__`."""
    if frames == "auto":
        frames, told = max_frames_that_fit(processor, model, path, videos=videos)
        warn(f"{told}.")
    taken = read_sampled_video(processor, path, fps=rate, frames=frames)
    return taken.frames, taken.fps


def max_frames_that_fit(
    processor: Any,
    model: nn.Module,
    path: str | os.PathLike[str],
    recipe: Recipe | None = None,
    videos: int = 1,
) -> tuple[int, str]:
    """Return how many frames of a file fit in a call with `videos` videos under `recipe` (None: the attached one), and a
    sentence that names the limit: the model's positions, its device's memory, or the file's length.

    Each number is tried on the prompt that the processor makes of that many frames. Raises `VideoError` for a source of
    unknown length.
    """
    from mmaccel.media.reader import video_metadata

    if recipe is None:
        recipe = Recipe() if (fast := attached(model)) is None else fast.recipe
    model, total, rate, height, width = unwrap(model), *video_metadata(path)
    if not total:
        raise VideoError(f"frames='auto': {path} does not tell its number of frames; give the number.")
    family: Any = adapter_for(model)
    limit = max_positions(family.text_model(model).config)
    reserve = min(RESERVE, (limit or 0) // 8)
    shared = f", for {videos} videos" if videos > 1 else ""
    positions = (
        f"the model has {limit} positions{shared}, and {reserve} are left for the words and the answer"
    )
    frames_per_unit = family.frames_per_unit(model)
    geometry, each = family.geometry(model), int(getattr(model, "dtype", torch.float32).itemsize)
    held = (
        0
        if getattr(recipe.kv, "window", None)
        else 2 * geometry.layers * geometry.kv_heads * geometry.head_dim
    )
    held += 0 if recipe.chunk else STATES * geometry.hidden
    device = home_device(model)
    host = free_host_bytes()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host

    def fill(units: int) -> tuple[float, str, int]:
        """Of the fullest room after so many units: how full it is (above 1: too small), its name, the prompt's tokens."""
        count = units * frames_per_unit
        size = budgeted_frame_size(processor, count, height, width) or (height, width)
        made = _prompt(processor, count, size, count / total * rate)
        tokens = made["input_ids"].numel()
        pixels = sum(x.numel() for name, x in made.items() if "pixel" in name)
        frames = 6 * height * width * count
        rooms = {
            f"{free / 2**30:.1f} GiB are free on {device}{shared}": (tokens * held + pixels)
            * each
            / free
            / SHARE,
            f"{host / 2**30:.1f} GiB of host memory are free{shared}": frames / host / SHARE,
        }
        rooms = {name: videos * full for name, full in rooms.items()}
        if limit is not None:
            last = int(family.positions(model, made).max()) + 1
            rooms[positions] = (last * videos + reserve) / limit
        name = max(rooms, key=lambda one: rooms[one])
        return rooms[name], name, tokens

    # A prompt is nearly linear in its frames, so each try guesses the next; growing strides bound the number of tries.
    fits, fails, at, stride, why, length = (
        0,
        max(total // frames_per_unit, 1) + 1,
        1,
        1,
        "there are no more",
        0,
    )
    while fits + 1 < fails:
        full, name, tokens = fill(at)
        if full <= 1:
            fits, length, at = at, tokens, max(at + stride, int(at / full))
            at = min(at, fails - 1) if why == "there are no more" else at
        else:
            fails, why, at = at, name, min(at - stride, int(at / full))
        stride *= 2
        at = at if fits < at < fails else (fits + fails) // 2
    if not fits:
        raise VideoError(
            f"frames='auto': there is no room for {plural(frames_per_unit, 'frame')} of {path}, for {why}; give frames=, "
            "or smaller ones."
        )
    count = min(fits * frames_per_unit, total)
    return count, f"frames='auto' took {count} of {plural(total, 'frame')}, {plural(length, 'token')}: {why}"


def _prompt(processor: Any, count: int, size: tuple[int, int], rate: float) -> dict[str, Tensor]:
    """The inputs of a prompt of one video of `count` frames, as the processor makes them, without memory for its pixels."""
    from mmaccel.media import Video

    for device in ("meta", "cpu"):
        frames = torch.zeros(1, 1, 1, 1, dtype=torch.uint8, device=device).expand(count, 3, *size)
        # Without a rate processors take their own default.
        video = Video(frames, torch.zeros(count, dtype=torch.float64), rate or None, rate, 0.0)  # type: ignore[arg-type]
        try:
            made: dict[str, Tensor] = processor(processor.video_token, videos=[video])
            break
        except Exception:  # of a processor that reads pixels, as one in NumPy does
            if device == "cpu":
                raise
    return made
