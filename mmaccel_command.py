"""The command `mmaccel`. It lies beside the package, whose import takes seconds: one that is stopped meanwhile says so."""

from __future__ import annotations

import os
import sys
from importlib import import_module


def main(commands: str = "mmaccel.cli") -> None:
    """As `main` of the module `commands`; stopped while that is imported, one line on standard error and 130."""
    # Read when torch is loaded: threads that spin while they wait take the time of those that work, where the machine is
    # busy or a draft has a process of its own.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        command = import_module(commands).main
    except KeyboardInterrupt:
        print("stopped.", file=sys.stderr, flush=True)
        # What is half imported may not survive an orderly end.
        os._exit(130)
    command()
