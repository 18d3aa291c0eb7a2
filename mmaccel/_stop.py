"""Handles Ctrl-C while the package is still being imported: ``python -m mmaccel`` then prints "stopped." and exits."""

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


def end_interrupt_handling() -> None:
    """Restore Python's default Ctrl-C handling, when the package has been imported."""
    if sys.excepthook is _told:
        sys.excepthook = sys.__excepthook__


# The name that a program run by -m has while its package is imported; no other import of this package sees it.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _told
