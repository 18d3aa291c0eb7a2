"""What needs a model's depth or shape is told by its configuration alone, in the words that are used once it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import DraftError, MmaccelError, ModelError
from mmaccel.models import loading

Folder = Callable[[str], Path]
HEAD = {"pattern": {"name": "a_shape", "sink": 16, "window": 128}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dense layers": ({"dense_layers": [1, 40]}, "there is no layer 40; the model has layers 0 to 2"),
    "a pruner's layer": ({"prune": {"name": "fastv", "layer": 9}}, "fastv: layer 9 of a model of 3"),
    "stages that fall together": (
        {"prune": {"name": "pyramid_drop", "stages_at": [0.5, 0.7]}},
        "fall on layers [2, 2] of 3",
    ),
    "the layer of a draft's pruner": (
        {"draft": {"name": "sequential", "model": "DRAFT", "prune": {"name": "uv", "layer": 30}}},
        "uv: layer 30 and base 1 on a target of 3 layers",
    ),
    "a layer of a table": (
        {"sparse": {"name": "per_head", "table": {8: {0: "grid"}}}},
        "table has layer 8; the model has layers 0 to 2",
    ),
    "a head of a table": (
        {"sparse": {"name": "per_head", "table": {0: {64: "grid"}}}},
        "has head 64; the model has heads 0 to",
    ),
    "a table of another model": (
        {"sparse": {"name": "per_head", "table": "TABLE"}},
        "was searched on another model",
    ),
    "a table that is not shipped": ({"sparse": "per_head"}, "no table is shipped with this model"),
    "a draft that is not there": (
        {"draft": {"name": "sequential", "model": "./nowhere"}},
        "there is no folder ./nowhere",
    ),
    "a draft beside nothing": ({"draft": {"name": "tree", "model": "beside"}}, "there is no folder"),
    "no draft, and none beside": (
        {"draft": "sequential"},
        "sequential: model is 'beside', as it is when none",
    ),
    "a draft of another family": (
        {"draft": {"name": "sequential", "model": "OTHER"}},
        "the draft is a qwen2_5_vl and the target a llava_onevision",
    ),
    "a draft in a process of its own": (
        {"draft": {"name": "parallel", "model": "DRAFT", "prune": {"name": "uv", "layer": 30}}},
        "uv: layer 30 and base 1 on a target of 3 layers",
    ),
}


def told(works: Callable[[], object]) -> str:
    with pytest.raises(MmaccelError) as error:
        works()
    return str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_it_is_told_before_and_after_in_the_same_words(
    name: str, random_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, words = WRONG[name]
    facts = {"type": "llava_onevision", "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    table = {"kind": "mmaccel heads", "schema": 1, "model": facts, "block": 64, "layers": [[HEAD]]}
    (tmp_path / "table.json").write_text(json.dumps(table))
    folder, other = random_folder("tiny-ov-draft"), random_folder("tiny-qwen-draft")
    text = json.dumps(fields)
    for word, path in (("TABLE", tmp_path / "table.json"), ("DRAFT", folder), ("OTHER", other)):
        text = text.replace(word, str(path))
    recipe = mmaccel.Recipe.load(json.loads(text))
    with monkeypatch.context() as unloaded:
        unloaded.setattr(loading, "load_model", lambda *_, **__: pytest.fail("something is loaded"))
        before = told(lambda: loading.check_recipe(recipe, folder))
    model = mmaccel.load_model(folder)
    assert words in before and before == told(lambda: mmaccel.accelerate(model, recipe))
    assert mmaccel.attached(model) is None


def test_an_outline_is_as_large_as_the_model(random_folder: Folder) -> None:
    for name in ("tiny-ov-draft", "tiny-qwen-draft"):
        found, model = loading.outline(random_folder(name)), loading.load_model(random_folder(name))
        family = adapter_for(model)
        assert found.config_only and not list(found.model.parameters())
        assert found.geometry == family.geometry(model)
        assert found.adapter.fingerprint(found.model) == family.fingerprint(model)
        assert found.folder == family.folder(model) == random_folder(name)
        assert found.adapter.name == family.name


def test_what_fits_is_not_refused(random_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    ov, recipe = random_folder("tiny-ov-draft"), {"dense_layers": [0, 2], "prune": "fastv"}
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("something is loaded"))
    loading.check_recipe(recipe, ov)
    for strategy in ("sequential", "parallel"):
        loading.check_recipe({"draft": {"name": strategy, "model": str(ov), "prune": "uv"}}, ov)


def test_a_folder_that_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        loading.outline(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="model type 'bert' is not supported"):
        loading.outline(tmp_path)


@pytest.mark.parametrize("strategy", ["sequential", "tree", "text_only", "parallel"])
def test_a_draft_of_no_model_is_the_one_beside_the_target(
    strategy: str, random_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every road, from within the folder too; where there is none, `WRONG` has the sentence."""
    target = tmp_path / "target"
    shutil.copytree(random_folder("tiny-ov-draft"), target)
    monkeypatch.chdir(target)
    with pytest.raises(DraftError, match="target-draft; give the draft model's folder"):
        loading.check_recipe(strategy, ".")
    shutil.copytree(target, tmp_path / "target-draft")
    for given in (strategy, {"draft": strategy}, {"draft": {"name": strategy}}):
        assert mmaccel.Recipe.load(given) == mmaccel.Recipe.load(draft={"name": strategy, "model": "beside"})
        loading.check_recipe(given, target)
        loading.check_recipe(given, ".")
    model = mmaccel.load_model(target)
    with mmaccel.accelerate(
        model, draft={"name": strategy, **({"process": False} if strategy == "parallel" else {})}
    ):
        pass


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_a_shipped_model_has_its_draft_beside_it(name: str) -> None:
    loading.check_recipe("sequential", name)
