"""The tests, and Python in a process of its own, which finds the packages of this checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = os.pathsep.join([str(ROOT), str(ROOT / "lab")])
"""For PYTHONPATH."""


def python(*words: str, said: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """What Python with these words printed, at the root of the checkout; `said` is its standard input. One that fails is
    told whole."""
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": SOURCES, **environment},
        cwd=ROOT,
        input=said,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done
