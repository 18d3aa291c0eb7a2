"""The examples of serving, run against a server: the `openai` package, a camera to alerts, a stream over the WebSocket."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import av
import pytest

from mmaccel_lab.world import World, render
from tests.examples import example
from tests.serve.conftest import KEY, Served, keyed, served, text, video

openai = pytest.importorskip("openai")
__all__ = ["example", "keyed", "served"]


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("film") / "world.mp4"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=1)
        stream.width, stream.height, stream.pix_fmt = 140, 84, "yuv420p"
        for frame in render(World.generate(7, 30).table(), 84, 140):
            array = frame.permute(1, 2, 0).contiguous().numpy()
            container.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.always
def test_openai_asks_about_a_file(served: Served, film: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    said = example("openai_client").ask(client, str(film), "Describe the video.", "mosaic")
    assert said.startswith("the video opens on the")
    printed = capsys.readouterr().out
    assert said in printed and "from" in printed.splitlines()[1]


def test_openai_s_own_types_and_errors(keyed: Served, served: Served, film: Path) -> None:
    """What the package makes of our answers: its types, usage, streams, and its errors by status."""
    client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0)
    asked: dict[str, Any] = {
        "model": "tiny-ov",
        "messages": [{"role": "user", "content": [video(example_url(film)), text("Describe the video.")]}],
        "max_tokens": 5,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 5
    assert whole.model_extra["mmaccel"]["recipe"] == "dense"
    streams = dict(stream=True, stream_options={"include_usage": True})
    chunks = list(client.chat.completions.create(**asked, **streams))
    said = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert said == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    with pytest.raises(openai.NotFoundError, match="tiny-ov"):
        client.chat.completions.create(**{**asked, "model": "gpt-9"})
    with pytest.raises(openai.BadRequestError, match="n: input should be 1"):
        client.chat.completions.create(**asked, n=2)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong-key", max_retries=0).models.list()

    async def also() -> str:
        async with openai.AsyncOpenAI(base_url=f"{keyed.url}/v1", api_key=KEY) as one:
            events = await one.chat.completions.create(**asked, stream=True)
            return "".join([event.choices[0].delta.content or "" async for event in events])

    assert asyncio.run(also()) == said


def example_url(film: Path) -> str:
    from tests.serve.conftest import mp4_url

    return mp4_url(film)


def test_openai_asks_about_a_camera(served: Served, film: Path) -> None:
    """Each piece is asked about by itself: the answer is the one to the same frames as a request of our own."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    found = list(example("openai_camera").looks(client, str(film), "Where is the scene set?", 10))
    assert [second for second, _ in found] == [9.0, 19.0, 29.0]
    assert all(said for _, said in found) and len({said for _, said in found}) > 1


def test_a_camera_to_alerts(served: Served, film: Path) -> None:
    found = list(example("camera_alerts").alerts(served.url, str(film), "Where is the scene set?"))
    assert found and [second for second, _ in found] == sorted({second for second, _ in found})
    assert all(a[1] != b[1] for a, b in itertools.pairwise(found))


def test_a_stream_over_the_socket(served: Served, film: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = asyncio.run(example("stream_socket").talk(served.url, str(film), "Describe the video.", 20.0))
    assert answer["text"] in capsys.readouterr().out
    # What came after it was asked is not in it.
    assert max(one["frames"][1] for one in answer["evidence"]) <= 20
