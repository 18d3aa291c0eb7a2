"""A table gives each head its pattern: planned together, run together, reported by name, refused elsewhere."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.adapter import ModelView
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import MmaccelWarning, RecipeError
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.prefill.plan import AttentionPlan, head_runs
from mmaccel.core.prefill.sparse import SparsePattern
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import policy
from mmaccel.policies.sparse import AShape, PerHead, VerticalSlash
from mmaccel.policies.sparse.orders import AttentionRegion, IntraPattern
from mmaccel.policies.sparse.per_head import KIND, SCHEMA, LayerHeadPatterns
from tests.models.tiny_random import BUILD, prompt
from tests.spies import heard, refusal

from .scenes import Scene, sequence

GRID = dict(name="grid", stride="free", min_stride=2, max_stride=12, last_q=16)
COLUMNS = dict(name="vertical_slash", vertical=9, slash=4, last_q=16)
NEAR = dict(name="a_shape", sink=5, window=11)
NEAREST = AShape(block=16, sink=5, window=11)
PIECES = [("text", 6), ("video", 36), ("text", 1), ("image",), ("text", 3), ("video", 36), ("text", 9)]


def test_queries_and_keys_are_handed_on_uncopied(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(1, 8, 96, 8), torch.randn(1, 4, 96, 8)

    def watched(self: IntraPattern, region: AttentionRegion) -> tuple[int, ...]:
        layer = region.layer
        assert layer.key is key if self.adaptive else layer.key._base is key
        assert layer.query is query if self.adaptive else layer.query._base is query
        return layer.planned_head_indices

    seen = heard(monkeypatch, IntraPattern, "cached_plan_parts", watched)
    from mmaccel.core.layout import TokenLayout

    layout = TokenLayout.text(1, 96)
    table = {0: {0: GRID, 1: COLUMNS, 2: GRID, 3: COLUMNS, 4: NEAR, 5: NEAR, 6: GRID, 7: GRID}}
    assert PerHead(block=16, table=table).plan(query, key, layout, layout) is not None
    # Each pattern is planned once for all its heads, and the window for one head.
    assert sorted(seen) == [(0,), (0, 2, 6, 7), (1, 3)]


@pytest.mark.parametrize("estimate", ["head", "group"])
@pytest.mark.parametrize("boundary", [None, "q_boundary", "boundary_2d"])
@pytest.mark.parametrize(
    "one", [GRID, {**GRID, "stride": "frame"}, COLUMNS], ids=["free", "frame", "columns"]
)
def test_heads_apart_are_planned_at_once_as_run_by_run(
    one: dict[str, Any], boundary: str | None, estimate: str
) -> None:
    pattern: Any = {**one, "estimate": estimate, "block": 16}
    if boundary == "q_boundary":
        pattern = {"name": boundary, "text": pattern, "video": pattern, "image": None, "block": 16}
    elif boundary:
        pattern = {"name": boundary, "default": pattern, "block": 16}
    scene = Scene((sequence([(TEXT, [9]), (VIDEO, [8] * 9), (TEXT, [7])]),), 0, 12, 4, 8, 3)
    query, key, _ = scene.tensors()
    layout, group = scene.layout(), 3
    heads = [0, 1, 4, 6, 7, 8, 9]  # of four runs: 2, 1, 3 and 1 of a key/value head
    own = policy("sparse", pattern)
    assert isinstance(own, SparsePattern)
    runs = head_runs(heads, group)
    assert len(runs) == 4
    named = LayerHeadPatterns(block=16, named=dict.fromkeys(heads, own), heads=12)
    plan = named.plan(query, key, layout, layout)
    assert plan is not None
    mask = plan.to_mask()
    assert mask[0, 0].sum() < layout.length * (layout.length + 1) / 2
    for run in runs:
        alone = own.plan(run.select_queries(query), key[:, run.groups], layout, layout)
        assert alone is not None and torch.equal(mask[:, list(run.heads)], alone.to_mask())


class Nearest:
    def plan(
        self, query: Tensor, key: Tensor, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> AttentionPlan | None:
        return NEAREST.plan(query, key, q_layout, k_layout)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_pattern_that_plans_its_own_way_does_so_among_others(mixed: bool) -> None:
    """It is made of one that is planned for some heads at once; what either class says of a plan is heard."""
    bases, own = ((Nearest, VerticalSlash), {}) if mixed else ((VerticalSlash,), {"plan": Nearest.plan})
    Half: Any = type("Half", bases, own)
    layout = TokenLayout.text(1, 96)
    query, key = torch.randn(1, 4, 96, 8), torch.randn(1, 2, 96, 8)
    half = Half(block=16, vertical=9, slash=4, last_q=16)
    plan = LayerHeadPatterns(block=16, named={0: half, 1: half}).plan(query, key, layout, layout)
    alone = half.plan(query[:, :2], key[:, :1], layout, layout)
    assert plan is not None and alone is not None
    assert torch.equal(plan.to_mask()[:, :2], alone.to_mask())


@pytest.mark.parametrize("kind", sorted(BUILD))
def test_a_run_names_the_pattern_of_each_head(kind: str) -> None:
    model = BUILD[kind](layers=3)
    table = {0: {0: NEAR, 1: GRID, 2: COLUMNS}, 2: {"3": "a_shape"}}
    recipe = dict(sparse=dict(name="per_head", block=16, table=table), dense_tail=8)
    inputs = prompt(kind, PIECES)
    with mmaccel.accelerate(model, recipe) as fast, torch.no_grad():
        out = model(**inputs).logits
        report = fast.report()
    first, last = ("a_shape", "grid", "vertical_slash", "dense"), ("dense", "dense", "dense", "a_shape")
    assert report.patterns == (first, ("dense",) * 4, last)
    assert 0.5 < report.kept < 1 and torch.isfinite(out).all()
    # With nothing but dense heads and windows that hold everything the logits are the plain model's.
    whole = {layer: {head: dict(name="a_shape", window=4096) for head in (1, 2)} for layer in range(3)}
    with mmaccel.accelerate(model, sparse=dict(name="per_head", table=whole), dense_tail=0), torch.no_grad():
        same = model(**inputs).logits
    with torch.no_grad():
        plain = model(**inputs).logits
    assert (same - plain).abs().max() <= 1e-4


@pytest.mark.parametrize("rows", [63, 64, 65])
def test_a_part_of_a_prompt_may_be_as_long_as_the_dense_tail(rows: int) -> None:
    """Where all rows are dense, none are left for the heads that are."""
    model, inputs = BUILD["llava"](layers=2), prompt("llava", PIECES * 2)
    length = inputs["input_ids"].shape[1]
    table = {0: {0: dict(name="a_shape", window=4096)}}
    plain = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    with mmaccel.accelerate(model, sparse=dict(name="per_head", block=16, table=table), dense_tail=64):
        got = model.generate(**inputs, max_new_tokens=3, do_sample=False, prefill_chunk_size=length - rows)
    assert torch.equal(got, plain)


def test_kept_counts_dense_heads_and_the_tail_once() -> None:
    model = BUILD["qwen"](layers=1)
    inputs = prompt("qwen", PIECES)
    length = inputs["input_ids"].shape[1]
    table = {0: {0: dict(name="a_shape", sink=0, window=16)}}
    with mmaccel.accelerate(model, sparse=dict(name="per_head", block=16, table=table), dense_tail=8) as fast:
        with torch.no_grad():
            model(**inputs)
        kept = fast.report().kept
    causal = length * (length + 1) / 2
    alone = Recipe.load(sparse=dict(block=16, **table[0][0]), dense_tail=8)
    with mmaccel.accelerate(model, alone) as fast, torch.no_grad():
        model(**inputs)
        one = fast.report().kept
    assert kept == pytest.approx((one + 3) / 4, rel=1e-9) and one < 0.5 and causal > 0


def table_of(model: Any, **more: Any) -> dict[str, Any]:
    fingerprint = adapter_for(model).fingerprint(model)
    heads = [{"pattern": {"name": "a_shape", "sink": 16, "window": 32}}] * fingerprint["heads"]
    layers = [heads] * fingerprint["layers"]
    return {"kind": KIND, "schema": SCHEMA, "model": fingerprint, "block": 64, "layers": layers, **more}


def in_file(model: Any, folder: Path, **more: Any) -> Recipe:
    """The recipe of such a table in a file."""
    path = folder / "table.json"
    path.write_text(json.dumps(table_of(model, **more)))
    return Recipe.load(sparse={"name": "per_head", "table": str(path)})


def test_a_table_serves_its_model_and_no_other(tmp_path: Path) -> None:
    model = BUILD["qwen"]()
    recipe = in_file(model, tmp_path)
    with mmaccel.accelerate(model, recipe) as fast, torch.no_grad():
        model(**prompt("qwen", PIECES))
        assert fast.report().heads() == {"a_shape": 8}
        assert fast.recipe.sparse.max_blocks_total(640, 640) == AShape(sink=16, window=32).max_blocks_total(
            640, 640
        )
    with pytest.raises(
        RecipeError, match=r"searched on another model .*'qwen2_5_vl' there, 'llava_onevision' here"
    ):
        mmaccel.accelerate(BUILD["llava"](), recipe)
    with pytest.raises(RecipeError, match=r"searched on another model .layers 2 there, 3 here"):
        mmaccel.accelerate(BUILD["qwen"](layers=3), recipe)


def test_a_table_warns_of_other_weights(tmp_path: Path) -> None:
    model = BUILD["qwen"]()
    recipe = in_file(model, tmp_path, weights=adapter_for(model).qk_checksum(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mmaccel.accelerate(model, recipe).detach()
    with torch.no_grad():
        model.model.language_model.layers[1].self_attn.k_proj.weight.neg_()
    with pytest.warns(MmaccelWarning, match="table .* was searched on other weights of this architecture"):
        mmaccel.accelerate(model, recipe).detach()


def test_the_digest_of_weights_does_not_hang_on_the_type_they_are_loaded_in() -> None:
    model = BUILD["llava"]().to(torch.bfloat16)
    digest = adapter_for(model).qk_checksum(model)
    assert digest is not None and len(digest) == 16
    assert digest == adapter_for(model).qk_checksum(model.to(torch.float32))


@pytest.mark.parametrize(("context", "told"), [(100, True), (250, False), (2000, True)])
def test_a_prompt_far_from_the_length_of_the_search_is_told_once(
    tmp_path: Path, context: int, told: bool
) -> None:
    model = BUILD["qwen"]()
    inputs = prompt("qwen", PIECES)
    length = inputs["input_ids"].shape[1]
    assert 125 < length <= 500
    with mmaccel.accelerate(model, in_file(model, tmp_path, context=context)) as fast, torch.no_grad():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**inputs)
            model(**inputs)
        assert [str(one.message) for one in caught if "searched on" in str(one.message)] == [
            f"sparse: the table {tmp_path}/table.json was searched on {context} tokens, and this prompt has {length}; "
            "`mmaccel search` at this length makes one that fits it."
        ] * told
        assert any("searched on" in note for note in fast.report().notes) == told


class Mesh:
    """Of the mesh that transformers keeps with a sharded model what is asked for its rank."""

    mesh_dim_names = ("tp",)

    def get_local_rank(self, name: str) -> int:
        return {"tp": 1}[name]


def test_a_shard_of_a_model_follows_the_patterns_of_its_own_heads() -> None:
    model = BUILD["qwen"]()
    sinks = {head: dict(name="a_shape", sink=head, window=5) for head in range(4)}
    adapter = adapter_for(model)
    model._tp_size, model._device_mesh = 2, Mesh()
    assert adapter.local_heads(model) == range(2, 4)
    view = ModelView(model, adapter, adapter_for)
    bound = PerHead(table={0: sinks, 1: {1: sinks[1], 2: sinks[2]}}, default="dense").for_model(view)
    assert [bound.for_layer(0).head_pattern(head) for head in range(2)] == [
        AShape(sink=head, window=5) for head in (2, 3)
    ]
    # Of the second layer the shard has head 2 alone, its first.
    assert [bound.for_layer(1).head_pattern(head).name for head in range(2)] == ["a_shape", "dense"]


def test_the_shipped_table_lies_in_the_model_s_folder(tmp_path: Path) -> None:
    model = BUILD["qwen"]()
    with pytest.raises(RecipeError, match="no table is shipped with this model"):
        mmaccel.accelerate(model, "per_head")
    # A default is for all heads then, and for none where the folder has a table of them all.
    either = {"sparse": {"name": "per_head", "default": "tri_shape"}}
    with mmaccel.accelerate(model, either) as fast, torch.no_grad():
        model(**prompt("qwen", PIECES))
        assert fast.report().heads() == {"tri_shape": 8}
        told = (
            "sparse: no table of heads (heads.json) is in the model's folder; tri_shape runs for all heads; "
        )
        told += "`mmaccel search MODEL --video FILE --out heads.json` makes one"
        assert fast.report().notes == (told,)
    model.config._name_or_path = str(tmp_path)
    (tmp_path / "heads.json").write_text(json.dumps(table_of(model)))
    with mmaccel.accelerate(model, either) as fast, torch.no_grad():
        model(**prompt("qwen", PIECES))
        assert fast.report().heads() == {"a_shape": 8}
        assert not any("no table" in one for one in fast.report().notes)
    with mmaccel.accelerate(model, "per_head") as fast, torch.no_grad():
        model(**prompt("qwen", PIECES))
        assert fast.report().heads() == {"a_shape": 8}
        assert fast.report().recipe["sparse"]["table"] == str(tmp_path / "heads.json")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(table="nowhere.json"), "'nowhere.json' cannot be read .no such file"),
        (dict(table=3), "table is 3; give 'shipped', a file, or a mapping"),
        (dict(table={0: 4}), r"table\[0\] is 4; give a mapping"),
        (dict(table={"x": {}}), "'x' is not a layer"),
        (dict(table={0: {-1: "grid"}}), "-1 is not a head"),
        (dict(table={0: {1: dict(window=3)}}), "a mapping needs the policy's name"),
        (dict(table={0: {1: "per_head"}}), "give one pattern"),
        (dict(table={0: {1: dict(name="grid", block=32)}}), "blocks of 32 and the rest of 64"),
        (dict(table={0: {3: "gird"}}), r"table\[0\]\[3\]: unknown sparse 'gird': did you mean 'grid'"),
        (dict(default=7), "default is 7; give one pattern"),
    ],
)
def test_wrong_choices_are_told(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        Recipe.load(sparse={"name": "per_head", **fields})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not valid JSON"),
        ('{"kind": "other"}', "holds no head patterns"),
        ('{"kind": "mmaccel heads", "schema": 99}', "has schema 99 and this version reads 1"),
        ('{"kind": "mmaccel heads", "schema": 1, "layers": [[]]}', "is not whole"),
        (
            '{"kind": "mmaccel heads", "schema": 1, "model": {}, "block": 64, "layers": [[{}]]}',
            "is not whole",
        ),
    ],
)
def test_a_file_that_is_no_table_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match=told):
        PerHead(table=str(path))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ({"name": "zzz"}, "unknown sparse 'zzz': there are"),
        ({"name": "a_shape", "windw": 3}, "sparse 'a_shape' has no field 'windw'"),
        ({"name": "a_shape", "window": 0}, "a_shape: window is 0"),
    ],
)
def test_a_wrong_pattern_in_a_file_is_told_with_its_place(
    tmp_path: Path, pattern: dict[str, Any], told: str
) -> None:
    path = tmp_path / "heads {1}.json"
    layers = [[{"pattern": {"name": "grid"}}] * 2, [{"pattern": {"name": "grid"}}, {"pattern": pattern}]]
    held = {"kind": "mmaccel heads", "schema": 1, "model": {}, "block": 64, "layers": layers}
    path.write_text(json.dumps(held))
    said = refusal(lambda: PerHead(table=str(path)), RecipeError)
    assert said.startswith(f"per_head: table {str(path)!r}, layer 1, head 1: {told}")


def test_layers_and_heads_beyond_the_model_are_told() -> None:
    model = BUILD["qwen"]()
    with pytest.raises(RecipeError, match="layer 2; the model has layers 0 to 1"):
        mmaccel.accelerate(model, sparse=PerHead(table={2: {0: "grid"}}))
    with pytest.raises(RecipeError, match="head 4; the model has heads 0 to 3"):
        mmaccel.accelerate(model, sparse=PerHead(table={1: {4: "grid"}}))


def test_a_recipe_with_a_table_survives_yaml() -> None:
    recipe = Recipe.load(sparse=dict(name="per_head", table={0: {1: GRID, 2: "a_shape"}}, default=NEAR))
    import yaml

    assert Recipe.load(yaml.safe_load(recipe.to_yaml())) == recipe
