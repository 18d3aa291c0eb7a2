"""Streams that outlive their replica: two servers over one folder, then Ray Serve with replicas that go and come."""

import asyncio
import functools
import itertools
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.sync.client import connect

from mmaccel.core.errors import RecipeError
from mmaccel.serve.engine import Engine
from mmaccel.serve.settings import Limits, Settings
from tests.serve.conftest import KEY, OTHER, QUESTION, SESSIONS, Served, jpegs, loaded, recipes, running
from tests.spies import until

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
replicas = pytest.importorskip("mmaccel.serve.replicas", reason="Ray Serve is not installed")
MOST = Limits(own_sessions=64, sessions=64)
LOST: list[Any] = []
"""Requests that were sent again."""


@pytest.fixture(autouse=True)
def _shipped(shipped: Callable[[str], str]) -> None:
    shipped("tiny-ov")


def replica(name: str, settings: Settings) -> AbstractContextManager[Served]:
    """A server that shares its streams, under this name, with others over its folder."""
    return running(settings, registry=functools.partial(replicas.ReplicatedStreams, replica=name))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    """Two servers, as two replicas are, over one folder."""
    settings = Settings(saves=tmp_path, keys=(KEY, OTHER))
    with replica("one", settings) as one, replica("two", settings) as two:
        yield one, two


