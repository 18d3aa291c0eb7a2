"""Recipes and tables of heads, as odd as files can be."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from importlib import resources
from pathlib import Path

import pytest
import yaml

from mmaccel import Recipe
from mmaccel.core.registry import BASES, registry
from tests.fuzz.trial import Case, damaged, try_apart, try_here
from tests.fuzz.values import changed, odd

PRESETS = [
    file.read_bytes()
    for file in resources.files("mmaccel").joinpath("recipes").iterdir()
    if file.name.endswith(".yaml")
]
FIELDS = [field.name for field in dataclasses.fields(Recipe)]
BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
RAW = (
    BOMB.replace("a:", "sparse:", 1), BOMB + "sparse: *i\n", "sparse: &a [*a]\n", "sparse: &a {name: *a}\n",
    "sparse: " + "[" * 3000, "sparse: " + "[" * 60 + "]" * 60, "sparse: " + "{a: " * 3000, "chunk: " + "9" * 5000,
    "dense_tail: 0x" + "f" * 5000, "chunk: 1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1:1", "sparse: " + "x" * 250_000,
    "sparse: " + "x" * 300_000, "sparse: !!python/object/apply:os.system ['exit 1']", "sparse: !!timestamp x",
    "sparse: !!int x", "sparse: !!int ''", "sparse: !!bool x", "sparse: !!binary =", "sparse: !!float x",
    "sparse: 2020-99-99", "sparse: !!set {a, b}", "? [a, b]\n: 1", "? {a: b}\n: 1", "<<: 5", "<<: [*x]",
    "<<: {sparse: grid}",
    "a: &a {sparse: grid}\n<<: [*a, *a]", "- a\n- b", "sparse: {name: [grid]}", "sparse: {[a]: b}", "1: 2", "null: 3",
    "%YAML 9.9\n---\nsparse: grid", "---\nsparse: grid\n---\nsparse: grid", "sparse: |\n  grid", "\tsparse: grid",
    "sparse: grid\0",
    "sparse: {name: per_head, table: /dev/zero}", "sparse: {name: per_head, table: PIPE}",
    "sparse: {name: per_head, table: .}",
    "sparse: {name: per_head, table: {0: {0: grid}, x: 5}}", "sparse: \u2028", "@", "`", "*", "&",
    "!", "%", "{", "}", "draft: off", "sparse: {name: grid, block: 1000000000000}", "dense_layers: [true]",
    "dense_tail: true",
)  # fmt: skip


def recipe(chance: random.Random, folder: Path) -> Case:
    way, path = chance.randrange(4), folder / "recipe.yaml"
    if way == 0:
        data = damaged(chance, chance.choice(PRESETS))
    elif way == 1:
        data = (
            chance.choice(RAW)
            .replace("PIPE", str(folder / "pipe"))
            .encode(chance.choice(("utf-8",) * 6 + ("utf-16",)))
        )
    else:
        fields = {}
        for _ in range(chance.choice((1, 1, 2, 4))):
            name = chance.choice(FIELDS)
            fields[name] = odd(chance)
            if name in BASES and way == 3:
                policy = chance.choice(sorted(registry(name)))
                known = [
                    field.name for field in dataclasses.fields(registry(name)[policy]) if field.init
                ] or ["x"]
                fields[name] = {"name": policy, **{chance.choice(known): odd(chance) for _ in range(2)}}
        data = yaml.safe_dump(fields, allow_unicode=True).encode("utf-8", "surrogatepass")
    path.write_bytes(data)
    return lambda: repr(Recipe.load(path))


HEAD = {
    "kind": "no_boundary",
    "pattern": {"name": "a_shape", "sink": 16, "window": 128},
    "errors": {},
    "score": 0.1,
}
TABLE = {
    "kind": "mmaccel heads", "schema": 1, "block": 64, "context": 600, "sample": {"tokens": 600},
    "model": {"type": "llava_onevision", "layers": 2, "heads": 2}, "layers": [[HEAD, HEAD], [HEAD, HEAD]],
}  # fmt: skip
TABLES = (
    b"", b"[]", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b'{"kind": 1e999}', b"NaN", b"\xff\xfe{}",
    b'"\\ud800"',
    b"[[],[],[],[]" * 50_000, b"\0" * 4096,
)  # fmt: skip


def table(chance: random.Random, folder: Path) -> Case:
    path, way = folder / "heads.json", chance.randrange(8)
    whole = json.dumps(TABLE).encode()
    data = json.dumps(changed(chance, TABLE)).encode("utf-8", "surrogatepass")
    path.write_bytes(damaged(chance, whole) if way == 0 else chance.choice(TABLES) if way == 1 else data)

    def load() -> None:
        recipe = Recipe.load(str(path))
        recipe.sparse.at(0).per_head(2)
        repr(recipe.to_dict())

    return load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_recipes(folder: Path) -> None:
    assert 0.02 < try_here(lambda chance: recipe(chance, folder)) < 0.6


def test_tables(folder: Path) -> None:
    assert 0.02 < try_here(lambda chance: table(chance, folder)) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("make", [recipe, table])
def test_in_processes_with_limits(folder: Path, make: object) -> None:
    try_apart(lambda chance: make(chance, folder))  # type: ignore[operator]
