"""What one caller may hold, and that what happens beside a request changes nothing of its answer."""

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from websockets.exceptions import ConnectionClosed

import mmaccel
from mmaccel.core.decoding.generate import CallEnded, Deadline
from mmaccel.core.recipe import Recipe
from mmaccel.media.video import write_jpeg
from mmaccel.serve import copies, sources
from mmaccel.serve import engine as engines
from mmaccel.serve.kept import VideoCache
from mmaccel.serve.metrics import Metrics
from mmaccel.serve.settings import Limits, Settings
from tests.serve.conftest import (
    KEY,
    QUESTION,
    SESSIONS,
    Served,
    frames_url,
    heard,
    jpegs,
    opened,
    running,
    talking,
    text,
    video,
)
from tests.serve.test_load import CHAT, head, raw, without_end
from tests.spies import until

# --- Sockets ----------------------------------------------------------------------------------------------------------


def test_messages_of_sockets_are_capped_and_not_compressed() -> None:
    settings = Settings(keys=(KEY,), limits=Limits(message_bytes=20_000, sockets=2))
    with running(settings) as served, served.client(KEY) as client:
        path = opened(client)
        with talking(served, path) as one:
            assert not one.protocol.extensions
            one.send("x" * 20_001)  # before any key
            with pytest.raises(ConnectionClosed) as closed:
                one.recv(timeout=20)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        key_of = {"additional_headers": {"Authorization": f"Bearer {KEY}"}}
        with talking(served, path, **key_of) as one, talking(served, path, **key_of) as two:
            assert heard(one, "ready") and heard(two, "ready")
            with talking(served, path, **key_of) as three, pytest.raises(ConnectionClosed, match="too many"):
                three.recv(timeout=20)
        until(lambda: not any(served.app.state.streams._sockets.values()))


def test_frames_that_wait_are_capped_in_bytes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go = asyncio.Event()

    async def slow(*_: Any, **__: Any) -> int:
        await go.wait()
        return 0

    with running(Settings(limits=Limits(message_bytes=10_000))) as served, served.client() as client:
        monkeypatch.setattr(mmaccel.AsyncVideoSession, "watch", slow)
        with talking(served, opened(client)) as talk:
            # A frame that is taken in, and that `slow` holds up.
            heavy = sources.decode_base64(jpegs()[0]) + bytes(4000)
            for _ in range(8):  # less than 32 frames, more than 10 kB
                talk.send(heavy)
            assert heard(talk, "dropped")["frames"] == 1


def test_frames_that_differ_are_taken_in_one_after_another(served: Served, stream: str, monkeypatch) -> None:
    """Of another size, or without a time: the others of their batch keep theirs."""
    calls, go = [], threading.Event()

    async def watch(self: Any, frames: Any, times: Any = None, **_: Any) -> int:
        while not go.is_set():
            await asyncio.sleep(0.01)
        calls.append((len(frames), times))
        return len(frames) - (times is None)

    monkeypatch.setattr(mmaccel.AsyncVideoSession, "watch", watch)
    other = write_jpeg(torch.zeros(3, 20, 20, dtype=torch.uint8), 4096)
    with talking(served, stream) as talk:
        heard(talk, "ready")
        for at in range(4):
            talk.send(json.dumps({"type": "frame", "data": jpegs()[0], "time": float(at)}))
        talk.send(sources.decode_base64(jpegs()[0]))
        talk.send(other)
        time.sleep(0.3)
        go.set()
        taken = list[int]()
        while sum(count for count, _ in calls) < 6 or len(taken) < len(calls):
            taken.append(heard(talk, "taken")["taken"])
        assert calls[-2:] == [(1, None), (1, None)]
        assert [moment for _, times in calls for moment in times or ()] == [0.0, 1.0, 2.0, 3.0]
        assert taken[-2:] == [0, 0]  # as `watch` told, not as many as were sent


def test_a_cancelled_question_is_told(served: Served) -> None:
    with (
        running(model=without_end()) as served,
        served.client() as client,
        talking(served, opened(client, 3)) as talk,
    ):
        talk.send(json.dumps({"type": "ask", "id": "a", "question": "Describe.", "max_tokens": 3000}))
        said = heard(talk, "delta")["text"]
        talk.send(json.dumps({"type": "cancel", "id": "a"}))
        told = heard(talk, "answer")
        assert told["finish_reason"] == "cancelled" and told["text"].startswith(said)


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_memories_of_streams_are_capped_with_those_of_the_host() -> None:
    with running(Settings(limits=Limits(memory_bytes=10 << 20))) as served, served.client() as client:
        path = opened(client, 40)  # 4 MB on the device, a slab of 16 MiB on the host
        (one,) = served.app.state.streams._open.values()
        counted = client.get(path).json()["counters"]
        assert one.kept.total_bytes() == counted["bytes"] + counted["host_bytes"] > 10 << 20
        again = client.post(f"{path}/frames", json={"frames": [jpegs()[0]]})
        for refused in (again, client.post(SESSIONS, json={"recipe": "mosaic"})):
            assert refused.status_code == 429 and "close one" in refused.text
        client.delete(path)
        opened(client, 1, seconds=1)  # of 900 s it would hold as much again


