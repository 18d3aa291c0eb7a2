"""Films that `mmaccel` reads and watches: without an index, large, stored, cameras opened again, frames let go of.

A stored film is ingested: frames see all before them, the pattern acts, questions and stops cut it. Half an hour of it
through the command and through Python: four kinds of question, evidence, counters, the same words.
"""

import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import mmaccel
from mmaccel import VideoSession, media
from mmaccel.cli.choices import name_options_in_errors, read_video
from mmaccel.cli.console import progress_bars
from mmaccel.core.errors import VideoError, VideoWarning
from mmaccel.core.streams import sources
from mmaccel.core.streams.live import tune_python_for_streams
from mmaccel.media import reader
from mmaccel.media.preprocess import PixelSettings, resized_size
from mmaccel_lab.world import World, write_mp4
from mmaccel_lab.world.words import QUESTIONS
from tests.cli import Call
from tests.media.films import numbers, write_film
from tests.spies import refusal

SQUARE = PixelSettings(size={"height": 14, "width": 14}, fps=1000.0)  # every frame
SIZE = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
PATCHES = PixelSettings(size=SIZE, patch_size=14, merge_size=2, temporal_patch_size=2)


def look(path: object, pixels: PixelSettings = SQUARE, **how: Any) -> Any:
    with progress_bars() as progress:
        own = SimpleNamespace(video=pixels, style=None, own_video_settings=True, tiny=None)
        return read_video(str(path), own, progress, **how)


def test_a_source_without_an_index_needs_no_option(tmp_path: Path) -> None:
    path = write_film(tmp_path / "bare.h264", 60, format="h264")
    assert numbers(look(path).frames) == list(range(60))
    assert numbers(look(path, max_frames=8).frames) == list(range(0, 60, 8))


@pytest.mark.parametrize(
    ("pixels", "size"),
    [(SQUARE, (14, 14)), (PATCHES, (28, 56)), (PixelSettings(size={}, do_resize=False), (64, 128))],
)
def test_fit_is_what_the_processor_does(pixels: PixelSettings, size: tuple[int, int]) -> None:
    assert resized_size(pixels, 30, 64, 128) == size


def test_a_long_film_is_shrunk_to_what_the_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    path = write_film(tmp_path / "film.mp4", 40, height=160, width=256)
    exact = look(path).frames
    assert exact.shape == (40, 3, 160, 256)
    monkeypatch.setattr(reader, "ROOM", 40 * 3 * 160 * 256 - 1)
    monkeypatch.setattr(reader, "free_host_bytes", lambda: 1 << 20)
    small = look(path).frames
    assert small.shape == (40, 3, 28, 45) and numbers(look(path, frames=4).frames) == [0, 10, 20, 30]
    means = [frames.float().mean((0, 2, 3)) for frames in (exact, small)]
    torch.testing.assert_close(*means, rtol=0, atol=2.0)
    assert not [one for one in recwarn if issubclass(one.category, VideoWarning)]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"frames": 9}, "--frames 9 is more than the 6 frames of PATH: ask for fewer."),
        ({"max_frames": 0}, "--max-frames 0 must be at least 1."),
        ({"fps": float("inf")}, "--fps inf must be a positive number of frames a second."),
    ],
)
def test_errors_name_the_options_of_the_command(tmp_path: Path, how: dict[str, Any], sentence: str) -> None:
    # The name of the file holds the words that are looked for.
    path = write_film(tmp_path / "frames=fps=.mp4", 6)
    assert refusal(lambda: look(path, **how), VideoError).replace(str(path), "PATH") == sentence


def test_too_little_memory_names_the_options_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_film(tmp_path / "film.mp4", 6)
    monkeypatch.setattr(reader, "free_host_bytes", lambda: 1000)
    with pytest.raises(VideoError, match=r"are free: give --fps, --frames or --max-frames\.$"):
        look(path)
    bare = write_film(tmp_path / "bare.h264", 6, format="h264")
    monkeypatch.setattr(reader, "free_host_bytes", lambda: 1 << 40)
    with pytest.raises(VideoError, match=r"its number of frames: use --fps instead of --frames\.$"):
        look(bare, frames=2)


def test_warnings_name_no_argument_the_command_lacks(tmp_path: Path) -> None:
    path = write_film(tmp_path / "wide.mp4", 1, height=2, width=4100)
    with pytest.warns(VideoWarning, match=r"frames of 4100x2 were shrunk to 4096x2 and none lost\.$"):
        look(path)
    with pytest.warns(UserWarning, match="max_side= stays"), name_options_in_errors():
        import warnings

        warnings.warn("max_side= stays", UserWarning, stacklevel=1)


