"""Many clients, slow ones, ones that leave, and a device without memory: each affects its own request alone."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

import mmaccel
from mmaccel.models.together import copy_sharing_weights
from mmaccel.serve.guard import CHECK_S
from mmaccel.serve.settings import Limits, Refused, Settings
from mmaccel.serve.turns import FairQueue
from tests.media.films import write_film
from tests.serve.conftest import (
    CHAT,
    KEY,
    OTHER,
    QUESTION,
    Served,
    frames_url,
    jpegs,
    loaded,
    mp4_url,
    opened,
    running,
    text,
    video,
)
from tests.spies import broken, product, until


def body(words: str = QUESTION, frames: int = 4, **fields: Any) -> dict[str, Any]:
    content = [video(frames_url(frames)), text(words)]
    return {"model": "tiny-ov", "messages": [{"role": "user", "content": content}], **fields}


@pytest.mark.parametrize("many", [36, pytest.param(500, marks=pytest.mark.slow)])
def test_many_clients_at_once_all_get_their_own_answer(served: Served, client: Any, many: int) -> None:
    """So many questions at once, of two kinds of work; each gets the answer that it gets alone."""
    asked = [
        body(frames=2 + n % 3, max_tokens=2, mmaccel={"recipe": ("mosaic", "fastv")[n % 2]}) for n in range(6)
    ]
    alone = [client.post(CHAT, json=one).json()["choices"] for one in asked]

    async def all_at_once() -> list[Any]:
        limits = httpx2.Limits(max_connections=many)
        async with httpx2.AsyncClient(
            base_url=served.url, timeout=300, limits=limits, trust_env=False
        ) as client:
            return await asyncio.gather(*(client.post(CHAT, json=asked[n % 6]) for n in range(many)))

    answers = asyncio.run(all_at_once())
    assert [one.status_code for one in answers] == [200] * many
    assert [one.json()["choices"] for one in answers] == [alone[n % 6] for n in range(many)]
    assert served.engine.turns._free == served.engine.settings.limits.at_once


def test_callers_take_turns() -> None:
    """Of one who asked ten times and one who came later, the later one is second; a cancelled one holds nothing up."""

    async def work() -> list[str]:
        turns, order = FairQueue(1, 19), list[str]()

        async def one(caller: str) -> None:
            async with turns.wait_for_turn(caller):
                order.append(caller)
                await asyncio.sleep(0)

        async with turns.wait_for_turn("first"):
            tasks = [asyncio.create_task(one("many")) for _ in range(10)]
            await asyncio.sleep(0)
            tasks += [asyncio.create_task(one("late")) for _ in range(2)]
            await asyncio.sleep(0)
            tasks[3].cancel()
            for _ in range(8):
                tasks.append(asyncio.create_task(one("more")))
            await asyncio.sleep(0)
            with pytest.raises(Refused, match="wait already"):
                await one("one too many")
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(turns) == 0 and turns._free == 1
        return order

    order = asyncio.run(work())
    assert order[:6] == ["many", "late", "more"] * 2 and len(order) == 19


def test_a_busy_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    generate = mmaccel.Accelerated.generate
    monkeypatch.setattr(mmaccel.Accelerated, "generate", lambda *a, **k: (go.wait(20), generate(*a, **k))[1])
    asked = body(max_tokens=1, mmaccel={"recipe": "fastv"})
    with running(Settings(limits=Limits(at_once=1, waiting=1))) as served, served.client() as client:
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(client.post, CHAT, json=asked) for _ in range(2)]
            until(lambda: len(served.engine.turns) == 1)
            refused = client.post(CHAT, json=asked)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            go.set()
        assert [one.result().status_code for one in found] == [200, 200]


@pytest.mark.always
def test_one_caller_does_not_keep_another_waiting() -> None:
    """Twenty requests of one key, then one of another: it is answered before most of them."""
    asked = body(max_tokens=1, mmaccel={"recipe": "fastv"})
    order: list[str] = []
    settings = Settings(keys=(KEY, OTHER), limits=Limits(at_once=1))
    with running(settings) as served, served.client(KEY) as many, served.client(OTHER) as late:

        def ask(client: Any, name: str) -> None:
            assert client.post(CHAT, json=asked).status_code == 200
            order.append(name)

        with ThreadPoolExecutor(20) as pool:
            all_of_them = [pool.submit(ask, many, "many") for _ in range(20)]
            until(lambda: len(served.engine.turns) >= 10)
            ask(late, "late")
        assert all(one.result() is None for one in all_of_them)
    assert order.index("late") < 12


def raw(served: Served) -> socket.socket:
    host, port = re.findall(r"//(.*):(\d+)", served.url)[0]
    return socket.create_connection((host, int(port)), timeout=20)


def head(length: int, path: str = CHAT) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_a_client_that_sends_slowly_is_cut_off_and_holds_nobody_up() -> None:
    with running(Settings(limits=Limits(body_seconds=0.5))) as served:
        slow = [raw(served) for _ in range(20)]
        for one in slow:
            one.sendall(head(10_000) + b"{")
        assert served.chat([text("hello")], max_tokens=1).status_code == 200
        for one in slow:
            assert b" 408 " in one.recv(4096)
            one.close()


@pytest.mark.always
def test_a_client_that_reads_slowly_holds_nobody_up(served: Served) -> None:
    asked = json.dumps(body("Describe the video.", 4, stream=True, max_tokens=24)).encode()
    slow = [raw(served) for _ in range(6)]
    for one in slow:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.sendall(head(len(asked)) + asked)
    until(lambda: served.engine.turns._free == served.engine.settings.limits.at_once)
    assert served.chat([text("hello")], max_tokens=1).status_code == 200
    for one in slow:
        found = b""
        while b"[DONE]" not in found:
            data = one.recv(4096)
            assert data
            found += data
        one.close()


@pytest.fixture(scope="module")
def unending(served: Served) -> Iterator[Served]:
    """A server whose model never ends an answer."""
    with running(Settings(limits=Limits(seconds=20)), model=without_end()) as one:
        yield one


def without_end() -> Any:
    model = copy_sharing_weights(loaded()[0])
    model.generation_config.eos_token_id = 10**6  # no token
    return model


@pytest.mark.parametrize(
    ("recipe", "streamed"), product(["dense", "fastv", "mosaic", "stream"], [False, True])
)
def test_a_client_that_leaves_ends_its_answer(unending: Served, recipe: str, streamed: bool) -> None:
    """The model is left long before the answer would have ended, and is free for others."""
    served, tokens = unending, list[float]()
    decode = served.engine.processor.decode
    noted = lambda *a, **k: (tokens.append(time.monotonic()), time.sleep(0.02), decode(*a, **k))[2]  # noqa: E731
    served.engine.processor.decode = noted
    try:
        asked, path = body("Describe.", 3, stream=streamed, max_tokens=1500, mmaccel={"recipe": recipe}), CHAT
        streams = served.app.state.streams
        if recipe == "stream":
            with served.client() as client:
                path = f"{opened(client, 3)}/ask"
            asked = {"question": "Describe.", "stream": streamed, "max_tokens": 1500}
        written = json.dumps(asked).encode()
        one = raw(served)
        one.sendall(head(len(written), path) + written)
        until(lambda: len(tokens) > 5)
        one.close()
        until(lambda: served.engine.turns._free == served.engine.settings.limits.at_once, 8)
        until(lambda: not any(one.busy for one in streams._open.values()), 8)
        until(lambda: not len(served.engine.batch), 8)
        assert len(tokens) < 600
    finally:
        served.engine.processor.decode = decode
    assert served.chat([text("hello")], max_tokens=1).status_code == 200


def test_a_client_that_leaves_ends_its_prompt(served: Served) -> None:
    """Between two layers of a sampled answer's prompt."""
    runs, goes_on, written = list[None](), threading.Event(), body("Describe.", 3, temperature=1)
    layers = served.engine.model.model.language_model.layers

    def waits(module: Any, given: Any, _: Any) -> None:  # of whichever copy of the model runs the prompt
        if isinstance(module, type(layers[0])) and given[0].shape[1] > 1:
            runs.append(None)
            goes_on.wait(10)

    hook = torch.nn.modules.module.register_module_forward_hook(waits)
    try:
        whole = json.dumps(written | {"mmaccel": {"recipe": "dense"}}).encode()
        one = raw(served)
        one.sendall(head(len(whole)) + whole)
        until(lambda: len(runs) > 0)
        one.close()
        time.sleep(3 * CHECK_S)  # until the server has seen it
        goes_on.set()
        until(lambda: served.engine.turns._free == served.engine.settings.limits.at_once, 8)
        assert len(runs) == 1 < len(layers)
    finally:
        goes_on.set()
        hook.remove()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: not enough memory"),
    ],
    ids=["cuda", "host", "cpu"],
)
def test_out_of_memory_in_one_request_leaves_the_others(
    served: Served, client: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Under `generate`, while a video is taken in, and on a stream, whose memory stays what it was."""
    bad = 5  # frames of the request that fails
    generate, taken = mmaccel.Accelerated.generate, {}

    def failing(self: Any, *given: Any, **more: Any) -> Any:
        if len(more["pixel_values_videos"][0]) == bad:
            raise error
        return generate(self, *given, **more)

    for name in ("watch", "ingest"):
        taken[name] = getattr(mmaccel.AsyncVideoSession, name)

        async def taking(self: Any, frames: Any, *rest: Any, name: str = name, **more: Any) -> int:
            if len(frames) == bad:
                raise error
            return int(await taken[name](self, frames, *rest, **more))

        monkeypatch.setattr(mmaccel.AsyncVideoSession, name, taking)
    monkeypatch.setattr(mmaccel.Accelerated, "generate", failing)

    def ask(one: tuple[int, str]) -> Any:
        return served.chat([video(frames_url(one[0])), text()], max_tokens=2, mmaccel={"recipe": one[1]})

    asked = [(frames, recipe) for recipe in ("fastv", "mosaic", "dense") for frames in (3, bad, 4)]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(ask, asked))
    for answer, (frames, _) in zip(answers, asked, strict=True):
        assert answer.status_code == (503 if frames == bad else 200), answer.text
    assert answers[1].json()["error"]["code"] == "out_of_memory"
    path = opened(client, 3)
    failed = client.post(f"{path}/frames", json={"frames": list(jpegs()[:bad]), "fps": 1})
    assert failed.status_code == 503
    assert client.post(f"{path}/frames", json={"frames": list(jpegs()[3:5]), "fps": 1}).json()["frames"] == 5
    assert client.post(f"{path}/ask", json={"question": QUESTION}).status_code == 200


@pytest.mark.always
def test_a_request_ends_with_its_time() -> None:
    with running(Settings(limits=Limits(seconds=0.6)), model=without_end()) as served:
        for recipe in ("fastv", "mosaic", "dense"):
            began = time.monotonic()
            words = [video(frames_url(3)), text()]
            answer = served.chat(words, max_tokens=3000, mmaccel={"recipe": recipe})
            assert time.monotonic() - began < 6
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert answer.json()["mmaccel"]["finish_reason"] == "timeout"


@pytest.mark.parametrize("recipe", ["fastv", "mosaic"])
def test_a_video_that_takes_too_long_to_read_ends_the_request(recipe: str, tmp_path: Path) -> None:
    url = mp4_url(write_film(tmp_path / "long.mp4", 1500))
    with running(Settings(limits=Limits(seconds=0.05))) as served:
        late = served.chat([video(url), text()], mmaccel={"recipe": recipe, "fps": 10}, max_tokens=1)
        assert late.status_code == 408 and "was not read within 0.05 s" in late.text
        assert served.engine.turns._free == 2 and not served.engine.kept._videos


def test_memory_that_is_short_lets_kept_videos_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as served:
        ours = {"recipe": "mosaic"}
        assert served.chat([video(frames_url(3)), text()], max_tokens=1, mmaccel=ours).status_code == 200
        assert len(served.engine.kept._videos) == 1

        calls, full = list[int](), torch.OutOfMemoryError("CUDA out of memory.")

        def fails(*_: Any, **__: Any) -> bool:
            calls.append(len(served.engine.kept._videos))
            return bool(calls[-1]) or calls == [0]

        broken(monkeypatch, mmaccel.Accelerated, "generate", full, fails)
        plain = {"recipe": "fastv"}
        assert served.chat([text("hello")], max_tokens=1, mmaccel=plain).status_code == 200
        assert calls == [1, 0]
        calls.clear()
        assert served.chat([text("hello")], max_tokens=1, mmaccel=plain).status_code == 503
        assert calls == [0]  # with nothing to let go, once is enough
