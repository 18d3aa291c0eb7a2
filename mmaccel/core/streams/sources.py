"""Reopens a live source when it stalls, fails or ends, after growing delays, and records what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from mmaccel.core.errors import VideoError, VideoStalled
from mmaccel.core.streams.parts import Clip

Part = TypeVar("Part")
FIRST_S, MOST_S, STEP_S = 0.5, 30.0, 0.05
"""Seconds until a source is opened again: at first, and at most; and between two checks meanwhile."""


@dataclass
class StreamEvent:
    """What happened to a stream. Its source sent nothing ("stall"), failed ("fault") or ended ("end") after a frame shown at
    `seconds` of the stream: `why` is the error, `lasted` the seconds until frames came again (None until then). Or its
    memory forgot frames ("let_go"): the last of them was shown at `seconds`, and they span `lasted` seconds."""

    kind: Literal["stall", "fault", "end", "let_go"]
    seconds: float
    why: str = ""
    lasted: float | None = None


def shift_clip(clip: Clip, seconds: float) -> Clip:
    """Return the clip with all times increased by `seconds`."""
    assert clip.times is not None
    return replace(clip, times=[moment + seconds for moment in clip.times])


def clips_with_reconnect(
    opens: Callable[[], Any],
    check: Callable[[], None],
    note: Callable[[StreamEvent], None],
    begin: float,
    times: Callable[[Part], Sequence[float]],
    later: Callable[[Part, float], Part],
) -> Generator[Part, None, None]:
    """Yield the clips of a source, which `opens` opens again whenever it is over, until `check` raises.

    After a break, times continue from the last frame plus the seconds that the break lasted. `note` gets each break as it
    begins; `begin` is when the stream's last frame was shown; `times` returns the seconds of a clip's frames, and `later`
    the clip shifted by some seconds.
    """
    last, since, wait = begin, time.monotonic(), FIRST_S
    event: StreamEvent | None = None
    while True:
        kind, why, shift = "end", "", None
        try:
            with closing(opens()) as clips:
                for clip in clips:
                    if event is not None:
                        event.lasted, wait = time.monotonic() - since, FIRST_S
                        shift = last + event.lasted - times(clip)[0]
                        event = None
                    if shift is not None:
                        clip = later(clip, shift)
                    yield clip
                    last, since = [last, *times(clip)][-1], time.monotonic()
        except VideoError as error:
            kind, why = "stall" if isinstance(error, VideoStalled) else "fault", str(error)
        if event is None:
            event = StreamEvent(kind, last, why)  # type: ignore[arg-type]
            note(event)
        end = time.monotonic() + wait
        while (left := end - time.monotonic()) > 0:
            check()
            time.sleep(min(STEP_S, left))
        check()
        wait = min(2 * wait, MOST_S)
