"""Questions to a stream: parsing, when they are due, and printing answers with the frames they are based on."""

from __future__ import annotations

import os
import queue
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from mmaccel.cli.console import describe_cut_off, plural, remark
from mmaccel.core.decoding.generate import Answer
from mmaccel.core.errors import ModelError, VideoError, check_text, quoted
from mmaccel.core.files import outside
from mmaccel.core.report import Report
from mmaccel.core.report_page import (
    bytes_text,
    describe_draft,
    format_answer_speed,
    format_attention_share,
    format_head_counts,
)

if TYPE_CHECKING:
    from mmaccel.media import Video

INPUT = "-"
"""In the place of a question: those on standard input."""
PATIENCE_S = 1.0
"""Seconds after which a standard input that does not end is told of."""
HEADS = ("based on", "shown at", "visible in", "retrieved in", "attention-rollout share")
"""Shares of the layers; visible is retrieved, or in the local window, which is visible without being looked for. The last is
`Evidence.score`; blank where the memory does not tell it."""
PLACES = {"bytes": "device", "host_bytes": "host", "host_disk_bytes": "files"}
"""Where a memory is, by its counter."""

Asked = tuple[float | None, str]
"""A question, and the seconds after which it is asked; None: at the end."""
Piece = tuple["Video | None", list[Asked]]
"""Frames, if any, and the questions that are due after them."""


def parse_question(text: str, source: str = "--question") -> Asked:
    """Parse QUESTION@SECONDS to (seconds or None, question); `source` names its origin in errors."""
    check_text(text, source)
    words, at, when = text.rpartition("@")
    try:
        seconds = float(when) if at else None
    except ValueError:
        if when.split() == [when]:
            raise VideoError(
                f"{source}: {quoted(when)} after the @ of {quoted(text)} is not a time; give seconds from the "
                "start, such as @12.5, or put a space after an @ that belongs to the question."
            ) from None
        words, seconds = text, None
    words = words if at and seconds is not None else text
    if not words.strip():
        raise ModelError(f"{source}: {quoted(text)} has no question; give QUESTION@SECONDS.")
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise VideoError(f"{source}: {seconds:g} is not a time in a video; give seconds from its start.")
    return seconds, words.strip()


def read_piped_questions(given: Sequence[str]) -> list[Asked]:
    """Return the questions on standard input, read to its end, if it is a pipe or file. `given`: those of --question.

    If there are any, standard input may be meant for another command, so it is read only if one of them is ``-``.
    """
    if INPUT not in given:
        try:
            mode = os.fstat(sys.stdin.fileno()).st_mode
        except (AttributeError, OSError, ValueError):
            return []  # closed, or none
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
            return []
        if given:
            remark("standard input is not read beside --question; --question - reads it.")
            return []
    slow = threading.Timer(PATIENCE_S, remark, ["questions are read from standard input until it ends."])
    slow.daemon = True
    slow.start()
    try:
        # Not as text: a locale may let bytes through that are none.
        data = b"" if sys.stdin is None else sys.stdin.buffer.read(outside.TEXT_BYTES + 1)
    finally:
        slow.cancel()
    lines = outside.decode_text(data, "standard input", ModelError, fix="give one question a line, in UTF-8")
    found = [
        parse_question(line, "standard input")
        for line in lines.replace("\r", "\n").split("\n")
        if line.strip()
    ]
    timed = sum(at is not None for at, _ in found)
    questions = plural(len(found), "question")
    remark(f"{questions} from standard input: {timed} at a time, {len(found) - timed} at the end.")
    return found


def split_clip_at_questions(part: Video, asked: list[Asked]) -> Iterator[Piece]:
    """Cut a clip after each frame at which a question is due; yield pieces with their questions, removed from `asked`."""
    times, start = part.clock.tolist(), 0
    while start < len(part):
        when = asked[0][0] if asked else None
        stop = len(part) if when is None else sum(moment <= when for moment in times)
        # A question whose time has passed between two clips is due before this one.
        piece = part.slice_frames(start, stop) if stop > start else None
        due: list[Asked] = []
        if stop < len(part):
            while asked and asked[0][0] is not None and asked[0][0] < times[stop]:
                due.append(asked.pop(0))
        yield piece, due
        start = max(start, stop)


class TerminalQuestions:
    """Reads questions typed on the terminal while the command is working."""

    def __init__(self, listen: bool) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._over = not listen
        if listen:
            remark("type a question and press return; Ctrl-D ends.")
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in sys.stdin:
                try:
                    self._lines.put(check_text(line.strip(), "this question"))
                except ModelError as error:
                    remark(str(error))
        except UnicodeDecodeError:
            remark("what was typed is not UTF-8 text; no more questions are read.")
        finally:
            self._lines.put(None)

    def read(self, waits: bool = False) -> Iterator[str]:
        """Yield questions typed since the last call; with `waits` also those typed from now on, until the input ends."""
        while not self._over and (waits or not self._lines.empty()):
            line = self._lines.get()
            self._over = line is None
            if line:
                yield line


