"""The notebooks of examples/ run as they are, cell after cell, in a folder of their own, and say what is true."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.examples import EXAMPLES


def run(name: str) -> tuple[dict[str, Any], str]:
    """The names that the cells leave behind, and what they print."""
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as said:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}:{cell['id']}", "exec"), names)
    return names, said.getvalue()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.savefig(tmp_path / "drawn.png"))


def test_a_stream(tmp_path: Path) -> None:
    names, said = run("stream.ipynb")
    assert names["answer"].text == names["question"].answer
    assert len(names["moments"]) == 3 and (tmp_path / "drawn.png").stat().st_size > 1000
    assert said.splitlines()[-1] == f"256 frames: {names['question'].answer}"


def test_a_long_video(tmp_path: Path) -> None:
    names, said = run("long_video.ipynb")
    dense, sparse = names["answers"].values()
    assert dense[0] == sparse[0] == names["question"].answer
    assert dense[2].kept in (None, 1.0) and 0 < sparse[2].kept < 1
    assert (tmp_path / "drawn.png").stat().st_size > 1000 and "tokens" in said
