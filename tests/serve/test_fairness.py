"""What one caller takes from the others: saves, streams that are resumed or left, sockets, and words that are too many."""

import asyncio
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import Request
from pydantic import ValidationError
from websockets.exceptions import ConnectionClosed

import mmaccel
from mmaccel.core.adapter import unwrap
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError
from mmaccel.core.recipe import Recipe
from mmaccel.serve import messages, socket
from mmaccel.serve.settings import Limits, Settings
from mmaccel.serve.streams import count_bytes
from tests.serve.conftest import (
    KEY,
    OTHER,
    SESSIONS,
    SMALL,
    Served,
    heard,
    jpegs,
    loaded,
    opened,
    posted,
    recipes,
    running,
    talking,
)
from tests.spies import until

# --- Saves ------------------------------------------------------------------------------------------------------------


def test_names_of_saves_that_are_new_at_once_are_counted(tmp_path: Path) -> None:
    """Several of one caller pass no check together, and one that saves nothing takes no name."""
    with running(Settings(saves=tmp_path, limits=Limits(saves=2))) as served, served.client() as client:
        paths = [opened(client, 1, fps=0.01) for _ in range(4)]
        assert client.post(f"{opened(client)}/save", json={"name": "empty"}).status_code == 400
        with ThreadPoolExecutor(4) as pool:
            told = pool.map(lambda at: client.post(f"{paths[at]}/save", json={"name": f"n{at}"}), range(4))
            codes = sorted(one.status_code for one in told)
        assert codes == [200, 200, 429, 429] and len(list((tmp_path / "local").iterdir())) == 2


def test_files_that_go_while_they_are_counted_count_as_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "data-1").mkdir(parents=True)
        (tmp_path / name / "data-1" / "file").write_bytes(bytes(10))
    walk = socket.sources.os.walk

    def going(folder: Any) -> Any:
        for root, folders, files in walk(folder):
            shutil.rmtree(tmp_path / "b", ignore_errors=True)
            yield root, folders, [*files, "gone"]

    monkeypatch.setattr("mmaccel.serve.streams.os.walk", going)
    assert count_bytes(tmp_path) == 10


# --- Streams ----------------------------------------------------------------------------------------------------------


def test_streams_that_are_resumed_count_before_they_are_read(tmp_path: Path) -> None:
    """By the bytes of their files, and once more by what they hold."""
    with running(Settings(saves=tmp_path)) as served, served.client() as client:
        posted(client, f"{opened(client, 40)}/save", name="mine")
    size = count_bytes(tmp_path)
    body = {"recipe": "mosaic", "resume": "mine", "seconds": 1}
    for limit, reason in ((size - 1, "will hold"), (size + 1000, "they may; close one")):
        settings = Settings(saves=tmp_path, limits=Limits(memory_bytes=limit))
        with running(settings) as served, served.client() as client:
            answer = client.post(SESSIONS, json=body)
            assert answer.status_code == 503 and reason in answer.text, answer.text
            assert not served.app.state.streams._open and not served.app.state.streams.admission._promises


def test_a_saved_stream_names_the_recipe_to_resume_it_under(tmp_path: Path) -> None:
    chosen = {**recipes(), "other": Recipe.load(None, kv={**SMALL, "window": 24})}
    with running(Settings(saves=tmp_path), chosen) as served, served.client() as client:
        posted(client, f"{opened(client, 2)}/save", name="mine")
        answer = client.post(SESSIONS, json={"recipe": "other", "resume": "mine"})
        assert answer.status_code == 400
        told = "resume: mine was saved under the recipe 'mosaic'; name that one."
        assert answer.json()["error"]["message"] == told


def test_a_stream_whose_client_has_left_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(self: Any) -> bool:
        return True

    with running() as served, served.client() as client:
        opened(client)
        monkeypatch.setattr(Request, "is_disconnected", gone)
        client.post(SESSIONS, json={"recipe": "mosaic"})
        assert len(served.app.state.streams._open) == 1


