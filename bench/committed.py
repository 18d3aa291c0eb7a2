"""The ratios that `make bench` compares with, `ratios.json`: of each case by processor, and why they are as they are."""

import json
import platform
import re
from pathlib import Path
from typing import Any

from mmaccel.core.rows import write_atomically


def processor() -> str:
    """What the system says of this machine's processor: "cpu family 26, model 2, model name AMD EPYC"."""
    info = Path("/proc/cpuinfo")
    found = re.findall(
        r"^(cpu family|model|model name)\s*: (.+)$", info.read_text() if info.exists() else "", re.M
    )
    return ", ".join(f"{field} {value}" for field, value in dict(found).items()) or platform.machine()


def ratio_of(case: dict[str, Any]) -> float:
    """The ratio of this processor; of one that is not listed, the largest, for processors alone differ by up to a half."""
    return case["ratios"].get(processor()) or max(case["ratios"].values())


def commit(path: Path, name: str, ratio: float, why: str) -> None:
    """Write this processor's ratio, beside those of others with the same reason; a new reason begins anew."""
    cases = json.loads(path.read_text()) if path.exists() else {}
    beside = cases[name]["ratios"] if name in cases and cases[name]["why"] == why else {}
    cases[name] = {"why": why, "ratios": {**beside, processor(): round(ratio, 4)}}
    write_atomically(path, json.dumps(cases, indent=1, sort_keys=True) + "\n")
