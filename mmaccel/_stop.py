"""Imported before all that takes seconds: ``python -m mmaccel`` that is stopped meanwhile says so, as the command does."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("stopped.", file=sys.stderr, flush=True)
    # What is half imported may not survive an orderly end.
    os._exit(130)


def over() -> None:
    """The package is imported: from now on the code that runs handles Ctrl-C itself."""
    if sys.excepthook is _told:
        sys.excepthook = sys.__excepthook__


# The name that a program run by -m has while its package is imported; no other import of this package sees it.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _told
