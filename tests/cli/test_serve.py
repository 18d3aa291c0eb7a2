"""`mmaccel serve`: what it refuses before it loads a model, and a process that answers and stops."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import SOURCES
from tests.cli import Call

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx2")


def test_a_port_that_is_taken_is_named(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = call.error("serve", "--port", port)
    assert (
        f"--port: 127.0.0.1:{port} cannot be served (address already in use); free it, or give another"
        in told
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