def evidence_table(answer: Answer, moments: int) -> Table:
    """Return a table of the best `moments` frames that an answer is based on, in the order of `Answer.top`."""
    table = Table(box=None, pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="left" if head == HEADS[0] else "right")
    for one in answer.top(moments):
        first, last = one.frames
        span = f"frame {first}" if first == last else f"frames {first}-{last}"
        shares = f"{one.share:.0%}", f"{one.recalled:.0%}", "" if one.score is None else f"{one.score:.1%}"
        table.add_row(span, f"{one.seconds:.0f} s", *shares)
    return table


def evidence_footer(answer: Answer, moments: int) -> list[str]:
    """Return the lines below the evidence table: whether the answer was cut off, number of frames not shown, speed."""
    left = len(answer.evidence) - moments
    lines = [describe_cut_off(answer.finish_reason, len(answer.ids))]
    if moments and not answer.evidence:
        lines.append("based on no frame")
    if left > 0:
        lines.append(f"and on {left} more")
    if answer.evidence and all(one.score is None for one in answer.evidence):
        lines.append("these were seen; this memory does not tell which of them the answer is based on")
    elif any(one.share > one.recalled == 0 for one in answer.top(moments)):
        lines.append("0% retrieved: a recent frame, or another that every question sees without retrieval")
    kept = {
        name.removeprefix("visual "): int(n)
        for name, n in answer.counters.items()
        if name.partition(" ")[0] == "visual"
    }
    if told := describe_kept_tokens(kept):
        lines.append(f"video: {told}")
    # With the end token, as the report counts.
    count = len(answer.ids) + (answer.finish_reason == "stop")
    decoded = format_answer_speed(count, answer.tokens_per_s)
    lines.append(f"first token {answer.ttft_s:.3f} s; decode: {decoded}")
    return [line for line in lines if line]


def describe_kept_tokens(tokens: Mapping[str, int]) -> str:
    """Return how many video tokens there are, and how many are left where (name -> count, all of them first); empty if all
    are left."""
    whole, *left = tokens.items() or [("", 0)]
    told = [f"{count} {name}{' on' if name.startswith('from ') else ''}" for name, count in left]
    return ", ".join([plural(whole[1], "token"), *told]) if left else ""


def stream_status_lines(report: Report, ingested: tuple[int, int] = (0, 0)) -> list[str]:
    """Return lines that say what each part of a session's recipe did (frames seen, query-key pairs computed, tokens
    drafted), and what its memory holds. `ingested`: the first frame of the last ingestion, and the first after it."""
    parts, draft, seen = [], report.draft, report.kv.get("ingest_seen")
    if seen is not None:
        cut = " (a timed question or a save ended an ingestion)" if ingested[0] and seen < 1 else ""
        parts.append(f"each frame attended to {seen:.0%} of earlier frames on average{cut}")
    if report.kept is not None:
        first, end = ingested
        where = f" in the last ingestion (frames {first}-{end - 1})" if first else ""
        share = format_attention_share(report.kept)
        parts.append(f"pairs computed{where}: {share} ({format_head_counts(report.heads())})")
    if drafted := describe_draft({**draft, "notes": ()}):
        parts.append(f"the last answer's draft: {drafted}")
    told = ["; ".join(parts)] if parts else []
    held = [summarize_stream_memory(report.kv, report.peak_bytes)] if report.kv else []
    return [*told, *held, *draft["notes"], *report.notes]


def summarize_stream_memory(kv: Mapping[str, float], peak: int) -> str:
    """Return one line on what a stream's memory holds and where, from its counters `kv`; `peak`: the run's peak bytes."""
    units, here = kv.get("units", 0), kv.get("resident", 0)
    what = f"{here:.4g} of {units:g} steps of time (frames) on the device"
    if units == kv.get("window") and "let_go" in kv:
        done = "offloaded" if kv.get("clusters") else "clustered or offloaded"
        what = f"all {units:g} steps of time (frames) fit in the window, nothing was {done}"
    more = [", ".join(f"{place} {bytes_text(kv[key])}" for key, place in PLACES.items() if kv.get(key))]
    if kv.get("fetch_needed"):
        more.append(f"{kv.get('prefetch_coverage', 0):.0%} of what questions copied back was prefetched")
    return "; ".join([f"memory: {what}", *filter(None, more), f"peak {bytes_text(peak)}"])
