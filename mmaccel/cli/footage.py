"""The video of a command: read at once or clip by clip, with errors that name the options of the command."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmaccel.cli.console import counter, err, many
from mmaccel.core.errors import VideoError, VideoStalled, VideoWarning

if TYPE_CHECKING:
    from rich.progress import Progress

    from mmaccel.media import Event, Video

MAX_FRAMES = 4096
OPTIONS = {"fps": "--fps", "frames": "--frames", "max_frames": "--max-frames", "timeout": "--timeout"}
"""The options of a command that give arguments of `media.read`."""

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
    from mmaccel.media.preprocess import size_of

    if frames is not None and (fps is not None or max_frames is not None):
        raise VideoError(
            "--frames says how many frames, --fps and --max-frames bound them; give one or the other."
        )
    how: dict[str, Any] = {"frames": frames, "timeout": timeout, "faster": fps is None}
    if frames is None:
        how["max_frames"] = max_frames if max_frames is not None else processor.video.max_frames or MAX_FRAMES
        how["fps"] = fps if fps is not None else processor.video.fps
    fit = partial(size_of, processor.video)
    with own_options():
        return media.read(path, **how, fit=fit, progress=counter(progress, "decode", "frames"))


@contextmanager
def own_options() -> Iterator[None]:
    """Errors and warnings of `media.read` inside name the command's options in place of its arguments."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", VideoWarning)
        try:
            yield
        except VideoError as error:
            raise VideoError(error.said(OPTIONS)) from error
    for one in caught:
        told = one.message.said(OPTIONS) if isinstance(one.message, VideoWarning) else one.message
        warnings.warn(told, one.category, stacklevel=3)


def rated(clips: Iterator[Video], video: str, fps: float, *, guess: bool, quiet: bool) -> Iterator[Video]:
    """The same clips; prints before the first how many frames a second are read, and how many the source has.

    Raises `VideoError` where `fps` is more than both the source's mean rate and `FASTEST`; `guess`: that rate is unknown.
    """
    from mmaccel.media.sampling import FASTEST

    for number, part in enumerate(clips):
        if number == 0:
            own = None if guess or not part.source_fps > 0 else part.source_fps
            if fps > max(FASTEST, 1.001 * (own or 0.0)):
                raise VideoError(
                    f"--fps: {fps:g} is more than the {max(FASTEST, own or 0.0):g} frames a second that can be read of "
                    f"{video}; give no more."
                )
            if not quiet:
                err().print(rate(fps, own), highlight=False, soft_wrap=True)
        yield part


def rate(fps: float, own: float | None) -> str:
    """The line on the rate; `own` is the mean rate of the source, None where unknown."""
    if own is not None and fps > 1.001 * own:
        return (
            f"reads {fps:g} frames a second (--fps); the source has {own:g} on average, and what stands is taken as --gaps "
            "says."
        )
    if own is not None and fps > 0.999 * own:
        return f"reads every frame, {own:g} a second (--fps)."
    of = "" if own is None else f" of {own:g}"
    return (
        f"reads {fps:g}{of} frames a second (--fps); what is shown for less than {1 / fps:g} s may be missed."
    )


def until_broken(clips: Iterator[Video], broken: list[VideoError]) -> Iterator[Video]:
    """The same clips up to a stall or fault, which goes to `broken`; before the first clip it is raised."""
    begun = False
    try:
        for part in clips:
            begun = True
            yield part
    except VideoStalled as stall:
        name = str(stall).partition(" stalled:")[0]
        frames = many(stall.frames, "frame")
        told = VideoError(
            f"{name} stalled: nothing came for {stall.seconds:g} s after {frames}, and it has not ended; "
            "raise --timeout."
        )
        if not begun:
            raise told from stall
        told.__cause__ = stall
        broken.append(told)
    except VideoError as error:
        if not begun:
            raise
        broken.append(error)


def ended(broken: Sequence[VideoError], failed: Sequence[Exception]) -> str:
    """How a watch that nobody stopped ended: "end", "stall", "fault" of the source, or another "error"."""
    if broken:
        return "stall" if isinstance(broken[0].__cause__, VideoStalled) else "fault"
    return "error" if failed else "end"


def described(event: Event) -> str:
    """One line for an event."""
    told = f"{event.kind} at {event.time:g} s"
    return told if not event.seconds else f"{told}, {event.seconds:.3g} s"
