"""Policies of a user's own: a file or module that registers them is imported before a command runs.

Only the command line names such files. A recipe does not: one that somebody else wrote would then run what it likes.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from pathlib import Path

from mmaccel.core.errors import MmaccelError, RecipeError


def bring(given: str) -> None:
    """Import a Python file, or a module by its name; raises `RecipeError` where it is not there or fails.

    The file's folder goes to the end of the path of Python, so that processes that are started find the module too.
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
