"""The other commands: what they print and what they write."""

import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mmaccel import media
from mmaccel.cli import console, main
from mmaccel.cli.console import print_json
from mmaccel.core.recipe import Recipe
from mmaccel_lab.cli.worlds import DEMO_KINDS
from mmaccel_lab.world import World
from tests.cli import Call, after

Folder = Callable[[str], Path]


def test_list_is_an_object_of_kinds(call: Call) -> None:
    told = call.object("list", "--json")
    assert {"sparse", "kv", "draft", "prune", "model", "recipe", "shape", "backend"} <= set(told)
    assert "a_shape" in told["sparse"] and "tiny-ov" in told["model"] and "long-video" in told["recipe"]
    assert told["backend"]["reference"] is None
    status, out, _ = call("list")
    assert status == 0 and all(name in out for name in (*told["sparse"], *told["recipe"], *told["shape"]))
    for kind in ("sparse", "kv", "draft", "prune", "recipe", "family", "shape", "backend"):
        for name in told[kind]:
            status, out, err = call("describe", name)
            assert status == 0 and err == "" and name in out and len(out.split()) > 5, name


def test_describe_shows_fields_and_presets(call: Call) -> None:
    out = call("describe", "a_shape")[1]
    assert "window: int = 4096" in out and "sink: int = 128" in out and "first `sink` tokens" in out
    assert "default: {name: a_shape" in call("describe", "long-video")[1]
    shape = call.text("describe", "a_shape")
    assert "sink: int = 128 (at least 0)\n" in shape and "\n  block: int = 64\n" in shape
    assert "\n      whether to draft for" in call("describe", "sequential")[1]
    for name in ("generic", "internvl"):
        told = call("describe", name)[1]
        assert "generic (family)" in told and "serves internvl, " in told and "\n  streams: yes" in told
    out = call("describe", "window")[1]
    assert "window (recipe: what `--recipe window` is; there is a kv of this name too, below)" in out
    assert "window (kv)" in out and "(recipe: what `--recipe std` is)" in call("describe", "std")[1]
    assert call("describe", "prompt-lookup")[1] == call("describe", "exact")[1], "a former name"
    status, out, _ = call("describe", "beside")
    assert status == 0
    assert all(f"beside (of draft {name})" in out for name in ("parallel", "sequential", "tree"))
    assert out.count("\n  model: ") == 3
    assert "the folder beside the target's with its name and ``-draft``" in out
    status, out, _ = call("describe", "averaging")
    assert status == 0 and "averaging (of prune fastv)" in out
    assert "FastV.averaging(share: float, depth: int, layer: int = 2)" in out and "averaged over" in out
    for unknown in ("besides", "stages", "_own"):
        assert f"unknown name {unknown!r}" in call.error("describe", unknown)


def test_describe_explains_every_field_of_a_recipe(call: Call) -> None:
    text, defaults = call.text("describe", "recipe").split("\ndefaults\n")
    for field in dataclasses.fields(Recipe):
        assert re.search(rf"^{field.name}  +[\w\"]", text, re.MULTILINE), field.name
        assert f"  {field.name} = " in defaults
    assert "dense_tail = 64\n" in defaults and "sparse = dense\n" in defaults and "chunk = null\n" in defaults


@pytest.mark.parametrize(
    ("name", "field", "text"),
    [
        ("off", "in_batches", "whether to draft for a batch"),
        ("fastv", "compact", "renumber the kept tokens 0, 1, 2, ..."),
        ("rekv", "window", "frames, the current one included, that a query sees"),
        ("sequential", "in_batches", "whether to draft for a batch"),
        ("sequential", "window", None),
    ],
)
def test_describe_explains_the_fields_of_a_base(call: Call, name: str, field: str, text: str | None) -> None:
    """Below the field, where the policy's own text does not explain it already."""
    said = call.text("describe", name).split("\nfields (None is null in YAML)\n")[1].splitlines()
    at = next(n for n, line in enumerate(said) if line.startswith(f"  {field}: "))
    deep = said[at + 1][:6] == 6 * " "
    assert deep == (text is not None) and (text is None or said[at + 1].strip().startswith(text))
    assert max(map(len, said)) <= 125


def test_world_writes_a_video_and_its_truth(call: Call, tmp_path: Path) -> None:
    path, truth = tmp_path / "w.mp4", tmp_path / "w.json"
    assert "20 frames" in call.text("world", "--seed", 5, "--frames", 20, "--out", path, "--truth", truth)
    told = json.loads(truth.read_text())
    assert told == World.generate(5, 20).truth() and len(media.read(path)) == 20
    again = tmp_path / "again.mp4"
    call("world", "--seed", 5, "--frames", 20, "--out", again)
    assert again.read_bytes() == path.read_bytes()


