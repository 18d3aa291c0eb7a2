"""A clip, a model that knows nothing, and a way to run commands."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer

from mmaccel.cli import console
from mmaccel_lab.world import World, write_mp4
from tests.cli import Call

GET_COMMAND = functools.cache(typer.main.get_command)


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """64 frames of world 3: about a thousand tokens."""
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    write_mp4(World.generate(3, 64), path)
    return str(path)


@pytest.fixture
def ov(random_folder: Callable[[str], Path]) -> str:
    return str(random_folder("tiny-ov-draft"))


@pytest.fixture(autouse=True)
def slow_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of progress comes between what a command says, however slow the machine is."""
    monkeypatch.setattr(console, "EVERY_S", 3600.0)


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of all commands are read from their functions by the first call, not by each."""
    monkeypatch.setattr(typer.main, "get_command", GET_COMMAND)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch does not begin with a full collection of all that the tests hold; `test_watch` tries it as it is."""
    monkeypatch.setattr("mmaccel.cli.watch.tune_python_for_streams", nullcontext)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(capsys)
