"""Scripts of bench/ run in this process, as the command line runs them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def ran(script: str, out: Path, *words: str) -> list[dict[str, Any]]:
    """The rows in `out` after `bench/<script>.py --device cpu --out <out> <words>`."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        importlib.import_module(script).main(["--device", "cpu", "--out", str(out), *words])
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return [json.loads(line) for line in out.read_text().splitlines()]