def call(served: Served | str, method: str, path: str, key: str | None = KEY, **body: Any) -> Any:
    url = served if isinstance(served, str) else served.url
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx2.Client(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
        return client.request(method, SESSIONS + path, json=body or None)


def told(answer: Any) -> Any:
    """What of an answer does not hang on the clock."""
    assert answer.status_code == 200, answer.text
    return {name: answer.json()[name] for name in ("text", "tokens", "finish_reason", "evidence")}


def test_a_stream_goes_on_at_another_replica(pair: tuple[Served, Served]) -> None:
    """Frames here, a question there, frames there, a question here; and what it says is what one server alone says."""
    one, two = pair
    number = call(one, "POST", "", recipe="mosaic").json()["id"]
    assert number.endswith(".one") and call(two, "GET", f"/{number}").json()["frames"] == 0
    with running() as alone:
        own = call(alone, "POST", "", None, recipe="mosaic").json()["id"]
        steps = itertools.cycle((one, two, two, one))
        for first in range(0, 40, 10):
            frames = list(jpegs()[first : first + 10])
            some = {"frames": frames, "times": [float(first + i) for i in range(10)]}
            assert call(next(steps), "POST", f"/{number}/frames", **some).json()["frames"] == first + 10
            call(alone, "POST", f"/{own}/frames", None, **some)
            asked = {"question": QUESTION, "max_tokens": 4}
            right = told(call(alone, "POST", f"/{own}/ask", None, **asked))
            assert [told(call(place, "POST", f"/{number}/ask", **asked)) for place in pair] == [right, right]


def test_a_conversation_goes_on_too(pair: tuple[Served, Served]) -> None:
    one, two = pair
    number = call(one, "POST", "", recipe="mosaic").json()["id"]
    call(one, "POST", f"/{number}/frames", frames=list(jpegs()[:6]), fps=1)
    first = call(one, "POST", f"/{number}/ask", question=QUESTION, max_tokens=4, chat=True).json()
    call(two, "POST", f"/{number}/ask", question="And then?", max_tokens=4, chat=True)
    stream = two.app.state.streams._open[number]
    said = [turn["role"] for turn in stream.session.session.history]
    assert said == ["user", "assistant"] * 2
    assert stream.session.session.history[1]["content"] == first["text"]


def test_a_stream_belongs_to_its_key_and_is_deleted_everywhere(pair: tuple[Served, Served]) -> None:
    one, two = pair
    number = call(one, "POST", "", recipe="mosaic").json()["id"]
    call(one, "POST", f"/{number}/frames", frames=list(jpegs()[:2]), fps=1)
    assert call(two, "GET", f"/{number}", OTHER).status_code == 404
    assert call(two, "GET", f"/{number}").status_code == 200
    for wrong in ("../x", "..%2F..%2Fetc.one", number.replace(".one", ".two"), "a" * 40):
        assert call(two, "GET", f"/{wrong}").status_code == 404
    assert call(two, "DELETE", f"/{number}").status_code == 200
    for place in pair:
        assert call(place, "GET", f"/{number}").status_code == 404
        assert not place.app.state.streams._open
    folder = one.engine.settings.saves
    assert folder is not None and not list((folder / replicas.LIVE).iterdir())


def test_of_two_replicas_that_take_frames_at_once_one_is_told(pair: tuple[Served, Served]) -> None:
    """None overwrites what the other has saved: it says so, and has the other's state after that."""
    one, two = pair
    number = call(one, "POST", "", recipe="mosaic").json()["id"]
    call(one, "POST", f"/{number}/frames", frames=list(jpegs()[:2]), fps=1)
    call(two, "GET", f"/{number}")
    streams, late = one.app.state.streams, asyncio.Event()
    changed = streams.on_stream_change

    async def slowly(stream: Any) -> None:
        while not late.is_set():
            await asyncio.sleep(0.01)
        await changed(stream)

    streams.on_stream_change = slowly
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(call, one, "POST", f"/{number}/frames", frames=list(jpegs()[2:5]), fps=1)
        while streams._open[number].session.frames < 5:
            time.sleep(0.01)
        assert call(two, "POST", f"/{number}/frames", frames=list(jpegs()[2:3]), fps=1).json()["frames"] == 3
        late.set()
        assert first.result().status_code == 409 and "gone on elsewhere" in first.result().text
    assert call(one, "GET", f"/{number}").json()["frames"] == 3


def test_what_nobody_uses_any_longer_is_removed(tmp_path: Path) -> None:
    settings = Settings(saves=tmp_path, limits=Limits(idle_seconds=1.0))
    with replica("one", settings) as one:
        old = call(one, "POST", "", None, recipe="mosaic").json()["id"]
    time.sleep(1.1)
    with replica("two", settings) as two:
        assert call(two, "GET", f"/{old}", None).status_code == 404


def test_what_nobody_uses_is_removed_while_a_replica_runs(tmp_path: Path) -> None:
    """Also what a replica that crashed had only begun."""
    settings = Settings(saves=tmp_path, limits=Limits(idle_seconds=1.0))
    with replica("one", settings):
        left = [tmp_path / replicas.LIVE / f"{name * 24}.gone" for name in "ab"]
        for one in left:
            one.mkdir(parents=True)
        (left[0] / replicas.FACTS).write_text('{"owner": "local"}')
        until(lambda: not any(one.exists() for one in left), 20)


def test_a_stream_that_is_only_asked_is_in_use(tmp_path: Path) -> None:
    """By a socket, whose questions are no requests of their own: a replica that starts leaves it alone."""
    settings = Settings(saves=tmp_path, limits=Limits(idle_seconds=2.0))
    asked = json.dumps({"type": "ask", "id": "1", "question": QUESTION, "max_tokens": 2})
    with replica("one", settings) as one:
        number = call(one, "POST", "", None, recipe="mosaic").json()["id"]
        call(one, "POST", f"/{number}/frames", None, frames=list(jpegs()[:2]), fps=1)
        with connect(f"ws{one.url.removeprefix('http')}{SESSIONS}/{number}/socket") as talk:
            end = time.monotonic() + 4
            while time.monotonic() < end:
                talk.send(asked)
                while json.loads(talk.recv(30))["type"] != "answer":
                    pass
            with replica("two", settings) as two:
                assert call(two, "GET", f"/{number}", None).json()["frames"] == 2


def test_a_caller_has_so_many_streams_on_all_replicas(tmp_path: Path) -> None:
    settings = Settings(saves=tmp_path, keys=(KEY, OTHER), limits=Limits(saves=2))
    with replica("one", settings) as one, replica("two", settings) as two:
        numbers = [call(place, "POST", "", recipe="mosaic").json()["id"] for place in (one, two)]
        for place in (one, two):
            answer = call(place, "POST", "", recipe="mosaic")
            assert answer.status_code == 429 and "on all replicas" in answer.text
        assert call(one, "POST", "", OTHER, recipe="mosaic").status_code == 201
        assert call(two, "DELETE", f"/{numbers[0]}").status_code == 200
        assert call(one, "POST", "", recipe="mosaic").status_code == 201


def test_streams_of_all_replicas_are_listed(pair: tuple[Served, Served]) -> None:
    numbers = [call(place, "POST", "", recipe="mosaic").json()["id"] for place in pair]
    assert call(pair[0], "POST", f"/{numbers[0]}/frames", frames=list(jpegs()[:2])).status_code == 200
    for place in pair:
        told = {one["id"]: one for one in call(place, "GET", "").json()["data"]}
        assert set(told) == set(numbers) and [told[one]["frames"] for one in numbers] == [2, 0]
        assert not call(place, "GET", "", OTHER).json()["data"]


@pytest.mark.parametrize(
    ("saves", "number", "says"),
    [(False, "1", "--saves"), (True, "0", "--replicas"), (True, "1-", "--replicas")],
)
def test_what_cannot_be_is_told_before_anything_starts(
    tmp_path: Path, saves: bool, number: str, says: str
) -> None:
    with pytest.raises(RecipeError, match=says):
        replicas.serve_on_ray(make, Settings(saves=tmp_path if saves else None), number)


# Ray Serve.


def make(saves: str = "", limits: Limits = MOST) -> Engine:
    model, processor = loaded()
    settings = Settings(saves=Path(saves), limits=limits)
    chosen = {name: one for name, one in recipes().items() if name in ("dense", "mosaic")}
    return Engine("tiny-ov", model, processor, chosen, settings)


@contextmanager
def deployed(number: int, saves: Path, make: Any = make, gpus: Sequence[int] = (0, 0)) -> Iterator[str]:
    """The address of so many replicas on a small Ray of their own, which ends with it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    small = {"object_store_memory": 80 << 20, "include_dashboard": False, "log_to_driver": False}
    small["num_gpus"] = sum(gpus)  # which Ray believes
    ray.init(address="local", num_cpus=8, namespace="serve", logging_level="error", **small)
    try:
        settings = Settings(saves=saves, port=port, limits=MOST)
        replicas.serve_on_ray(
            functools.partial(make, str(saves)), settings, str(number), *gpus, blocking=False
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.serve.shutdown()
        ray.shutdown()


def telling(saves: str) -> Engine:
    """An engine whose metrics are the seconds after which Python's threads take turns."""
    engine = make(saves)
    engine.metrics.prometheus_text = lambda: str(sys.getswitchinterval()).encode()  # type: ignore[method-assign]
    return engine


def test_a_replica_s_process_is_tuned_for_streams(tmp_path: Path) -> None:
    with deployed(1, tmp_path, telling) as url:
        assert float(httpx2.get(f"{url}/metrics", trust_env=False).text) < 0.005


def surely(url: str, method: str, path: str, **body: Any) -> Any:
    """The response to a request that is sent again while no replica is there to answer it."""
    end = time.monotonic() + 60
    while True:
        try:
            answer = call(url, method, path, None, **body)
            if answer.status_code < 500:
                return answer
            LOST.append((path, answer.status_code, answer.text))
        except httpx2.TransportError as error:
            LOST.append((path, error))
        assert time.monotonic() < end, "no replica answers"
        time.sleep(0.2)


def scale(number: int) -> None:
    """As the dashboard's `.../deployments/mmaccel/scale` does."""
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    place = DeploymentID(name=replicas.NAME, app_name=replicas.NAME)
    ray.get(client._controller.update_deployment_replicas.remote(place, number))


def wait_for(number: int) -> None:
    """Until so many replicas run, and none comes or goes."""
    end = time.monotonic() + 90
    while True:
        found = ray.serve.status().applications[replicas.NAME].deployments[replicas.NAME].replica_states
        if {str(getattr(state, "value", state)): n for state, n in found.items() if n} == {"RUNNING": number}:
            return
        assert time.monotonic() < end, f"there are not {number} replicas: {found}"
        time.sleep(0.2)


def watched(url: str, number: int) -> dict[str, Any]:
    """Streams of unlike frames, and what each says."""

    def one(i: int) -> tuple[str, Any]:
        name = surely(url, "POST", "", recipe="mosaic", fps=0.1).json()["id"]  # one replica may hold all
        some = list(jpegs()[i % 8 : i % 8 + 6 + i % 5])
        assert surely(url, "POST", f"/{name}/frames", frames=some, fps=1).json()["frames"] == len(some)
        return name, said(url, name)

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(one, range(number)))


