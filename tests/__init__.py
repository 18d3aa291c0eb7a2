"""The tests, and where a process that one of them starts finds the packages of this checkout."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = os.pathsep.join([str(ROOT), str(ROOT / "lab")])
"""For PYTHONPATH."""
