"""The source of a `watch`: at which rate it is read, what was uneven in it, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mmaccel.cli.console import err, many
from mmaccel.core.errors import VideoError, VideoStalled

if TYPE_CHECKING:
    from mmaccel.media import Event, Video


def rated(clips: Iterator[Video], video: str, fps: float, *, guess: bool, quiet: bool) -> Iterator[Video]:
    """The same clips; before the first, a line on how many frames a second are read, and of how many.

    Raises `VideoError` where the source has fewer; `guess` says that its own rate is not known.
    """
    for number, part in enumerate(clips):
        if number == 0:
            own = None if guess or not part.source_fps > 0 else part.source_fps
            if own is not None and fps > 1.001 * own:
                raise VideoError(
                    f"--fps: {fps:g} is more than the {own:g} frames a second of {video}; give no more than it has."
                )
            if not quiet:
                err().print(rate(fps, own), highlight=False, soft_wrap=True)
        yield part


def rate(fps: float, own: float | None) -> str:
    """What is read of a source with `own` frames a second, None where that is not known."""
    if own is not None and fps > 0.999 * own:
        return f"reads all {own:g} frames a second (--fps)."
    of = "" if own is None else f" of {own:g}"
    return (
        f"reads {fps:g}{of} frames a second (--fps); what is shown for less than {1 / fps:g} s may be missed."
    )


def until_broken(clips: Iterator[Video], broken: list[VideoError]) -> Iterator[Video]:
    """The same clips up to a stall or a fault, which goes to `broken`; one before the first clip is raised."""
    begun = False
    try:
        for part in clips:
            begun = True
            yield part
    except VideoStalled as stall:
        if not begun:
            raise
        name = str(stall).partition(" stalled:")[0]
        frames = many(stall.frames, "frame")
        broken.append(
            VideoError(
                f"{name} stalled: nothing came for {stall.seconds:g} s after {frames}, and it is not over; raise --timeout."
            )
        )
        broken[0].__cause__ = stall
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
    """A line on what was uneven."""
    told = f"{event.kind} at {event.time:g} s"
    return told if not event.seconds else f"{told}, {event.seconds:.3g} s"
