"""The page in a real browser: a file, the camera, an address, a question, evidence, two recipes, errors. The browser is
Debian's chromium without a window, told what to do by the DevTools protocol.

`make test-page` runs these; `MMACCEL_PICTURES=docs` writes the pictures of docs/serving.md.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect

from mmaccel.serve.settings import Limits, Settings
from mmaccel_lab.world import World, write_mp4
from tests.media.films import answering, send
from tests.serve.conftest import KEY, Served, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: make test-page installs it"),
]
PICTURES = os.environ.get("MMACCEL_PICTURES")


class Page:
    """One page of a browser."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": given}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, expression: str, seconds: float = 40) -> Any:
        end = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.1)
        return found

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def choose(self, selector: str, path: Path) -> None:
        """Choose a file, as a user does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def picture(self, name: str) -> None:
        """Keep a picture of the page, where they are asked for."""
        if PICTURES:
            data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
            (Path(PICTURES) / f"page_{name}.png").write_bytes(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of a fresh chromium with a camera that is not there, and no way to the internet."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1180,900", "--no-first-run"]
    flags += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    folder = tmp_path_factory.mktemp("browser")
    flags += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--disable-background-networking"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-dev-shm-usage"]
    with subprocess.Popen([CHROMIUM, *flags, "about:blank"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening" in line)
            port = re.findall(r":(\d+)/", line)[0]
            pages = httpx2.get(f"http://127.0.0.1:{port}/json", trust_env=False).json()
            url = next(one["webSocketDebuggerUrl"] for one in pages if one["type"] == "page")
            with connect(url, max_size=1 << 26) as socket:
                one = Page(socket)
                for domain in ("Page", "Runtime", "DOM"):
                    one.call(f"{domain}.enable")
                yield one
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A film of the world, a frame a second."""
    path = tmp_path_factory.mktemp("film") / "world.mp4"
    write_mp4(World.generate(7, 64), path, 84, 140)
    return path


def opened(page: Page, served: Served, first: str = "mosaic", second: str = "") -> None:
    page.go(served.url)
    page.until("document.getElementById('first').options.length > 0")
    assert page.value("document.getElementById('model').textContent") == "tiny-ov"
    page.value(f"document.getElementById('first').value = '{first}'")
    page.value(f"document.getElementById('second').value = '{second}'")


def ask(page: Page, words: str) -> None:
    page.value(f"document.getElementById('question').value = {words!r}")
    page.value("document.getElementById('ask').requestSubmit()")


def no_error(page: Page) -> None:
    assert page.value("document.getElementById('error').hidden"), page.value(
        "document.getElementById('error').textContent"
    )


def test_a_file_a_question_and_evidence_under_two_recipes(page: Page, served: Served, film: Path) -> None:
    opened(page, served, "mosaic", "dense")
    page.choose("#file", film)
    assert "64 frames" in page.until(
        "document.getElementById('state').textContent.includes('frames') && state.textContent"
    )
    page.until("[...document.querySelectorAll('.held')].every(one => one.textContent.includes('64 frames'))")
    assert "visual clusters" in page.value("document.querySelector('.held').textContent")
    # The timeline has more than one colour.
    assert (
        page.value(
            "new Set(new Uint32Array(document.querySelector('.timeline').getContext('2d')"
            ".getImageData(0, 5, document.querySelector('.timeline').width, 1).data.buffer)).size"
        )
        > 2
    )
    ask(page, "Describe the video.")
    page.until(
        "[...document.querySelectorAll('.took')].every(one => one.textContent.includes('the first after'))"
    )
    said = page.value("[...document.querySelectorAll('.answer')].map(one => one.textContent)")
    assert len(said) == 2 and all(len(one) > 10 for one in said)
    seen = "[...document.querySelectorAll('.run')].map(run => run.querySelectorAll('.evidence img').length)"
    first, second = page.value(seen)
    assert first > 0 and second == 0  # a memory that keeps all has all in view, and says so
    assert page.value("document.querySelectorAll('.evidence')[1].textContent") == "Every frame was in view."
    page.until(
        "[...document.querySelectorAll('.evidence img')].every(one => one.complete && one.naturalWidth === 140)"
    )
    assert page.value(
        "[...document.querySelectorAll('.evidence li')].every(one => /\\d:\\d\\d/.test(one.textContent))"
    )
    no_error(page)
    page.picture("file")


