"""An answer on a stream and what it rests on, for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmaccel.cli.console import cut_short, number, out
from mmaccel.core.errors import VideoError

if TYPE_CHECKING:
    from rich.table import Table

    from mmaccel.core.answer import Answer
    from mmaccel.core.session import VideoSession

HEADS = (
    "rests on",
    "shown at",
    "layers that saw it",
    "layers that retrieved it",
    "part of what reached the answer",
)
"""Seen is retrieved, or in the local window, which is seen without being looked for. What reaches an answer is estimated by
attention from layer to layer (`Evidence.score`); blank where the memory does not tell it."""


def evidence_table(answer: Answer, moments: int) -> Table:
    """The best `moments` that an answer rests on, in the order of `Answer.top`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="left" if head == HEADS[0] else "right")
    for one in answer.top(moments):
        shares = f"{one.share:.0%}", f"{one.recalled:.0%}", "" if one.score is None else f"{one.score:.1%}"
        table.add_row(_span(one.frames), f"{one.seconds:.0f} s", *shares)
    return table


def below(answer: Answer, moments: int) -> list[str]:
    """What people read below the table: where the answer was cut off, what the table leaves out, how fast it was."""
    left = len(answer.evidence) - moments
    cut = cut_short(answer.finish_reason, len(answer.ids))
    told = [cut] if cut else []
    told += [] if answer.evidence or not moments else ["rests on no moment"]
    if left > 0:
        told.append(f"and on {left} more")
    if answer.evidence and all(one.score is None for one in answer.evidence):
        told.append("these were seen; which of them the answer rests on this memory does not tell")
    return [
        *told,
        f"first token {answer.ttft_s:.3f} s, then {number(answer.tokens_per_s, '.1f', ' tokens/s')}",
    ]


def _span(frames: tuple[int, int]) -> str:
    return f"frame {frames[0]}" if frames[0] == frames[1] else f"frames {frames[0]}-{frames[1]}"


def as_object(
    text: str, at: float | None, session: VideoSession, answer: Answer, moments: int
) -> dict[str, Any]:
    """An answer, JSON-ready; of the moments it rests on the best, and how many there are."""
    return {
        "question": text,
        "at": at,
        "asked_at": session.seconds,
        "frames": len(session),
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "ttft_s": answer.ttft_s,
        "tokens_per_s": answer.tokens_per_s,
        "evidence": [
            {
                "frames": list(one.frames),
                "seconds": one.seconds,
                "share": one.share,
                "recalled": one.recalled,
                "score": one.score,
            }
            for one in answer.top(moments)
        ],
        "moments": len(answer.evidence),
        "counters": answer.counters,
    }


def ask_and_show(
    session: VideoSession, most: int, moments: int, quiet: bool, text: str, at: float | None = None
) -> dict[str, Any]:
    """Ask, show the answer as it comes, and what it rests on."""
    if not len(session):
        raise VideoError(f"--question: nothing was seen before {text!r} is asked; ask it later.")
    if quiet:
        answer = session.ask(text, most, evidence=moments > 0)
        return as_object(text, at, session, answer, moments)
    console = out()
    console.print(f"[{session.seconds:.1f} s] {text}", markup=False, highlight=False)
    reply = session.ask(text, most, stream=True, evidence=moments > 0)
    for piece in reply:
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    assert reply.answer is not None
    if reply.answer.evidence:
        console.print(evidence_table(reply.answer, moments))
    for line in below(reply.answer, moments):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    return as_object(text, at, session, reply.answer, moments)
