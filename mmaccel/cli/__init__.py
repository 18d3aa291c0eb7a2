"""The command line. Commands import what they need when they run, so that asking for help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mmaccel.cli import ask, caption, catalog, draw, evaluate, haystack, search, stream, watch, worlds
from mmaccel.cli.arguments import Commands, OneVideo
from mmaccel.cli.console import quiet, sentence
from mmaccel.cli.own import bring
from mmaccel.cli.stopping import INTERRUPTED, status_of, terminable

app = typer.Typer(
    name="mmaccel",
    cls=Commands,
    help="Vision-language models made fast on long video.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from mmaccel import __version__

        print(f"mmaccel {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    own: Annotated[
        list[str] | None,
        typer.Option(
            "--import", help="A Python file or module to import first, for policies of your own; repeatable."
        ),
    ] = None,
) -> None:
    """Vision-language models made fast on long video."""
    for one in own or ():
        bring(one)


app.command("ask", cls=OneVideo)(ask.ask)
app.command("watch", cls=OneVideo)(watch.watch)
app.command("caption", cls=OneVideo)(caption.caption)
app.command("list")(catalog.list_names)
app.command("describe")(catalog.describe)
app.command("search")(search.search)
app.command("draw")(draw.draw)
app.command("world")(worlds.world)
app.command("demo")(worlds.demo)
evaluate.app.command("haystack")(haystack.haystack)
evaluate.app.command("stream")(stream.stream)
app.add_typer(evaluate.app, name="eval")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave the process: 0, 1 (the answers were not good enough), 2 (a user's error), 130 (stopped by an
    interrupt), 143 (stopped by SIGTERM).

    A user's error is one sentence on standard error; with MMACCEL_DEBUG=1 it is the traceback.
    """
    with terminable():
        status = _run(arguments)
    sys.exit(status_of(status))


def _run(arguments: Sequence[str] | None) -> object:
    try:
        quiet()
        command = typer.main.get_command(app)
        return command.main(args=arguments if arguments is None else list(arguments), standalone_mode=False)
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            # The help of the command; rich may have printed it already.
            print(str(error.format_message()) if hasattr(error, "format_message") else "", end="\n")
            return 0
        told = sentence(error)
        if told is None or os.environ.get("MMACCEL_DEBUG") == "1":
            raise
        print(f"error: {told}", file=sys.stderr)
        return 2
