"""`mmaccel serve`: what it refuses, and a process that answers and stops; what the deployment page names is there."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.main import get_command

from mmaccel.cli import app
from tests import SOURCES
from tests.cli import Call

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx2")

from mmaccel.serve.metrics import Metrics  # noqa: E402
from mmaccel.serve.settings import Limits  # noqa: E402


def test_a_port_that_is_taken_is_named(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = call.error("serve", "--port", port)
    assert (
        f"--port: 127.0.0.1:{port} cannot be served (address already in use); free it, or give another"
        in told
    )


def test_saves_that_are_no_folder_are_told_of_before_a_model_is_loaded(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = call.error("serve", "--saves", str(tmp_path / "file"), "--model", "no such model")
    assert f"--saves: {tmp_path / 'file'} cannot be written (File exists); name a folder" in " ".join(
        told.split()
    )


@pytest.mark.parametrize(("name", "extra", "option"), [("fastapi", "serve", ()), ("ray", "ray", ("--ray",))])
def test_without_an_extra_it_says_what_to_install(
    name: str, extra: str, option: tuple[str, ...], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mmaccel.serve.app", "mmaccel.serve.replicas"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    err = call.error("serve", *option)
    assert f"serve needs {name}: install it with pip install 'mmaccel[{extra}]'" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dense", "no recipe drafts in a process of its own; give one whose draft is 'parallel'"),
        ("OWN", "names device 'cuda:1' itself; set that to null"),
        ("parallelvlm --gpus 0.5", "give that a whole one"),
        ("parallelvlm --device cpu", "give that a whole one"),
        ("dense --device cpu --gpus 0.5", "--gpus: replicas on --device cpu use none; leave it out"),
        ("dense --recipe parallelvlm", ""),
    ],
)
def test_a_gpu_that_nobody_would_use_is_refused(words, says, call, tmp_path, shipped, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mmaccel.serve.replicas", served := Mock())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (own := tmp_path / "own.yaml").write_text("draft: {name: parallel, device: 'cuda:1'}")
    words = f"--model {shipped('tiny-ov')} --ray --draft-gpus 0.5 --recipe {words.replace('OWN', str(own))}"
    assert says in (call.error if says else call.text)("serve", *words.split())
    assert says or served.serve_on_ray.call_args.args[2:] == ("1", 1, 0.5)


@pytest.mark.always
def test_a_process_serves_and_stops(shipped: Callable[[str], str], tmp_path: Path) -> None:
    """From its start to an answer; SIGTERM ends it as it ends every command."""
    (tmp_path / "keys").write_text("a-key-of-mine\n")
    words = f"-m mmaccel serve --model {shipped('tiny-ov')} --port 0 --keys {tmp_path / 'keys'} --device cpu"
    env = {**os.environ, "PYTHONPATH": SOURCES}
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *words.split()], env=env, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "running on" in line)
            url = re.findall(r"http://[\d.:]+", line)[0]
            body: dict[str, Any] = {"model": "tiny-ov", "messages": [{"role": "user", "content": "Hello"}]}
            path = f"{url}/v1/chat/completions"
            assert httpx.post(path, json=body, trust_env=False).status_code == 401
            head = {"Authorization": "Bearer a-key-of-mine"}
            answer = httpx.post(path, json=body, headers=head, trust_env=False, timeout=60)
            assert time.monotonic() - began < 20
            assert answer.status_code == 200 and answer.json()["mmaccel"]["recipe"] == "dense"
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(20) in (0, 143), rest
            assert "Traceback" not in rest
        finally:
            process.kill()


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
    let_in = (ROOT / ".dockerignore").read_text().split()
    assert {f"!{one}" for one in copied} == {one for one in let_in if one.startswith("!")}
    assert "mmaccel" in copied and all((ROOT / one).exists() for one in copied)
    # All that the build of the package reads is copied before it is installed.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    read = [project["project"]["readme"], *project["project"]["license-files"]]
    assert {*read, *project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]} <= set(copied)
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    # Without a model's name nothing can be served, for the image has no lab.
    assert re.findall(r"^CMD (.+)$", FILE, re.MULTILINE) == ['["serve", "--help"]']
    (line,) = re.findall(r"^    docker run .+$", PAGE, re.MULTILINE)
    saves = parsed(shlex.split(line.partition(" mmaccel ")[2]))["saves"]
    assert Path(saves) == Path("/saves")  # text under older versions of typer, which make the path later
    assert set(re.findall(r"--build-arg (\w+)=", PAGE)) == set(re.findall(r"^ARG (\w+)", FILE, re.MULTILINE))
