"""Commands, run in the tests' own process."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mmaccel.cli import main
from mmaccel_lab.cli import main as lab

LAB = {"demo", "eval", "world"}
"""Commands of `mmaccel-lab`; all others are of `mmaccel`."""


def interrupt() -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def after(
    count: int, works: Callable[..., Iterator[Any]], stop: Callable[[], None] = interrupt
) -> Callable[..., Iterator[Any]]:
    """The same, stopped by the user, or as `stop` does it, once it has given so many."""

    def stopped(*given: Any, **how: Any) -> Iterator[Any]:
        for number, one in enumerate(works(*given, **how) if count else [None]):
            if number == count:
                break
            yield one
        stop()

    return stopped


class Call:
    """Runs a command of `mmaccel` or `mmaccel-lab`: exit status, standard output, standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        self.capsys.readouterr()
        words = [str(one) for one in arguments]
        command = words[2:3] if words[:1] == ["--import"] else words[:1]
        with pytest.raises(SystemExit) as done:
            (lab if LAB.intersection(command) else main)(words)
        out, err = self.capsys.readouterr()
        return int(done.value.code or 0), out, err

    def text(self, *arguments: object) -> str:
        """What it prints; it succeeds."""
        status, out, err = self(*arguments)
        assert status == 0, err
        return out

    def object(self, *arguments: object) -> Any:
        """The one object that it prints, and nothing else; it succeeds."""
        status, out, err = self(*arguments)
        assert (status, err) == (0, ""), err
        return json.loads(out)

    def error(self, *arguments: object) -> str:
        """The one sentence with which it refuses."""
        status, out, err = self(*arguments)
        assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, out + err
        return err
