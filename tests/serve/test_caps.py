"""Caps that hold together: bytes of frames, sockets, memories, saves and sources; and a stream that is one too many."""

import base64
import io
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import PIL.Image
import pytest
import torch

from mmaccel.core.recipe import Recipe
from mmaccel.media.video import FrameConverter
from mmaccel.serve import sources
from mmaccel.serve.admission import AdmissionController, StreamUsageCounts
from mmaccel.serve.engine import DEVICE_SHARE, Engine
from mmaccel.serve.kept import Thumbnails
from mmaccel.serve.settings import Limits, Refused, Settings
from tests.media.films import answering, write_film
from tests.serve.conftest import SESSIONS, SMALL, Served, jpegs, mp4_url, running, text, video


def bomb(side: int = 4096) -> bytes:
    """A picture of one colour: hundreds of bytes that are megabytes decoded."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (side, side)).save(file, "WEBP", lossless=True)
    assert len(file.getvalue()) < 1000
    return file.getvalue()


def test_frames_that_are_too_large_together_are_not_decoded(
    served: Served, client: Any, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "read_image", Mock(side_effect=AssertionError("it was decoded")))
    one = base64.b64encode(bomb()).decode()
    many = [one] * 100  # 5 GB of 70 kB
    told = served.chat([video("data:video/webp;base64," + ",".join(many)), text()])
    assert told.status_code == 413 and "decoded" in told.text
    told = client.post(f"{stream}/frames", json={"frames": many})
    assert told.status_code == 413 and "decoded" in told.text


def test_a_film_that_is_too_large_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = mp4_url(write_film(tmp_path / "film.mp4", 20))
    monkeypatch.setattr(FrameConverter, "convert", Mock(side_effect=AssertionError("it was decoded")))
    with running(Settings(limits=Limits(decoded_bytes=10_000))) as served:
        told = served.chat([video(film), text()], mmaccel={"frames": 10})
    assert told.status_code == 400 and "10 frames of" in told.text and "need" in told.text


def test_sources_of_a_request_share_its_room() -> None:
    """Of images and videos together, not of each."""
    picture = base64.b64encode(bomb(64)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/webp;base64,{picture}"}}
    film = video(f"data:video/webp;base64,{picture},{picture}")
    with running(Settings(limits=Limits(decoded_bytes=4 * 3 * 64 * 64))) as served:
        ours: dict[str, Any] = {"max_tokens": 1, "mmaccel": {"recipe": "dense"}}
        assert served.chat([image, film, image, text()], **ours).status_code == 200
        for more in ([image, film, film, text()], [image] * 5 + [text()]):
            told = served.chat(more, **ours)
            assert told.status_code == 413 and "decoded" in told.text


@pytest.mark.parametrize(
    "headers", [{"Host": "["}, {"Host": "[::1"}, {"Origin": "http://["}, {"Host": "a]", "Origin": "//["}]
)
def test_headers_that_are_no_addresses(served: Served, keyed: Served, headers: dict[str, str]) -> None:
    for one in (served, keyed):
        with one.client() as client:
            told = client.get("/health", headers=headers)
            assert told.status_code == 400 and "no address" in told.json()["error"]["message"]


def test_the_newest_picture_is_there_once_it_is_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, seen = Thumbnails(4), list[bytes | None]()

    def writing(frame: Any, side: int) -> bytes:
        seen.append(pictures.nearest_thumbnail(100))  # as another thread does meanwhile
        return bytes([int(frame[0, 0, 0])])

    monkeypatch.setattr("mmaccel.serve.kept.write_jpeg", writing)
    frames = torch.arange(9, dtype=torch.uint8).view(9, 1, 1, 1).expand(9, 3, 1, 1)
    pictures.add(0, frames)
    assert seen == [None, *(bytes([n]) for n in (0, 1, 2, 3, 4, 5, 6, 7))]
    assert pictures.nearest_thumbnail(3) == b"\0" and len(pictures._files) <= 4


def site(film: bytes, request: Any) -> None:
    """Answers a request by its path."""
    name = request.path[1:].partition("?")[0]
    place = "/round" if name == "round" else name[3:] if name.startswith("to=") else ""
    known = name in ("film.mp4", "endless", "slow")
    request.send_response((301 if name == "round" else 302) if place else 200 if known else 404)
    if place:
        request.send_header("Location", place)
    if name != "endless":
        request.send_header("Content-Length", "1000000" if name == "slow" else str(len(film)))
    request.end_headers()
    while name in ("endless", "slow"):
        request.wfile.write(bytes(1 << 16) if name == "endless" else b"a")
        time.sleep(0.0 if name == "endless" else 0.05)
    request.wfile.write(film)


@pytest.mark.always
def test_http_sources_have_caps(tmp_path: Path) -> None:
    film = write_film(tmp_path / "film.mp4", 12).read_bytes()
    limits = Limits(source_bytes=1 << 20, source_seconds=0.5, redirects=2)
    with answering(partial(site, film)) as url, running(Settings(private=True, limits=limits)) as served:

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


def test_a_redirect_may_not_lead_to_a_private_address(served: Served, tmp_path: Path, monkeypatch) -> None:
    """Nor may a name that means another address when it is looked up again."""
    film = write_film(tmp_path / "film.mp4", 12).read_bytes()
    with answering(partial(site, film)) as url:
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


RECIPES = {
    "all": Recipe.load(None, kv="rekv"),
    "short": Recipe.load(None, kv={"name": "rekv", "keep_seconds": 60}),
}


def measured(**limits: Any) -> AdmissionController:
    """Frames of 0.1 s and 1000 bytes: calls of half a unit run nothing."""
    made = AdmissionController(RECIPES, replace(Limits(), **limits))
    for name in RECIPES:
        one = made.admit_stream(name, 1.0, 900.0)
        made.record_call(one, 2.0, (0, 0), (10, 10_000))
        made.record_call(one, 0.0, (10, 10_000), (20, 20_000))
        made.record_call(one, 50.0, (20, 20_000), (30, 30_000), live=False)
        made.release_promise(one)
    return made


def refused(
    admission: AdmissionController, told: str, name: str = "all", fps: float = 1.0, seconds: float = 900.0
) -> str:
    """The code with which a stream is refused, since others need what it would take."""
    with pytest.raises(Refused, match=told) as caught:
        admission.admit_stream(name, fps, seconds)
    assert caught.value.status == 503
    return caught.value.code


def test_time_is_promised_until_it_is_all_taken() -> None:
    admission = measured(busy=0.86)
    given = [admission.admit_stream("all", 2.0, 900.0) for _ in range(4)]
    told = r"fps: 1 frames a second of this stream take 0\.100 s of each second"
    assert refused(admission, told) == "no_time"
    admission.admit_stream("all", 0.5, 900.0)
    admission.release_promise(given[0])
    admission.release_promise(given[0])
    admission.admit_stream("all", 2.0, 900.0)
    assert refused(admission, told) == "no_time"
    admission.admit_stream("all", None, 900.0)  # goes on here


def test_bytes_are_predicted_to_what_the_recipe_keeps() -> None:
    admission = measured(memory_bytes=1_500_000)
    one = admission.admit_stream("all", 1.0, 900.0)
    assert admission.predicted_bytes(one) == 900_000
    assert refused(admission, "seconds: this stream will hold 900000 bytes after 900 s") == "no_room"
    assert admission.predicted_bytes(admission.admit_stream("short", 1.0, 900.0)) == 60_000
    assert admission.predicted_bytes(admission.admit_stream("all", 1.0, 10.0)) == 10_000
    admission.record_call(one, 1.0, (20, 20_000), (21, 2_000_000))
    assert refused(admission, "seconds: ", "short", 1.0, 1.0) == "no_room"


def test_a_memory_that_grows_no_more_takes_no_more() -> None:
    admission = AdmissionController(RECIPES, Limits())
    one = admission.admit_stream("all", 1.0, 900.0)
    admission.record_call(one, 1.0, (50, 7_000), (60, 7_000))
    assert admission.predicted_bytes(one) == 7_000


def test_a_slab_is_not_what_a_frame_takes() -> None:
    """Bytes come a slab at a time: nothing is told before they grow, and then by all frames since the first look."""
    admission, slab = AdmissionController(RECIPES, Limits()), 256 << 20
    one = admission.admit_stream("all", 1.0, 900.0)
    admission.record_call(one, 1.0, (0, 0), (1, slab))
    assert admission.predicted_bytes(one) == slab
    admission.record_call(one, 1.0, (1, slab), (25, 2 * slab))
    assert admission.predicted_bytes(one) == pytest.approx(2 * slab + slab / 24 * 875)
    admission.record_call(one, 1.0, (25, 2 * slab), (26, 2 * slab))
    assert admission.predicted_bytes(admission.admit_stream("all", 1.0, 25.0)) < 2 * slab


def test_frames_that_come_faster_than_was_said_count(monkeypatch: pytest.MonkeyPatch) -> None:
    admission, now = measured(busy=0.8), 0.0
    monkeypatch.setattr("mmaccel.serve.admission.monotonic", lambda: now)
    one = admission.admit_stream("all", 1.0, 900.0)
    for now in (0.0, 10.0, 20.0):
        admission.record_call(one, 5.0, (int(5 * now), 0), (int(5 * now) + 50, 0))
    assert one.rate == 5.0 and admission.predicted_load(one) > 0.4


def test_a_stored_video_is_no_rate_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    admission, now = measured(), 0.0
    monkeypatch.setattr("mmaccel.serve.admission.monotonic", lambda: now)
    one = admission.admit_stream("all", 1.0, 900.0)
    for now, live in ((0.0, True), (5.0, False), (20.0, True)):
        admission.record_call(one, 5.0, (int(now), 0), (int(now) + (20 if live else 3600), 0), live)
    assert one.rate == 1.0


def test_a_server_refuses_the_stream_that_is_too_much() -> None:
    """The first is let in, for nothing is known; then by its frames; and what was refused or closed takes nothing."""
    chosen = {"mosaic": Recipe.load(None, kv=SMALL)}
    with running(Settings(), chosen) as served, served.client() as client:
        opened = client.post(SESSIONS, json={"fps": 1}).json()["id"]
        for at in range(0, 16, 8):
            frames = {"frames": list(jpegs()[at : at + 8])}
            assert client.post(f"{SESSIONS}/{opened}/frames", json=frames).status_code == 200
        cost = served.app.state.streams.admission._costs["mosaic"]
        assert [new for _, new in cost] == [8, 8] and min(cost)[0] > 0
        cost.extend([(0.5, 1)] * cost.maxlen)
        assert client.post(SESSIONS, json={"fps": 0.4}).status_code == 201
        refused = client.post(SESSIONS, json={"fps": 1})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_time", refused.text
        assert "send fewer frames a second" in refused.json()["error"]["message"]
        assert client.delete(f"{SESSIONS}/{opened}").status_code < 300
        assert client.post(SESSIONS, json={"fps": 1}).status_code == 201


def test_bytes_of_the_device_are_promised_until_they_are_all_taken() -> None:
    """What a question takes comes once, and is no growth by frames; a cap of the host's is none of the device's."""
    kv = {"name": "rekv", "store": {"process_bytes": 1000, "spill": "drop_oldest"}}
    admission = AdmissionController({"capped": Recipe.load(None, kv=kv)}, Limits(), device_bytes=3_500)
    one = admission.admit_stream("capped", 1.0, 100.0)
    admission.record_call(one, 0.0, StreamUsageCounts(0, 0), StreamUsageCounts(10, 9_000, 400))
    admission.record_call(one, 0.0, StreamUsageCounts(10, 9_000, 400), StreamUsageCounts(12, 9_900, 1_000, 1))
    admission.record_call(
        one, 0.0, StreamUsageCounts(12, 9_900, 1_000, 1), StreamUsageCounts(20, 20_000, 1_008, 1)
    )
    assert admission.predicted_bytes(one, device=True) == 1_008 + 80
    admission.admit_stream("capped", 1.0, 100.0)
    admission.admit_stream("capped", 1.0, 100.0)
    told = r"1088 bytes of the device and the open ones 3264, of 3500"
    assert refused(admission, told, "capped", seconds=100.0) == "no_room"
    admission.admit_stream("capped", None, 100.0)  # goes on here


@pytest.mark.parametrize("device", [False, True])
def test_frames_count_where_questions_lie_between_them(device: bool) -> None:
    admission = AdmissionController(RECIPES, Limits(memory_bytes=1_500_000), device_bytes=500_000)
    one, now = admission.admit_stream("all", 1.0, 900.0), StreamUsageCounts(0, 0)
    for n in range(1, 31):
        before, now = now, StreamUsageCounts(10 * n, 10_000 * n, 5_000 * n, n - 1)
        admission.record_call(one, 0.01, before, now)
    grown = (5_000 if device else 10_000) * 90
    assert admission.predicted_bytes(one, device) == pytest.approx(grown, rel=0.01)
    assert refused(admission, "seconds: this stream will hold") == "no_room"


def test_bytes_of_the_device_are_of_all_devices_without_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [SimpleNamespace(home=torch.device("cuda", n)) for n in (0, 0, 1)]
    family = SimpleNamespace(layers=lambda model: layers)
    monkeypatch.setattr("mmaccel.serve.engine.adapter_for", lambda model: family)
    monkeypatch.setattr("mmaccel.serve.engine.home_device", lambda layer: layer.home)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda one: (1_000 * (1 + one.index), 80_000))
    free = Engine.free_device_bytes(SimpleNamespace(model=None))  # type: ignore[arg-type]
    assert free == DEVICE_SHARE * 3_000
    videos = 0
    admission = AdmissionController(RECIPES, Limits(), free, lambda: videos)
    one = admission.admit_stream("all", 1.0, 10.0)
    admission.record_call(one, 0.0, StreamUsageCounts(0, 0), StreamUsageCounts(10, 1_000, 1_000))
    admission.admit_stream("all", 1.0, 10.0)
    admission.release_promise(one)
    videos = 1_000
    told = "of 1700 for all; ask for fewer seconds, or come later"
    assert refused(admission, told, seconds=10.0) == "no_room"
