"""`mmaccel watch` and `mmaccel serve`: frames that are let go of, and a camera that is opened again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmaccel import media
from mmaccel.core.errors import VideoError
from mmaccel.core.streams import sources
from tests.cli import Call


def test_a_camera_is_opened_again(call: Call, clip: str, ov: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FIRST_S", 0.01)
    real, opened = media.clips, list[str]()

    def clips(address: str, **how: Any) -> Any:
        opened.append(address)
        if len(opened) == 2:
            raise VideoError("http://camera/1 cannot be opened; try again.")
        if len(opened) == 4:
            raise KeyboardInterrupt
        return real(clip, **how)

    monkeypatch.setattr(media, "clips", clips)
    words = "watch", "http://camera/1", "--model", ov, "--recipe", "rekv", "--fps", 1
    status, out, _ = call(*words, "--reconnect", "--json", "--question", "what is shown ?@40")
    told = json.loads(out)
    assert status == 130 and opened == ["http://camera/1"] * 4
    assert (told["ended"], told["complete"]) == ("stopped", False)
    assert [one["kind"] for one in told["breaks"]] == ["end", "end"], "one break, however often it is tried"
    first, second = told["breaks"]
    assert first["lasted"] > 0 and second["lasted"] is None
    # Each time the 64 s of the file, behind what came before.
    assert told["frames"] == 2 * 64 and told["seconds"] == pytest.approx(63 + first["lasted"] + 63, abs=0.01)
    assert [one["asked_at"] for one in told["answers"]] == pytest.approx([40.0], abs=1.0)
    opened.clear()
    monkeypatch.setattr(media, "clips", real)
    err = call.error(*("watch", clip, *words[2:]), "--reconnect")
    assert "--reconnect:" in err and "is a file, which is read once" in err


def test_frames_are_let_go_of(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    kv = tmp_path / "kv.yaml"
    kv.write_text("kv: {name: rekv, window: 4}\n")
    words = "watch", clip, "--model", ov, "--fps", 1, "--live", "--recipe", kv, "--clip", 4
    how = "--keep-seconds", 10, "--save", tmp_path / "s"
    told = call.object(*words, *how, "--question", "what is shown ?", "--json")
    assert told["recipe"]["kv"]["keep_seconds"] == 10
    (gone,) = told["let_go"]
    assert gone["kind"] == "let_go" and gone["seconds"] == pytest.approx(told["seconds"] - 11, abs=1e-6)
    assert told["counters"]["let_go"] == 53 and all(
        one["seconds"] >= told["seconds"] - 10 for one in told["answers"][0]["evidence"]
    )
    status, _, err = call(*words, "--keep-seconds", 10)
    assert status == 0 and "let go of frames of 52 s, up to 52 s" in err
    err = call.error("watch", "--load", tmp_path / "s", "--model", ov, "--keep-seconds", 10)
    assert "a saved session has its own" in err
    # Each frame's keys and values, of all layers, are some ten thousand bytes.
    told = call.object(*words, "--host-bytes", "200KB", "--json")
    assert told["recipe"]["kv"]["spill"] == "drop_oldest"
    assert 0 < told["counters"]["host_bytes"] <= 200_000 and told["let_go"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("watch", "CLIP", "--recipe", "full", "--keep-seconds", 3),
            "--keep-seconds: kv 'full' lets nothing go",
        ),
        (
            ("watch", "CLIP", "--recipe", "full", "--host-bytes", "3GB"),
            "--host-bytes: kv 'full' lets nothing go",
        ),
        (("watch", "CLIP", "--host-bytes", "much"), "--host-bytes: 'much' is not a size"),
        (("watch", "CLIP", "--keep-seconds", 0), "keep_seconds is 0"),
        (("serve", "--recipe", "dense", "--keep-seconds", 3), "--keep-seconds: kv 'full' lets nothing go"),
    ],
)
def test_what_cannot_be(call: Call, clip: str, words: tuple[Any, ...], says: str) -> None:
    assert says in call.error(*(clip if word == "CLIP" else word for word in words))


def test_a_server_has_one_cap_for_all(call: Call, ov: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = pytest.importorskip("mmaccel.serve.app")
    given: list[Any] = []
    monkeypatch.setattr(app, "run", given.append)
    monkeypatch.setattr("mmaccel.serve.engine.Engine", lambda *parts: parts)
    assert call("serve", "--keep-seconds", 60, "--host-bytes", "1GiB", "--model", ov)[0] == 0
    kv = given[0][3]["mosaic"].kv
    assert (kv.keep_seconds, kv.process_bytes, kv.spill, kv.host_bytes) == (60, 1 << 30, "drop_oldest", None)
