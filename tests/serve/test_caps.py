"""Caps that hold together: bytes of decoded frames, of sockets, of memories and of saves; and headers that are none."""

from __future__ import annotations

import base64
import io
from typing import Any

import PIL.Image
import pytest

from mmaccel.serve import sources
from mmaccel.serve.kept import Pictures
from mmaccel.serve.settings import Limits, Settings
from tests.serve.conftest import Served, running, text, video

CHAT, SESSIONS = "/v1/chat/completions", "/v1/streaming/sessions"


def bomb(side: int = 4096) -> bytes:
    """A picture of one colour: hundreds of bytes that are megabytes decoded."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (side, side)).save(file, "WEBP", lossless=True)
    assert len(file.getvalue()) < 1000
    return file.getvalue()


@pytest.fixture
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be decoded."""

    def decoding(*_: Any) -> Any:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(sources, "read_image", decoding)


def test_frames_that_are_too_large_together_are_not_decoded(served: Served, undecoded: None) -> None:
    one = base64.b64encode(bomb()).decode()
    many = [one] * 100  # 5 GB of 70 kB
    told = served.chat([video("data:video/webp;base64," + ",".join(many)), text()])
    assert told.status_code == 413 and "decoded" in told.text
    with served.client() as client:
        path = f"{SESSIONS}/{client.post(SESSIONS, json={}).json()['id']}"
        told = client.post(f"{path}/frames", json={"frames": many})
        assert told.status_code == 413 and "decoded" in told.text
        client.delete(path)


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
    import torch

    pictures, seen = Pictures(4), list[bytes | None]()

    def writing(frame: Any, side: int) -> bytes:
        seen.append(pictures.at(100))  # as another thread does meanwhile
        return bytes([int(frame[0, 0, 0])])

    monkeypatch.setattr("mmaccel.serve.kept.write_jpeg", writing)
    frames = torch.arange(9, dtype=torch.uint8).view(9, 1, 1, 1).expand(9, 3, 1, 1)
    pictures.add(0, frames)
    assert seen == [None, *(bytes([n]) for n in (0, 1, 2, 3, 4, 5, 6, 7))]
    assert pictures.at(3) == b"\0" and len(pictures._files) <= 4
