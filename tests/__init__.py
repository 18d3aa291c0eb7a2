"""The tests; Python in a process of its own, which finds the packages of this checkout; and errors of one sentence."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = os.pathsep.join([str(ROOT), str(ROOT / "lab")])
"""For PYTHONPATH."""


def python(*words: str, said: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """What Python with these words printed, at the root of the checkout; `said` is its input. One that fails is told."""
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


@contextmanager
def sentence(error: type[Exception], *words: str) -> Iterator[None]:
    """What is inside is refused in one sentence that has these words."""
    import pytest  # here, for processes that tests start import this file

    with pytest.raises(error) as caught:
        yield
    told = str(caught.value)
    assert "\n" not in told and told.endswith((".", "?")) and all(word in told for word in words), told