def test_eval_needle_gives_accuracy_for_each_length(
    call: Call, ov: str, tmp_path: Path, random_folder: Folder
) -> None:
    arguments = f"eval needle --model {ov} --frames 8,16 --samples 2 --seed 4 --videos {tmp_path}".split()
    told = call.object(*arguments, "--json")
    assert set(told["accuracy"]) == {"8", "16"} and told["complete"]
    assert [row["asked"] for row in told["lengths"]] == [2, 2]
    assert len(list(tmp_path.glob("*.mp4"))) == 4
    status, out, _ = call(*arguments, "--recipe", "a_shape", "--kind", "all")
    assert status == 0 and "frames" in out and "pairs computed" in out and "combine" in out
    model = random_folder("tiny-qwen-draft")
    arguments = ("eval", "needle", "--model", model, "--frames", "8", "--samples", 1, "--documents", "--json")
    told = call.object(*arguments)
    assert told["documents"] and set(told["lengths"][0]["kinds"]) == {"needle"}


@pytest.mark.parametrize(
    ("command", "count"), [("eval needle --frames 8,9 --samples 5", 3), ("demo --worlds 2 --frames 8", 1)]
)
def test_what_was_asked_is_told_when_it_is_stopped(
    call: Call, ov: str, monkeypatch: pytest.MonkeyPatch, command: str, count: int
) -> None:
    from mmaccel_lab.eval import needle

    monkeypatch.setattr(needle, "judge", after(count, needle.judge))
    words = (*command.split(), "--model", ov, "--recipe", "a_shape")
    status, out, err = call(*words, "--json")
    told = json.loads(out)
    assert status == 130 and not told["complete"] and "answers so far" in err
    if command.startswith("demo"):
        assert len(told["cases"]) == 1
        status, out, _ = call(*words)
        assert status == 130 and "dense: 0.0% of 1 right" in out
    else:
        assert told["lengths"][0]["asked"] == 3


def test_eval_caption(call: Call, ov: str) -> None:
    arguments = ("eval", "caption", "--model", ov, "--draft", ov, "--frames", 12, "--samples", 2)
    told = call.object(*arguments, "--json")
    assert told["agreement"] == 1.0 and told["captions"] == 2 and told["tokens"] > 40
    status, out, _ = call(*arguments)
    assert status == 0 and "2 captions" in out and "agrees on 100.0%" in out


