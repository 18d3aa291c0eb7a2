"""Shared by both command-line programs: global options, argument checks, signals and exit codes."""

from __future__ import annotations

import io
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

from mmaccel.cli.console import error_sentence, open_tolerant_stream, silence_libraries
from mmaccel.core.errors import MmaccelError, RecipeError, VideoError, quoted

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
        """Signal handler: raise KeyboardInterrupt, at once or when the shield ends; ignore a signal soon after the last.

        Python swallows exceptions raised in `__del__` and some callbacks, so the next SIGTERM has to act too.
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
def delay_sigterm() -> Iterator[None]:
    """Context that delays SIGTERM until the code inside, such as a save, has ended."""
    _signal.shields += 1
    try:
        yield
    finally:
        _signal.shields -= 1
    if _signal.waits and not _signal.shields:
        _signal.waits = False
        raise KeyboardInterrupt


@contextmanager
def delay_stop_signals() -> Iterator[Callable[[], bool]]:
    """Context that delays Ctrl-C and SIGTERM until the code inside has ended; it yields a function that tells whether one of
    them came. A second Ctrl-C acts at once. A handler installed by the caller stays."""
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
        with delay_sigterm():
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
    """The group of a program's commands; prints a message if a command is stopped, unless the command printed its own."""

    @_told_when_stopped()
    def make_context(self, *given: Any, **how: Any) -> Any:
        return super().make_context(*given, **how)

    @_told_when_stopped()
    def invoke(self, ctx: Any) -> Any:
        return super().invoke(ctx)


class OneVideoCommand(TyperCommand):
    """A command that takes one video, and perhaps a question; more arguments give a one-sentence error."""

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
                    f"the question came as {1 + len(ctx.args)} arguments, {quoted(question)} and {quoted(second)} "
                    "among them; put it in quotes."
                )
        if second is not None:
            raise VideoError(
                f"give one video, not two ({quoted(video)} and {quoted(second)}); run the command once for each."
            )
        return left


def create_program(name: str, purpose: str) -> typer.Typer:
    """Create a program without commands, with --version and --import; `purpose` is the first line of its help."""
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
            import_plugin(one)

    return app


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with 0, 1 (answers below a threshold), 2 (user's error), 130 (interrupted) or 143 (SIGTERM).

    A user's error prints one sentence to standard error, or with MMACCEL_DEBUG=1 the traceback. SIGTERM raises
    KeyboardInterrupt in the main thread, as Ctrl-C does, and again if repeated after `AGAIN_S`. If the caller ignores
    SIGTERM or has its own handler, that stays.
    """
    global _signal
    for name in ("stdout", "stderr"):
        given = getattr(sys, name)
        # Not one of the caller's own.
        if given is getattr(sys, f"__{name}__") and isinstance(given, io.TextIOWrapper | None):
            setattr(sys, name, open_tolerant_stream(given))
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        if ours:
            _signal = _Signal()
            signal.signal(signal.SIGTERM, _signal.handle)
        silence_libraries()
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
        elif (told := error_sentence(error)) is None or os.environ.get("MMACCEL_DEBUG") == "1":
            raise
        else:
            print(f"error: {told}", file=sys.stderr)
            status = 2
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = status if isinstance(status, int) else 0
    sys.exit(TERMINATED if code == INTERRUPTED and _signal.came else code)


def import_plugin(given: str) -> None:
    """Import a user's file of policies, or a module by name (--import); raises `RecipeError` if it is missing or fails.

    Only the command line can name such files: a recipe, which somebody else may have written, cannot run code. The file's
    folder is appended to sys.path, so that child processes find the module too.
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
