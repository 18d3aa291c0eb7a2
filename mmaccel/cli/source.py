"""What `watch` says of its source: the rate, irregular times, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mmaccel.cli.console import err, many
from mmaccel.core.errors import VideoError, VideoStalled

if TYPE_CHECKING:
    from mmaccel.media import Event, Video


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
