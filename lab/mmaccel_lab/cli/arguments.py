"""Options that several commands take, and what they say when they are stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.cli.console import print_json
from mmaccel.core.errors import WorldError

Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the first world.")]
Videos = Annotated[
    Path | None, typer.Option("--videos", help="Keep the mp4 files here and use those that are there.")
]
Documents = Annotated[bool, typer.Option("--documents", help="Text between video segments (MM-NIAH).")]
Segments = Annotated[int, typer.Option("--segments", min=1, help="Video segments of a document.")]


def kinds_of(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Kinds of question from a list with commas."""
    from mmaccel_lab.world.questions import checked_kinds

    asked = _parts(text)
    if not asked:
        raise WorldError(f"no kind of question is named; choose from {', '.join(known)}.")
    return checked_kinds(asked, known)


def lengths_of(text: str, option: str = "--frames") -> list[int]:
    """Numbers of frames from a list with commas."""
    parts = _parts(text)
    wrong = [part for part in parts if not (part.isascii() and part.isdigit()) or int(part) < 1]
    if wrong or not parts:
        raise WorldError(
            f"{option}: {wrong[0] if wrong else text!r} is not a number of frames; give for example 8,32,128."
        )
    return [int(part) for part in parts]


def check_segments(lengths: list[int], segments: int) -> None:
    """Raise `WorldError` for a length that does not divide into the segments of a document."""
    for length in lengths:
        if length % segments:
            raise WorldError(
                f"--frames: {length} does not divide into {segments} segments; give a multiple of it."
            )


def check_place(option: str, path: Path | None) -> None:
    """Raise `WorldError` for a path at which no file can be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise WorldError(f"{option}: {path} is not a place for a file; name a file in a folder that exists.")


@contextmanager
def shown(
    as_json: bool,
    answered: Callable[[], int],
    result: Callable[[bool], Mapping[str, Any]],
    table: Callable[[], None],
    goes_on: bool = False,
) -> Iterator[None]:
    """Ask inside. What was answered is shown at the end, also after Ctrl-C (then with status 130) or when something broke.

    answered  how many answers there are
    result    what is shown as JSON, told whether all was answered
    table     shows it otherwise
    goes_on   whether the same command takes up from what `--out` holds, as one who stops it is told
    """
    whole = stopped = False
    try:
        yield
        whole = True
    except KeyboardInterrupt:
        stopped = True
    finally:
        count = answered()
        # An error before the first answer is told alone.
        if as_json and (whole or stopped or count):
            print_json(result(whole))
        elif not as_json and (whole or count):
            table()
    if stopped:
        tell_stop(count, "; the same command goes on from what --out holds" if goes_on else "")
        raise typer.Exit(130)


def tell_stop(answered: int, more: str = "") -> None:
    """Say that a command was stopped, whether there are answers to show, and what `more` there is to know."""
    told = "these are the answers so far" if answered else "nothing was answered"
    print(f"stopped: {told}{more}.", file=sys.stderr)


def _parts(text: str) -> list[str]:
    return text.replace(",", " ").split()