def test_a_kept_video_counts_with_its_host_memory() -> None:
    with running(Settings(limits=Limits(kept_bytes=10 << 20))) as served:
        assert served.chat(
            [video(frames_url(40)), text()], max_tokens=1, mmaccel={"recipe": "mosaic"}
        ).is_success
        until(lambda: not served.engine.kept._videos)


def test_shrinking_leaves_what_was_made_meanwhile() -> None:
    """While one is closed, another is made under its key."""

    async def work() -> None:
        videos = VideoCache(Limits(kept=0), Metrics())

        class One:
            users, closed = 0, False

            def __init__(self, meanwhile: Any = None) -> None:
                self.session, self.meanwhile = self, meanwhile

            def total_bytes(self) -> int:
                return 1

            async def close(self) -> None:
                self.closed = True
                if self.meanwhile is not None:
                    await self.meanwhile()

        new = One()

        async def made() -> None:
            for key in ("a", "b"):
                videos._videos[key] = asyncio.get_running_loop().create_future()
                videos._videos[key].set_result(new)  # type: ignore[arg-type]

        old = [One(made), One()]
        for key, one in zip(("a", "b"), old, strict=True):
            videos._videos[key] = asyncio.get_running_loop().create_future()
            videos._videos[key].set_result(one)  # type: ignore[arg-type]
        assert await videos.close_unused(0) == 2
        assert all(one.closed for one in old) and not new.closed and len(videos._videos) == 2

    asyncio.run(work())


def test_saves_are_few_and_tell_no_folder(tmp_path: Path) -> None:
    with running(Settings(saves=tmp_path, limits=Limits(saves=1))) as served, served.client() as client:
        path = opened(client, 2)
        for _ in range(2):  # under a name that there is
            assert client.post(f"{path}/save", json={"name": "mine"}).is_success
        assert client.post(f"{path}/save", json={"name": "more"}).status_code == 429
        for file in tmp_path.glob("local/mine/data-*/*.safetensors"):
            file.unlink()
        told = client.post(SESSIONS, json={"recipe": "mosaic", "resume": "mine"})
        assert told.status_code == 400 and "mine" in told.text and str(tmp_path) not in told.text


# --- Calls ------------------------------------------------------------------------------------------------------------


def test_calls_on_streams_of_one_caller_are_bounded() -> None:
    limits = Limits(calls=1, waiting=1, seconds=20)
    with running(Settings(limits=limits), model=without_end()) as served, served.client() as client:
        path, began = opened(client, 2), threading.active_count()
        asked = json.dumps({"question": "Describe.", "max_tokens": 3000}).encode()
        clients = [raw(served) for _ in range(2)]
        for one in clients:
            one.sendall(head(len(asked), f"{path}/ask") + asked)
        (turns,) = served.app.state.streams._calls.values()
        until(lambda: len(turns) == 1)
        assert client.post(f"{path}/ask", json={"question": QUESTION}).status_code == 429
        assert threading.active_count() <= began + 2
        for one in clients:
            one.close()
        until(lambda: turns._free == 1)


