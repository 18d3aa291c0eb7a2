"""The tables of docs/architectures.md: ``python -m tests.backends.architectures_page ROWS`` writes them.

The first is the table in the code; the second is made from ROWS, a file of what `python -m tests.backends.compiled` printed.
"""

import json
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mmaccel.backends.ops.operator import ARCHITECTURES, KERNELS, Architecture

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
HEAD = ["| | " + " | ".join(row.name for row in ARCHITECTURES) + " |", "|---|" + "---|" * len(ARCHITECTURES)]


def declared() -> str:
    """The table of what runs where, as Markdown, and the reasons below it."""
    reasons = list(dict.fromkeys(why for row in ARCHITECTURES for why in row.lacks.values()))
    lines = [*HEAD]
    facts: dict[str, Callable[[Architecture], str]] = {
        "GPUs": lambda row: row.devices,
        "shared memory of a program": lambda row: f"{row.shared >> 10} KB",
        "our kernels are": lambda row: "run and timed" if row.has_run else "compiled",
    }
    for name, fact in facts.items():
        lines.append(f"| {name} | " + " | ".join(fact(row) for row in ARCHITECTURES) + " |")
    for kernels, name in KERNELS.items():
        cells = (
            f"no ({reasons.index(row.lacks[kernels]) + 1})" if kernels in row.lacks else "yes"
            for row in ARCHITECTURES
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{i}. {why[0].upper()}{why[1:]}." for i, why in enumerate(reasons, 1))])


def measured(rows: Iterable[dict[str, Any]]) -> str:
    """The table of what was compiled: of each group the kernels, and the most shared memory and stack that one takes."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["way"].split()[0], {}).setdefault(row["architecture"], []).append(row)
    told = "kernels; KB of shared memory and bytes of stack a thread, at most."
    lines = [f"Compiled by Triton {version('triton')}: {told}", "", *HEAD]
    for group, each in found.items():
        cells = []
        for row in ARCHITECTURES:
            some = each.get(row.name, [])
            most = [max((x[what] for x in some), default=0) for what in ("shared", "stack")]
            cells.append(f"{len(some)}; {most[0] / 1024:.4g} KB; {most[1]}" if some else "none")
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def between(text: str, name: str, new: str | None = None) -> str:
    """What a page has between the marks of `name`; with `new`, the page with this in its place."""
    begin, end = (f"<!-- {mark} {name} -->\n" for mark in ("begin", "end"))
    before, rest = text.split(begin)
    old, after = rest.split(end)
    return old.strip() if new is None else f"{before}{begin}\n{new}\n\n{end}{after}"


def main(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    page = between(PAGE.read_text(encoding="utf-8"), "what runs where", declared())
    PAGE.write_text(between(page, "what was compiled", measured(rows)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
