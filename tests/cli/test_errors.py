"""Faults that a user of the command meets are one sentence, those of choices before the model is loaded."""

import errno
import json
import os
import shlex
import shutil
import socket
from pathlib import Path

import pytest

from mmaccel.cli import app, main
from mmaccel.cli.console import error_sentence
from mmaccel_lab.cli import app as lab
from tests.cli import LAB, Call
from tests.spies import broken

WHOLE = "watch CLIP --recipe full"
HAYSTACK = "eval haystack --model OV"
RECOMMEND = "recommend --minutes 60 --questions 5 --device h200 --host-memory 64GB"
ASK = "ask CLIP hi --model OV --recipe"
EVALS = ("needle", "caption", "table", "haystack")
LOADED: dict[str, str] = {
    "ask none.mp4 hi --model OV": "there is no file none.mp4",
    "ask none.mp4 hi --model tiny-ov": "there is no file none.mp4",
    "watch none.mp4 --model tiny-ov": "there is no file none.mp4",
    "ask FOLDER/notes.mp4 hi --model OV": "notes.mp4",
    "ask FOLDER hi --model OV": "is a folder, not a video",
    "watch CLIP --model tiny-qwe": "did you mean 'tiny-qwen'?",
    "search tiny-qwe --video CLIP --out t.json": "mean 'tiny-qwen'?",
    "search OV --video none.mp4 --out FOLDER/t.json": "there is no file none.mp4",
    "ask CLIP hi --model OV --fps 1 --frames 3": "give one or the other",
    "ask CLIP hi --model OV --frames 0": "--frames 0 must be at least 1",
    "ask CLIP hi --model OV --fps -1": "--fps -1.0 must be a positive number",
    "watch CLIP --model OV --fps 900 --question hi": "--fps: 900 is more than the",
    "ask CLIP 'what ?' --model OV --fps 1e9": "--fps 1e+09 is more than the 240 frames a second that can be read of",
    "ask CLIP 'what ?' --model OV --timeout 0": "--timeout 0 must be",
    "ask '' 'what ?' --model OV": "check the path.",
    "eval caption --model OV --words 2": "max_words must be 17 or more",
    "watch CLIP --model OV --fps 0": "must be a positive number",
}
"""Errors that come when a processor is loaded or later; those of the other table come before."""

