"""The command line of the lab, made as that of mmaccel is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from mmaccel.cli.program import create_program, run
from mmaccel_lab.cli import evaluate, haystack, stream, worlds

app = create_program("mmaccel-lab", "The synthetic world of mmaccel: make it, and measure answers about it.")
app.command("demo")(worlds.demo)
app.command("world")(worlds.world)
evaluate.app.command("haystack")(haystack.haystack)
evaluate.app.command("stream")(stream.stream)
app.add_typer(evaluate.app, name="eval")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command of `mmaccel-lab` and leave the process; see `mmaccel.cli.program.run`."""
    run(app, arguments)
