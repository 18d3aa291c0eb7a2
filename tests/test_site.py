"""The site and its pages: navigation, links, reference, tutorials that run, commands as quoted; and what a forge runs.

`make docs` builds it, where a warning is an error; nothing here needs its packages.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.main import get_command

import mmaccel
from mmaccel.cli import app, main
from mmaccel_lab.cli import app as lab
from mmaccel_lab.world import World, write_mp4

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIALS = sorted(path.name for path in (DOCS / "tutorials").glob("*.md"))
SITE = runpy.run_path(str(DOCS / "site.py"))
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
WORDS = 1500


def pages(nav: Any) -> Iterator[str]:
    """The files that a navigation names."""
    for one in nav:
        for inner in one.values():
            yield from [inner] if isinstance(inner, str) else pages(inner)


def blocks(page: Path) -> list[str]:
    return re.findall(r"(?s)```python\n(.*?)```", page.read_text(encoding="utf-8"))


def test_every_page_stands_in_the_navigation() -> None:
    named = list(pages(CONFIG["nav"]))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | set(SITE["OUTSIDE"].values())
    assert len(named) == len(set(named)) and set(named) == there
    assert all((ROOT / path).is_file() for path in SITE["OUTSIDE"])


def test_links_stay_on_the_site() -> None:
    linked: Callable[[str, str], str] = SITE["linked"]
    text = "[a](docs/speed.md#b) ![c](docs/pictures/speed.svg) [d](lab/README.md) [e](examples/stock_qwen.py) [f](https://g.h)"
    assert (
        linked(text, "index.md") == "[a](speed.md#b) ![c](pictures/speed.svg) [d](lab.md) e [f](https://g.h)"
    )
    assert (
        linked("[a](../../CONTRIBUTING.md) [b](../speed.md)", "tutorials/x.md")
        == "[a](../contributing.md) [b](../speed.md)"
    )
    assert linked("[a](nowhere.md)", "presets.md") == "[a](nowhere.md)"  # mkdocs says that it leads nowhere


def test_rows_of_a_docstring_are_lists() -> None:
    text = (
        "One.\n\nsink, window  the first\n              and the last\nblock   tokens\n\n    code\nEnd of it."
    )
    assert SITE["listed"](text) == (
        "One.\n\n- **sink, window**: the first\n  and the last\n- **block**: tokens\n\n    code\nEnd of it."
    )
    plain = "Two lines\nof prose, where nothing  is a row? no: `x` is."
    assert SITE["listed"](plain) == plain


def test_the_reference_names_what_is_there() -> None:
    names = re.findall(r"(?m)^::: (\S+)$", (DOCS / "reference.md").read_text(encoding="utf-8"))
    for name in names:
        module, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(module), last, None) or importlib.import_module(name)
        assert found.__doc__, name
    missing = set(mmaccel.__all__) - {name.removeprefix("mmaccel.") for name in names}
    # `attached` is for tools; errors stand on their module's part of the page.
    assert missing == {"MmaccelError", "MmaccelWarning", "__version__", "attached", "models", "policies"}


def test_pages_for_newcomers_are_short() -> None:
    long = {}
    for path in [
        *(DOCS / f"{n}.md" for n in ("troubleshooting", "limits", "commands")),
        *(DOCS / "tutorials").glob("*.md"),
    ]:
        count = len(path.read_text(encoding="utf-8").split())
        if count > WORDS:
            long[path.name] = count
    assert TUTORIALS and long == {}


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    write_mp4(World.generate(7, 128), path)
    return path


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_as_it_stands(
    name: str,
    film: Path,
    shipped: Callable[[str], str],
    forgotten: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped("tiny-ov"), shipped("tiny-ov-draft")
    monkeypatch.chdir(tmp_path)
    for video in ("film.mp4", "camera.mp4"):
        (tmp_path / video).symlink_to(film)
    found = blocks(DOCS / "tutorials" / name)
    assert found
    module = ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)  # where dataclasses look names up
    space = vars(module)
    for number, block in enumerate(found):
        exec(compile(block, f"{name}, block {number}", "exec", dont_inherit=True), space)
    if name == "long-video.md":
        assert space["answer"] == "orange" and "orange" in Path("page.html").read_text()
    if name == "stream.md":
        assert space["answer"].text == "pink" and Path("page.html").read_text().count("<img") > 2


def test_the_tutorial_s_own_policy_is_known_to_commands(
    forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(blocks(DOCS / "tutorials" / "own-policy.md")[0])
    monkeypatch.chdir(tmp_path)
    for words in (["describe", "powers"], ["draw", "powers", "--out", "powers.png"]):
        with pytest.raises(SystemExit) as done:
            main(["--import", "mine.py", *words])
        assert not done.value.code
    assert (tmp_path / "powers.png").stat().st_size > 1000


def test_a_forge_runs_what_ci_runs_on_the_pythons_of_the_package() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    check = flow["jobs"]["check"]
    assert {"run": ".ci/run"} in check["steps"] and os.access(ROOT / ".ci" / "run", os.X_OK)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classed = [one.rpartition(" :: ")[2] for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert check["strategy"]["matrix"]["python"] == classed == ["3.11", "3.12"]
    assert {"run": "make docs"} in flow["jobs"]["docs"]["steps"] and project["authors"]
    pinned = project["optional-dependencies"]["docs"]
    assert pinned and all("==" in one for one in pinned)


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
    assert len(quoted("mmaccel ")) > 15 and len(quoted("mmaccel-lab ")) > 4
    assert len(quoted(r"bench/\w+\.py")) > 15