UNLOADED: dict[str, str] = {
    "ask CLIP": "Missing argument",
    "ask CLIP ' ' --model OV": "the question is empty; ask something.",
    "ask CLIP hi --model OV --recipe no.yaml": "there is no file 'no.yaml'",
    "ask CLIP hi --recipe grid --recipe grid": "recipe 'grid' is given twice",
    "ask CLIP hi --model OV --recipe uv": "give it to the draft",
    "ask CLIP hi --model OV --recipe sequential": "give the draft model's folder (--draft on the command line).",
    "ask CLIP hi --model OV --draft nodraft": "unknown model 'nodraft': did you mean",
    "ask CLIP hi --model OV --draft ./nodraft": "there is no folder ./nodraft; check the path",
    "ask CLIP hi --model nomodel": "unknown model 'nomodel': there are tiny-hybrid, tiny-ov,",
    "ask CLIP hi --model OV --draft tiny-ov-draf": "mean 'tiny-ov-draft'?",
    "caption CLIP --recipe std --model tiny-qwe": "mean 'tiny-qwen'?",
    "caption CLIP --model OV --recipe dense": "drafts nothing",
    "caption CLIP --model OV --frames 2": "give the draft model's folder",
    "search OV --video CLIP --out FOLDER/no/t.json": "does not exist; create it first.",
    "search OV --video CLIP --out FOLDER/t.json --boundaries q": "unknown boundary type",
    "search OV --video CLIP --out FOLDER/t.json --backend fast": "unknown backend",
    "search OV --video CLIP --out FOLDER/t.json --cost money": "'seconds' or 'pairs'",
    "draw none.json --out FOLDER/m.svg": "table 'none.json' cannot be read",
    "draw dense --out FOLDER/m.svg": "name another pattern",
    "draw heads --model OV --video CLIP --out FOLDER/h --format gif": "unknown format 'gif'",
    "draw heads --model OV --video CLIP --out FOLDER/full.yaml": "is a file; give a folder",
    "ask CLIP hi --model FOLDER": "config.json",
    "ask CLIP hi --model OV --device moon": "'moon' is not a device",
    "ask CLIP hi --model OV --device cuda:99": "cuda:99 is not there",
    "ask CLIP hi --model OV --dtype int8": "unknown dtype 'int8'",
    "ask CLIP hi --sparse x": "No such option: --sparse",
    "ponder": "No such command 'ponder'.",
    "describe vertical": "did you mean 'vertical_slash'?",
    "world --out nofolder/x.mp4": "the folder nofolder does not exist",
    "world --out x.mp4 --truth nofolder/x.json": "the folder nofolder does not exist",
    "world --out x.mp4 --frames 0": "frames must be 1 or more",
    "world --out x.mp4 --style noir": "unknown style 'noir'",
    "eval needle --frames 8,many": "--frames: 'many' is not a number of frames",
    "eval needle --kind colour": "unknown question kind 'colour'",
    "eval needle --documents --frames 9": "9 does not divide into 4 segments",
    "eval needle --samples 0": "Invalid value for '--samples'",
    "eval needle --frames '\xb2'": "is not a number of frames",
    "demo --kinds ,": "no kind of question is named",
    f"eval needle --seed {2**32}": "seed must lie between 0 and 2147483647",
    f"demo --seed0 {2**31}": "training has seen others",
    "watch CLIP --model tiny-ov --recipe sparse_to_dense --question hi": "a VideoSession does not have; set draft to 'off'",
    "watch CLIP --model OV --save CLIP --question hi": "is not a saved session; give another path",
    "ask CLIP hi --model OV --device meta": "'meta' is not a device",
    "eval table --out nofolder/x.json": "in a folder that exists",
    "ask CLIP hi --model OV --draft OV --recipe dense --compare": "the recipe of that name is another",
    "world --out /proc/x.mp4": "cannot be written",
    "demo --kinds taste": "unknown question kind 'taste'",
    "ask CLIP other.mp4 hi --model OV": "give one video, not two",
    "ask CLIP CLIP --model OV": "run the command once for each.",
    "caption CLIP other.mp4": "'other.mp4'); run the command once for each.",
    "ask CLIP what colour --model OV": "'what' and 'colour' among them; put it in quotes.",
    "ask CLIP 'what \udcff ?' --model OV": "not UTF-8; write it in UTF-8.",
    "watch CLIP --question 'what ?' --question '\udcff ?'": "--question: '\\udcff ?' has bytes that are not UTF-8",
    "ask CLIP 'what ?' --recipe FOLDER/a.yaml": "is a folder, not a file",
    "ask CLIP 'what ?' --recipe FOLDER/full.yaml": "kv 'full' has no fields; remove 'frames'",
    "report FOLDER/full.yaml": "give a file of what `mmaccel ask --json` or",
    "ask CLIP 'what ?' --recipe FOLDER/16.yaml": "is not UTF-8 text: line 1 has",
    "watch CLIP --model OV --recipe rekw": "rekv",
    "watch CLIP --model OV --load nowhere": "nowhere is not a saved session",
    "watch CLIP --model OV --load nowhere --recipe rekv": "leave --recipe or --load out",
    "watch CLIP --model OV --question @3": "has no question",
    "watch CLIP --model OV other.mp4": "give one video, not two",
    f"{WHOLE} --keep-seconds 3": "--keep-seconds: kv 'full' lets nothing go",
    f"{WHOLE} --host-bytes 3GB": "--host-bytes: kv 'full' lets nothing go",
    "watch CLIP --host-bytes much": "--host-bytes: 'much' is not a size",
    "watch CLIP --keep-seconds 0": "keep_seconds is 0",
    "serve --port 0 --recipe dense --keep-seconds 3": "--keep-seconds: kv 'full' lets nothing go",
    f"{HAYSTACK} --rival a_shap": "unknown rival 'a_shap'",
    f"{HAYSTACK} --recipe a_shape --rival a_shape": "is a --recipe too",
    f"{HAYSTACK} --level grid": "unknown recipe of --level 'grid'",
    f"{HAYSTACK} --compress a_shape": "unknown method of --compress 'a_shape'",
    f"{HAYSTACK} --compress visionzip --rival fastv": "unknown rival 'fastv'",
    f"{HAYSTACK} --recipe a_shape --rival without_tail": "unknown rival 'without_tail'",
    f"{HAYSTACK} --rows no/where.jsonl": "--rows: there is no file no/where.jsonl",
    f"{HAYSTACK} --documents --frames 33": "33 does not divide into 4 segments",
    f"{HAYSTACK} --out no/where.jsonl": "--out: no/where.jsonl is not a place for a file",
    f"{RECOMMEND} --memory much": "--memory: 'much' is not a size; give one such as 24GB",
    f"{RECOMMEND} --memory 24": "--memory: '24' is not a size; give one such as 24GB",
    f"{RECOMMEND} --host-memory 0GB": "--host-memory: '0GB' is not a size",
    f"{RECOMMEND} --frame-size big": "--frame-size: 'big' is not HEIGHTxWIDTH",
    f"{RECOMMEND} --device h900": "Devices known by name are h200, h100",
    f"{RECOMMEND} --model nothing": "model 'nothing'",
    "serve --host 0.0.0.0": "give a key by --keys FILE or MMACCEL_KEY",
    "serve --draft-gpus 1": "--draft-gpus: they go with --ray",
    "serve --keys nowhere.txt": "--keys: nowhere.txt cannot be read",
    "serve --files nowhere": "--files: there is no folder nowhere",
    "serve --port 0 --recipe nothing": "nothing",
    "serve --port 0 --model tiny-nothing": "tiny-nothing",
    f"{ASK} gird": "did you mean 'grid'?",
    f"{ASK} FIELD": "did you mean 'window'?",
    f"{ASK} PAIR": "prune 'fastv' has compact = True",
    f"{ASK} BACKEND": "backend 'flash' cannot run on cpu",
    f"{ASK} searched": "no table is shipped with this model",
    f"{ASK} DRAFT": "uv: layer 30 and base 1 on a target of 3 layers",
    f"{ASK} TABLE": "table has layer 8; the model has layers 0 to 2",
    "draw heads --video CLIP --model OV --out x --layer 9": "--layer: there is no 9",
    "caption CLIP --model OV --recipe PAIR --draft OV": "prune 'fastv' has compact = True",
    "demo --model OV --recipe PAIR": "prune 'fastv' has compact = True",
    **{f"eval {name} --model OV --recipe PAIR": "and kv 'rekv' sets the positions" for name in EVALS},
    "watch CLIP --model OV --recipe PAIR": "prune 'fastv' has compact = True",
    "watch CLIP --model OV --recipe gird": (
        "unknown memory of streams 'gird': there are full, livevlm, mosaic, no_cache, offload, recent, rekv,"
    ),
    "draw FOLDER --out pictures": "is not a saved session",
    "eval stream --model OV --memory rekw": "did you mean 'rekv'?",
    "eval stream --model OV --memory 'rekv frame=3'": "did you mean 'frames'?",
    "search OV --out t.json": "--video: name at least one",
    "search OV --video CLIP --out t.json --backend flash": "backend 'flash' cannot run on cpu",
    "search OV --video CLIP --out t.json --block 48": "block is 48; give a power of two",
    "search OV --video CLIP --out FOLDER": "is a folder",
    "draw heads --model OV --out x": "--video: name at least one",
}


