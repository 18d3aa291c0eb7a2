"""What composes with what, and the JSON schema of recipes: the page and the schema are what the code says."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmaccel.cli import catalog as pairs
from mmaccel.cli.catalog import DESCRIBED, schema
from mmaccel.core.errors import RecipeError
from mmaccel.core.recipe import Recipe, check_sequences, names, presets, stream_policy
from mmaccel.core.registry import registry
from tests.cli import Call

PAGE = Path(__file__).parent.parent.parent / "docs" / "compose.md"
MARK = "<!-- mmaccel list --pairs -->\n\n"


def test_the_page_is_what_recipes_say(call: Call) -> None:
    told = PAGE.read_text(encoding="utf-8").split(MARK)[1]
    status, out, err = call("list", "--pairs")
    assert (status, err) == (0, "") and out == told, "write the page anew with mmaccel list --pairs"
    assert all(f"`{name}`" in told for slot in pairs.SLOTS for name in registry(slot))


def test_a_cell_is_yes_or_the_reason_without_names() -> None:
    told = pairs.together("draft", "prune", "sparse_to_dense", "dycoke")
    assert told.startswith("prune chooses what each decoded token sees") and "'dycoke'" not in told
    assert pairs.together("draft", "prune", "sparse_to_dense", "fastv") == pairs.YES
    assert (
        pairs.together("kv", "prune", "rekv", "fastv")
        == pairs.together("kv", "prune", "window", "fastv")
        == pairs.YES
    )
    assert pairs.together("sparse", "kv", "grid", "rekv") == pairs.YES
    assert pairs.together("sparse", "kv", "grid", "window") == pairs.YES
    assert "reads the whole cache" in pairs.together("kv", "draft", "rekv", "sparse_to_dense")
    assert pairs.together("kv", "draft", "rekv", "sequential") == pairs.YES
    assert pairs.inside("sequential", "uv") == pairs.YES != pairs.inside("off", "uv")


def good(**parts: object) -> bool:
    try:
        Recipe(**parts)  # type: ignore[arg-type]
    except RecipeError:
        return False
    return True


def serves(recipe: Recipe) -> tuple[bool, bool]:
    told = pairs.verdict(lambda: check_sequences(recipe)), pairs.verdict(lambda: stream_policy(recipe))
    return told[0] == pairs.YES, told[1] == pairs.YES


def test_two_by_two_is_enough() -> None:
    """Every four policies: a recipe of them is good where all its pairs are, and serves what each of them serves."""
    built = {slot: {name: pairs.build(slot, name) for name in registry(slot)} for slot in pairs.SLOTS}
    built["prune"] |= {"none": None}
    built["sparse"] = {name: built["sparse"][name] for name in ("dense", "grid", "per_head")}
    fine = {
        (a, x, b, y): good(**{a: built[a][x], b: built[b][y]})
        for a, b in itertools.combinations(built, 2)
        for x in built[a]
        for y in built[b]
    }
    uses = {
        (slot, name): serves(Recipe(**{slot: one}))
        for slot, some in built.items()
        for name, one in some.items()
        if good(**{slot: one})
    }
    checked = 0
    for four in itertools.product(*built.values()):
        chosen = dict(zip(built, four, strict=True))
        want = all(fine[a, chosen[a], b, chosen[b]] for a, b in itertools.combinations(built, 2))
        parts = {slot: built[slot][name] for slot, name in chosen.items()}
        assert good(**parts) == want, chosen
        if want:
            each = [uses[slot, name] for slot, name in chosen.items()]
            assert serves(Recipe(**parts)) == tuple(all(use[n] for use in each) for n in (0, 1)), chosen
            checked += 1
    assert checked > 20


jsonschema: Any = pytest.importorskip("jsonschema")


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
    assert found["properties"].keys() == {field.name for field in dataclasses.fields(Recipe)}
    grid = next(
        one
        for one in found["definitions"]["sparse"]["anyOf"][1:]
        if one["properties"]["name"]["const"] == "grid"
    )
    assert grid["properties"]["score"]["enum"] == ["contrast", "mean", "sum"]
    assert grid["properties"]["score"]["default"] == "contrast"
    assert grid["properties"]["score"]["description"].startswith('score "mean": a class of lines')


def test_the_command_prints_it(call: Call) -> None:
    assert call.object("schema") == json.loads(json.dumps(schema()))
