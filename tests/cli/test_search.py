"""`mmaccel search` and `mmaccel draw`: what they write, print, draw and refuse."""

import builtins
import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.cli import draw
from mmaccel.core.decoding.generate import Evidence
from mmaccel.search import recompute_table
from mmaccel.search.run import SearchProgress, head_pattern_names, main_pattern_name
from mmaccel_lab.world import World, render
from tests.cli import Call
from tests.spies import broken

HOW = ("--cost", "pairs", "--block", 16, "--device", "cpu")


@pytest.fixture(scope="module")
def table(random_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of a random model, by the command itself, from two short clips with text between."""
    from mmaccel.cli import main
    from mmaccel_lab.world import write_mp4

    folder = tmp_path_factory.mktemp("search")
    for seed in (3, 4):
        write_mp4(World.generate(seed, 16), folder / f"{seed}.mp4")
    path = folder / "table.json"
    sample = ("--video", folder / "3.mp4", "--text", "a note says the lamp is red . " * 8)
    sample += ("--video", folder / "4.mp4", "--text", "describe the video .")
    arguments = ("search", random_folder("tiny-ov-draft"), *sample, "--out", path, *HOW, "--boundaries")
    arguments += ("no_boundary,q_boundary",)
    with pytest.raises(SystemExit) as done:
        main([str(one) for one in arguments])
    assert not done.value.code
    return path


@pytest.fixture
def mine(table: Path, tmp_path: Path) -> Path:
    """A recipe of that table."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"sparse: {{name: per_head, block: 16, table: {table}}}\n")
    return recipe


def test_search_writes_a_table(table: Path) -> None:
    found = json.loads(table.read_text())
    assert recompute_table(found) == found
    assert found["sample"]["videos"] == ["3.mp4", "4.mp4"] and found["sample"]["frames"] == 32
    assert found["sample"]["text_tokens"] > 60 and found["boundaries"] == ["no_boundary", "q_boundary"]
    assert [p.name for p in table.parent.iterdir() if "parts" in p.name or p.name.startswith(".")] == []


def test_ask_runs_it_and_names_each_head(table: Path, mine: Path, call: Call, ov: str, clip: str) -> None:
    asked = ("ask", clip, "hi", "--model", ov, "--recipe", mine, "--max-new-tokens", 1, "--json")
    told = json.loads(call.text(*asked))
    found = json.loads(table.read_text())
    names = [name for layer in told["patterns"] for name in layer]
    assert told["heads"] == {name: names.count(name) for name in set(names)} and told["kept"] < 1
    heads = [head["pattern"] for layer in found["layers"] for head in layer]
    within = [main_pattern_name(head) for head in heads]
    assert "q_boundary" in {head["name"] for head in heads}
    assert names == [
        main if main == head["name"] else f"{head['name']}({main})"
        for head, main in zip(heads, within, strict=True)
    ]
    by_head = told["kept_by_head"]
    assert [len(layer) for layer in by_head] == [len(layer) for layer in found["layers"]]
    shares = [share for layer in by_head for share in layer]
    assert sum(shares) / len(shares) == pytest.approx(told["kept"]) and len(set(shares)) > 1


def test_what_ask_ran_is_drawn_as_a_table_is(
    table: Path, mine: Path, call: Call, ov: str, tmp_path: Path, clip: str
) -> None:
    asked = ("ask", clip, "hi", "--model", ov, "--recipe", mine, "--max-new-tokens", 1)
    assert "mmaccel draw FILE --out heads.svg" in call.text(*asked)
    (tmp_path / "run.json").write_text(call(*asked, "--json")[1])
    for what, name in ((table, "table"), (tmp_path / "run.json", "run")):
        assert call("draw", what, "--out", tmp_path / f"{name}.svg")[0] == 0
    drawn = [(tmp_path / f"{name}.svg").read_text() for name in ("table", "run")]
    cells = [[one for one in text.split("<path")[1:] if "fill: #" in one] for text in drawn]
    assert len(cells[0]) == len(cells[1]) > 8 and drawn[1].count("q_boundary") == 1
    (tmp_path / "run.json").write_text('{"patterns": {"grid": 3}}')
    err = call.error("draw", tmp_path / "run.json", "--out", tmp_path / "run.svg")
    assert "holds no head patterns" in err


def test_search_names_heads_as_a_report_does(
    table: Path, call: Call, ov: str, clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads(table.read_text())
    monkeypatch.setattr("mmaccel.search.search", lambda *given, **more: found)
    status, out, err = call("search", ov, "--video", clip, "--max-tokens", 300, "--out", tmp_path / "t.json")
    names = [name for layer in head_pattern_names(found) for name in layer]
    told = ", ".join(f"{name} x {names.count(name)}" for name in sorted(set(names)))
    assert status == 0 and f"\nheads: {told}\n" in out, err
    assert "q_boundary(" in told


def test_a_sample_is_cut_to_its_bound(call: Call, ov: str, clip: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    words = ("search", ov, "--video", clip, "--max-tokens", 300, "--out", path, *HOW)
    told = call.object(*words, "--boundaries", "no_boundary", "--json")
    assert 250 < told["tokens"] <= 300 and told["heads"] == sum(told["boundaries"].values())
    assert json.loads(path.read_text())["sample"]["frames"] < 20


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_draw_makes_a_map(table: Path, call: Call, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"map.{ending}"
    status, out, _ = call("draw", table, "--out", path)
    assert status == 0 and str(path) in out and path.stat().st_size > 1000
    if ending == "svg":
        assert "<svg" in path.read_text()


def test_draw_shows_what_a_pattern_computes(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "grid.svg"
    assert "did you mean 'grid'?" in call.error("draw", "grids", "--out", path)
    status, out, err = call("draw", "grid", "--out", path, "--device", "cuda:99")  # which it does not use
    assert (status, err) == (0, "") and str(path) in out and "in the order of the plan" in path.read_text()
    assert out.endswith("in place of the (default): block 16 (64)\n")
    out = call.text("draw", "a_shape", "--out", path)
    assert out.endswith("block 16 (64), sink 16 (128), window 48 (4096)\n")
    assert "text vertical_slash" in call.text("draw", "q_boundary", "--out", path)


def test_draw_shows_heads(call: Call, ov: str, clip: str, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "heads"
    named = ("--layer", 1, "--head", 0, "--head", 1, "--resolution", 32, "--max-tokens", 300)
    status, out, err = call("draw", "heads", "--model", ov, "--video", clip, "--out", folder, *named)
    assert status == 0, err
    assert sorted(p.name for p in folder.iterdir()) == ["layer01-head00.png", "layer01-head01.png"]
    assert "2 heads\n" in out
    monkeypatch.setattr(draw, "MANY", 3)
    unnamed = ("--resolution", 16, "--max-tokens", 300, "--format", "svg")
    status, out, err = call("draw", "heads", "--model", ov, "--video", clip, "--out", folder, *unnamed)
    assert status == 0 and (said := re.search(r"(\d+) heads of (\d+), evenly spread", out)), err
    assert int(said[1]) == len(list(folder.glob("*.svg"))) < int(said[2])
    assert "weight of a pair" in next(folder.glob("*.svg")).read_text()


def test_a_missing_matplotlib_is_told(table: Path, call: Call, tmp_path: Path, monkeypatch) -> None:
    missing = ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    def asked(name: Any, *_: Any, **__: Any) -> bool:
        return name.split(".")[0] == "matplotlib"

    broken(monkeypatch, builtins, "__import__", missing, asked)
    err = call.error("draw", table, "--out", tmp_path / "map.svg")
    assert err == "error: pictures need matplotlib; pip install matplotlib.\n"


def test_a_picture_is_written_whole_and_where_it_is_said(
    call: Call, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("map", "map.xyz"):
        assert "end the name in .svg, .png or .pdf." in call.error("draw", table, "--out", tmp_path / name)
    no_folder = call.error("draw", table, "--out", tmp_path / "no" / "map.svg")
    assert "does not exist; create it first." in no_folder
    call.text("draw", table, "--out", tmp_path / "map.svg")
    before = (tmp_path / "map.svg").read_bytes()
    assert len(before) > 1000

    def full(self: Any, path: Path, **more: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert "no space is left" in call.error("draw", table, "--out", tmp_path / "map.svg")
    assert (tmp_path / "map.svg").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["map.svg"]


def test_two_searches_share_no_folder(call: Call, ov: str, clip: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    words = f"--out {path} --boundaries no_boundary --max-tokens 300"
    arguments = ("search", ov, "--video", clip, *words.split(), *HOW)
    with SearchProgress.hold_lock(tmp_path / "t.json.parts"):
        err = call.error(*arguments)
        assert not path.exists()
        told = (
            f"another search is at work in {tmp_path}/t.json.parts; wait for its end, or give another --out."
        )
        assert err == f"error: {told}\n"
    # Nothing was done in it, and nothing is left.
    assert list(tmp_path.iterdir()) == []
    assert call(*arguments)[0] == 0 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_shipped_models_have_their_table(name: str, shipped: Callable[[str], str]) -> None:
    from mmaccel.core.attach import adapter_for
    from mmaccel.models import shipped as tiny
    from mmaccel.models.loading import load_model
    from mmaccel.policies.sparse.per_head import describe_model_difference, read_head_table

    found = read_head_table(tiny.tiny_model_folder(shipped(name)) / "heads.json")
    assert recompute_table(found) == found
    model = load_model(name)
    assert describe_model_difference(found, adapter_for(model).fingerprint(model)) is None


def saved(ov: str, folder: Path, kv: dict[str, object]) -> Path:
    model, processor = mmaccel.load_model(ov, dtype=torch.float32), mmaccel.load_processor(ov)
    world = World.generate(3, 40)
    with mmaccel.VideoSession(model, processor, None, kv=kv) as session:
        assert session.clusters() == {} and session.shown == []
        session.watch(render(world.table(0.3), 168, 280), fps=1.0)
        session.save(folder)
    return folder


def test_a_session_is_drawn(call: Call, ov: str, tmp_path: Path) -> None:
    session = saved(
        ov, tmp_path / "session", {"name": "mosaic", "window": 8, "index": {"name": "clusters", "init": 12}}
    )
    truth, out = tmp_path / "truth.json", tmp_path / "pictures"
    truth.write_text(json.dumps(World.generate(3, 40).truth()))
    command = ("draw", session, "--model", ov, "--format", "svg")
    asked = ("--question", "what colour was the star ?", "--truth", truth, "--layer", 1, "--layer", 0)
    told = call.text(*command, *asked, "--out", out)
    names = ["retrieved.svg", "timeline-layer00.svg", "timeline-layer01.svg"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert all(name in told and "<svg" in (out / name).read_text() for name in names)
    for wrong, match in (
        (("--layer", 99), "there is no 99"),
        (("--truth", session / "session.json"), "holds no truth"),
        (("--truth", tmp_path / "none.json"), "holds no truth"),
    ):
        assert match in call.error(*command, *wrong, "--out", out)
    assert "is a file" in call.error(*command, "--out", truth)


def test_a_memory_without_clusters_wants_a_question(call: Call, ov: str, tmp_path: Path) -> None:
    session = saved(ov, tmp_path / "session", {"name": "rekv", "window": 8, "frames": 4})
    command = ("draw", session, "--model", ov, "--out", tmp_path / "pictures")
    assert "give --question" in call.error(*command)
    status, told, _ = call(*command, "--question", "what colour was the star ?")
    assert status == 0 and "retrieved.png" in told and "timeline" not in told


def test_runs_are_in_order_of_time() -> None:
    assert draw.entry_runs_by_cluster([5, 5, 2, 5, 2, 2]) == {5: [(0, 2), (3, 4)], 2: [(2, 3), (4, 6)]}
    assert list(draw.entry_runs_by_cluster([5, 5, 2])) == [5, 2] and draw.entry_runs_by_cluster([]) == {}


def test_a_lane_for_each_cluster_and_one_for_many_small_ones() -> None:
    world = World.generate(3, 60)
    visual = torch.arange(60)[None] // 10
    semantic = torch.stack([torch.zeros(120, dtype=torch.long), torch.arange(120) // 2])
    shown = [2.0 * n for n in range(60)]
    truth = draw.GroundTruth(world.truth())
    drawn = draw.plot_cluster_timeline({"visual": visual, "semantic": semantic}, shown, 1, truth)
    scenes, above, below = drawn.axes
    assert len(scenes.texts) == len(world.segments) and len(above.collections) == 6
    assert len(below.collections) == draw.LANES and below.get_ylabel().startswith("60 semantic")
    assert "layer 1" in below.get_ylabel() and "layer" not in above.get_ylabel()
    (first, *_), (x0, x1) = above.collections, above.get_xlim()
    assert (x0, x1) == (0, 120) and first.get_paths()[0].get_extents().x1 == 20
    assert len(draw.plot_cluster_timeline({"visual": visual}, shown, 0).axes) == 1


def test_what_a_question_rests_on_is_marked() -> None:
    world = World.generate(3, 60)
    (question, *_) = world.questions(["order"])
    evidence = [Evidence((n, n), float(n), 0.5, 4, 0.3) for n in (3, 9)]
    told = draw.GroundTruth(world.truth())
    assert told.question_seconds(question.text) == tuple(float(n) for n in question.frames)
    asked = question.text.capitalize().replace(" ?", "?").replace(" ,", ",")
    assert asked != question.text and told.question_seconds("what else ?") == ()
    answers = [(asked, "star", evidence), ("what else ?", "no", evidence)]
    drawn = draw.plot_retrieved_frames(answers, 60.0, told)
    assert [len(axes.lines) for axes in drawn.axes] == [2, 0]
    assert [len(axes.collections[0].get_segments()) for axes in drawn.axes] == [2, 2]
