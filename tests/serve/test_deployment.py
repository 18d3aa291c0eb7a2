"""What docs/deployment.md and the Containerfile name is there: metrics, options, files, extras."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mmaccel.cli import app

pytest.importorskip("prometheus_client")

from mmaccel.serve.metrics import Metrics
from mmaccel.serve.settings import Limits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
FILE = (ROOT / "Containerfile").read_text(encoding="utf-8")


def test_every_metric_of_the_page_is_one_of_the_server_s() -> None:
    metrics = Metrics()
    metrics.requests.labels("/health", "200").inc()
    told = {one.name for family in metrics.registry.collect() for one in family.samples}
    named = set(re.findall(r"`(mmaccel_\w+)`", PAGE))
    assert len(named) > 10 and named <= told


def test_numbers_of_the_page_are_those_of_the_settings() -> None:
    limits = Limits()
    assert f"near {limits.sessions}, after which" in PAGE and f"near {limits.memory_bytes >> 30} GiB" in PAGE
    assert "for an hour" in PAGE and limits.idle_seconds == 3600


def parsed(words: list[str]) -> Any:
    command: Any = get_command(app)
    context = command.make_context("mmaccel", list(words))
    _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    return command.make_context(command.name, list(words), parent=context).params


@pytest.mark.parametrize(
    "line", [line for line in re.findall(r"^    (.+)$", PAGE, re.MULTILINE) if "mmaccel serve" in line]
)
def test_the_command_takes_what_the_page_types(line: str) -> None:
    words = shlex.split(line.partition("mmaccel serve ")[2])
    told = parsed(["serve", *words])
    assert told["ray"] is ("--ray" in words) and told["recipe"]


def test_the_image_is_made_of_what_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.findall(r"ARG EXTRAS=(\w+)", FILE) == ["ray"] and {"ray", "serve"} <= extras.keys()
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", FILE, re.MULTILINE) for word in line.split()]
    assert "mmaccel" in copied and all((ROOT / one).exists() for one in copied)
    # All that the build of the package reads is copied before it is installed.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    read = [project["project"]["readme"], *project["project"]["license-files"]]
    assert {*read, *project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]} <= set(copied)
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (told,) = re.findall(r"^CMD \[(.+)\]$", FILE, re.MULTILINE)
    saves = parsed([word.strip().strip('"') for word in told.split(",")])["saves"]
    assert Path(saves) == Path("/saves")  # text under older versions of typer, which make the path later
    assert set(re.findall(r"--build-arg (\w+)=", PAGE)) == set(re.findall(r"^ARG (\w+)", FILE, re.MULTILINE))
