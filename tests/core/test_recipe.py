"""Recipes: from names, files and mappings; the sentences of wrong ones; which choices exclude each other."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import yaml

from mmaccel.cli.choices import load_stream_recipe
from mmaccel.core.decoding.draft import DraftState
from mmaccel.core.errors import OWN, MmaccelWarning, RecipeError, UnknownName
from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.memory.kv import StreamPolicy, StreamState
from mmaccel.core.prefill.prune import TokenPruner
from mmaccel.core.prefill.sparse import BLOCK, MOST, SparsePattern
from mmaccel.core.recipe import VERSION, Recipe, list_recipes, presets, read_recipe_fields
from mmaccel.core.registry import Registry, registry
from mmaccel.policies.kv import Window
from mmaccel.policies.sparse import AShape
from mmaccel.policies.sparse.grid import MOST_STRIDE
from tests.spies import refusal


def test_the_default_is_the_plain_model_and_frozen() -> None:
    recipe = Recipe()
    assert (recipe.sparse.name, recipe.kv.name, recipe.draft.name) == ("dense", "full", "off")
    assert recipe.prune is None
    assert Recipe.load() == recipe == Recipe.load({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.chunk = 64  # type: ignore[misc]
    assert Recipe.load("a_shape", dense_tail=0).dense_tail == 0
    assert Recipe.load(AShape(window=64)).sparse == AShape(window=64)
    assert Recipe.load(Recipe(chunk=128), sparse="a_shape") == Recipe(chunk=128, sparse=AShape())
    assert Recipe.load("a_shape", sparse={"name": "a_shape", "window": 64}).sparse == AShape(window=64)


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_says_what_it_is(name: str) -> None:
    assert len(presets()[name].split()) >= 5
    recipe = Recipe.load(name)
    assert Recipe.load(yaml.safe_load(recipe.to_yaml())) == recipe


@pytest.mark.parametrize(
    "name, window, depth",
    [
        ("parallelvlm-ov-0.5b-7b", 3, 28),
        ("parallelvlm-ov-7b-72b", 9, 80),
        ("parallelvlm-qwen-7b-32b", 5, 64),
        ("parallelvlm-ov-7b-7b", 2, 28),
        ("parallelvlm-qwen-7b-7b", 2, 28),
        ("parallelvlm", None, None),
        ("vanilla-sd", 5, None),
        ("onsd", 5, None),
        ("std", 9, None),
    ],
)
def test_presets_have_the_windows_the_tenth_and_the_layer_of_the_paper(
    name: str, window: int | None, depth: int | None
) -> None:
    draft: Any = Recipe.load(name).draft
    assert draft.window == window
    if draft.name == "parallel":
        assert (draft.pruner.name, draft.pruner.retention) == ("uv", 0.1)
        assert draft.prune_when == "measured", "a tenth where that is faster"
    if draft.name == "sparse_to_dense":
        assert draft.retention == 0.1
    if depth is not None:
        assert draft.pruner.pruning_stages(depth)[0].layer == 20


def test_yaml_file_round_trip(tmp_path: Path) -> None:
    recipe = Recipe(
        sparse=AShape(sink=16, window=96),
        draft={"name": "sequential", "model": "some/folder", "window": 3},  # type: ignore[arg-type]
        chunk=256,
        dense_tail=0,
        dense_layers=(0, 2),
    )
    path = tmp_path / "mine.yaml"
    path.write_text(recipe.to_yaml())
    assert Recipe.load(path) == recipe == Recipe.load(str(path))
    assert read_recipe_fields(path)["sparse"] == {"name": "a_shape", "block": 64, "sink": 16, "window": 96}
    path = tmp_path / "off.yaml"
    for said in ("off", "{name: off}"):
        path.write_text(f"sparse: a_shape\ndraft: {said}\n")
        assert Recipe.load(path).draft.name == "off"


def test_a_written_recipe_has_a_version_which_is_checked(tmp_path: Path) -> None:
    """One without a version loads as it did; of a newer one no field is looked at."""
    path, fields = tmp_path / "mine.yaml", {"sparse": "a_shape"}
    text = Recipe.load(fields).to_yaml()
    assert text.startswith(f"version: {VERSION}\n") and "version" not in Recipe().to_dict()
    for given in (text, text.partition("\n")[2]):
        path.write_text(given)
        assert Recipe.load(path) == Recipe.load(fields)
    for version in (VERSION + 1, 0, "1", True, None):
        path.write_text(yaml.safe_dump({"version": version, "sparce": "a_shape"}))
        told = f"version: {version!r}; this mmaccel reads versions up to {VERSION}: give that, or update mmaccel."
        assert sentence(path) == told
        assert read_recipe_fields(path)["version"] == version
    with pytest.raises(RecipeError, match="version: 9; "):
        Recipe.load({"version": 9})


def test_a_table_counts_from_the_folder_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    model = {"name": "per_head", "table": "heads.json"}
    head = {"pattern": {"name": "a_shape", "sink": 16, "window": 128}}
    facts = {"kind": "mmaccel heads", "schema": 1, "model": {}, "block": 64, "layers": [[head]]}
    (there / "heads.json").write_text(json.dumps(facts))
    (there / "mine.yaml").write_text(yaml.safe_dump({"sparse": model}))
    monkeypatch.chdir(here)
    recipe = Recipe.load("../there/mine.yaml")
    assert recipe.sparse.for_layer(0).head_pattern_names(1) == ("a_shape",)
    # A table alone is a recipe as well.
    assert Recipe.load("../there/heads.json") == recipe
    monkeypatch.chdir(there)
    assert Recipe.load("mine.yaml").sparse.for_layer(0).head_pattern_names(1) == ("a_shape",)
    (here / "mine.yaml").write_text(yaml.safe_dump({"sparse": model}))
    told = sentence(here / "mine.yaml")
    assert f"cannot be read (no such file or directory: {here}/heads.json)" in told
    assert read_recipe_fields("searched")["sparse"]["table"] == "shipped"


def test_every_path_counts_from_the_folder_of_its_file(tmp_path: Path, monkeypatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there, here / "small", there / "draft", there / "tiny-ov-draft"):
        folder.mkdir()
    monkeypatch.chdir(here)

    def model(name: str, strategy: str = "sequential") -> str:
        (there / "mine.yaml").write_text(yaml.safe_dump({"draft": {"name": strategy, "model": name}}))
        return str(Path(Recipe.load("../there/mine.yaml").draft.model).resolve().relative_to(there))

    for name, strategy in (("draft", "tree"), ("./draft", "parallel"), ("tiny-ov-draft", "text_only")):
        assert model(name, strategy) == Path(name).name
    assert model("./missing") == "missing", "what is wrong is told of the place that was meant"
    # Names stay, and so does what is not there.
    for name in ("beside", "owner/draft", "tiny-qwen-draft", "small"):
        (there / "mine.yaml").write_text(yaml.safe_dump({"draft": {"name": "sequential", "model": name}}))
        assert Recipe.load("../there/mine.yaml").draft.model == name
    for memory in ("mosaic", "rekv", "offload"):
        kv = {"name": memory, "store": {"spill": "disk", "folder": "files"}}
        (there / "mine.yaml").write_text(yaml.safe_dump({"kv": kv}))
        assert Path(Recipe.load("../there/mine.yaml").kv.store.folder).resolve() == there / "files"
        assert Recipe.load({"kv": kv}).kv.store.folder == "files", "there is no file to count from"
    monkeypatch.chdir(there)
    assert model("./tiny-ov-draft") == "tiny-ov-draft"
    assert Path(Recipe.load("mine.yaml").draft.model).is_absolute()


def sentence(source: object = None, **choices: object) -> str:
    """The message of the error that a wrong recipe raises; one line that ends with a full stop."""
    return refusal(lambda: Recipe.load(source, **choices), RecipeError)


def test_fields_of_a_policy_beside_it_are_told_where_they_belong(tmp_path: Path) -> None:
    told = "kv 'mosaic': give its fields in a mapping of their own; write {'kv': {'name': 'mosaic', 'frames': 16}}."
    for given in ({"name": "mosaic", "frames": 16}, {"kv": "mosaic", "frames": 16}):
        assert sentence(given) == told
        (tmp_path / "r.yaml").write_text(json.dumps(given))
        assert sentence(tmp_path / "r.yaml").endswith(f"r.yaml': {told}")
    with pytest.raises(UnknownName) as wrong:
        Recipe.load("mosaik")
    with pytest.raises(UnknownName) as other:
        load_stream_recipe("mosaik")
    both = [re.findall("full, .*, window", str(one.value)) for one in (wrong, other)]
    assert both[0] == both[1] != []


def test_unknown_names_give_the_nearest_and_the_list() -> None:
    for wrong, near in (("a_shap", "a_shape"), ("rekw", "rekv"), ("sequentiel", "sequential")):
        told, kinds = sentence(wrong), list_recipes()
        same = registry(kinds[near])
        want = f"did you mean {near!r}? Of kind {kinds[near]} there are {', '.join(sorted(same))}; "
        want += f"`mmaccel list` has the others; {OWN}."
        assert told == f"unknown recipe {wrong!r}: {want}"
    assert "unknown sparse 'griddd': did you mean 'grid'?" in sentence(sparse="griddd")
    assert "unknown recipe field 'sprase': did you mean 'sparse'?" in sentence({"sprase": "dense"})
    told = sentence(sparse={"name": "a_shape", "windw": 3})
    assert "sparse 'a_shape' has no field 'windw': did you mean 'window'?" in told and "sink" in told
    assert "'sprase': did you mean 'sparse'?" in sentence(Recipe(), sprase="grid")
    assert "unknown backend 'cuda'" in sentence(backend="cuda")
    assert "fields 'sprase' and 'bakend': did you mean 'sparse' and 'backend'?" in sentence(
        sprase=1, bakend=2
    )
    told = sentence(sparse={"name": "a_shape", "windw": 3, "snk": 2})
    assert "has no fields 'windw' and 'snk': did you mean 'window' and 'sink'?" in told
    # A name far from all gives the list alone.
    told = sentence(sparse="zzzzzz")
    assert "did you mean" not in told and ": there are a_shape, " in told
    assert sentence("zzzzzz") == f"unknown recipe 'zzzzzz': `mmaccel list` has them all; {OWN}."
    assert len(sentence("zzzzzz.yaml")) < 120


def sparse(name: str, **fields: object) -> dict[str, object]:
    return {"sparse": {"name": name, **fields}}


def drafted(**fields: object) -> dict[str, object]:
    return {"draft": {"name": "sequential", "model": "tiny-ov-draft", **fields}}


NO_MODEL = drafted(model=None)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"chunk": 63}, "chunk: 63; give at least 64 tokens"),
        ({"chunk": "all"}, "chunk: 'all'"),
        ({"dense_tail": -1}, "dense_tail: -1; give a number of rows"),
        ({"dense_layers": [0, -2]}, "dense_layers: [0, -2]"),
        ({"dense_layers": 3}, "dense_layers: 3; give a list of layer numbers"),
        ({"backend": 3}, "unknown backend '3'"),
        ({"sparse": 7}, "sparse: 7 is not a SparsePattern"),
        ({"sparse": None}, "sparse: None is not a SparsePattern"),
        ({"kv": AShape()}, "is not a KVPolicy; give a name, a mapping with a name, or an instance"),
        ({"sparse": {"window": 3}}, "sparse: a mapping needs the policy's name"),
        (sparse("a_shape", window=0), "a_shape: window is 0"),
        (sparse("a_shape", block=48), "a_shape: block is 48; give a power of two"),
        (sparse("grid", block=1 << 20), "grid: block is 1048576; give a power of two from 16 to 256"),
        (sparse("a_shape", window=10**20), f"window is {10**20}; give at most {2**31 - 1}"),
        (sparse("grid", max_stride=1 << 17), "max_stride is 131072; give at most 65536"),
        (sparse("a_shape", window=float("inf")), "a_shape: window is inf; give a whole number"),
        (sparse("grid", slash=1), "grid: slash is 1; give true or false"),
        (sparse("block_topk", top="all"), "top is the text 'all'; give a whole number or null"),
        (NO_MODEL, "sequential: model is None; give the draft model's folder"),
        (
            drafted(kv={"name": "recent", "local": 4, "window": 1}),
            "draft.kv: recent: local is 4; give 0 to `window` (1).",
        ),
        (drafted(kv={"name": "recent", "lokal": 4}), "draft.kv: kv 'recent' has no field 'lokal': did you"),
        (drafted(prune="uw"), "draft.prune: unknown prune 'uw': there are"),
        ({"kv": {"name": "mosaic", "store": {"spill": 1}}}, "mosaic: store: host: spill is 1"),
    ],
    ids=str,
)
def test_a_wrong_value_is_told_in_one_sentence(choices: dict[str, object], words: str) -> None:
    assert words in sentence(**choices)


def largest() -> list[tuple[str, str, int]]:
    """The numbers of every pattern that no other field bounds, each at its largest."""
    found = []
    for name, cls in registry("sparse").items():
        hints = get_type_hints(cls)
        for each in dataclasses.fields(cls):
            kinds = get_args(hints[each.name]) or (hints[each.name],)
            bounded = each.name == "min_stride" or (name, each.name) == ("block_topk", "stride")
            if int in kinds and not bounded:
                most = {"block": BLOCK}.get(each.name, MOST)
                found.append(
                    (name, each.name, MOST_STRIDE if (name, each.name) == ("grid", "max_stride") else most)
                )
    return found


@pytest.mark.parametrize(("pattern", "field", "most"), largest())
def test_the_largest_numbers_work(pattern: str, field: str, most: int) -> None:
    """What a recipe takes, its plan takes."""
    modality = torch.cat([torch.zeros(1, 40), torch.full((1, 160), VIDEO), torch.zeros(1, 56)], 1).long()
    frame = torch.where(modality == VIDEO, (torch.arange(256) - 40) // 16, -1)
    layout = TokenLayout.build(modality, frame=frame)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 256, 16, generator=generator) for heads in (4, 2))
    fields: dict[str, Any] = {"name": pattern, field: most}
    if pattern == "per_head":
        fields["table"] = {0: {0: {"name": "grid"}}}
    plan = Recipe.load(sparse=fields).sparse.plan(query, key, layout, layout)
    assert plan is None if pattern == "dense" else plan is not None and bool(plan.to_mask().any())
    with pytest.raises(RecipeError, match=field):
        Recipe.load(sparse={**fields, field: 2 * most})


def test_a_word_of_searches_is_told_for_what_it_means(tmp_path: Path) -> None:
    """`mmaccel search` has four kinds of boundary, of which one is none."""
    file = tmp_path / "recipe.yaml"
    file.write_text("sparse: no_boundary")
    wanted = (
        "'no_boundary' is what a search calls a pattern by itself, without a boundary; give that pattern, such as "
        "'grid', 'a_shape' or 'vertical_slash'."
    )
    assert sentence("no_boundary") == f"recipe {wanted}"
    for where, within in (
        ("", file),
        ("", {"sparse": "no_boundary"}),
        ("boundary_2d: default: ", {"sparse": {"name": "boundary_2d", "default": "no_boundary"}}),
    ):
        assert sentence(within).endswith(f"{where}sparse {wanted}")


FILES = {
    "# nothing\n": "is empty; write a mapping such as 'sparse: a_shape'",
    "sparse: a_shape\nchunk: 128\nsparse: grid\n": "'sparse' is given twice, in lines 1 and 3; leave one out",
    "sparse: {name: a_shape, sink: 1, sink: 2}\n": "'sink' is given twice, in lines 1 and 1",
    "sparse: [dense\n": "is not valid YAML",
    "- dense\n- full\n": "holds list; write a mapping",
    # YAML's numbers have a sign in the exponent: one without is a text.
    "sparse: {name: a_shape, window: 1.0e400}": "window is the text '1.0e400'; give a whole number.",
    "sparse: {name: a_shape, window: 1.0e+400}": "a_shape: window is inf; give a whole number.",
}


@pytest.mark.parametrize("text", FILES)
def test_files_that_are_no_recipe(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yml"
    assert "there is no file" in sentence(file) and "made of it, AShape()" in sentence(AShape)
    file.write_text(text)
    assert FILES[text] in sentence(file)


def test_a_name_is_registered_once() -> None:
    own = Registry("toy")
    own.add("one", AShape)
    own.add("one", again := type("AShape", (AShape,), {"__module__": AShape.__module__}))
    assert own["one"] is again, "a cell of a notebook is run again"
    with pytest.raises(RecipeError, match="toy 'one' is registered already"):
        own.add("one", Window)
    with pytest.raises(UnknownName, match="unknown kind 'nothing'"):
        registry("nothing")


class LiveOnly(StreamPolicy):
    """A memory of streams that knows of no ingestion."""

    name = "live_only"

    def open_stream(self, *given: Any) -> StreamState:
        raise AssertionError("nothing is opened")


def test_an_impossible_pair_is_told_in_one_sentence() -> None:
    told = sentence(sparse="a_shape", kv=LiveOnly())
    assert "sparse 'a_shape' cannot stand beside kv 'live_only'" in told
    assert "set sparse to 'dense' or kv to 'full'" in told


@pytest.mark.parametrize("margin, fits", [(4, False), (8, False), (9, True), (10, True)])
def test_a_memory_must_roll_back_as_far_as_a_draft_asks(margin: int, fits: bool) -> None:
    choices: dict[str, Any] = {
        "kv": Window(margin=margin),
        "draft": {"name": "sequential", "model": "x", "window": 8},
    }
    if fits:
        Recipe.load(**choices)
    else:
        told = sentence(**choices)
        assert f"rolls back up to 9 tokens and kv 'window' only {margin}" in told
        assert "set the memory's margin to 9" in told


@pytest.mark.parametrize(
    ("base", "former", "name"),
    [
        (SparsePattern, "bound", "max_blocks_total"),
        (SparsePattern, "expected", "expected_blocks"),
        (SparsePattern, "plan_of", "plan_heads"),
        (SparsePattern, "placed", "with_base_dir"),
        (StreamState, "enter", "begin_pass"),
        (StreamState, "turn", "question_scope"),
        (StreamPolicy, "asks", "query_time_fields"),
        (DraftState, "notes", "report_notes"),
    ],
)
def test_a_member_that_was_renamed_is_refused_and_not_ignored(base: type, former: str, name: str) -> None:
    with pytest.raises(RecipeError, match=f"Mine: {former} is called {name} now; rename it."):
        type("Mine", (base,), {former: lambda *given: None})


def test_a_name_that_another_kind_had_is_free_and_that_of_a_pruner_is_taken() -> None:
    type("Mine", (SparsePattern,), {"asks": lambda *given: None})
    with pytest.warns(MmaccelWarning, match="Mine: seat is the former name; write stage: ClassVar = 'layer'"):
        assert type("Mine", (TokenPruner,), {"seat": "layer"}).stage == "layer"  # type: ignore[attr-defined]
