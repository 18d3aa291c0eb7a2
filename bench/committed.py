"""The ratios that `make bench` compares with (`ratios.json`): of each case by processor, and why they are as they are.

{"clustering": {"why": "splits look at fewer units", "ratios": {"AMD EPYC, family 26, model 2": 3.7}}}
"""

from __future__ import annotations

import json
import platform
import re
import statistics
from pathlib import Path
from typing import Any

from mmaccel.core.report import write_whole


def processor() -> str:
    """What the system calls this machine's processor."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.+)$", text, re.M))
    if "model name" not in found:
        return platform.machine()
    return f"{found['model name']}, family {found.get('cpu family')}, model {found.get('model')}"


def ratio_of(case: dict[str, Any]) -> float:
    """The ratio of this processor; of one that is not listed, the geometric mean of those that are."""
    ratios: dict[str, float] = case["ratios"]
    return ratios.get(processor()) or statistics.geometric_mean(ratios.values())


def commit(path: Path, name: str, ratio: float, why: str) -> None:
    """Write this processor's ratio, beside those of others with the same reason; a new reason begins anew."""
    cases = json.loads(path.read_text()) if path.exists() else {}
    beside = cases[name]["ratios"] if name in cases and cases[name]["why"] == why else {}
    cases[name] = {"why": why, "ratios": {**beside, processor(): round(ratio, 4)}}
    write_whole(path, json.dumps(cases, indent=1, sort_keys=True) + "\n")