@pytest.fixture
def freezing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A watch freezes what there is, and thaws it."""
    monkeypatch.setattr("mmaccel.cli.watch.tune_python_for_streams", tune_python_for_streams)
    yield
    gc.freeze()


def test_no_full_collection_comes_between_tokens(
    freezing: None, call: Call, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there before the first frame is frozen, and threads take short turns, for the command alone."""
    seen, watch = list[int](), VideoSession.watch
    frozen = lambda: gc.get_freeze_count() * (sys.getswitchinterval() < 0.005)  # noqa: E731
    noted = lambda self, *given, **how: (seen.append(frozen()), watch(self, *given, **how))[1]  # noqa: E731
    monkeypatch.setattr(VideoSession, "watch", noted)
    how = "--live", "--question", "hi", "--model", ov, "--max-new-tokens", 1
    assert call("watch", write_film(tmp_path / "film.mp4", 6), *how)[0] == 0
    assert seen and min(seen) > 10_000 and gc.get_freeze_count() == 0 and sys.getswitchinterval() == 0.005
    with VideoSession(mmaccel.load_model(ov), mmaccel.load_processor(ov), None, kv="mosaic") as session:
        before = gc.get_threshold(), gc.isenabled()
        session.watch(torch.zeros(2, 3, 84, 140, dtype=torch.uint8), fps=1.0)
        session.ask("hi", 1)
        assert (gc.get_threshold(), gc.isenabled()) == before and seen[-1] == gc.get_freeze_count() == 0


def test_ask_takes_a_bare_stream(call: Call, ov: str, tmp_path: Path) -> None:
    path = write_film(tmp_path / "bare.h264", 20, format="h264")
    words = f"--model {ov} --json --fps 25 --max-frames 4 --max-new-tokens 1"
    assert call.object("ask", path, "hi", *words.split())["frames"] == 3


FRAMES, FPS = 900, 0.5
SEED = 67
KV = "{name: mosaic, window: 32, frames: 64, local: 8, cache: 32}\n"


class Asked(NamedTuple):
    kind: str
    text: str
    answer: str
    frames: tuple[int, ...]


def all_questions(world: World) -> list[Asked]:
    """Of the four kinds about a world: every card, every two cards in an order of their own, and each scene's first time."""
    draw, found = random.Random(0), list[Asked]()
    for one in world.questions(["needle", "scene"]):
        found.append(Asked(one.kind, one.text, one.answer, one.frames))
    for first, second in combinations(world.cards, 2):
        one, other = draw.sample((first, second), 2)
        at = (first.frame, second.frame)
        names = (one.shape, other.shape)
        found.append(Asked("order", QUESTIONS["order"].format(*names), first.shape, at))
        colours = f"{one.colour} and {other.colour}"
        found.append(Asked("combine", QUESTIONS["combine"].format(*names), colours, at))
    return found


