"""Sources at http addresses: their caps, and that none leads to a private address."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmaccel.serve import sources
from mmaccel.serve.settings import Limits, Settings
from mmaccel.serve.sources import is_public
from tests.media.films import write_film
from tests.serve.conftest import Served, running, text, video


class Answers(http.server.BaseHTTPRequestHandler):
    """A site that answers by the path asked for."""

    film = b""

    def do_GET(self) -> None:
        name = self.path[1:].partition("?")[0]
        if name == "film.mp4":
            return self._give(self.film)
        if name.startswith("to="):
            return self._give(b"", 302, name[3:])
        if name == "round":
            return self._give(b"", 301, "/round")
        if name == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(bytes(1 << 16))
        if name == "slow":
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            while True:
                self.wfile.write(b"a")
                time.sleep(0.05)
        return self._give(b"nothing", 404)

    def _give(self, body: bytes, status: int = 200, place: str = "") -> None:
        self.send_response(status)
        if place:
            self.send_header("Location", place)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def site(film: bytes) -> Iterator[str]:
    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # who hangs up on an endless answer

    handler = type("One", (Answers,), {"film": film})
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_http_sources_have_caps(tmp_path: Path) -> None:
    film = write_film(tmp_path / "film.mp4", 12).read_bytes()
    limits = Limits(source_bytes=1 << 20, source_seconds=1.0, redirects=2)
    with site(film) as url, running(Settings(private=True, limits=limits)) as served:

        def status(path: str) -> tuple[int, str]:
            response = served.chat([video(f"{url}/{path}"), text()], max_tokens=1, mmaccel={"frames": 4})
            return response.status_code, response.text

        assert status("film.mp4?a=ä b#c")[0] == 200
        assert status("to=/to=film.mp4")[0] == 200
        assert status("round") == (400, status("round")[1]) and "redirects" in status("round")[1]
        assert status("missing")[0] == 400
        assert status("endless")[0] == 413
        began = time.monotonic()
        assert status("slow")[0] == 400 and time.monotonic() - began < 4
        assert status("to=file:///etc/passwd")[0] == 400
        assert status("to=ftp://127.0.0.1/a")[0] == 400


def test_a_redirect_may_not_lead_to_a_private_address(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor may a name that means another address when it is looked up again."""
    film = write_film(tmp_path / "film.mp4", 12).read_bytes()
    with site(film) as url:
        monkeypatch.setattr(sources, "is_public", lambda one: one == "127.0.0.1")
        assert served.chat([video(f"{url}/film.mp4"), text()], max_tokens=1).status_code == 200
        inside = served.chat([video(f"{url}/to=http://10.0.0.1/a.mp4"), text()], max_tokens=1)
        assert inside.status_code == 403
        # Several addresses, of which one is private: a browser would try them in turn.
        real, found = sources.socket.getaddrinfo, []

        def lookup(name: Any, *rest: Any, **more: Any) -> Any:
            if name != "rebind.example":
                return real(name, *rest, **more)
            found.append(name)
            whole = real("127.0.0.1", *rest, **more)
            return [*whole, (*whole[0][:4], ("10.0.0.1", whole[0][4][1]))]

        monkeypatch.setattr(sources.socket, "getaddrinfo", lookup)
        rebound = served.chat([video(url.replace("127.0.0.1", "rebind.example") + "/film.mp4"), text()])
        assert rebound.status_code == 403 and len(found) == 1


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111"])
def test_public_addresses_are(address: str) -> None:
    assert is_public(address)
