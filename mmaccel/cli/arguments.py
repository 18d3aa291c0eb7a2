"""Messages for one argument too many, and for a command that is stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from mmaccel.core.errors import VideoError, shown


class Commands(TyperGroup):
    """The commands; one that is stopped says so, unless it has said more itself."""

    def make_context(self, *given: Any, **how: Any) -> Any:
        with _told_when_stopped():
            return super().make_context(*given, **how)

    def invoke(self, ctx: Any) -> Any:
        with _told_when_stopped():
            return super().invoke(ctx)


@contextmanager
def _told_when_stopped() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        raise typer.Exit(130) from None


class OneVideo(TyperCommand):
    """A command on one video, and perhaps a question, which says in one sentence that more were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        left = super().parse_args(ctx, args)
        question = ctx.params.get("question")
        if isinstance(question, str):
            check_question(ctx.params["video"], question)
            if ctx.args:
                raise VideoError(
                    f"the question came as {1 + len(ctx.args)} arguments, {shown(question)} and {shown(ctx.args[0])} "
                    "among them; put it in quotes."
                )
        elif ctx.args:
            raise _two(ctx.params["video"], ctx.args[0])
        return left


def check_question(video: str, question: str) -> None:
    """Raise `VideoError` for a question that is a second video: a file, or one word that ends as the video's name does."""
    # Of a text that is too long for a name, pathlib raises what the system says.
    named = len(question.split()) == 1 and Path(question).suffix
    if os.path.isfile(question) or (named and named == Path(video).suffix):
        raise _two(video, question)


def _two(one: str, other: str) -> VideoError:
    return VideoError(
        f"give one video, not two ({shown(one)} and {shown(other)}); run the command once for each."
    )