def test_streams_of_a_caller_are_listed(keyed: Served) -> None:
    with keyed.client(KEY) as mine, keyed.client(OTHER) as other:
        path = opened(mine, 2)
        (one,) = mine.get(SESSIONS).json()["data"]
        number = path.rpartition("/")[2]
        assert (one["id"], one["recipe"], one["frames"], one["seconds"]) == (number, "mosaic", 2, 1.0)
        assert other.get(SESSIONS).json() == {"object": "list", "data": []}
        assert mine.delete(path).is_success and not mine.get(SESSIONS).json()["data"]


def test_an_empty_stream_waits_for_no_pass(client: Any) -> None:
    """Nor does a body that gives nothing: all its fields have defaults."""
    model, _ = loaded()
    with adapter_for(unwrap(model)).stream_adapter(*loaded()).turns.hold():
        answer = client.post(SESSIONS, timeout=5)
        assert answer.status_code == 201 and answer.json()["counters"] == {}
        assert client.get(f"{SESSIONS}/{answer.json()['id']}", timeout=5).status_code == 200


def test_there_is_no_picture_past_the_last_frame(client: Any) -> None:
    path = opened(client, 2)
    assert [client.get(f"{path}/frames/{at}").status_code for at in (1, 2, 5000)] == [200, 404, 404]


# --- Sockets ----------------------------------------------------------------------------------------------------------


def test_sockets_without_a_key_count_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """And have little time: they shut out nobody who sends a key."""
    monkeypatch.setattr(socket, "KEY_S", 0.3)
    with running(Settings(keys=(KEY,), limits=Limits(sockets=1))) as served, served.client(KEY) as client:
        path = opened(client)
        counted = served.app.state.streams._sockets
        with talking(served, path) as idle:
            until(lambda: counted["at 127.0.0.1"] == 1 == counted[None])
            with pytest.raises(Exception, match="403"):  # no room even to send a key
                talking(served, path)
            with pytest.raises(ConnectionClosed, match="needs a key"):
                idle.recv(timeout=5)
        until(lambda: not counted)
        with talking(served, path) as wrong, pytest.raises(ConnectionClosed, match="does not know this key"):
            wrong.send(json.dumps({"type": "key", "key": "another-key"}))
            wrong.recv(timeout=20)
        with pytest.raises(Exception, match=r"403|does not know"):
            talking(served, path, additional_headers={"Authorization": "Bearer another-key"})


def test_errors_of_a_socket_tell_which_message(served: Served, stream: str) -> None:
    question = {"type": "on", "id": "a", "question": "What?"}
    with talking(served, stream) as talk:
        heard(talk, "ready")
        talk.send(json.dumps({**question, "every": -1}))
        assert heard(talk, "error")["id"] == "a"
        for number in range(9):
            talk.send(json.dumps({**question, "id": str(number)}))
        assert "8 such questions run on this socket" in heard(talk, "error")["message"]
        talk.send(json.dumps({**question, "id": "0"}))
        told = heard(talk, "error")
        assert told["id"] == "0" and "a question with this id runs" in told["message"]


def test_a_standing_question_is_short_and_turned_into_tokens_in_a_thread(monkeypatch: Any) -> None:
    on, threads = mmaccel.VideoSession.on, list[Any]()

    def spied(self: Any, *given: Any, **more: Any) -> Any:
        threads.append(threading.current_thread())
        return on(self, *given, **more)

    monkeypatch.setattr(mmaccel.VideoSession, "on", spied)
    how = Settings(limits=Limits(text=100))
    with running(how) as served, served.client() as client, talking(served, opened(client)) as talk:
        for field in ("question", "says"):
            talk.send(json.dumps({"type": "on", "question": "What?", field: "a" * 101}))
            assert f"{field}: it has more than 100 characters" in heard(talk, "error")["message"]
        talk.send(json.dumps({"type": "on", "question": "What?"}))
        until(lambda: bool(threads))
    assert [one.name for one in threads] == ["mmaccel-live"]


def test_a_standing_question_that_fails_is_told(served: Served, stream: str, monkeypatch: Any) -> None:
    """And gives its id and its place back."""
    monkeypatch.setattr(
        mmaccel.VideoSession, "_answer", Mock(side_effect=ModelError("it cannot be answered."))
    )
    with talking(served, stream) as talk:
        for _ in range(2):
            talk.send(json.dumps({"type": "on", "id": "a", "question": "What?"}))
            talk.send(json.dumps({"type": "frame", "data": jpegs()[0]}))
            told = heard(talk, "error")
            assert (told["id"], told["message"]) == ("a", "it cannot be answered.")


