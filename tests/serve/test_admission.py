"""A stream that would break the promise to the others is refused, by what frames were measured to take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mmaccel.core.recipe import Recipe
from mmaccel.serve.admission import Admission
from mmaccel.serve.settings import Limits, Refused, Settings
from tests.serve.conftest import SESSIONS, SMALL, jpegs, running

RECIPES = {
    "all": Recipe.load(None, kv="rekv"),
    "short": Recipe.load(None, kv={"name": "rekv", "keep_seconds": 60}),
}


def measured(**limits: Any) -> Admission:
    """Frames of 0.1 s and 1000 bytes: calls of half a unit run nothing."""
    made = Admission(RECIPES, replace(Limits(), **limits))
    for name in RECIPES:
        one = made.admit(name, 1.0, 900.0)
        made.took(one, 2.0, (0, 0), (10, 10_000))
        made.took(one, 0.0, (10, 10_000), (20, 20_000))
        made.took(one, 50.0, (20, 20_000), (30, 30_000), live=False)
        made.end(one)
    return made


def test_time_is_promised_until_it_is_all_taken() -> None:
    admission = measured(busy=0.86)
    given = [admission.admit("all", 2.0, 900.0) for _ in range(4)]
    with pytest.raises(
        Refused, match=r"fps: 1 frames a second of this stream take 0\.100 s of each second"
    ) as told:
        admission.admit("all", 1.0, 900.0)
    assert told.value.status == 503 and told.value.code == "no_time"
    admission.admit("all", 0.5, 900.0)
    admission.end(given[0])
    admission.end(given[0])
    admission.admit("all", 2.0, 900.0)
    with pytest.raises(Refused):
        admission.admit("all", 1.0, 900.0)
    admission.admit("all", None, 900.0)  # goes on here


def test_bytes_are_predicted_to_what_the_recipe_keeps() -> None:
    admission = measured(memory_bytes=1_500_000)
    one = admission.admit("all", 1.0, 900.0)
    assert admission.bytes(one) == 900_000
    with pytest.raises(Refused, match="seconds: this stream will hold 900000 bytes after 900 s") as told:
        admission.admit("all", 1.0, 900.0)
    assert told.value.status == 503 and told.value.code == "no_room"
    assert admission.bytes(admission.admit("short", 1.0, 900.0)) == 60_000
    assert admission.bytes(admission.admit("all", 1.0, 10.0)) == 10_000
    admission.took(one, 1.0, (20, 20_000), (21, 2_000_000))
    with pytest.raises(Refused):
        admission.admit("short", 1.0, 1.0)


def test_a_memory_that_grows_no_more_takes_no_more() -> None:
    admission = Admission(RECIPES, Limits())
    one = admission.admit("all", 1.0, 900.0)
    admission.took(one, 1.0, (50, 7_000), (60, 7_000))
    assert admission.bytes(one) == 7_000


def test_a_slab_is_not_what_a_frame_takes() -> None:
    """Bytes come a slab at a time: nothing is told before they grow, and then by all frames since the first look."""
    admission, slab = Admission(RECIPES, Limits()), 256 << 20
    one = admission.admit("all", 1.0, 900.0)
    admission.took(one, 1.0, (0, 0), (1, slab))
    assert admission.bytes(one) == slab
    admission.took(one, 1.0, (1, slab), (25, 2 * slab))
    assert admission.bytes(one) == pytest.approx(2 * slab + slab / 24 * 875)
    admission.took(one, 1.0, (25, 2 * slab), (26, 2 * slab))
    assert admission.bytes(admission.admit("all", 1.0, 25.0)) < 2 * slab


def test_frames_that_come_faster_than_was_said_count(monkeypatch: pytest.MonkeyPatch) -> None:
    admission, now = measured(busy=0.8), 0.0
    monkeypatch.setattr("mmaccel.serve.admission.monotonic", lambda: now)
    one = admission.admit("all", 1.0, 900.0)
    for now in (0.0, 10.0, 20.0):
        admission.took(one, 5.0, (int(5 * now), 0), (int(5 * now) + 50, 0))
    assert one.rate == 5.0 and admission.busy(one) > 0.4


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
