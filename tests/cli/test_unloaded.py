"""What is wrong with a recipe, or stands in the way of a model, is told before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli import Call

ASK = ("ask", "CLIP", "hi", "--model", "OV", "--recipe")
EVALS = ("needle", "caption", "table", "haystack")
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "a name": ((*ASK, "gird"), "did you mean 'grid'?"),
    "a field": ((*ASK, "FIELD"), "did you mean 'window'?"),
    "a pair": ((*ASK, "PAIR"), "prune 'fastv' has compact = True"),
    "a backend": ((*ASK, "BACKEND"), "backend 'flash' cannot run on cpu"),
    "a table that is not shipped": ((*ASK, "searched"), "no table is shipped with this model"),
    "a layer that is not there": ((*ASK, "LAYER"), "there is no layer 40; the model has layers 0 to 2"),
    "a pruner's layer": ((*ASK, "PRUNE"), "fastv: layer 9 of a model of 3"),
    "the layer of a draft's pruner": ((*ASK, "DRAFT"), "uv: layer 30 and base 1 on a target of 3 layers"),
    "a layer of a table": ((*ASK, "TABLE"), "table has layer 8; the model has layers 0 to 2"),
    "a layer to draw": (
        ("draw", "heads", "--video", "CLIP", "--model", "OV", "--out", "x", "--layer", "9"),
        "--layer: there is no 9",
    ),
    "of captions": (
        ("caption", "CLIP", "--model", "OV", "--recipe", "PAIR", "--draft", "OV"),
        "prune 'fastv' has compact = True",
    ),
    "of the demo": (("demo", "--model", "OV", "--recipe", "PAIR"), "prune 'fastv' has compact = True"),
    **{
        f"of eval {name}": (("eval", name, "--model", "OV", "--recipe", "PAIR"), "and kv 'rekv' decides where")
        for name in EVALS
    },
    "of a stream": (("watch", "CLIP", "--model", "OV", "--recipe", "PAIR"), "prune 'fastv' has compact = True"),
    "a memory by no name": (
        ("watch", "CLIP", "--model", "OV", "--recipe", "gird"),
        "unknown memory of streams 'gird': there are full, livevlm, mosaic, no_cache, offload, recent, rekv,",
    ),
    "of a saved stream": (("draw", "FOLDER", "--out", "pictures"), "is not a saved session"),
    "a memory compared": (("eval", "stream", "--model", "OV", "--memory", "rekw"), "did you mean 'rekv'?"),
    "a memory's field": (
        ("eval", "stream", "--model", "OV", "--memory", "rekv frame=3"),
        "did you mean 'frames'?",
    ),
    "a search without a sample": (("search", "OV", "--out", "t.json"), "--video: name at least one"),
    "a search by no backend": (
        ("search", "OV", "--video", "CLIP", "--out", "t.json", "--backend", "flash"),
        "backend 'flash' cannot run on cpu",
    ),
    "a search in odd blocks": (
        ("search", "OV", "--video", "CLIP", "--out", "t.json", "--block", "48"),
        "block is 48; give a power of two",
    ),
    "a search into a folder": (("search", "OV", "--video", "CLIP", "--out", "FOLDER"), "is a folder"),
    "heads without a sample": (("draw", "heads", "--model", "OV", "--out", "x"), "--video: name at least one"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_it_is_told_unloaded(
    name: str, call: Call, clip: str, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmaccel.cli import choices
    from mmaccel.models import loading

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something is loaded")

    monkeypatch.setattr(loading, "load_model", refuse)
    monkeypatch.setattr(choices, "load_processor", refuse)
    monkeypatch.chdir(tmp_path)
    stand = {"CLIP": clip, "OV": ov, "FOLDER": str(tmp_path)}
    for file, text in (
        ("FIELD", "sparse: {name: a_shape, windw: 3}"),
        ("PAIR", "prune: {name: fastv, compact: true}\nkv: rekv"),
        ("BACKEND", "backend: flash"),
        ("LAYER", "dense_layers: [0, 40]"),
        ("PRUNE", "prune: {name: fastv, layer: 9}"),
        ("DRAFT", f"draft: {{name: parallel, model: {ov}, prune: {{name: uv, layer: 30}}}}"),
        ("TABLE", "sparse: {name: per_head, table: {8: {0: grid}}}"),
    ):
        stand[file] = str(tmp_path / f"{file}.yaml")
        Path(stand[file]).write_text(text + "\n")
    arguments, words = WRONG[name]
    assert words in call.error(*(stand.get(one, one) for one in arguments), "--device", "cpu")


def test_a_hub_that_is_not_reached_is_no_wrong_name(
    call: Call, clip: str, ov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    monkeypatch.chdir(tmp_path)
    told = []
    for kind in (errors.LocalEntryNotFoundError, errors.HFValidationError):

        def fail(*_: object, kind: type[Exception] = kind, **__: object) -> str:
            raise kind("no")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        err = call.error("ask", clip, "hi", "--model", "owner/name")
        told.append(err)
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
