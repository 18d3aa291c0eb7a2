"""Servers for tests: the app under uvicorn on a port of its own, with a tiny model that all share."""

import base64
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.recipe import Recipe
from mmaccel.media.video import write_jpeg
from mmaccel_lab.world import World, render
from tests.media.films import write_film
from tests.models.streams import CLUSTERS

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2")

import uvicorn  # noqa: E402
from websockets.sync.client import connect  # noqa: E402

from mmaccel.serve.app import create_app, uvicorn_settings  # noqa: E402
from mmaccel.serve.engine import Engine  # noqa: E402
from mmaccel.serve.settings import Settings  # noqa: E402
from mmaccel.serve.streams import Streams  # noqa: E402

QUESTION = "What colour was the star?"
CHAT, SESSIONS = "/v1/chat/completions", "/v1/streaming/sessions"
KEY, OTHER = "first-key-1234", "second-key-5678"
SMALL = {"name": "mosaic", "frames": 8, "window": 16, "local": 4, "index": CLUSTERS}


@functools.cache
def loaded() -> tuple[Any, Any]:
    return mmaccel.load_model("tiny-ov", dtype=torch.float32), mmaccel.load_processor("tiny-ov")


def recipes() -> dict[str, Recipe]:
    return {
        "dense": Recipe.load("dense"),
        "mosaic": Recipe.load(None, kv=SMALL),
        "fastv": Recipe.load("fastv"),
        "prompt_lookup": Recipe.load("prompt_lookup"),
    }


@dataclass
class Served:
    """A running server."""

    url: str
    engine: Engine
    app: Any

    def client(self, key: str | None = None, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False, **options)

    def chat(self, content: Any, key: str | None = None, **fields: Any) -> Any:
        """The response to one message of the user."""
        messages = [{"role": "user", "content": content}]
        with self.client(key) as client:
            return client.post(
                "/v1/chat/completions", json={"model": "tiny-ov", "messages": messages, **fields}
            )


@contextmanager
def running(
    settings: Settings | None = None,
    chosen: dict[str, Recipe] | None = None,
    model: Any = None,
    registry: Any = Streams,
) -> Iterator[Served]:
    plain, processor = loaded()
    model = plain if model is None else model
    engine = Engine("tiny-ov", model, processor, chosen or recipes(), settings or Settings())
    app = create_app(engine, registry)
    told = {"port": 0, "log_level": "warning", "timeout_graceful_shutdown": 5}
    server = uvicorn.Server(uvicorn.Config(app, **told, **uvicorn_settings(engine.settings)))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", engine, app)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def served(shipped: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    shipped("tiny-ov")
    folder = tmp_path_factory.mktemp("files")
    write_film(folder / "bars.mp4", 20)
    (folder / "secret.txt").write_text("nobody reads this")
    with running(Settings(folder=folder, saves=tmp_path_factory.mktemp("saves"))) as one:
        yield one


@pytest.fixture(scope="session")
def keyed(shipped: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    shipped("tiny-ov")
    with running(Settings(keys=(KEY, OTHER), saves=tmp_path_factory.mktemp("saves"))) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    """A client of the server that all share; the streams that a test leaves open there are closed after it."""
    with served.client() as one:
        yield one
        for number in list(served.app.state.streams._open):
            one.delete(f"{SESSIONS}/{number}")


@pytest.fixture
def stream(client: Any) -> str:
    """The path of a stream on that server, which has seen nothing yet."""
    return opened(client)


@functools.cache
def jpegs(frames: int = 40) -> tuple[str, ...]:
    """Frames of the world as base64 of JPEG."""
    film = render(World.generate(3, 40).table(), 42, 70)[:frames]
    return tuple(base64.b64encode(write_jpeg(one, 4096)).decode() for one in film)


def frames_url(frames: int = 40) -> str:
    return "data:video/jpeg;base64," + ",".join(jpegs(frames))


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def text(words: str = QUESTION) -> dict[str, Any]:
    return {"type": "text", "text": words}


def opened(client: Any, frames: int = 0, **fields: Any) -> str:
    """The path of a stream that is opened, and has taken in so many frames of the world, one a second."""
    response = client.post(SESSIONS, json={"recipe": "mosaic", **fields})
    assert response.status_code == 201, response.text
    path = f"{SESSIONS}/{response.json()['id']}"
    if frames:
        posted(client, f"{path}/frames", frames=list(jpegs()[:frames]), fps=1)
    return path


def posted(client: Any, path: str, **body: Any) -> Any:
    """What is answered to a body that is taken."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def talking(served: Served, path: str, **how: Any) -> Any:
    """A socket of the stream at a path."""
    return connect(f"ws{served.url[4:]}{path}/socket", **how)


def heard(talk: Any, kind: str) -> Any:
    """The next message of a type, or the next event of a name."""
    while True:
        told = json.loads(talk.recv(timeout=30))
        if kind in (told["type"], told.get("name")):
            return told


def mp4_url(path: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
