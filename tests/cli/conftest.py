"""A clip, a model that knows nothing, and a way to run commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmaccel.cli import console, main
from mmaccel_lab.cli import main as lab
from mmaccel_lab.world import World, write_mp4

LAB = {"demo", "eval", "world"}
"""Commands of `mmaccel-lab`; all others are of `mmaccel`."""


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


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command of `mmaccel` or `mmaccel-lab` in this process: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        words = [str(one) for one in arguments]
        command = words[2:3] if words[:1] == ["--import"] else words[:1]
        with pytest.raises(SystemExit) as done:
            (lab if LAB.intersection(command) else main)(words)
        out, err = capsys.readouterr()
        return int(done.value.code or 0), out, err

    return run
