"""Streams over HTTP and WebSocket: what a session says, and that questions and frames go side by side."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.media.video import read_image
from mmaccel.serve.settings import Limits, Settings
from mmaccel.serve.socket import Incoming
from mmaccel.serve.sources import decode_base64
from tests.media.films import write_film
from tests.serve.conftest import (
    KEY,
    OTHER,
    QUESTION,
    SESSIONS,
    SMALL,
    Served,
    heard,
    jpegs,
    loaded,
    mp4_url,
    opened,
    posted,
    running,
    talking,
)
from tests.spies import until


def frames(count: int) -> list[str]:
    return list(jpegs()[:count])


def reference(count: int) -> mmaccel.VideoSession:
    model, processor = loaded()
    session = mmaccel.VideoSession(model, processor, None, kv=SMALL)
    session.watch(torch.stack([read_image(decode_base64(one)) for one in frames(count)]), fps=1.0)
    return session


@pytest.mark.always
def test_a_stream_answers_as_a_session_does(client: Any) -> None:
    with reference(40) as session:
        one = opened(client)
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(mmaccel.VideoSession, "counters")  # they wait for a pass and the device
            taken = posted(client, f"{one}/frames", frames=frames(40), fps=1.0)
        assert taken == {"taken": 40, "frames": 40, "seconds": 39.0}
        told = posted(client, f"{one}/ask", question=QUESTION, thumbnails=True)
        answer = session.ask(QUESTION)
        assert (told["text"], told["finish_reason"], told["tokens"]) == (answer.text, "stop", len(answer.ids))
        best = answer.top(1)[0]
        assert told["evidence"][0]["frames"] == list(best.frames)
        shown = read_image(decode_base64(told["evidence"][0]["image"].partition(",")[2]))
        assert torch.equal(shown, read_image(client.get(f"{one}/frames/{best.frames[0]}").content))
        facts = client.get(one).json()
        assert facts["shown"] == session.shown and facts["frames"] == 40
        assert set(facts["clusters"]) >= {"visual"}
        assert facts["clusters"] == {k: v[0].tolist() for k, v in session.clusters().items()}
        assert client.delete(one).json()["deleted"] and client.get(one).status_code == 404


def test_the_socket_stands_in_the_description_of_the_api(client: Any) -> None:
    told = client.get("/openapi.json").json()["info"]["description"]
    messages = Incoming.json_schema()["discriminator"]["mapping"]
    assert "/{id}/socket" in told and len(messages) == 6 and all(f"`{name}`" in told for name in messages)


def test_an_answer_comes_by_events(client: Any) -> None:
    with reference(24) as session:
        one = opened(client, 24)
        words = {"question": "Describe the video.", "max_tokens": 12, "stream": True}
        events = [
            block.split("\n") for block in client.post(f"{one}/ask", json=words).text.split("\n\n")[:-1]
        ]
        kinds = [event[0] for event in events]
        assert kinds == ["event: delta"] * (len(kinds) - 1) + ["event: answer"]
        datas = [json.loads(event[1].removeprefix("data: ")) for event in events]
        said = "".join(one["text"] for one in datas[:-1])
        assert said.strip() == datas[-1]["text"] == session.ask("Describe the video.", 12).text
        wrong = client.post(f"{one}/ask", json={"question": " ", "stream": True})
        assert wrong.status_code == 400 and "empty" in wrong.json()["error"]["message"]


def test_a_stored_video_is_ingested_and_one_is_watched(client: Any, tmp_path: Path) -> None:
    url = {"url": mp4_url(write_film(tmp_path / "film.mp4", 30))}
    for stored in (True, False):
        one = opened(client)
        body = {"video_url": url, "fps": 5, "stored": stored}
        assert client.post(f"{one}/frames", json=body).json()["taken"] == 15
        assert ("ingest_seen" in client.get(one).json()["counters"]) >= stored


def test_text_stands_beside_frames(client: Any) -> None:
    """With frames, alone, and through a save."""
    with reference(24) as session:
        one = opened(client)
        star = {"text": " red star ", "begin": 4.0, "end": 5.0}
        lines = [star, {"text": "a cup"}, {"text": "late", "begin": 90}]
        taken = posted(client, f"{one}/frames", frames=frames(24), fps=1.0, text=lines[:2])
        assert taken == {"taken": 24, "frames": 24, "seconds": 23.0}
        assert posted(client, f"{one}/frames", text=lines[2:]) == {**taken, "taken": 0}
        session.tell([(4.0, 5.0, "red star"), (23.0, 23.0, "a cup"), (90.0, 90.0, "late")])
        for between in (None, [3.0, 5.0]):
            told = posted(client, f"{one}/ask", question=QUESTION, between=between)
            answer = session.ask(QUESTION, between=None if between is None else (3.0, 5.0))
            assert told["text"] == answer.text
            assert told["lines"] == [list(line) for line in answer.lines] != []
        posted(client, f"{one}/save", name="told")
        again = opened(client, resume="told")
        assert posted(client, f"{again}/ask", question=QUESTION, between=[3, 5])["lines"] == told["lines"]


@pytest.mark.always
def test_a_saved_stream_goes_on(client: Any) -> None:
    one = opened(client, 30)
    said = client.post(f"{one}/ask", json={"question": QUESTION}).json()
    assert client.post(f"{one}/save", json={"name": "mine"}).json() == {"saved": "mine", "frames": 30}
    client.delete(one)
    again = opened(client, resume="mine")
    assert client.get(again).json()["frames"] == 30
    told = client.post(f"{again}/ask", json={"question": QUESTION}).json()
    assert told["text"] == said["text"] and len(told["evidence"]) == len(said["evidence"])
    assert client.post(SESSIONS, json={"recipe": "mosaic", "resume": "other"}).status_code == 404


def test_a_stream_is_its_key_s_own(keyed: Served) -> None:
    with keyed.client(KEY) as mine, keyed.client(OTHER) as other, keyed.client() as nobody:
        one = opened(mine, 4)
        mine.post(f"{one}/save", json={"name": "mine"})
        calls: list[tuple[str, str, Any]] = [
            ("GET", one, None),
            ("POST", f"{one}/ask", {"question": QUESTION}),
            ("POST", f"{one}/frames", {"frames": frames(1)}),
            ("POST", f"{one}/save", {"name": "theirs"}),
            ("GET", f"{one}/frames/0", None),
            ("DELETE", one, None),
            ("POST", SESSIONS, {"recipe": "mosaic", "resume": "mine"}),
        ]
        for method, path, body in calls:
            assert other.request(method, path, json=body).status_code == 404
            assert nobody.request(method, path, json=body).status_code == 401
        assert mine.get(one).json()["frames"] == 4
    with pytest.raises(Exception), talking(keyed, one) as socket:  # noqa: B017
        socket.send(json.dumps({"type": "key", "key": OTHER}))
        socket.recv(timeout=20)
    with talking(keyed, one) as socket:
        socket.send(json.dumps({"type": "key", "key": KEY}))
        assert json.loads(socket.recv(timeout=20))["name"] == "ready"


def test_frames_and_answers_go_side_by_side_on_a_socket(served: Served, client: Any) -> None:
    with reference(24) as session:
        path = opened(client)
        said = session.ask("Describe the video.", 24)
        with talking(served, path) as socket:
            assert heard(socket, "ready")["frames"] == 0
            for at, one in enumerate(frames(24)):
                socket.send(json.dumps({"type": "frame", "data": one, "time": float(at)}))
            while heard(socket, "taken")["frames"] < 24:
                pass
            socket.send(
                json.dumps({"type": "ask", "id": "a", "question": "Describe the video.", "max_tokens": 24})
            )
            pieces, taken = [json.loads(socket.recv(timeout=30))], 0
            assert pieces[0]["type"] == "delta"  # it speaks: now come frames
            for at, one in enumerate(frames(40)[24:], 24):
                socket.send(json.dumps({"type": "frame", "data": one, "time": float(at)}))
            kinds = []
            while "answer" not in kinds or taken < 40:
                message = json.loads(socket.recv(timeout=30))
                kinds.append(message["type"])
                if message["type"] == "delta":
                    pieces.append(message)
                elif message["type"] == "answer":
                    answer = message
                elif message["type"] == "event":
                    assert message["name"] == "taken", message
                    taken = message["frames"]
            # The frames that came meanwhile are not in the answer.
            assert answer["text"] == said.text == "".join(one["text"] for one in pieces).strip()
            assert kinds.count("evidence") == 1 and kinds.index("evidence") < kinds.index("answer")
            socket.send(jpegs_bytes(0))
            assert heard(socket, "taken")["frames"] == 41
            socket.send(json.dumps({"type": "look"}))
            assert heard(socket, "stream")["clusters"]
        assert client.get(path).json()["frames"] == 41


def jpegs_bytes(number: int) -> bytes:
    return decode_base64(jpegs()[number])


def test_a_stretch_of_time_a_conversation_and_a_drawn_answer(client: Any) -> None:
    with reference(40) as session:
        one = opened(client, 40)

        def said(question: str, **fields: Any) -> tuple[str, list[list[int]]]:
            told = posted(client, f"{one}/ask", question=question, max_tokens=12, **fields)
            return told["text"], [one["frames"] for one in told["evidence"]]

        words = "Describe the video."
        text, found = said(words, between=[5, 9])
        assert text == session.ask(words, 12, between=(5, 9)).text
        assert found and all(5 <= first <= last <= 9 for first, last in found)
        for question in (words, "What colour was it?"):
            assert said(question, chat=True)[0] == session.ask(question, 12, chat=True).text
        drawn = {said(words, temperature=2.0, seed=seed)[0] for seed in range(4)}
        assert len(drawn) > 1 and said(words, temperature=2.0, seed=1) == said(words, temperature=2.0, seed=1)


def test_a_standing_question_tells_of_changes(served: Served, stream: str) -> None:
    words = "Where is the scene set?"
    with talking(served, stream) as socket:
        heard(socket, "ready")
        asked = {"type": "on", "id": "s", "question": words, "every": 1.0, "last": 4.0}
        socket.send(json.dumps(asked))
        for at, one in enumerate(frames(40)):
            socket.send(json.dumps({"type": "frame", "data": one, "time": float(at)}))
            while heard(socket, "event")["name"] != "taken":
                pass
        socket.send(json.dumps({"type": "cancel", "id": "s"}))
    with talking(served, stream) as socket:
        heard(socket, "ready")
        socket.send(json.dumps({**asked, "id": "t", "last": None}))
        socket.send(json.dumps({"type": "frame", "data": frames(1)[0], "time": 41.0}))
        change = heard(socket, "change")
        assert change["id"] == "t" and change["text"] and change["before"] is None
        assert change["seconds"] == 41.0 and change["evidence"]


def test_a_wrong_message_is_told_and_ends_nothing(served: Served, stream: str) -> None:
    typed = ('{"type": "fly"}', '{"type": "frame"}', '{"type": "ask", "question": "a"}')
    with talking(served, stream) as socket:
        heard(socket, "ready")
        for wrong in ("", "{", "[]", *typed):
            socket.send(wrong)
            message = json.loads(socket.recv(timeout=20))
            assert message["name"] == "error" and len(message["message"]) < 400
        socket.send(b"no picture")
        assert "cannot be read as an image" in json.loads(socket.recv(timeout=20))["message"]
        socket.send(jpegs_bytes(1))
        assert heard(socket, "taken")["frames"] == 1


def test_frames_that_come_too_fast_are_left_out_and_told(served: Served, stream: str, monkeypatch) -> None:
    go = threading.Event()
    watch = mmaccel.AsyncVideoSession.watch

    async def slow(self: Any, *given: Any, **more: Any) -> int:
        while not go.is_set():
            await asyncio.sleep(0.02)
        return await watch(self, *given, **more)

    monkeypatch.setattr(mmaccel.AsyncVideoSession, "watch", slow)
    with talking(served, stream) as socket:
        heard(socket, "ready")
        for _ in range(60):
            socket.send(jpegs_bytes(0))
        assert heard(socket, "dropped")["frames"] >= 1
        go.set()
        while heard(socket, "taken")["frames"] < 32:
            pass


def test_streams_are_few_and_close_when_nobody_uses_them() -> None:
    limits = Limits(sessions=3, own_sessions=2, idle_seconds=0.4)
    settings = Settings(keys=(KEY, OTHER), limits=limits)
    with running(settings) as served, served.client(KEY) as mine, served.client(OTHER) as other:
        opened(mine), opened(mine)
        assert mine.post(SESSIONS, json={"recipe": "mosaic"}).status_code == 429
        path = opened(other)
        assert other.post(SESSIONS, json={"recipe": "mosaic"}).status_code == 429
        until(lambda: other.get(path).status_code != 200, 10)
        opened(mine)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "give frames or a video_url"),
        ({"frames": ["@@"]}, "not base64"),
        ({"frames": ["aGVsbG8="]}, "cannot be read as an image"),
        ({"frames": [], "video_url": {"url": "ftp://a/b"}}, "is no http:"),
        ({"video_url": "ftp://a/b"}, "is no http:"),
        ({"video_url": 5}, 'video_url: it is no address; give a text, or {"url": ...}'),
        ({"video_ur": "ftp://a/b"}, "video_ur: there is no such field; take 'video_url'"),
        ({"frames": ["a"], "times": [1.0, 2.0]}, "times: 2 for 1 frames"),
        ({"frames": ["a"], "times": ["nan"]}, "times.0: input should be a finite number"),
        ({"frames": ["a"], "fps": 0}, "fps: input should be greater than 0"),
        ({"frames": ["a"], "stored": True}, "stored"),
        ({"text": [{"text": " "}]}, "text.0.text: string should have at least 1 character"),
        ({"text": [{"text": "a" * 5000}]}, "text.0.text: string should have at most 4096 characters"),
        ({"text": [{"text": "a", "begin": -1}]}, "text.0.begin: input should be greater than or equal to 0"),
        ({"text": [{"text": "a"}] * 257}, "text: list should have at most 256 items"),
        ({"text": [{"text": "a"}]}, "tell: the session has seen no frame; watch something first."),
    ],
)
def test_frames_that_are_none_are_refused(client: Any, stream: str, body: Any, told: str) -> None:
    response = client.post(f"{stream}/frames", json=body)
    assert response.status_code == 400 and told in response.json()["error"]["message"]
    assert client.get(stream).json()["frames"] == 0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"text": "a", "begin": 3, "end": 2}, "text: a text cannot be from 3.0 to 2.0 s"),
        ({"text": "\x1c"}, "text: '' is no text of 1 to 4096 characters"),
        ({"text": "\ud800"}, "text.0.text: "),
    ],
)
def test_frames_beside_text_that_cannot_be_are_not_taken(
    client: Any, stream: str, line: dict[str, Any], told: str
) -> None:
    body = json.dumps({"frames": frames(1), "text": [line]})  # with what a client's own encoder refuses
    response = client.post(f"{stream}/frames", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and told in response.json()["error"]["message"]
    assert client.get(stream).json()["frames"] == 0
    early = {"frames": frames(3), "fps": 1.0, "text": [{"text": "a cup", "end": 1.0}]}
    assert client.post(f"{stream}/frames", json=early).json()["frames"] == 3
    answer = client.post(f"{stream}/ask", json={"question": QUESTION, "max_tokens": 2}).json()
    assert answer["lines"] == [[2.0, 2.0, "a cup"]]
