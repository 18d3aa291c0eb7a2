"""How much memory the host has, and how much of it may still be taken."""

from __future__ import annotations

from pathlib import Path

UNKNOWN = 2**62
"""More than there is: what is not known limits nothing."""

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")
FORMS = (
    ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_inactive_file", "total_active_file"),
    ),
)
"""Limit, use and statistics of the container around this process, in both forms of the system's control groups."""


def total() -> int:
    """Bytes of memory of the host, or of the container around this process where that is less."""
    return min(_host("MemTotal"), *(_number(limit) for limit, *_ in FORMS))


def available() -> int:
    """Bytes that can still be taken without harm; the system's copies of files give way and do not count as used."""
    left = _host("MemAvailable")
    for limit, use, stat, cached in FORMS:
        most = _number(limit)
        if most < UNKNOWN:
            left = min(left, most - _number(use, 0) + sum(_statistics(stat, cached)))
    return max(0, left)


def _host(name: str) -> int:
    found = [int(line.split()[1]) * 1024 for line in _lines(MEMINFO) if line.startswith(f"{name}:")]
    return found[0] if found else UNKNOWN


def _number(name: str, otherwise: int = UNKNOWN) -> int:
    lines = _lines(GROUP / name)
    return min(int(lines[0]), UNKNOWN) if lines and lines[0].isdigit() else otherwise


def _statistics(name: str, wanted: tuple[str, ...]) -> list[int]:
    return [int(line.split()[1]) for line in _lines(GROUP / name) if line.split()[0] in wanted]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split("\n")[:-1]
    except OSError:
        return []
