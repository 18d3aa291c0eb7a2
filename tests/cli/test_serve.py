"""`mmaccel serve`: what it refuses before it loads a model, and a process that answers and stops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx2")
ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mmaccel", "serve", *arguments]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}", **environment}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "0.0.0.0"], "give a key by --keys FILE or MMACCEL_KEY"),
        (["--keys", "nowhere.txt"], "--keys: nowhere.txt cannot be read"),
        (["--files", "nowhere"], "--files: there is no folder nowhere"),
        (["--recipe", "nothing"], "nothing"),
        (["--model", "tiny-nothing"], "tiny-nothing"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], told: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ImportError('no', name='fastapi')")
    done = run(PYTHONPATH=f"{tmp_path}:{ROOT}:{ROOT / 'lab'}")
    assert (
        done.returncode == 2
        and "serve needs fastapi: install it with pip install 'mmaccel[serve]'" in done.stderr
    )


def test_replicas_want_ray(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no', name='ray')")
    done = run("--ray", PYTHONPATH=f"{tmp_path}:{ROOT}:{ROOT / 'lab'}")
    assert (
        done.returncode == 2 and "serve needs ray: install it with pip install 'mmaccel[ray]'" in done.stderr
    )


def test_a_process_serves_and_stops(shipped: Callable[[str], str], tmp_path: Path) -> None:
    """From its start to an answer; SIGTERM ends it as it ends every command."""
    (tmp_path / "keys").write_text("a-key-of-mine\n")
    words = [
        "--model",
        shipped("tiny-ov"),
        "--port",
        "0",
        "--keys",
        str(tmp_path / "keys"),
        "--device",
        "cpu",
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}"}
    with subprocess.Popen(
        [sys.executable, "-m", "mmaccel", "serve", *words], env=env, stderr=subprocess.PIPE, text=True
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
            assert answer.status_code == 200 and answer.json()["mmaccel"]["recipe"] == "dense"
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(20) in (0, 143), rest
            assert "Traceback" not in rest
        finally:
            process.kill()
