"""How the command's threads wait for each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = "import sys; sys.argv = ['mmaccel', 'list']; from mmaccel_command import main; main()"


@pytest.mark.skipif(sys.platform != "linux", reason="the OpenMP of other platforms tells in other words")
@pytest.mark.parametrize(("given", "spins"), [(None, False), ("active", True)])
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(given: str | None, spins: bool) -> None:
    """As the OpenMP that torch has loaded tells it: what is set after that has no effect."""
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    own = {name: value for name, value in os.environ.items() if name not in unset}
    own |= {"OMP_DISPLAY_ENV": "verbose"} | ({} if given is None else {"OMP_WAIT_POLICY": given})
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND],
        cwd=Path(__file__).parents[2],
        env=own,
        capture_output=True,
        text=True,
        timeout=120,
    )
    count = re.search(r"GOMP_SPINCOUNT = '(\w+)'", ran.stderr)
    assert ran.returncode == 0 and count is not None and (count[1] != "0") is spins
