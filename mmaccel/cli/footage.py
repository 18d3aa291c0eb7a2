"""Reads the video of a command, with errors that name the options of the command."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.cli.console import counter
from mmaccel.core.errors import VideoError, VideoWarning

if TYPE_CHECKING:
    from rich.progress import Progress

    from mmaccel.media import Video
    from mmaccel.media.preprocess import Pixels

MAX_FRAMES = 4096
OPTIONS = (
    (r"; max_side= or size= sets another size", ""),
    (r", max_frames= or size=", " or max_frames="),
    (r"\bfps and frames exclude", "--fps and --frames exclude"),
    (r"\bframes=(?=\w|-)", "--frames "),
    (r"\bfps=(?=\w|-)", "--fps "),
    (r"\bmax_frames=(?=\w|-)", "--max-frames "),
    (r"\btimeout=(?=\w|-)", "--timeout "),
    (r"\braise timeout\b", "raise --timeout"),
    (r"\bframes=", "--frames"),
    (r"\bfps=", "--fps"),
    (r"\bmax_frames=", "--max-frames"),
)
"""The arguments of `media.read`, as its sentences name them, and the options of the command that give them."""

Timeout = Annotated[
    float | None, typer.Option("--timeout", help="Seconds that an address or a pipe may be silent (30).")
]


def watch(
    path: str,
    processor: Any,
    progress: Progress,
    *,
    fps: float | None = None,
    frames: int | None = None,
    max_frames: int | None = None,
    timeout: float | None = None,
) -> Video:
    """The frames a model is to see: as asked, or at the rate of its processor, or every one."""
    from mmaccel import media

    if frames is not None and (fps is not None or max_frames is not None):
        raise VideoError(
            "--frames says how many frames, --fps and --max-frames bound them; give one or the other."
        )
    how: dict[str, Any] = {"frames": frames, "timeout": timeout, "faster": fps is None}
    if frames is None:
        how["max_frames"] = max_frames if max_frames is not None else processor.video.max_frames or MAX_FRAMES
        how["fps"] = fps if fps is not None else processor.video.fps
    with own_options(path):
        return media.read(
            path, **how, fit=fit(processor.video), progress=counter(progress, "decode", "frames")
        )


def fit(pixels: Pixels) -> Callable[[int, int, int], tuple[int, int]]:
    """The size that a processor with these settings gives to (frames, height, width)."""
    from mmaccel.media.preprocess import frame_size_of, patch_size_of

    def size(frames: int, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels of what the model is given of so many frames of this size."""
        if not pixels.do_resize:
            return height, width
        if pixels.merge_size is not None:
            return patch_size_of(pixels, frames, height, width, cap=True)
        return frame_size_of(pixels, height, width)

    return size


@contextmanager
def own_options(path: str) -> Iterator[None]:
    """Errors and warnings of `media.read` inside, with the command's options in place of its arguments."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", VideoWarning)
        try:
            yield
        except VideoError as error:
            raise VideoError(_said(str(error), path)) from error
    for one in caught:
        told = _said(str(one.message), path) if issubclass(one.category, VideoWarning) else one.message
        warnings.warn(told, one.category, stacklevel=3)


def _said(told: str, path: str) -> str:
    # A path may hold any of the words.
    parts = told.split(path) if path else [told]
    for words, option in OPTIONS:
        parts = [re.sub(words, option, part) for part in parts]
    return path.join(parts)