def test_the_camera(page: Page, served: Served) -> None:
    opened(page, served)
    page.value("document.getElementById('fps').value = 4")
    page.value("document.getElementById('camera').click()")
    page.until("/ (8|9|\\d\\d) frames, /.test(' ' + document.querySelector('.held')?.textContent)")
    ask(page, "What is seen?")
    page.until("document.querySelector('.took').textContent.includes('the first after')")
    assert page.value("document.querySelectorAll('.evidence img').length") > 0
    no_error(page)
    page.picture("camera")
    page.value("document.getElementById('stop').click()")
    assert page.value("document.getElementById('state').textContent") == "The camera is off."


def test_errors_are_told_and_leave_the_page_at_work(page: Page, served: Served, tmp_path: Path) -> None:
    """An address is read after them, and a question answered."""
    opened(page, served)
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video at all" * 50)
    page.choose("#file", broken)
    told = page.until(
        "!document.getElementById('error').hidden && document.getElementById('error').textContent"
    )
    assert "the video" in told and "/tmp" not in told
    page.picture("error")
    page.value("document.getElementById('url').value = 'http://127.0.0.1:1/a.mp4'")
    page.value("document.getElementById('read').click()")
    page.until("document.getElementById('error').textContent.includes('not a public address')")
    page.value("document.getElementById('url').value = 'file:bars.mp4'")
    page.value("document.getElementById('read').click()")
    page.until("document.getElementById('state').textContent.startsWith('file:bars.mp4: 2 frames')")
    ask(page, " ")
    page.until("document.getElementById('error').textContent.includes('empty')")
    ask(page, "What is seen?")
    page.until("document.querySelector('.took').textContent.includes('the first after')")
    no_error(page)


def test_a_key_is_asked_for(page: Page, film: Path) -> None:
    with running(Settings(keys=(KEY,), limits=Limits(own_sessions=2))) as served:
        page.go(served.url)
        page.until("document.getElementById('model').textContent === 'this server needs a key'")
        assert not page.value("document.getElementById('keyed').hidden")
        page.value(f"key.value = '{KEY}'; key.onchange()")
        page.until("document.getElementById('first').options.length > 0")
        page.choose("#file", film)
        page.until("document.getElementById('state').textContent.includes('64 frames')")
        ask(page, "What is seen?")
        page.until("document.querySelector('.took').textContent.includes('the first after')")
        no_error(page)
        page.go("about:blank")


def test_the_example_s_page_of_another_origin_shows_its_camera_and_asks(page: Page) -> None:
    """`examples/browser.html`, from a server of files; a page of an origin that is not admitted gets nothing."""
    page_of = Path(__file__).parents[2] / "examples" / "browser.html"
    with (
        answering(lambda request: send(request, page_of.read_bytes())) as here,
        running(Settings(origins=(here,))) as served,
        running() as shut,
    ):
        page.go(f"{here}/browser.html?server={served.url}")
        page.until("/^[3-9] frames/.test(state.textContent)")
        page.value("question.value = 'What colour was the star?'; form.requestSubmit()")
        assert page.until("answer.textContent.includes('first token') && answer.textContent")[0] != " "
        page.go(f"{here}/browser.html?server={shut.url}")
        page.until("document.readyState === 'complete'")
        assert shut.engine.metrics.requests.labels("refused", "403")._value.get() > 0
        assert page.value("state.textContent") == "no frames yet"
        page.go("about:blank")
