"""What the pages quote of the command line and of bench/ is understood as it stands there."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mmaccel.cli import app
from mmaccel_lab.cli import app as lab

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "lab/README.md",
    "bench/README.md",
    *(
        f"docs/{n}.md"
        for n in (
            *(
                "mminference",
                "mosaic",
                "speed",
                "compose",
                "architecture",
                "stock",
                "families",
                "serving",
                "deployment",
                "troubleshooting",
            ),
            *(f"tutorials/{n}" for n in ("long-video", "stream", "captions", "own-policy", "own-family")),
        )
    ),
)
ENDS = re.compile(r"\s(?:#|&&|<|>|\|).*")
"""What comes after a command on its line."""


class _Understood(Exception):
    """The words were parsed; nothing is run."""


def quoted(program: str) -> list[tuple[str, str]]:
    """(page, words) of all that follows `program`, in blocks of code and between backticks."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for block in re.findall(r"(?m)^    .+$", text):
            found += [(page, one.strip()) for one in block.split("&&")]
        found += [(page, " ".join(one.split())) for one in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    start = re.compile(rf"(?:python )?{program}")
    return list(dict.fromkeys((page, ENDS.sub("", one)) for page, one in found if start.match(one)))


@pytest.mark.parametrize(("page", "line"), [one for one in quoted(r"bench/\w+\.py") if " " in one[1]])
def test_a_script_takes_what_is_quoted(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *words = shlex.split(line.removeprefix("python "))
    plain = argparse.ArgumentParser.parse_args

    def only(self: argparse.ArgumentParser, *given: Any, **options: Any) -> Any:
        plain(self, *given, **options)
        raise _Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only)
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(_Understood):
        runpy.run_path(str(ROOT / script))["main"]()


@pytest.mark.parametrize(("page", "line"), [*quoted("mmaccel "), *quoted("mmaccel-lab ")])
def test_the_command_line_takes_what_is_quoted(page: str, line: str) -> None:
    program, *words = shlex.split(line)
    command: Any = get_command(lab if program == "mmaccel-lab" else app)
    context = None
    while hasattr(command, "resolve_command") and words:
        context = command.make_context(command.name or "mmaccel", list(words), parent=context)
        words = [*context._protected_args, *context.args]
        _, command, words = command.resolve_command(context, words)
    assert command is not None and not command.hidden, "a command that moved"
    if words:
        assert command.make_context(command.name, list(words), parent=context).params


def test_quotes_are_found() -> None:
    """A pattern that finds nothing would pass everything."""
    assert (
        len(quoted("mmaccel ")) > 15
        and len(quoted("mmaccel-lab ")) > 4
        and len(quoted(r"bench/\w+\.py")) > 15
    )
