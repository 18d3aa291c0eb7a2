"""The JSON schema of recipes admits what `Recipe.load` admits, and refuses what editors should underline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmaccel.cli.catalog import DESCRIBED, schema
from mmaccel.core.errors import RecipeError
from mmaccel.core.recipe import VERSION, Recipe, names, presets
from mmaccel.core.registry import registry

jsonschema: Any = pytest.importorskip("jsonschema")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def admits() -> Callable[[Any], bool]:
    found = json.loads(json.dumps(schema(), allow_nan=False))
    jsonschema.Draft7Validator.check_schema(found)
    return jsonschema.Draft7Validator(found).is_valid  # type: ignore[no-any-return]


def test_presets_and_policies_are_admitted(admits: Callable[[Any], bool]) -> None:
    for name in presets():
        text = resources.files("mmaccel").joinpath("recipes", f"{name}.yaml").read_text()
        assert admits(yaml.safe_load(text)), name
    whole = 0
    for name in names():
        try:
            fields = Recipe.load(name).to_dict()
        except RecipeError:  # a pruner of drafts is no recipe by itself
            assert registry("prune")[name].stage == "draft"
            continue
        whole += 1
        assert admits(json.loads(json.dumps(fields))), name
        assert admits(yaml.safe_load(Recipe.load(name).to_yaml())), name
    assert whole > 40


WRONG: list[dict[str, Any]] = [
    {"sparse": "gird"},
    {"sparce": "grid"},
    {"sparse": {"name": "grid", "strid": 3}},
    {"sparse": {"name": "grid", "stride": "row"}},
    {"sparse": {"stride": "frame"}},
    {"sparse": None},
    {"kv": {"name": "mosaic", "frames": "8"}},
    {"kv": {"name": "mosaic", "index": {"name": "nothing"}}},
    {"draft": {"name": "sequential", "prune": {"name": "uv", "retentoin": 0.1}}},
    {"draft": {"name": "sequential", "window": 2.5}},
    {"backend": "cuda"},
    {"chunk": "all"},
    {"dense_layers": 3},
    {"version": VERSION + 1},
    {"version": "1"},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_what_recipes_refuse_is_refused(fields: dict[str, Any], admits: Callable[[Any], bool]) -> None:
    assert not admits(fields)
    with pytest.raises(RecipeError):
        Recipe.load(fields)


def test_every_field_is_there_with_what_is_said_of_it() -> None:
    found = schema()
    for kind in DESCRIBED:
        policies = {
            one["properties"]["name"]["const"]: one for one in found["definitions"][kind]["anyOf"][1:]
        }
        assert policies.keys() == registry(kind).keys()
        for name, cls in registry(kind).items():
            fields = {field.name for field in dataclasses.fields(cls) if field.init}
            assert policies[name]["properties"].keys() == fields | {"name"} and policies[name]["description"]
    assert found["properties"].keys() == {"version", *(field.name for field in dataclasses.fields(Recipe))}
    grid = next(
        one
        for one in found["definitions"]["sparse"]["anyOf"][1:]
        if one["properties"]["name"]["const"] == "grid"
    )
    assert grid["properties"]["score"]["enum"] == ["contrast", "mean", "sum"]
    assert grid["properties"]["score"]["default"] == "contrast"
    assert grid["properties"]["score"]["description"].startswith('score "mean": a class of lines')


def test_the_command_prints_it_with_policies_of_ones_own(call: Call, tmp_path: Path) -> None:
    status, out, err = call("schema")
    assert (status, err) == (0, "") and json.loads(out) == json.loads(json.dumps(schema()))
    classes = registry("sparse")._classes
    path = tmp_path / "own_of_schema.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom mmaccel import register\n"
        "from mmaccel.policies.sparse.a_shape import AShape\n"
        '@register("sparse", "mine")\n@dataclass(frozen=True, kw_only=True)\n'
        'class Mine(AShape):\n    """Mine."""\n    width: int = 3\n'
    )
    try:
        assert '"mine"' in call("--import", path, "schema")[1] and '"mine"' not in out
    finally:
        classes.pop("mine", None)
