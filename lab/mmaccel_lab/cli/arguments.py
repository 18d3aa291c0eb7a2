"""Options that several commands take, and what they say when they are stopped."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mmaccel.core.errors import WorldError

Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the first world.")]
Videos = Annotated[
    Path | None, typer.Option("--videos", help="Keep the mp4 files here and use those that are there.")
]
GO_ON = "; the same command goes on from what --out holds"


def kinds_of(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Kinds of question from a list with commas."""
    from mmaccel_lab.world.questions import checked_kinds

    asked = _parts(text)
    if not asked:
        raise WorldError(f"no kind of question is named; choose from {', '.join(known)}.")
    return checked_kinds(asked, known)


def lengths_of(text: str) -> list[int]:
    """Numbers of frames from a list with commas."""
    parts = _parts(text)
    wrong = [part for part in parts if not (part.isascii() and part.isdigit()) or int(part) < 1]
    if wrong or not parts:
        raise WorldError(
            f"--frames: {wrong[0] if wrong else text!r} is not a number of frames; give for example 8,32,128."
        )
    return [int(part) for part in parts]


def check_segments(lengths: list[int], segments: int) -> None:
    """Raise `WorldError` for a length that does not divide into the segments of a document."""
    for length in lengths:
        if length % segments:
            raise WorldError(
                f"--frames: {length} does not divide into {segments} segments; give a multiple of it."
            )


def tell_stop(answered: int, more: str = "") -> None:
    """Say that a command was stopped, whether there are answers to show, and what `more` there is to know."""
    told = "these are the answers so far" if answered else "nothing was answered"
    print(f"stopped: {told}{more}.", file=sys.stderr)


def _parts(text: str) -> list[str]:
    return text.replace(",", " ").split()
