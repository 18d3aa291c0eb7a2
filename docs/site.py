"""What the site needs besides mkdocs.yml: pages from outside docs/, links that leave it, and lists in docstrings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

try:
    from griffe import Extension
except ImportError:  # the tests read this file without the site's packages
    Extension = object

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench.md",
    "lab/README.md": "lab.md",
    "lab/LOG.md": "log.md",
}
"""Pages of the repository, and what they are called on the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
ROW = re.compile(r"(?P<names>[a-z_`][\w`]*(?:(?:, | and )[\w`]+)*)  +(?P<text>\S.*)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    from mkdocs.structure.files import File

    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links that lead to pages of the site; a link to another file of the repository is its text alone."""
    return linked(markdown, page.file.src_uri)


def linked(markdown: str, page: str) -> str:
    """`markdown` of the site's `page`, its links as the site has them."""
    own = {name: path for path, name in OUTSIDE.items()}.get(page, join("docs", page))

    def link(found: re.Match[str]) -> str:
        picture, text, target, anchor = found.groups()
        path = normpath(join(dirname(own), target))
        inside = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is None:
            return text if os.path.exists(ROOT / path) else found[0]
        return f"{picture}[{text}]({relpath(inside, dirname(page) or '.')}{anchor or ''})"

    return LINK.sub(link, markdown)


def listed(docstring: str) -> str:
    """A docstring whose rows of names and what is said of them, as our docstrings have them, are Markdown lists."""
    lines: list[str] = []
    row = False
    for line in docstring.splitlines():
        found = ROW.fullmatch(line)
        if found:
            lines += [] if row or not lines or not lines[-1] else [""]
            lines.append(f"- **{found['names']}**: {found['text']}")
            row = True
        elif row and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            lines += [""] if row and line else []
            lines.append(line)
            row = False
    return "\n".join(lines)


class Lists(Extension):  # type: ignore[misc]
    """Docstrings with lists, for griffe."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
