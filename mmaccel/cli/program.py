"""Shared by the commands of a program: options before them, their arguments, and how they end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from mmaccel.cli.console import quiet, sentence
from mmaccel.core.errors import MmaccelError, RecipeError, VideoError, shown

INTERRUPTED, TERMINATED = 130, 143
AGAIN_S = 1.0
"""Seconds after which another SIGTERM acts: a supervisor may signal a process and its whole group, and means one stop."""


class _Signal:
    """Whether SIGTERM came, and whether a shield delays it."""

    def __init__(self) -> None:
        self.came = self.waits = False
        self.shields = 0
        self._acted = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, or have the shield raise it when it ends; do nothing soon after the last time.

        Python swallows what is raised in a `__del__` or in some callbacks: the next SIGTERM has to act too.
        """
        now = time.monotonic()
        if self.came and now - self._acted < AGAIN_S:
            return
        self.came, self._acted = True, now
        self.waits = self.shields > 0
        if not self.waits:
            raise KeyboardInterrupt


_signal = _Signal()


@contextmanager
def shielded() -> Iterator[None]:
    """SIGTERM waits until the code inside, such as a save, has ended."""
    _signal.shields += 1
    try:
        yield
    finally:
        _signal.shields -= 1
    if _signal.waits and not _signal.shields:
        _signal.waits = False
        raise KeyboardInterrupt


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM wait until the code inside has ended, which can ask what is given whether one came; a second Ctrl-C
    acts at once. A handler of the caller's own stays."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        with shielded():
            yield lambda: came or _signal.waits
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


@contextmanager
def _told_when_stopped() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


class Commands(TyperGroup):
    """The commands; one that is stopped says so, unless it has said more itself."""

    @_told_when_stopped()
    def make_context(self, *given: Any, **how: Any) -> Any:
        return super().make_context(*given, **how)

    @_told_when_stopped()
    def invoke(self, ctx: Any) -> Any:
        return super().invoke(ctx)


class OneVideo(TyperCommand):
    """A command on one video, and perhaps a question, which says in one sentence that more were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        left = super().parse_args(ctx, args)
        video, question = ctx.params["video"], ctx.params.get("question")
        second = next(iter(ctx.args), None)
        if isinstance(question, str):
            # A question may be a second video: a file, or one word that ends as the video's name does.
            named = len(question.split()) == 1 and Path(question).suffix
            # Of a text that is too long for a name, pathlib raises what the system says.
            if os.path.isfile(question) or (named and named == Path(video).suffix):
                second = question
            elif second is not None:
                raise VideoError(
                    f"the question came as {1 + len(ctx.args)} arguments, {shown(question)} and {shown(second)} "
                    "among them; put it in quotes."
                )
        if second is not None:
            raise VideoError(
                f"give one video, not two ({shown(video)} and {shown(second)}); run the command once for each."
            )
        return left


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

    A user's error is one sentence on standard error; with MMACCEL_DEBUG=1 it is the traceback. SIGTERM stops a command as
    Ctrl-C does: it raises KeyboardInterrupt in the main thread, one `AGAIN_S` later too. Where SIGTERM is ignored or has a
    handler of the caller's own, that stays.
    """
    global _signal
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        if ours:
            _signal = _Signal()
            signal.signal(signal.SIGTERM, _signal.handle)
        quiet()
        command, given = typer.main.get_command(app), None if arguments is None else list(arguments)
        status = command.main(args=given, standalone_mode=False)
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr)
        status = INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            # The help of the command; rich may have printed it already.
            print(str(error.format_message()) if hasattr(error, "format_message") else "", end="\n")
            status = 0
        elif (told := sentence(error)) is None or os.environ.get("MMACCEL_DEBUG") == "1":
            raise
        else:
            print(f"error: {told}", file=sys.stderr)
            status = 2
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = status if isinstance(status, int) else 0
    sys.exit(TERMINATED if code == INTERRUPTED and _signal.came else code)


def bring(given: str) -> None:
    """Import a file of a user's own policies, or a module by its name; raises `RecipeError` where it is not there or fails.

    Only the command line names such files: a recipe that did, and that somebody else wrote, would run what it likes. The
    file's folder goes to the end of the path of Python, so that processes that are started find the module too.
    """
    path = Path(given).resolve() if given.endswith(".py") else None
    name = given if path is None else path.stem
    if path is not None:
        if not path.is_file():
            raise RecipeError(
                f"--import: there is no file {given!r}; give an existing Python file, or a module's name."
            )
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
    try:
        module = import_module(name)
    except MmaccelError as error:
        raise RecipeError(f"--import {given}: {error}") from error
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(given, error) from error
        raise RecipeError(
            f"--import: there is no module {given!r}; give a Python file by its path, or the name of an installed module."
        ) from error
    # A file may do anything, ending the process included.
    except (Exception, SystemExit) as error:
        raise _failed(given, error) from error
    if path is not None and Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise RecipeError(f"--import {given}: another module is called {name!r}; give the file another name.")


def _failed(given: str, error: BaseException) -> RecipeError:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(given).name]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = "" if line is None else f" in line {line}"
    told = " ".join(str(error).split()).rstrip(".")
    return RecipeError(f"--import {given}: it fails{where} with {type(error).__name__}: {told}; fix it.")