def test_frames_have_the_time_of_a_request_and_end_with_their_client(
    served: Served, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    async def watch(*_: Any, timeout: float | None = None, **__: Any) -> int:
        seen.append(timeout)
        try:
            await asyncio.sleep(20)
        finally:
            seen.append("ended")
        return 0

    monkeypatch.setattr(mmaccel.AsyncVideoSession, "watch", watch)
    body = json.dumps({"frames": [jpegs()[0]]}).encode()
    one = raw(served)
    one.sendall(head(len(body), f"{stream}/frames") + body)
    until(lambda: seen)
    one.close()
    until(lambda: "ended" in seen, 5)
    assert 500 < seen[0] <= 600


def test_a_client_that_leaves_ends_its_download_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def slow(*_: Any) -> Any:
        try:
            while True:
                time.sleep(0.02)
                yield b"x"
        finally:
            ended.set()

    monkeypatch.setattr(sources, "download", slow)
    with running(Settings(limits=Limits(fetching=1))) as served:
        content = [video("http://example.com/a.mp4"), text()]
        body = {"model": "tiny-ov", "messages": [{"role": "user", "content": content}]}
        asked = json.dumps(body).encode()
        one = raw(served)
        one.sendall(head(len(asked)) + asked)
        under_way = served.engine._fetching
        until(lambda: under_way and under_way["local"].locked())
        one.close()
        until(lambda: not under_way["local"].locked(), 5)
        assert ended.is_set()


def test_sources_of_a_request_are_capped_together_and_images_apart() -> None:
    with running(Settings(limits=Limits(source_bytes=100_000, image_bytes=30_000))) as served:

        def data(size: int, kind: str) -> dict[str, Any]:
            url = f"data:{kind}/x;base64," + "A" * (4 * size // 3)
            return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}

        assert served.chat([data(30_003, "image"), text()]).status_code == 413
        assert served.chat([data(60_000, "video"), text()]).status_code == 400  # it is no video
        told = served.chat([data(60_000, "video")] * 2 + [text()])
        assert told.status_code == 413 and "bytes" in told.text


def test_a_page_of_a_named_origin_may_call() -> None:
    origin = "https://page.example"
    with running(Settings(origins=(origin,))) as served, served.client() as client:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        for who, allowed in ((origin, origin), ("https://evil.example", None)):
            told = client.options(CHAT, headers={**asks, "Origin": who})
            assert told.headers.get("access-control-allow-origin") == allowed
        told = client.get("/v1/models", headers={"Origin": origin})
        assert told.is_success and told.headers["access-control-allow-origin"] == origin
        assert client.get("/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_an_answer_that_a_stop_text_ends_has_its_evidence(served: Served) -> None:
    words = [video(frames_url(24)), text("Describe the video.")]
    ours: dict[str, Any] = {"max_tokens": 12, "mmaccel": {"recipe": "mosaic"}}
    whole = served.chat(words, **ours).json()
    first = whole["choices"][0]["message"]["content"].split()[1]
    cut = served.chat(words, **ours, stop=first).json()
    assert cut["mmaccel"]["finish_reason"] == "stop" and first not in cut["choices"][0]["message"]["content"]
    assert cut["mmaccel"]["evidence"] and cut["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert 0 < cut["usage"]["completion_tokens"] <= whole["usage"]["completion_tokens"]


def test_who_waits_for_a_copy_has_its_time_and_makes_one_where_that_failed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, alone = served.engine, Settings(limits=Limits(at_once=1, together=0))
    engine = engines.Engine("x", plain.model, plain.processor, {"dense": Recipe()}, alone)
    real, fails = copies.accelerate, threading.Event()

    def failing(*given: Any) -> Any:
        fails.wait(10)
        monkeypatch.setattr(copies, "accelerate", real)
        raise MemoryError

    monkeypatch.setattr(copies, "accelerate", failing)

    def make() -> None:
        with pytest.raises(MemoryError), engine._copy_of("dense", Deadline(20)):
            pass

    first = threading.Thread(target=make)
    first.start()
    until(lambda: engine.copies._made["dense"] == 1)
    with pytest.raises(CallEnded), engine._copy_of("dense", Deadline(0.2)):
        pass
    threading.Timer(0.3, fails.set).start()
    with engine._copy_of("dense", Deadline(20)):
        first.join()
    with engine._draws(Deadline(1)), pytest.raises(CallEnded), engine._draws(Deadline(0.2)):
        pass


def test_errors_after_the_first_piece_are_told_and_counted(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = mmaccel.core.streams.live.AsyncReply.__anext__
    faults = (torch.OutOfMemoryError("CUDA"), "no memory"), (KeyError("mine"), "the server failed")
    for error, told in faults:
        pieces: list[str] = []

        async def failing(self: Any, error: Any = error, pieces: Any = pieces) -> str:
            if pieces:
                raise error
            pieces.append(await step(self))
            return str(pieces[0])

        monkeypatch.setattr(mmaccel.core.streams.live.AsyncReply, "__anext__", failing)
        counted = b"mmaccel_out_of_memory_total 1.0"
        with running() as one, one.client() as client, caplog.at_level(logging.ERROR, "mmaccel.serve"):
            path = opened(client, 3)
            events = client.post(f"{path}/ask", json={"question": QUESTION, "stream": True}).text
            assert "event: delta" in events and "event: error" in events and told in events
            assert (counted in client.get("/metrics").content) == (told == "no memory")
            assert not one.app.state.streams.get(path.rpartition("/")[2], "local").busy
    assert any(one.exc_info and one.exc_info[0] is KeyError for one in caplog.records)


def test_a_stream_that_cannot_close_does_not_keep_others_open(monkeypatch: pytest.MonkeyPatch) -> None:
    close, calls = mmaccel.AsyncVideoSession.close, []

    async def failing(self: Any) -> None:
        calls.append(self)
        await close(self)
        if len(calls) == 1:
            raise RuntimeError("it cannot")

    monkeypatch.setattr(mmaccel.AsyncVideoSession, "close", failing)
    with running(Settings(limits=Limits(idle_seconds=0.3))) as served, served.client() as client:
        opened(client), opened(client)
        until(lambda: len(calls) == 2)