@pytest.fixture(scope="module")
def half_an_hour(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    world = replace(World.generate(SEED, FRAMES), fps=FPS)
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    write_mp4(world, path, 112, 112)
    assert world.frames / world.fps == 30 * 60
    return world, path


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-ov", "tiny-qwen"])
def test_half_an_hour(model: str, half_an_hour: tuple[World, Path], call: Call, tmp_path: Path) -> None:
    world, film = half_an_hour
    questions = all_questions(world)
    kinds = Counter(one.kind for one in questions)
    assert len(questions) >= 50 and set(kinds) == {"needle", "scene", "order", "combine"}
    (tmp_path / "recipe.yaml").write_text(f"kv: {KV}")
    asked = [part for one in questions for part in ("--question", one.text)]
    status, out, err = call(
        "watch", film, "--model", model, "--recipe", tmp_path / "recipe.yaml", "--json", "--max-new-tokens", 8, "--live",
        "--save", tmp_path / "saved", *asked, "--device", "cpu",
    )  # fmt: skip
    assert status == 0, err
    told = json.loads(out)
    assert told["frames"] == FRAMES and told["complete"] and told["seconds"] == (FRAMES - 1) / FPS
    answers = {one["question"]: one for one in told["answers"]}
    assert len(answers) == len(questions) == len(told["answers"])
    counters = told["counters"]
    assert 1 - counters["resident"] / counters["units"] >= 0.9
    named = (
        "recalled", "eager_splits", "deferred", "deferred_splits", "singletons", "host_bytes_in", "host_copies_in",
        "fetch_covered", "fetch_cached",
    )  # fmt: skip
    assert min(counters[one] for one in named) > 0, {one: counters[one] for one in named}
    assert 0 < counters["prefetch_coverage"] <= 1
    right = Counter(one.kind for one in questions if answers[one.text]["answer"].strip(" .") == one.answer)
    assert right.total() >= 0.5 * len(questions) and set(right) == set(kinds), f"{right} of {kinds}"
    assert all(one["evidence"] and one["ttft_s"] > 0 for one in answers.values())
    # The same from Python, from the start and from what the command saved.
    net, processor = mmaccel.load_model(model).float(), mmaccel.load_processor(model)
    with mmaccel.VideoSession(net, processor, tmp_path / "recipe.yaml") as session:
        assert session.watch(film) == FRAMES
        said = [session.ask(one.text, 8) for one in questions]
    assert [one.text for one in said] == [answers[one.text]["answer"] for one in questions]
    with mmaccel.VideoSession.resume(net, processor, tmp_path / "saved") as session:
        assert [session.ask(one.text, 8).text for one in questions[:12]] == [one.text for one in said[:12]]


NARROW = "kv: {name: rekv, frames: 4, window: 4, local: 2, encode_frames: 0}\n"
GRID = "sparse: {name: a_shape, sink: 16, window: 64, block: 16}\n"


@pytest.fixture
def told(call: Call, clip: str, ov: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What `watch` of the clip, or `ask`, says of itself, under a recipe in YAML."""
    path = tmp_path / "recipe.yaml"

    def run(recipe: str, *words: object, command: str = "watch") -> dict[str, Any]:
        path.write_text(recipe)
        base = ("--model", ov, "--recipe", path, "--fps", 0.5, "--max-new-tokens", 4, "--json")
        asked = ("how many ?",) if command == "ask" else ("--question", "how many ?", "--clip", 8)
        found: dict[str, Any] = call.object(command, clip, *asked, *base, *words)
        return found

    return run


def test_a_file_is_ingested_as_a_session_does(
    told: Callable[..., dict[str, Any]], clip: str, ov: str, tmp_path: Path
) -> None:
    stored, live = told(NARROW), told(NARROW, "--live")
    assert stored["frames"] == live["frames"] == 32
    assert stored["counters"]["ingested"] == 32 and stored["counters"]["ingest_seen"] == 1
    assert "ingested" not in live["counters"]
    model, processor = mmaccel.load_model(ov).float(), mmaccel.load_processor(ov)
    for found, how in ((stored, "ingest"), (live, "watch")):
        with mmaccel.VideoSession(model, processor, tmp_path / "recipe.yaml") as session:
            assert getattr(session, how)(clip, fps=0.5) == 32
            answer = session.ask("how many ?", 4)
        assert found["answers"][0]["answer"] == answer.text
        scores = [one["score"] for one in found["answers"][0]["evidence"]]
        assert scores == pytest.approx([one.score for one in answer.top(5)], abs=1e-4)
    scores = [[one["score"] for one in found["answers"][0]["evidence"]] for found in (stored, live)]
    assert scores[0] != pytest.approx(scores[1], abs=1e-4), "under the window alone it is another"


@pytest.mark.parametrize("cut", [("--question", "what was first ?@30"), ("--save-every", 1e-9)])
def test_a_question_s_time_and_a_save_end_an_ingestion(
    told: Callable[..., dict[str, Any]], tmp_path: Path, cut: tuple[object, ...]
) -> None:
    save = ("--save", tmp_path / "s")
    found = told(NARROW, *cut, *save)
    assert found["frames"] == found["counters"]["ingested"] == 32
    assert 0.1 < found["counters"]["ingest_seen"] < 1
    assert told(NARROW, "--save-every", 0, *save)["counters"]["ingest_seen"] == 1
    assert [one["frames"] for one in found["answers"]] == [*([16] if len(found["answers"]) > 1 else []), 32]


def test_the_pattern_acts_on_a_file_and_is_told_where_it_does_not(
    told: Callable[..., dict[str, Any]],
) -> None:
    stored, live, short = (told(NARROW + GRID, *more) for more in ((), ("--live",), ("--clip", 3)))
    asked = told(NARROW + GRID, command="ask")
    assert asked["kept"] == short["kept"] == stored["kept"], "passes do not hang on clips"
    assert asked["answer"] == short["answers"][0]["answer"] == stored["answers"][0]["answer"]
    assert 0 < stored["kept"] < 1 and set(stored["heads"]) == {"a_shape"}
    assert stored["notes"] == []
    assert live["kept"] is None and "acts on those given to ingest" in live["notes"][0]


def test_a_memory_that_does_not_ingest_watches(told: Callable[..., dict[str, Any]], monkeypatch) -> None:
    monkeypatch.setattr("mmaccel.policies.kv.rekv.ReKV.ingests", False)
    found = told(NARROW)
    assert found["frames"] == 32 and "ingested" not in found["counters"]


LONGER = [("tiny-ov", 256), ("tiny-ov", 1800), ("tiny-qwen", 1800)]


@pytest.mark.parametrize(
    ("model", "seconds"),
    [("tiny-qwen", 256), *(pytest.param(*one, marks=pytest.mark.slow) for one in LONGER)],
)
def test_one_recipe_has_all_three_systems_at_work(
    model: str, seconds: int, call: Call, shipped: Callable[[str], str], tmp_path: Path
) -> None:
    """Through `watch` right answers, through `generate` the plain model's, which errs on 1,800 s; no part idle."""
    name, film = shipped(model), tmp_path / "film.mp4"
    world = replace(World.generate(SEED, int(seconds * FPS)), fps=FPS)
    write_mp4(world, film, 112, 112)
    questions = all_questions(world)
    needles = [one for one in questions if one.kind == "needle"][:2]
    asked = needles + [one for one in questions if one.kind == "order"][:4]
    base = ("--model", name, "--recipe", "everything", "--max-new-tokens", 8, "--device", "cpu", "--json")
    words = [part for one in asked for part in ("--question", one.text)]
    found = json.loads(call.text("watch", film, *base, *words))
    assert found["frames"] == world.frames and found["counters"]["ingest_seen"] == 1
    said = [one["answer"].strip(" .") for one in found["answers"]]
    right = [one == want.answer for one, want in zip(said, asked, strict=True)]
    assert sum(right) >= len(asked) - 1, said
    assert found["kept"] < 1 and any("grid" in head for head in found["heads"]) and found["notes"] == []
    assert all(one["counters"]["recalled"] > 0 and one["counters"]["drafted"] > 0 for one in found["answers"])
    # All of them, also where the model's processor takes fewer unless it is asked.
    again = "ask", film, needles[0].text, *base, "--frames", world.frames
    one, plain = (json.loads(call.text(*again, *more)) for more in ((), ("--recipe", "dense")))
    assert one["frames"] == world.frames and one["answer"] == plain["answer"]
    assert one["kept"] < 1 and one["draft"]["rounds"] > 0 and one["draft"]["failed"] is None


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
    assert told["counters"]["let_go"] == 53
    assert all(one["seconds"] >= told["seconds"] - 10 for one in told["answers"][0]["evidence"])
    status, _, err = call(*words, "--keep-seconds", 10)
    assert status == 0 and "let go of frames shown from 0 to 52 s" in err and "kv: 53 of " in err
    err = call.error("watch", "--load", tmp_path / "s", "--model", ov, "--keep-seconds", 10)
    assert "a saved session has its own" in err
    # Each frame's keys and values, of all layers, are some ten thousand bytes.
    told = call.object(*words, "--host-bytes", "200KB", "--json")
    assert told["recipe"]["kv"]["store"]["spill"] == "drop_oldest"
    assert 0 < told["counters"]["host_bytes"] <= 200_000 and told["let_go"]


def test_a_server_has_one_cap_for_all(call: Call, ov: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = pytest.importorskip("mmaccel.serve.app")
    given: list[Any] = []
    monkeypatch.setattr(app, "run_server", given.append)
    monkeypatch.setattr("mmaccel.serve.engine.Engine", lambda *parts: parts)
    assert call("serve", "--port", 0, "--keep-seconds", 60, "--host-bytes", "1GiB", "--model", ov)[0] == 0
    kv = given[0][3]["mosaic"].kv
    store = kv.store
    assert (kv.keep_seconds, store.process_bytes, store.host_bytes) == (60, 1 << 30, None)
    assert store.spill == "drop_oldest"
