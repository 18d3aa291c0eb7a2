"""The command `mmaccel`. It lies beside the package, whose import takes seconds: one that is stopped meanwhile says so."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """As `mmaccel.cli.main`; stopped while that is imported, one line on standard error and 130."""
    try:
        from mmaccel.cli import main as command
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr, flush=True)
        # What is half imported may not survive an orderly end.
        os._exit(130)
    command()