def test_a_save_that_fails_leaves_the_folder_of_another(served: Served, stream: str) -> None:
    """Which has reserved it and waits for its turn; there is nothing to save of the stream that fails."""
    streams = served.app.state.streams
    folder = streams.saved_stream_folder("both", streams._open[stream.rpartition("/")[2]].owner)
    streams.reserve_save(folder)
    with served.client() as client:
        assert client.post(f"{stream}/save", json={"name": "both"}).status_code == 400
        assert folder.exists() and streams._saving[folder] == 1
        streams._saving.clear()
        assert client.post(f"{stream}/save", json={"name": "both"}).status_code == 400
    assert not folder.exists() and not streams._saving


# --- Bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {f"field {number}": 0 for number in range(300_000)},
        {"frames": [0] * 300_000},
        {"frames": ["a"], "times": ["x"] * 300_000},
    ],
    ids=["fields", "frames", "times"],
)
def test_the_first_error_ends_the_check_of_a_body(body: dict[str, Any]) -> None:
    began = time.process_time()
    with pytest.raises(ValidationError) as caught:
        messages.FramesRequest.model_validate(body)
    assert caught.value.error_count() == 1 and time.process_time() - began < 0.5


def test_a_body_of_too_many_values_is_not_read(client: Any, stream: str) -> None:
    body = b'{"times": [0' + b",0" * 600_000 + b"]}"
    answer = client.post(f"{stream}/frames", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413 and "send fewer values" in answer.text


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"between": [90, 60]}, "between: it begins at 90 s and ends before, at 60 s; swap the two."),
        ({"between": "60-90"}, "between: it is not a list; give one of two numbers, as [60, 90]."),
        ({"chat": "yes"}, "chat: input should be a valid boolean."),
        ({"schema": {}}, "schema: there is no such field; take 'response_format'."),
        ({"top_k": 5}, "top_k: it is not served; leave it out."),
        ({"repetition_penalty": 1.1}, "repetition_penalty: it is not served; leave it out."),
    ],
)
def test_a_wrong_field_is_told_in_plain_words(client: Any, stream: str, body: Any, told: str) -> None:
    answer = client.post(f"{stream}/ask", json={"question": "What?", **body})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == told


def test_other_errors_are_told_in_plain_words(keyed: Served, client: Any, stream: str) -> None:
    def message(answer: Any) -> str:
        return str(answer.json()["error"]["message"])

    assert message(client.post(f"{stream}/save", json={"name": "A b"})) == (
        "name: give 1 to 64 letters, digits, - or _ of ASCII, the first a letter or digit."
    )
    given = client.post(f"{stream}/frames", json={"text": ["the door"]})
    assert message(given) == "text.0: it is not a JSON object; give one."
    both = {"frames": [jpegs()[0]], "times": [0.0], "fps": 1}
    assert "fps: the frames have times" in message(client.post(f"{stream}/frames", json=both))
    with keyed.client("another-key") as wrong, keyed.client() as nobody:
        assert "does not know this key" in message(wrong.get(SESSIONS))
        assert "needs a key" in message(nobody.get(SESSIONS))


def test_what_runs_as_the_server_stops_leaves_no_stack(caplog: pytest.LogCaptureFixture) -> None:
    with running() as served, served.client() as client:
        tasks = list[Any]()

        @served.app.get("/v1/waits")
        async def waits() -> None:
            tasks.extend((asyncio.get_running_loop(), asyncio.current_task()))
            await asyncio.sleep(20)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.get, "/v1/waits")
            until(lambda: len(tasks) == 2)
            assert "mmaccel_running_requests 2.0" in client.get("/metrics").text
            tasks[0].call_soon_threadsafe(tasks[1].cancel)  # as uvicorn does
            answer = waiting.result(10)
    assert answer.status_code == 503 and "the server stops" in answer.text
    assert not [one for one in caplog.records if one.exc_info]
