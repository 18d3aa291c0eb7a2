"""What a benchmark does when it is told to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Within it SIGTERM ends the program as Ctrl-C does: what is in `finally` is done. The signal's own way leaves that out,
    and with it processes and folders that are to go away."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
