"""Lines of text with times (subtitles, OCR, transcripts) kept beside the frames of a stream, and SRT and WebVTT files.

The memory stores only units (frames), which may be compressed, pruned or merged, so no line is stored in it. A session keeps
the lines beside its memory, whatever memory that is, and puts those of the frames that a question recalls after the
question's words.
"""

from __future__ import annotations

import bisect
import html
import itertools
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.core.errors import ModelError, check_text, quoted
from mmaccel.core.files import outside
from mmaccel.core.memory.kv import StreamState
from mmaccel.core.streams.parts import StreamInfo

LONGEST, KEPT, TIMES, LATEST = 1 << 12, 1 << 21, 64, 1e12
"""Characters of a line, and of all lines that a session keeps, at most, its times counted as `TIMES` more; the oldest make
room. Half a day of speech has 2^21. A line is before the second `LATEST`."""
TOKENS, CHARACTERS = 1 << 11, 16
"""Tokens that the lines of a question take at most; and for each so many characters are looked at."""
FILE_BYTES = 16 << 20
LEAD = "\n\nText with its times in the video:"
TIME = r"(?:([0-9]{1,4}):)?([0-9]{1,2}):([0-9]{1,2}[,.][0-9]{1,3})"
CUE = re.compile(rf"\s*{TIME}\s*-->\s*{TIME}(?:\s.*)?")
MARKUP = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")
WRITE = "write 00:01:02,000 --> 00:01:04,000"


class TimedText(NamedTuple):
    """A text that was shown or said from `begin` to `end`, in seconds of the stream."""

    begin: float
    end: float
    text: str


def make_timed_text(begin: Any, end: Any, text: Any, call: str = "tell") -> TimedText:
    """Return a `TimedText` from `begin` to `end` (None: at `begin` alone), in seconds, without line breaks. Raises
    `ModelError`, which names `call`, for impossible times and for an empty or too long text."""
    end = begin if end is None else end
    if not all(isinstance(one, int | float) for one in (begin, end)) or not 0 <= begin <= end < LATEST:
        raise ModelError(
            f"{call}: a text cannot be from {quoted(begin)} to {quoted(end)} s; give two times, from 0 s on."
        )
    text = " ".join(check_text(text, call).split()) if isinstance(text, str) else text
    if not isinstance(text, str) or not 0 < len(text) <= LONGEST:
        raise ModelError(
            f"{call}: {quoted(text)} is no text of 1 to {LONGEST} characters; give some, or leave it out."
        )
    return TimedText(float(begin), float(end), text)


def read_timed_lines(given: Any) -> list[TimedText]:
    """Return the lines of an SRT or WebVTT file, or of (begin, end, text) triples, in order of time. Raises `ModelError`."""
    if isinstance(given, str | os.PathLike):
        return sorted(_cues(given))
    made = []
    for one in given or ():
        if not isinstance(one, tuple | list) or len(one) != 3:
            raise ModelError(
                f"subtitles: {quoted(one)} is no line; give (begin, end, text), in seconds, or a file."
            )
        begin, end, text = one
        made.append(make_timed_text(begin, end, text, "subtitles"))
    return sorted(made)


def _cues(path: str | os.PathLike[str]) -> Iterable[TimedText]:
    name, fix = quoted(os.fspath(path), outside.PATH)[1:-1], "give an SRT or WebVTT file"
    words, cues = list[str](), list[tuple[int, float, float, list[str]]]()
    text = outside.read_text(path, f"subtitles: {name}", ModelError, most=FILE_BYTES, fix=fix)
    for number, row in enumerate(text.splitlines(), 1):
        if "-->" in row:
            if (found := CUE.fullmatch(row)) is None:
                raise ModelError(
                    f"subtitles: line {number} of {name} has no two times: {quoted(row)}; {WRITE}."
                )
            parts = [float(part.replace(",", ".")) for part in found.groups("0")]
            begin, end = (3600 * h + 60 * m + s for h, m, s in (parts[:3], parts[3:]))
            cues.append((number, begin, end, words := []))
        elif row.strip():
            words.append(row)
        else:
            words = []  # of what follows, up to the next cue, nothing is shown
    if not cues:
        raise ModelError(f"subtitles: {name} has no line of two times; {fix}, or {WRITE}.")
    for number, begin, end, words in cues:
        if said := html.unescape(MARKUP.sub("", " ".join(words))).strip():
            yield make_timed_text(begin, end, said, f"subtitles: line {number} of {name}")


def merge_timed_lines(have: tuple[TimedText, ...], new: Sequence[TimedText]) -> tuple[TimedText, ...]:
    """Merge two lists of lines, each in order of time, without duplicates; drop the oldest beyond `KEPT` characters."""
    if not new:
        return have
    lines = list(dict.fromkeys(sorted([*have, *new])))
    sizes = itertools.accumulate(len(one.text) + TIMES for one in reversed(lines))
    return tuple(lines[len(lines) - sum(size <= KEPT for size in sizes) :])


