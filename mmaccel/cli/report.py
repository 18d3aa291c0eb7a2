"""`mmaccel report`, and `--report` of ask and watch: a run as one HTML page that works offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mmaccel.cli.console import remark
from mmaccel.core.errors import RecipeError, quoted
from mmaccel.core.files import outside
from mmaccel.core.report_page import format_policy_names, render_page
from mmaccel.core.rows import write_atomically

if TYPE_CHECKING:
    from mmaccel.media import Video

Page = Annotated[
    Path | None,
    Option("--report", help="Also write the run to this file, as one page of HTML that needs no network."),
]

FIX = "give a file of what `mmaccel ask --json` or `mmaccel watch --json` printed"


def report(
    run: Annotated[
        str, Argument(help="What `mmaccel ask --json` or `mmaccel watch --json` printed, in a file.")
    ],
    output: Annotated[Path | None, Option("--out", help="The page; RUN with the ending .html.")] = None,
    video: Annotated[
        str | None, Option(help="The video, where it is not at the path that the run names.")
    ] = None,
) -> None:
    """Write an HTML page of a run: what was chosen, what it cost, what it kept, and the frames its answers are based on.

    Frames are read from the video again; for a camera or URL the page shows times only.
    """
    told = outside.read_json(run, f"run {quoted(run, outside.PATH)}", RecipeError, fix=FIX)
    output = Path(run).with_suffix(".html") if output is None else output
    try:
        write_html_page(told, output, told["video"] if video is None else video)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RecipeError(f"{quoted(run, outside.PATH)} is no run; {FIX}.") from error


def check_report_path(path: Path | None) -> None:
    """Raise `RecipeError` if no report can be written to `path` (None: none is asked for); called before the run."""
    if path is not None and not path.parent.is_dir():
        raise RecipeError(f"--report: the folder {path.parent} does not exist; create it first.")
    if path is not None and path.is_dir():
        raise RecipeError(f"--report: {path} is a folder; give a file, such as page.html.")


def write_html_page(told: Mapping[str, Any], path: Path, video: str | Video | None) -> None:
    """Write the HTML page of a run to `path`. `told`: the --json output of ask or watch; `video`: source of thumbnails."""
    from mmaccel.media import thumbnails

    picture = (lambda _: None) if video is None else thumbnails(video)
    facts = {name: told.get(name) for name in ("model", "video", "frames", "seconds", "error")}
    if "answers" in told:
        began, shift = told["began"] or 0.0, told["shift"]

        def moved(seconds: float) -> bytes | None:
            """A frame by its seconds in the session; none where another video was watched then."""
            return None if shift and seconds <= began else picture(seconds - shift)

        text = render_page(
            {format_policy_names(told["recipe"]): {**told, "kv": told["counters"]}},
            told["answers"],
            facts,
            moved,
        )
    else:
        runs = {run["recipe"]: run for run in (told.get("dense"), *told.get("runs", (told,))) if run}
        many = len(runs) > 1
        answers = [
            {**run, "question": told["question"], "recipe": name if many else None}
            for name, run in runs.items()
        ]
        fields = {name: {**run, "recipe": run["fields"], "kv": run["cache"]} for name, run in runs.items()}
        given = [number / told["fps"] for number in range(told["frames"])]
        text = render_page(fields, answers, facts, picture, given)
    write_atomically(path, text)
    remark(f"the page of this run: {path}")
