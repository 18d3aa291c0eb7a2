"""The command line. Commands import what they need when they run, so that `--help` is fast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

import typer

from mmaccel.cli import ask, caption, catalog, doctor, draw, recommend, report, search, serve, watch
from mmaccel.cli.program import OneVideoCommand, create_program, run
from mmaccel.core.errors import MmaccelError
from mmaccel.models.shipped import INSTALL

app = create_program("mmaccel", "Vision-language models made fast on long video.")
app.command("ask", cls=OneVideoCommand)(ask.ask)
app.command("watch", cls=OneVideoCommand)(watch.watch)
app.command("caption", cls=OneVideoCommand)(caption.caption)
app.command("serve")(serve.serve)
app.command("list")(catalog.list_names)
app.command("describe")(catalog.describe_name)
app.command("schema")(catalog.print_schema)
app.command("recommend")(recommend.recommend)
app.command("search")(search.search)
app.command("draw")(draw.draw_pictures)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)


def _refuse_moved_command(context: typer.Context) -> None:
    name = context.info_name
    raise MmaccelError(f"`mmaccel {name}` is now `mmaccel-lab {name}`; where that is missing, run {INSTALL}.")


for _name in ("demo", "eval", "world"):
    # Whatever follows, --help included, gets the same sentence.
    app.command(
        _name,
        hidden=True,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(_refuse_moved_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one `mmaccel` command with `arguments` (None: sys.argv) and exit the process; exit codes as in `program.run`."""
    # CUDA reads it when it begins. A host that feeds several devices then waits for none of them.
    os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    run(app, arguments)