def lines_starting_between(
    lines: Sequence[TimedText], since: float, ends: float, shift: float
) -> list[TimedText]:
    """Shift the times of `lines` by `shift` seconds, and return the lines that then begin at or after `since` and before
    `ends`, in seconds. `lines` are in order of time."""
    first, last = (bisect.bisect_left(lines, at - shift, key=lambda one: one.begin) for at in (since, ends))
    return shift_lines(lines[first:last], shift)


def stream_end_seconds(info: StreamInfo) -> float:
    """Return the second at which the last frame of a stream ends. A frame lasts 1 / rate of the last clip; if that is
    unknown, as long as the frame before it, but at most the median of the last eight (1 s after one or two frames)."""
    steps = [b - a for a, b in itertools.pairwise(info.times[-9:])]
    usual = statistics.median_low(steps) if len(steps) > 1 else 1.0
    return info.times[-1] + (1 / info.rate if info.rate else min([usual, *steps[-1:]]))


def shift_lines(lines: Sequence[TimedText], seconds: float) -> list[TimedText]:
    """Return `lines` with times increased by `seconds`."""
    return [TimedText(one.begin + seconds, one.end + seconds, one.text) for one in lines]


def lines_without_units(info: StreamInfo, gone: Iterable[int]) -> tuple[TimedText, ...]:
    """Return the lines of a stream without those that began while one of the units (frames) `gone` was shown."""
    starts, lost = info.unit_times(0) if info.timed_texts else [], set(gone)
    return tuple(one for one in info.timed_texts if _unit_at(starts, one.begin) not in lost)


def layer_share_per_unit(
    state: StreamState, layers: int, tokens: int, numbers: Sequence[int]
) -> dict[int, float]:
    """Return, during a question, unit (frame) number -> the share of the `layers` layers that see the unit, if any does.

    A unit has `tokens` tokens. `numbers` are the numbers by which the result names the memory's units, in their order.
    A layer whose memory cannot tell what it sees counts as seeing all units.
    """
    total = torch.zeros(len(numbers))
    for layer in range(layers):
        seen = state.seen_tokens(layer)
        one = torch.ones(len(numbers), device=total.device if seen is None else seen.device)
        if seen is not None:
            one.zero_()[seen // tokens] = 1.0
        total = total.to(one.device) + one
    return {number: seen / layers for number, seen in zip(numbers, total.tolist(), strict=True) if seen}


def lines_for_question(
    info: StreamInfo, share: dict[int, float], between: tuple[float, float] | None
) -> list[TimedText]:
    """Return the lines that a question of a stream may read, best first: those shown between the two times of `between`, or,
    if it is None, those shown together with a unit (frame) that the question sees. `share`: unit number -> the share of
    layers that see it; lines of the largest share come first, of equal ones the latest. None begins after the last frame."""
    lines = info.timed_texts[
        : bisect.bisect_left(info.timed_texts, stream_end_seconds(info), key=lambda one: one.begin)
    ]
    if between is not None:
        return [one for one in reversed(lines) if one.begin <= between[1] and one.end >= between[0]]
    starts, read = info.unit_times(0), sum(info.spans[-1]) if info.spans else 0
    if read < len(info.times):  # of a unit not yet complete
        share[len(starts)] = 1.0
        starts.append(info.times[read])
    most, worth = [[share.get(number, 0.0) for number in range(len(starts))]], dict[TimedText, float]()
    for one in lines:
        first = _unit_at(starts, one.begin)
        behind = max(first + 1, bisect.bisect_left(starts, one.end))
        power = (behind - first).bit_length() - 1
        while len(most) <= power:  # `most[p]` has the greatest share of each 2^p units in a row
            most.append(list(map(max, most[-1], most[-1][1 << (len(most) - 1) :])))
        worth[one] = max(most[power][first], most[power][behind - (1 << power)])
    return sorted((one for one in reversed(lines) if worth[one] > 0), key=lambda one: -worth[one])


def trim_lines_to_tokens(
    lines: Sequence[TimedText], room: int, ids: Callable[[str], Tensor]
) -> tuple[tuple[TimedText, ...], str, Tensor]:
    """Take the first of `lines`, given best first, that together fit into `room` tokens. Return them in order of time, their
    text, and ids [n] by ``ids(text)``. A line too long alone is skipped; no more than ``room * CHARACTERS`` are read."""
    some, whole, longest = list[TimedText](), room - len(ids(LEAD)), room * CHARACTERS
    left, unread = whole, longest
    for one in lines:
        if len(text := _said(one)) > longest:
            continue
        if (unread := unread - len(text)) < 0:
            break
        if (tokens := len(ids(text))) > whole:
            continue
        if (left := left - tokens) < 0:
            break
        some.append(one)
    while True:
        text = LEAD + "".join(map(_said, sorted(some))) if some else ""
        if len(made := ids(text)) <= room:
            return tuple(sorted(some)), text, made
        some.pop()  # together they are longer


def _unit_at(starts: Sequence[float], seconds: float) -> int:
    """The unit (frame) that was shown at `seconds`; before the first one, that."""
    return max(0, bisect.bisect_right(starts, seconds) - 1)


def _said(one: TimedText) -> str:
    minutes, rest = divmod(int(one.begin), 60)
    return f"\n[{minutes // 60}:{minutes % 60:02}:{rest:02}] {one.text}"
