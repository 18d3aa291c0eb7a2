"""A browser for tests: Debian's chromium without a window, told what to do by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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

    def picture(self, path: Path) -> None:
        """A picture of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a fresh chromium with a camera that is not there, and no way to the internet."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1180,900", "--no-first-run"]
    flags += [
        "--use-fake-device-for-media-stream",
        "--use-fake-ui-for-media-stream",
        "--disable-dev-shm-usage",
    ]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--disable-background-networking"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with subprocess.Popen([CHROMIUM, *flags, "about:blank"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening" in line)
            port = re.findall(r":(\d+)/", line)[0]
            pages = httpx2.get(f"http://127.0.0.1:{port}/json", trust_env=False).json()
            url = next(one["webSocketDebuggerUrl"] for one in pages if one["type"] == "page")
            with connect(url, max_size=1 << 26) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "DOM"):
                    page.call(f"{domain}.enable")
                yield page
        finally:
            process.terminate()