def test_eval_table(call: Call, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmaccel_lab.eval import table

    few = functools.partial(table.step_ratio, length=16, steps=4, rounds=1)
    monkeypatch.setattr(table, "step_ratio", few)
    rows = tmp_path / "rows.json"
    arguments = f"eval table --model {ov} --draft {ov} --samples 1 --max-tokens 128 --out {rows}".split()
    status, out, _ = call(*arguments)
    # A model that knows nothing misses its bounds, and the status says so.
    assert status == 1 and "| V-NIAH | 8 |" in out and "| draft step |" in out and "at least 98.0%" in out
    told = json.loads(rows.read_text())
    assert [row["task"] for row in told["lines"]] == ["V-NIAH", "draft step"]
    assert told["complete"] and told["markdown"] in out
    # A second run measures what is missing only, and puts it where it belongs.
    told["lines"] = [{**told["lines"][1], "value": 99.0}]
    rows.write_text(json.dumps(told))
    status, out, _ = call(*arguments)
    again = json.loads(rows.read_text())["lines"]
    assert [row["task"] for row in again] == ["V-NIAH", "draft step"] and again[1]["value"] == 99.0
    assert "holds the table of seed 0, not 5" in call.error(*arguments, "--seed", 5)
    rows.write_text("[]")
    err = call.error(*arguments)
    assert "holds no table" in err and rows.read_text() == "[]"


def test_demo_fails_when_the_answers_are_wrong(call: Call, ov: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("demo", "--model", ov, "--worlds", 1, "--seed0", 7, "--frames", 8, "--recipe", "a_shape")
    status, out, _ = call(*arguments, "--json")
    told = json.loads(out)
    assert status == 1 and len(told["cases"]) == 3 and set(told["accuracy"]) == {"dense", "a_shape"}
    assert {case["kind"] for case in told["cases"]} == set(DEMO_KINDS)
    assert told["complete"] and len(told["seeds"]) == 1 and not set(told["seeds"]) & set(told["skipped"])
    status, out, err = call(*arguments)
    assert status == 1 and "the truth:" in out and "of 3 right" in out
    assert "fewer than 90% of the answers are right: dense (0.0%), a_shape (0.0%)." in err
    assert all(str(seed) in out for seed in told["seeds"])
    from mmaccel_lab.eval.cases import Case

    monkeypatch.setattr(Case, "right", lambda self, said: True)
    assert "dense: 100.0% of 3 right" in call.text(*arguments)


def test_demo_of_many_recipes_fits(call: Call, ov: str) -> None:
    names = ["a_shape", "tri_shape", "grid", "window", "sf_fixed"]
    recipes = [word for name in names for word in ("--recipe", name)]
    out = call("demo", "--model", ov, "--worlds", 1, "--frames", 8, "--kinds", "needle", *recipes)[1]
    lines = out.splitlines()
    heads = [line.split("┃") for line in lines if line.startswith("┃ world")]
    assert max(map(len, lines)) <= 120
    assert [[one.strip() for one in head[4:-1]] for head in heads] == [["dense", *names[:2]], names[2:]]


def test_what_cannot_be_asked_is_told(call: Call, ov: str) -> None:
    """One frame holds one card: no order to ask about."""
    arguments = ("eval", "needle", "--model", ov, "--frames", "1,8", "--samples", 1, "--kind", "order")
    status, out, err = call(*arguments, "--json")
    told = json.loads(out)
    assert status == 0 and not told["complete"] and told["accuracy"]["1"] is None
    assert told["lengths"][0]["asked"] == 0 and told["lengths"][0]["kinds"]["order"]["asked"] == 0
    assert told["missing"] == [{"frames": 1, "kind": "order", "asked": 0, "wanted": 1}]
    assert "0 of 1 order questions at 1 frames" in err


def test_what_was_measured_is_printed_when_something_breaks(
    call: Call, ov: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmaccel_lab.cli import main
    from mmaccel_lab.eval import table

    line = table.Line("V-NIAH", 8, 128, 1.0, 1, 0.98)
    monkeypatch.setattr(table, "measure", after(1, lambda *_, **__: iter([line]), lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        main(["eval", "table", "--model", ov, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert not told["complete"] and [line["task"] for line in told["lines"]] == ["V-NIAH"]


@pytest.mark.parametrize("own", [None, "1x"])
def test_launch_queues_are_long_unless_the_user_says_otherwise(
    call: Call, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    name = "CUDA_SCALE_LAUNCH_QUEUES"
    monkeypatch.setenv(name, own or "")  # so that it is put back
    if own is None:
        monkeypatch.delenv(name)
    call("list")
    assert os.environ[name] == (own or "4x")


def test_version_and_help(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    from mmaccel import __version__
    from mmaccel_lab.cli import main as lab

    assert call("--version") == (0, f"mmaccel {__version__}\n", "")
    with pytest.raises(SystemExit):
        lab(["--version"])
    assert capsys.readouterr().out == f"mmaccel-lab {__version__}\n"
    for bare in ((), ("eval",)):
        status, out, err = call(*bare)
        assert status == 0 and "Usage" in out and "error" not in err


def test_numbers_of_a_list_stand_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    told = dict(by_head=[[1, 0.25], [-1e-09]], said=["[\n1\n]", 2], none=[], some=[None, 1])
    told["in"] = [{"x": [3, 4]}]
    print_json(told)
    out = capsys.readouterr().out
    assert json.loads(out) == told
    for line in ("    [1, 0.25],", "    [-1e-09]", '      "x": [3, 4]'):
        assert line in out.splitlines()


def test_output_that_cannot_be_written_ends_no_command(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoding lacks a letter, the reader has left, or the shell has closed it. A stream of the caller's stays."""
    read, write = os.pipe()
    with open(write, "w", encoding="ascii") as given, open(read) as reader:
        for name, stream in {"stdout": given, "stderr": None}.items():
            monkeypatch.setattr(sys, name, stream)
            monkeypatch.setattr(sys, f"__{name}__", stream)
        print("before", file=given)
        with pytest.raises(SystemExit, match="0"):
            main(["describe", "grid"])
        console.echo("\u0444")
        assert re.search(r"^before\n[^\0]*grid[^\0]*\\u0444\n$", os.read(read, 1 << 16).decode())
        reader.close()
        console.echo("unread")
        console.print_json({})
        console.remark("unread \udcff")
    monkeypatch.undo()
    assert call.text("--version").startswith("mmaccel ")
