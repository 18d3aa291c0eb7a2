"""The page in a real browser: a file, the camera, an address, a question, evidence, two recipes, errors.

`make test-page` runs these; `MMACCEL_PICTURES=docs` writes the pictures of docs/serving.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmaccel.serve.settings import Limits, Settings
from mmaccel_lab.world import World, render
from tests.media.films import answering, send
from tests.serve.browser import CHROMIUM, Page, browser
from tests.serve.conftest import KEY, Served, running

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed: make test-page installs it"),
]
PICTURES = os.environ.get("MMACCEL_PICTURES")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A film of the world, a frame a second."""
    import av

    path = tmp_path_factory.mktemp("film") / "world.mp4"
    frames = render(World.generate(7, 64).table(), 84, 140)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=1)
        stream.width, stream.height, stream.pix_fmt = 140, 84, "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame.permute(1, 2, 0).contiguous().numpy(), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return path


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.picture(Path(PICTURES) / f"page_{name}.png")


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
    picture(page, "file")


def test_the_camera(page: Page, served: Served) -> None:
    opened(page, served)
    page.value("document.getElementById('fps').value = 4")
    page.value("document.getElementById('camera').click()")
    page.until("/ (8|9|\\d\\d) frames, /.test(' ' + document.querySelector('.held')?.textContent)")
    ask(page, "What is seen?")
    page.until("document.querySelector('.took').textContent.includes('the first after')")
    assert page.value("document.querySelectorAll('.evidence img').length") > 0
    no_error(page)
    picture(page, "camera")
    page.value("document.getElementById('stop').click()")
    assert page.value("document.getElementById('state').textContent") == "The camera is off."


def test_an_address(page: Page, served: Served) -> None:
    opened(page, served)
    page.value("document.getElementById('url').value = 'file:bars.mp4'")
    page.value("document.getElementById('read').click()")
    page.until("document.getElementById('state').textContent.startsWith('file:bars.mp4: 2 frames')")
    no_error(page)


def test_errors_are_told_and_leave_the_page_at_work(page: Page, served: Served, tmp_path: Path) -> None:
    opened(page, served)
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video at all" * 50)
    page.choose("#file", broken)
    told = page.until(
        "!document.getElementById('error').hidden && document.getElementById('error').textContent"
    )
    assert "the video" in told and "/tmp" not in told
    picture(page, "error")
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