def streamed(url: str, name: str) -> str:
    """The answer to the question by server-sent events, its pieces put together."""
    asked = {"question": QUESTION, "max_tokens": 4, "stream": True}
    with httpx2.Client(base_url=url, timeout=60, trust_env=False) as client:
        lines = client.post(f"{SESSIONS}/{name}/ask", json=asked).text.splitlines()
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    pieces = "".join(one["text"] for one in told[:-1])
    assert told[-1]["text"] == pieces
    return pieces


def metrics_of_ray() -> list[str]:
    """What Prometheus reads of the machine, of ours."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    lines = httpx2.get(url, trust_env=False).text.splitlines()
    return [line for line in lines if line.startswith("ray_mmaccel_")]


def said(url: str, name: str) -> Any:
    return told(surely(url, "POST", f"/{name}/ask", question=QUESTION, max_tokens=4))


@pytest.mark.slow
@pytest.mark.parametrize("number", [12, 50])
def test_a_replica_is_killed_and_every_stream_answers_as_it_did(tmp_path: Path, number: int) -> None:
    with deployed(2, tmp_path) as url:
        before = watched(url, number)
        at = Counter(name.rpartition(".")[2] for name in before)
        assert len(at) == 2, "all streams are at one replica"
        gone = at.most_common(1)[0][0]
        name = next(one for one in before if one.endswith(gone))
        assert streamed(url, name) == before[name]["text"]
        with connect(f"ws{url.removeprefix('http')}{SESSIONS}/{name}/socket") as talk:
            assert json.loads(talk.recv())["name"] == "ready"
            talk.send(json.dumps({"type": "ask", "id": "1", "question": QUESTION, "max_tokens": 4}))
            while (heard := json.loads(talk.recv(30)))["type"] != "answer":
                pass
            assert heard["text"] == before[name]["text"]
        actor = ray.get_actor(f"SERVE_REPLICA::{replicas.NAME}#{replicas.NAME}#{gone}", namespace="serve")
        ray.kill(actor)
        with ThreadPoolExecutor(4) as pool:
            after = dict(zip(before, pool.map(functools.partial(said, url), before), strict=True))
        assert after == before
        # They also go on, and a replica comes in the place of the one that went.
        frames = surely(url, "GET", f"/{name}").json()["frames"]
        more = surely(url, "POST", f"/{name}/frames", frames=list(jpegs()[20:22]), fps=1).json()
        assert more["frames"] == frames + 2
        wait_for(2)
        end = time.monotonic() + 60
        while (
            len({one.split('replica="')[1][:8] for one in metrics_of_ray() if "mmaccel_streams{" in one}) < 2
        ):
            assert time.monotonic() < end, "Ray does not tell the streams of both replicas"
            time.sleep(1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_two_replicas_carry_the_streams_of_two(tmp_path: Path, number: int) -> None:
    """As many as each may have, when all are opened at once."""
    few = functools.partial(make, limits=Limits(own_sessions=6, sessions=6))
    with deployed(number, tmp_path, few) as url:
        wait_for(number)
        with ThreadPoolExecutor(12) as pool:
            tasks = [pool.submit(call, url, "POST", "", recipe="mosaic") for _ in range(12)]
        told = [one.result() for one in tasks]
        at = Counter(one.json()["id"].rpartition(".")[2] for one in told if one.status_code == 201)
        assert sorted(at.values()) == [6] * number
        assert {one.status_code for one in told} == {201, 429} if number == 1 else {201}


@pytest.mark.slow
def test_replicas_come_and_go_under_load(tmp_path: Path) -> None:
    """One, two, one again, while streams are asked all along: no answer is another one, and no request is lost."""
    LOST.clear()
    with deployed(1, tmp_path) as url:
        before = watched(url, 6)
        over, wrong, asked = False, list[Any](), Counter[str]()

        def ask(name: str) -> None:
            while not over:
                if (now := said(url, name)) != before[name]:
                    wrong.append((name, now))
                asked[name] += 1

        with ThreadPoolExecutor(6) as pool:
            tasks = [pool.submit(ask, name) for name in list(before)]
            try:
                scale(2)
                wait_for(2)
                new = watched(url, 8)
                homes = [{name.rpartition(".")[2] for name in some} for some in (before, new)]
                before |= new
                assert len(homes[0]) == 1 and homes[1] - homes[0], "the new replica takes no streams"
                tasks += [pool.submit(ask, name) for name in new]
                scale(1)
                wait_for(1)
                time.sleep(1)
            finally:
                over = True
        for one in tasks:
            one.result()
        assert not wrong and not LOST and min(asked[name] for name in list(before)[:6]) > 3
        assert {name: said(url, name) for name in before} == before
