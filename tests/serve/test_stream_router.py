"""To which replica a request goes."""

import asyncio
import pickle
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.serve.conftest import SESSIONS

replicas = pytest.importorskip("mmaccel.serve.replicas", reason="Ray Serve is not installed")


def test_homes_of_streams() -> None:
    """The named replica while it is there; after that the others share its streams, and a fourth moves but some."""
    numbers = [f"{n:020d}.a" for n in range(300)]
    assert {replicas._choose_replica(one, ["a", "b", "c"]) for one in numbers} == {"a"}
    before = {one: replicas._choose_replica(one, ["b", "c"]) for one in numbers}
    assert min(Counter(before.values()).values()) > 100
    after = {one: replicas._choose_replica(one, ["d", "b", "c"]) for one in numbers}
    moved = [one for one in numbers if after[one] != before[one]]
    assert 50 < len(moved) < 150 and {after[one] for one in moved} == {"d"}


class Request(SimpleNamespace):
    """What Ray tells a router of a request."""

    def __init__(self, number: int, path: str = SESSIONS, method: str = "POST") -> None:
        scope = {"path": path, "method": method, "type": "http"}
        super().__init__(
            args=[pickle.dumps(SimpleNamespace(asgi_scope=scope))],
            metadata=SimpleNamespace(internal_request_id=str(number)),
            routing_context=SimpleNamespace(should_backoff=False),
        )


def test_a_new_stream_goes_to_the_replica_with_the_fewest(tmp_path: Path) -> None:
    """Also of many that are opened at once; those of a replica that is gone count where they went."""
    made: Any = object.__new__(replicas.StreamRouter)
    made.initialize_state(str(tmp_path / "live"))
    a, b, c = (SimpleNamespace(replica_id=SimpleNamespace(unique_id=one)) for one in "abc")

    async def at_once(some: list[Any], numbers: range) -> Counter[str]:
        chosen = await asyncio.gather(*(made.choose_replicas(some, Request(number)) for number in numbers))
        assert all(len(ranks) == len(some) for ranks in chosen)  # the others, if the first has no room
        for number, ranks in zip(numbers, chosen, strict=True):
            name = ranks[0][0].replica_id.unique_id
            (tmp_path / "live" / f"{number:020d}.{name}").mkdir(parents=True)
            made.on_request_completed(ranks[0][0].replica_id, str(number))
        return Counter(ranks[0][0].replica_id.unique_id for ranks in chosen)

    assert asyncio.run(at_once([a], range(6))) == {"a": 6}
    assert asyncio.run(at_once([a, b], range(10, 24))) == {"a": 4, "b": 10}
    assert asyncio.run(at_once([a, b, c], range(30, 40))) == {"c": 10}
    # The ten of b are at the others now, of which each has ten by itself.
    homes = Counter(
        replicas._choose_replica(one.name, [a, c], lambda one: one.replica_id.unique_id).replica_id.unique_id
        for one in (tmp_path / "live").iterdir()
    )
    gap = max(homes.values()) - min(homes.values())
    assert sum(homes.values()) == 30 and set(homes) == {"a", "c"}
    new = asyncio.run(at_once([a, c], range(50, 50 + gap)))
    assert new == {min(homes, key=lambda one: homes[one]): gap} if gap else not new


def test_an_open_under_way_counts_once_where_it_is(tmp_path: Path) -> None:
    """Where it is routed again, where its first replica has no room, and for a while where it is given up."""
    made: Any = object.__new__(replicas.StreamRouter)
    made.initialize_state(str(tmp_path))
    two = a, b = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=one)) for one in "ab"]
    (tmp_path / f"{'0' * 20}.b").mkdir()
    first = lambda number: asyncio.run(made.choose_replicas(two, Request(number)))[0][0]  # noqa: E731
    for _ in range(3):
        assert first(1) is a  # b is one ahead
    made.on_request_routed(Request(1), b.replica_id, None)
    made.on_request_routed(Request(9, "/health", "GET"), b.replica_id, None)
    assert first(2) is a and first(3) is a  # none and two, one and two
    made._opening["1"] = made._opening["2"] = (time.monotonic() - replicas.OPENS_S, "a")
    assert first(4) in two and list(made._opening) == ["3", "4"]


def test_a_folder_that_cannot_be_read_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = object.__new__(replicas.StreamRouter)
    made.initialize_state(str(tmp_path))
    two = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=one)) for one in "ab"]
    for n in range(9):
        (tmp_path / f"{n:020d}.a").mkdir()
    choose = lambda number: asyncio.run(made.choose_replicas(two, Request(number)))[0][0]  # noqa: E731
    assert choose(1) is two[1]
    monkeypatch.setattr(replicas, "LISTS_S", 0.05)
    for broken in (Mock(side_effect=PermissionError), lambda _: time.sleep(0.3) or []):
        monkeypatch.setattr(replicas.os, "listdir", broken)
        assert choose(2) is two[1]


def test_other_requests_go_to_the_stream_s_replica_or_to_a_replica_with_less_to_do(tmp_path: Path) -> None:
    made: Any = object.__new__(replicas.StreamRouter)
    made.initialize_state(str(tmp_path))
    three = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=one)) for one in "abc"]
    choose = lambda *given: asyncio.run(made.choose_replicas(three, Request(1, *given)))  # noqa: E731
    assert choose(f"{SESSIONS}/{'0' * 20}.b/ask") == [[three[1]]]
    for path, method in ((SESSIONS, "GET"), ("/v1/chat/completions", "POST"), ("/health", "GET")):
        (found,) = choose(path, method)
        assert len(found) == 2
    assert not made._opening