@pytest.mark.parametrize(("line", "words"), [*LOADED.items(), *UNLOADED.items()], ids=ascii)
def test_a_users_error_is_one_sentence(
    line: str, words: str, call: Call, clip: str, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmaccel.cli import choices
    from mmaccel.models import loading

    for owner, name in ((loading, "load_model"), (choices, "load_processor")):
        if line in UNLOADED:
            broken(monkeypatch, owner, name, AssertionError("something is loaded"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.yaml").mkdir()
    (tmp_path / "full.yaml").write_text("kv: {name: full, frames: 64}")
    (tmp_path / "notes.mp4").write_text("not a film\n" * 50)
    (tmp_path / "16.yaml").write_text("sparse: a_shape", encoding="utf-16")
    stand = {"CLIP": clip, "OV": ov, "FOLDER": str(tmp_path)}
    for file, text in (
        ("FIELD", "sparse: {name: a_shape, windw: 3}"),
        ("PAIR", "prune: {name: fastv, compact: true}\nkv: rekv"),
        ("BACKEND", "backend: flash"),
        ("DRAFT", f"draft: {{name: parallel, model: {ov}, prune: {{name: uv, layer: 30}}}}"),
        ("TABLE", "sparse: {name: per_head, table: {8: {0: grid}}}"),
    ):
        stand[file] = str(tmp_path / f"{file}.yaml")
        Path(stand[file]).write_text(text + "\n")
    given = (stand.get(one, one) for one in shlex.split(line))
    err = call.error(*(one.replace("FOLDER/", f"{tmp_path}/") for one in given))
    assert words in err and err.rstrip().endswith((".", "?", ")")) and "Traceback" not in err


@pytest.mark.parametrize("command", [("ask", "ADDRESS", "what ?"), ("caption", "ADDRESS")], ids=str)
def test_a_silent_server_is_told_in_time(command: tuple[str, ...], call: Call, ov: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/x.mp4"
        given = (address if one == "ADDRESS" else one for one in command)
        draft = ("--draft", ov) if command[0] == "caption" else ()
        err = call.error(*given, "--model", ov, "--timeout", "0.3", *draft)
    told = f"{address} sent nothing in the time allowed: check the address, or raise --timeout."
    assert err == f"error: {told}\n"


def test_a_pipe_that_is_silent_from_the_start_names_the_option(call: Call, ov: str, tmp_path: Path) -> None:
    pipe = tmp_path / "camera"
    os.mkfifo(pipe)
    keep_open = os.open(pipe, os.O_RDWR)
    try:
        err = call.error("watch", pipe, "--model", ov, "--timeout", "0.5", "--question", "what ?")
    finally:
        os.close(keep_open)
    assert "--timeout" in err and "media.clips" not in err


@pytest.mark.parametrize("question", ["What is written on the sign? " * 20, "What is shown after intro.mp4"])
def test_a_question_is_no_second_video(question: str, call: Call, clip: str, ov: str) -> None:
    """One longer than a file's name can be, and one whose last word ends as the video's name does."""
    told = call.object("ask", clip, question, "--model", ov, "--max-new-tokens", 1, "--json")
    assert told["question"] == question


def test_a_near_name_of_a_model_asks_no_hub(call: Call, clip: str, tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub

    asked: list[object] = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *names, **_: asked.append(names) or 1 / 0
    )
    monkeypatch.chdir(tmp_path)
    status, out, err = call("ask", clip, "hi", "--model", "tiny-qwe")
    assert (status, out, asked) == (2, "", []) and "did you mean 'tiny-qwen'?" in err
    # What has an owner may be there, and a folder of any name is one.
    err = call.error("ask", clip, "hi", "--model", "tiny/qwe")
    assert "cannot be fetched from the hub (division by zero)" in err and asked
    (tmp_path / "tiny-qwe").mkdir()
    assert "tiny-qwe has no config.json" in call("ask", clip, "hi", "--model", "tiny-qwe")[2]


def test_a_cut_file_of_weights(call: Call, clip: str, ov: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ov, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "cannot be loaded" in call.error("ask", clip, "hi", "--model", folder)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name", ["rows.jsonl", None])
def test_a_full_disk_is_a_users_error(number: int, name: str | None) -> None:
    """What is written through an open file does not say its name."""
    told = error_sentence(OSError(number, "full", name))
    assert (
        told
        == f"{name or 'what was to be written'}: no space is left on the device; make room, or give a path with some."
    )


def test_debugging_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMACCEL_DEBUG", "1")
    with pytest.raises(Exception, match="unknown name 'no_such_thing'"):
        main(["describe", "no_such_thing"])


def test_our_own_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmaccel.cli import catalog

    monkeypatch.setattr(catalog, "presets", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["list"])


def test_help_names_the_commands() -> None:
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert all(
        name in done.output for name in ("ask", "watch", "caption", "list", "describe", "search", "draw")
    )
    assert not any(name in done.output for name in sorted(LAB))
    done = CliRunner().invoke(lab, ["--help"])
    assert done.exit_code == 0 and all(name in done.output for name in sorted(LAB))
    done = CliRunner().invoke(lab, ["eval", "--help"])
    assert done.exit_code == 0 and all(name in done.output for name in ("needle", "caption", "table"))


@pytest.mark.parametrize("name", sorted(LAB))
@pytest.mark.parametrize("words", [(), ("--help",), ("needle", "--frames", "8", "--json")])
def test_a_command_that_moved_says_where(
    name: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main([name, *words])
    out, err = capsys.readouterr()
    assert (done.value.code, out) == (2, "") and err.count("\n") == 1
    assert f"`mmaccel {name}` is now `mmaccel-lab {name}`" in err and "pip install mmaccel-lab" in err


def test_a_hub_that_is_not_reached_is_no_wrong_name(
    call: Call, clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    monkeypatch.chdir(tmp_path)
    told = []
    for kind in (errors.LocalEntryNotFoundError, errors.HFValidationError):
        broken(monkeypatch, huggingface_hub, "snapshot_download", kind("no"))
        told.append(call.error("ask", clip, "hi", "--model", "owner/name"))
    assert "is not on this machine, and the hub, which may have it, cannot be reached" in told[0]
    assert "is neither a folder here nor a model that the hub gives; check the name" in told[1]


@pytest.mark.parametrize("kind", ["bert", "clip"])
def test_a_family_that_is_not_supported_is_told_unloaded(
    kind: str, call: Call, clip: str, ov: str, tmp_path: Path
) -> None:
    """Of a model of text alone too, whose folder has no settings of a video's pixels."""
    folder = tmp_path / "model"
    shutil.copytree(ov, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    if kind == "bert":
        for path in folder.glob("*processor_config.json"):
            path.unlink()
    (folder / "model.safetensors").unlink()
    assert f"model type '{kind}' is not supported" in call.error("ask", clip, "hi", "--model", folder)
