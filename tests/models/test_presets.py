"""The presets for what people do act as they say on both families, in a session and in `generate`; those of papers list what
differs from ours."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import mmaccel
from mmaccel.core.errors import MmaccelWarning
from mmaccel.core.recipe import (
    FORMER,
    MAIN_PRESETS,
    Recipe,
    check_sequences,
    fields_of,
    presets,
    stream_policy,
)
from mmaccel_lab.world import World, render
from tests.models.streams import QUESTION, pair
from tests.products import product

FAMILIES = ("random-ov", "random-qwen")
FRAMES = {"random-ov": 280, "random-qwen": 560}
TOKENS = 12


def recipe(name: str, family: str) -> Recipe:
    """The preset, with a copy of the model as the draft of one that takes a model."""
    found = Recipe.load(name)
    if getattr(found.draft, "model", None) is None:
        return found
    return dataclasses.replace(
        found, draft=dataclasses.replace(found.draft, model=copy.deepcopy(pair(family)[0]))
    )  # type: ignore[type-var]


def film(frames: int) -> torch.Tensor:
    """Frames: `FRAMES` are more than a window of 76 and 64 recalled, and more tokens than twice a window of 1 024."""
    return render(World.generate(3, frames).table(), 112, 224)


@pytest.mark.parametrize(("name", "family"), product(MAIN_PRESETS, FAMILIES))
def test_all_that_a_preset_names_acts_in_a_session(name: str, family: str) -> None:
    model, processor = pair(family)
    chosen, report = recipe(name, family), None
    with mmaccel.VideoSession(model, processor, chosen) as session:
        take: Any = session.watch if name == "stream" else session.ingest
        take(film(FRAMES[family]), fps=1.0)
        answer, report = session.ask(QUESTION, TOKENS), session.report()
        counted = session.counters()
    assert len(answer.ids) > 1
    assert chosen.sparse.dense or 0 < (report.kept or 0) < 1
    if chosen.draft.active:
        assert report.draft["rounds"] > 0 and answer.counters.get("drafted", 0) > 0
    if chosen.kv.name == "mosaic":
        assert (
            counted["host_bytes"] > 0 and counted["recalled"] > 0 and counted["resident"] < counted["units"]
        )
    else:
        assert counted["resident"] == counted["units"]
    assert not any("idle" in note or "acts on those given to ingest" in note for note in report.notes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["exact", "captions"])
def test_a_lossless_preset_says_what_the_plain_model_says(name: str, family: str) -> None:
    model, processor = pair(family)
    inputs = processor.chat(QUESTION, videos=film(32), fps=1.0)
    said = {"max_new_tokens": TOKENS, "do_sample": False}
    with torch.no_grad():
        plain = model.generate(**inputs, **said)
    with mmaccel.accelerate(model, recipe(name, family)) as fast:
        assert torch.equal(model.generate(**inputs, **said), plain)
        assert fast.report().draft["rounds"] > 0 and fast.report().kept == 1.0


@pytest.mark.parametrize("name", MAIN_PRESETS)
def test_a_preset_says_what_it_keeps_and_risks_and_where_its_figures_stand(name: str) -> None:
    lines = resources.files("mmaccel").joinpath("recipes", f"{name}.yaml").read_text().splitlines()
    told = {line.split()[1] for line in lines if line.startswith("# ") and len(line.split()) > 3}
    assert {"keeps", "risks", "figures"} <= told and len(presets()[name].split()) > 5 and len(lines[0]) <= 101
    check_sequences(Recipe.load(name))
    stream_policy(Recipe.load(name))


def test_a_former_name_is_the_preset_that_took_its_place() -> None:
    for old, new in FORMER.items():
        assert old not in presets()
        with pytest.warns(MmaccelWarning, match=f"'{old}' is the former name; write '{new}'"):
            assert fields_of(old) == fields_of(new)
    # What was a preset of the memory's own defaults is the memory by its name.
    assert Recipe.load("mosaic") == Recipe.load(kv={"name": "mosaic", "frames": 64, "window": 76, "local": 8})


@pytest.mark.parametrize(
    "name, ours, page",
    [
        ("mosaic-paper", "mosaic", "mosaic"),
        ("mminference-paper", "grid", "mminference"),
        ("parallelvlm-paper", "parallelvlm", "parallelvlm"),
    ],
)
def test_a_paper_s_preset_lists_each_field_that_differs_from_ours(name: str, ours: str, page: str) -> None:
    """In the head of its file, `field value  where (default: value, ...)`; and the page of the paper names the preset."""
    text = resources.files("mmaccel").joinpath("recipes", f"{name}.yaml").read_text()
    found = re.findall(r"^# (\w+) (\S+)\s{2,}.*\(default: ([^,)]+)", text, re.MULTILINE)
    assert len(found) == text.count("default: ")
    listed = {field: (yaml.safe_load(value), yaml.safe_load(default)) for field, value, default in found}
    theirs, default = (dict(leaves(Recipe.load(one).to_dict())) for one in (name, ours))
    assert theirs.keys() == default.keys()
    differs = {field: (theirs[field], default[field]) for field in theirs if theirs[field] != default[field]}
    assert listed == {field.rpartition(".")[2]: values for field, values in differs.items()}
    told = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert f"`{name}`" in told


def leaves(fields: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Fields and values of nested mappings; names have dots."""
    for field, value in fields.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{field}.")
        else:
            yield f"{above}{field}", value
