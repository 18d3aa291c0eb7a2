"""What the commands of a program share: the options before them, and how they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from mmaccel.cli.arguments import Commands
from mmaccel.cli.console import quiet, sentence
from mmaccel.cli.own import bring
from mmaccel.cli.stopping import INTERRUPTED, status_of, terminable


def program(name: str, purpose: str) -> typer.Typer:
    """A program without commands. It has --version and --import; `purpose` is the first line of its help."""
    app = typer.Typer(
        name=name,
        cls=Commands,
        help=purpose,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def tell_version(asked: bool) -> None:
        """Print the version and leave, where `--version` is given."""
        if asked:
            from mmaccel import __version__

            print(f"{name} {__version__}")
            raise typer.Exit

    @app.callback(help=purpose)
    def options(
        # A default, since a string cannot name a function of this one.
        version: bool = typer.Option(
            False, "--version", callback=tell_version, is_eager=True, help="Print the version and leave."
        ),
        own: Annotated[
            list[str] | None,
            typer.Option(
                "--import",
                help="A Python file or module to import first, for policies of your own; repeatable.",
            ),
        ] = None,
    ) -> None:
        """Import what `--import` names, before the command runs."""
        for one in own or ():
            bring(one)

    return app


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and leave the process: 0, 1 (the answers were not good enough), 2 (a user's error), 130 (stopped by an
    interrupt), 143 (stopped by SIGTERM).

    A user's error is one sentence on standard error; with MMACCEL_DEBUG=1 it is the traceback.
    """
    with terminable():
        status = _run(app, arguments)
    sys.exit(status_of(status))


def _run(app: typer.Typer, arguments: Sequence[str] | None) -> object:
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
