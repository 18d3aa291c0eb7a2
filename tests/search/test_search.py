"""The search on tiny random models: what it writes, replayed, stopped, gone on with and used; and its pictures."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.layout import TEXT, VIDEO, TokenLayout
from mmaccel.core.registry import registry
from mmaccel.core.rows import read_rows
from mmaccel.search import SearchSettings, measure, picture, recompute_table, search, table_agreement
from mmaccel.search.run import differing_options, head_pattern_names
from mmaccel.search.space import (
    KINDS,
    BudgetScale,
    ModalityPairSlot,
    find_candidates_at_target_cost,
    recipe_for_slot,
)
from tests.models.tiny_random import BUILD, prompt
from tests.spies import Largest

PIECES = [("text", 12), ("video", 12), ("text", 30), ("video", 12), ("text", 9)]
PAIRS = SearchSettings(cost="pairs", block=16)


@pytest.fixture(scope="module", params=["qwen", pytest.param("llava", marks=pytest.mark.slow)])
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path, dict[str, Any]]:
    """A searched model of a family: (family, model, file, table)."""
    model = BUILD[request.param](layers=2)
    path = tmp_path_factory.mktemp("tables") / "table.json"
    table = search(model, prompt(request.param, PIECES), path, PAIRS)
    return request.param, model, path, table


def test_a_table_is_whole_and_says_what_it_is_about(found: Any) -> None:
    kind, model, path, table = found
    assert json.loads(path.read_text()) == table and not path.with_name("table.json.parts").exists()
    assert table["kind"] == "mmaccel heads" and table["schema"] == 1
    assert table["model"]["layers"] == 2 and table["model"]["type"] == model.config.model_type
    assert table["weights"] == adapter_for(model).qk_checksum(model)
    assert table["sample"]["tokens"] == prompt(kind, PIECES)["input_ids"].shape[1]
    assert table["modalities"] == ["text", "video"] and table["peak_bytes"] > 0 and table["seconds"] > 0
    assert [len(layer) for layer in table["layers"]] == [4] * 2
    for layer in table["layers"]:
        for head in layer:
            assert min(head["errors"].values()) <= head["score"] == head["errors"][head["kind"]]
            assert head["score"] <= 1.01 * min(head["errors"].values()) + 1e-6
            assert 0 < head["share"] < 1.1 and 0 < head["cost"] <= 1.05
            limit = 1.05 * table["measured"][0]["target_pairs"]
            causal = table["sample"]["tokens"] * (table["sample"]["tokens"] + 1) / 2
            # What was reckoned slot by slot is what the plan lists.
            assert head["share"] * causal <= limit * 1.001
            count = len(table["space"][head["kind"]])
            assert all(len(slot) == count for slot in head["scores"][head["kind"]].values())
    for kind_of, candidates in table["space"].items():
        assert sum(len(c["rows"]) for c in candidates) == 36, kind_of
        assert all(c["cost"] <= 1.05 for c in candidates if c["state"] != "dear")


def test_a_table_is_made_again_from_its_own_figures(found: Any) -> None:
    table = json.loads(found[2].read_text())
    assert recompute_table(table) == table
    for layer in table["layers"]:
        for head in layer:  # what follows from the figures is not copied
            head["pattern"], head["kind"], head["score"] = {"name": "dense"}, "none", 1.0
    table["space"] = {}
    assert recompute_table(table) == found[3]
    other = {**found[3], "measured": found[3]["measured"][:-2]}
    with pytest.raises(RecipeError, match="holds no cost of"):
        recompute_table(other)


def test_tables_that_differ_in_a_head_agree_on_the_rest(found: Any) -> None:
    table = found[3]
    budgets = json.loads(json.dumps(table).replace('"window": ', '"window": 1'))
    assert table_agreement(table, budgets) == 1.0
    budgets["layers"][0][0]["kind"] = "none"
    assert table_agreement(table, budgets) == pytest.approx(7 / 8)


def test_the_model_is_left_as_it_was_and_the_table_serves_it(found: Any) -> None:
    kind, model, path, table = found
    inputs = prompt(kind, PIECES)
    assert mmaccel.attached(model) is None
    recipe = dict(sparse=dict(name="per_head", table=str(path), block=16), dense_tail=0)
    with mmaccel.accelerate(model, recipe) as fast, torch.no_grad():
        model(**inputs)
        report = fast.report()
    assert report.patterns == tuple(head_pattern_names(table))
    kinds = tuple(tuple(name.split("(")[0] for name in layer) for layer in report.patterns)
    assert kinds == tuple(tuple(h["pattern"]["name"] for h in layer) for layer in table["layers"])
    # The first layer sees what the search saw: the same share is kept.
    first = sum(h["share"] for layer in table["layers"] for h in layer) / 8
    assert report.kept == pytest.approx(first, abs=0.05)


@pytest.fixture(scope="module")
def stopped(found: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a search of the same prompt has written when it is stopped in the second of two layers."""
    kind, model, *_ = found
    path = tmp_path_factory.mktemp("stopped") / "t.json"

    def stop(what: str, done: int, total: int | None) -> None:
        if what == "score" and done > (total or 0) // 2 + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(model, prompt(kind, PIECES), path, PAIRS, progress=stop)
    assert mmaccel.attached(model) is None and not path.exists()
    return path.with_name("t.json.parts").read_bytes()


@pytest.mark.parametrize("found", ["qwen"], indirect=True)
def test_a_stopped_search_goes_on(found: Any, stopped: bytes, tmp_path: Path) -> None:
    kind, model, _, table = found
    inputs, path, parts = prompt(kind, PIECES), tmp_path / "t.json", tmp_path / "t.json.parts"
    parts.write_bytes(stopped)
    assert [row["layer"] for row in read_rows([parts]) if "layer" in row] == [0]
    with pytest.raises(RecipeError, match=r"holds a search with another tolerance \(0.05\); give what"):
        search(model, inputs, path, SearchSettings(cost="pairs", block=16, tolerance=0.1))
    with pytest.raises(
        RecipeError, match=r"another sample \(.*\), --cost \(pairs\) and --extended \(False\);"
    ):
        search(model, prompt(kind, PIECES[:-1]), path, SearchSettings(block=16, extended=True))
    marks: list[int] = []

    def watching(what: str, done: int, total: int | None) -> None:
        if what == "score":
            marks.append(total or 0)
            assert parts.read_bytes().startswith(stopped)
            if done == 1:  # the layer on which costs were measured is gone
                assert [one.layer for one in gc.get_objects() if type(one) is measure.CapturedLayer] == [1]

    again = search(model, inputs, path, PAIRS, progress=watching)
    assert not parts.exists()
    assert again["layers"] == table["layers"] and again["space"] == table["space"]
    assert len(marks) == max(marks)  # one of two layers, and each of its steps once


@pytest.mark.parametrize("found", ["qwen"], indirect=True)
def test_what_is_damaged_is_measured_again_and_another_file_is_named(
    found: Any, stopped: bytes, tmp_path: Path
) -> None:
    kind, model, _, table = found
    inputs, path, parts = prompt(kind, PIECES), tmp_path / "t.json", tmp_path / "t.json.parts"
    for other in (b"a user's own", b'{"some": "rows"}\n', b'{"about": "something else"}\n'):
        parts.write_bytes(other)
        with pytest.raises(RecipeError, match=r"t.json.parts (is there and holds no|holds a) search"):
            search(model, inputs, path, PAIRS)
        assert parts.read_bytes() == other
    parts.unlink()
    parts.mkdir()  # as earlier versions had it
    with pytest.raises(RecipeError, match="holds no search that can go on; delete it"):
        search(model, inputs, path, PAIRS)
    parts.rmdir()
    # A line that is damaged, and one that was cut off: each is measured again.
    parts.write_bytes(stopped.replace(b'{"measured"', b'{"mea', 1)[:-100])
    again = search(model, inputs, path, PAIRS)
    assert not parts.exists() and again["layers"] == table["layers"]


def test_what_a_search_differs_in_is_told_as_it_is_given() -> None:
    sample = {"videos": ["a.mp4"], "text": ["hi"], "tokens": 300, "digest": "0"}
    known = {"context": 300, "target": 1, "boundaries": ["no_boundary"], "cost": "pairs", "sample": sample}
    assert differing_options(known, {**known, "target": 2, "context": 400}) == ["--context (300)"]
    other = {**sample, "videos": ["b.mp4"], "tokens": 301, "digest": "1"}
    told = {**known, "context": 301, "target": 2, "cost": "seconds", "sample": other}
    assert differing_options(known, told) == ["--video (a.mp4)", "--cost (pairs)"]
    found = differing_options(known, {**told, "context": 9000, "boundaries": []})
    assert found == ["--video (a.mp4)", "--cost (pairs)", "--context (300)", "--boundaries"]
    assert differing_options({**known, "context": 64000}, told)[-1] == "--context (64000)"
    assert differing_options(known, {**known, "schema": 2}) == ["schema"]


def test_costs_are_measured_when_asked(tmp_path: Path) -> None:
    model = BUILD["qwen"](layers=1)
    settings = SearchSettings(block=16, repeats=1, boundaries=("no_boundary", "q_boundary"))
    table = search(model, prompt("qwen", PIECES), tmp_path / "t.json", settings)
    assert table["cost"] == "seconds"
    assert all(row["seconds"] > 0 and row["target_seconds"] > 0 for row in table["measured"])
    assert set(table["space"]) <= {"no_boundary", "q_boundary"} and recompute_table(table) == table


def test_a_table_of_rows_of_ours_is_made_again(tmp_path: Path) -> None:
    model = BUILD["qwen"](layers=1)
    settings = SearchSettings(cost="pairs", block=16, boundaries=("no_boundary",), extended=True)
    table = search(model, prompt("qwen", PIECES), tmp_path / "t.json", settings)
    names = [name for one in table["space"]["no_boundary"] for name in one["rows"]]
    assert table["extended"] and sum(name.startswith("ours:") for name in names) > 9
    assert recompute_table(table) == table


def test_one_modality_has_no_boundary(tmp_path: Path) -> None:
    model = BUILD["llava"](layers=1)
    table = search(model, prompt("llava", [("text", 300)]), tmp_path / "t.json", PAIRS)
    assert list(table["space"]) == ["no_boundary"] and table["sample"]["frames"] == 0


def test_wrong_requests_are_told(tmp_path: Path) -> None:
    model = BUILD["qwen"](layers=1)
    with pytest.raises(RecipeError, match="does not exist; create it first"):
        search(model, prompt("qwen", PIECES), tmp_path / "no" / "t.json", PAIRS)
    with pytest.raises(RecipeError, match="is a folder"):
        search(model, prompt("qwen", PIECES), tmp_path, PAIRS)
    with pytest.raises(ModelError, match="the sample has 20 tokens"):
        search(model, prompt("qwen", [("text", 20)]), tmp_path / "t.json", PAIRS)
    two = {name: torch.cat([x, x]) for name, x in prompt("qwen", [("text", 90)]).items()}
    with pytest.raises(ModelError, match="a batch of one"):
        search(model, two, tmp_path / "t.json", PAIRS)


def planted(length: int = 512, frame: int = 16) -> measure.CapturedLayer:
    """Head 0 looks at its own cell in every frame, head 1 at its nearest neighbours, whatever stands between."""
    rng = torch.Generator().manual_seed(0)
    place = torch.arange(length)
    cells = torch.nn.functional.one_hot(place % frame, 32).float() * 9
    near = torch.stack(
        [torch.cos(place * w) for w in (0.02, 0.05)] + [torch.sin(place * w) for w in (0.02, 0.05)], 1
    )
    near = torch.nn.functional.pad(near, (0, 28)) * 9
    query = torch.stack([cells, near])[None]
    value = torch.randn(1, 2, length, 32, generator=rng)
    modality = torch.full((1, length), VIDEO)
    layout = TokenLayout.build(modality, frame=(place // frame)[None])
    return measure.CapturedLayer(0, query, query.clone(), value, 1.0, layout)


@pytest.mark.always
def test_planted_heads_are_found() -> None:
    inside = planted()
    bench = measure.LayerBenchmark(inside, "reference")
    target = BudgetScale(512, 16, 16).target_pattern()

    def cost(pattern: Any) -> float:
        row = bench.measure_cost(pattern, target, 0)
        return row["pairs"] / row["target_pairs"]

    space = find_candidates_at_target_cost(BudgetScale(512, 16, 16), ["no_boundary"], [VIDEO], cost, 0.05)
    heads = measure.measure_candidates(bench, space, [VIDEO], 16, 0.05)
    names = []
    for head in heads:
        names.append(measure.choose_head_pattern(space, head, 16, 0.05)["pattern"])
    assert names[0]["name"] == "grid" and names[0]["slash"]
    assert names[1]["name"] in ("a_shape", "vertical_slash") and heads[1]["errors"]["no_boundary"] < 0.2
    assert heads[0]["errors"]["no_boundary"] < 0.05


def test_errors_of_a_slot_are_those_of_its_rows_and_keys() -> None:
    rng = torch.Generator().manual_seed(1)
    length = 160
    query, key, value = (torch.randn(1, h, length, 8, generator=rng) for h in (4, 2, 2))
    modality = torch.full((1, length), VIDEO)
    modality[:, 20:50] = TEXT
    modality[:, 90:91] = TEXT
    inside = measure.CapturedLayer(0, query, key, value, 0.3, TokenLayout.build(modality))
    bench = measure.LayerBenchmark(inside, "reference")
    pattern = dict(name="a_shape", block=16, sink=3, window=9)
    group = 2
    score = query @ key.repeat_interleave(group, 1).transpose(2, 3) * 0.3
    causal = torch.ones(length, length).tril().bool()

    def attended(mask: torch.Tensor) -> torch.Tensor:
        weight = score.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
        return weight @ value.repeat_interleave(group, 1)

    for slot in (
        ModalityPairSlot("text", TEXT, None),
        ModalityPairSlot("video", None, VIDEO),
        ModalityPairSlot("text>video", TEXT, VIDEO),
    ):
        rows = modality[0] == slot.query if slot.query is not None else torch.ones(length).bool()
        keys = modality[0] == slot.key if slot.key is not None else torch.ones(length).bool()
        rank = keys.long().cumsum(0) - 1
        gap = rank[:, None] - rank[None, :]
        mine = causal & keys[None, :] & ((gap < 9) | (rank[None, :] < 3))
        exact, near = attended(causal & keys[None, :]), attended(mine)
        expected = ((near - exact)[0, :, rows].norm(dim=(1, 2)) / exact[0, :, rows].norm(dim=(1, 2))).double()
        kind = {"text": "q_boundary", "video": "k_boundary", "text>video": "boundary_2d"}[slot.name]
        got, share = bench.head_errors(recipe_for_slot(kind, slot, pattern, 16), slot)
        assert (share >= mine[rows].sum() / causal.sum() - 1e-9).all() and share.max() < 1
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert measure.relative_error(value[0], value[0], None).max() == 0


def test_nothing_of_the_size_of_all_pairs_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 3072
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, length, 8, generator=rng) for h in (2, 1, 1))
    modality = torch.full((1, length), VIDEO)
    modality[:, ::97] = TEXT
    frame = torch.where(modality == VIDEO, torch.arange(length)[None] // 97, -1)
    inside = measure.CapturedLayer(0, query, key, value, 0.3, TokenLayout.build(modality, frame=frame))

    monkeypatch.setattr(picture, "CELLS", 1 << 20)
    with Largest() as seen:
        bench = measure.LayerBenchmark(inside, "reference")
        for pattern in (
            dict(name="a_shape", sink=64, window=256),
            dict(name="grid"),
            dict(name="vertical_slash", vertical=64, slash=64),
        ):
            bench.head_errors(dict(block=64, **pattern), ModalityPairSlot("all", None, None))
        bench.dense_attention(VIDEO)
        for order in picture.drawing_token_orders(inside.layout).values():
            picture.pool_head_attention(inside, 0, order, 64)
    assert seen.entries < length * length / 2


def test_pictures_sum_what_there_is() -> None:
    inside = planted(256)
    assert measure.max_frame_tokens(inside.layout) == 16
    assert set(picture.drawing_token_orders(inside.layout)) == {"as it stands", "by place in the frame"}
    for order in picture.drawing_token_orders(inside.layout).values():
        assert sorted(order.tolist()) == list(range(256))
        cells = picture.pool_head_attention(inside, 0, order, 32)
        assert cells.shape == (32, 32) and float(cells.sum() * 64) == pytest.approx(256, rel=1e-4)
    rows = torch.arange(256)
    weight = picture.attention_weights(inside, 0, rows, inside.key[0, 0])
    whole = picture.pool_head_attention(inside, 0, rows, 256)
    torch.testing.assert_close(whole, weight)
    # In the order of cells a head that looks along its own cell is a chain of blocks.
    blocks = picture.pool_head_attention(
        inside, 0, picture.drawing_token_orders(inside.layout)["by place in the frame"], 16
    )
    assert (blocks.diagonal() * 256 > 0.9 * 16).all()


def test_watching_stops_where_nothing_more_is_wanted() -> None:
    model = BUILD["qwen"](layers=3)
    seen: list[int] = []
    measure.visit_attention_inputs(model, prompt("qwen", PIECES), lambda one: seen.append(one.layer), {0, 1})
    assert seen == [0, 1] and mmaccel.attached(model) is None
    measure.visit_attention_inputs(model, prompt("qwen", PIECES), lambda one: seen.append(one.layer), set())
    measure.visit_attention_inputs(model, prompt("qwen", PIECES), lambda one: seen.append(one.layer))
    assert seen == [0, 1, 0, 1, 2] and set(KINDS) >= {"no_boundary"}


DRAWN = ("a_shape", "tri_shape", "sf_fixed", "sf_strided", "vertical_slash", "grid", "block_topk")
BOUNDARIES = ("q_boundary", "k_boundary", "boundary_2d")


@pytest.mark.parametrize("name", [*DRAWN, *BOUNDARIES])
def test_both_panels_hold_the_pairs_of_a_plan(name: str) -> None:
    plan = picture.example_pattern_plan(name)
    mask = plan.to_mask()[0, 0]
    assert torch.equal(picture.part_number_matrix(plan) > 0, mask) and 0.02 < mask.float().mean() < 0.3
    spans = [span for part in picture.pair_masks_by_span(plan) for span in part]
    computed = sum(int(seen.sum()) for seen, _ in spans)
    assert computed == int(mask.sum())
    assert all(bool((listed | ~seen).all()) for seen, listed in spans)
    # The order of the plan makes the pairs dense: most blocks are not listed, and pairs fill a good part of those that are.
    listed = sum(int(listed.sum()) for _, listed in spans)
    assert computed > 0.25 * listed and listed < 0.5 * sum(listed.numel() for _, listed in spans)


def test_parts_of_a_boundary_are_rows_of_one_modality() -> None:
    modality = picture.demo_prompt_layout().modality[0]
    found = picture.part_number_matrix(picture.example_pattern_plan("q_boundary"))
    for number in range(1, int(found.max()) + 1):
        assert len(modality[(found == number).any(1)].unique()) == 1


def test_every_pattern_has_a_colour_of_its_own() -> None:
    names = (*DRAWN, "dense")
    assert set(names) <= registry("sparse").keys()
    assert len({picture.COLOURS[n] for n in (*names, "other")}) == 9
    drawn = picture.draw_head_pattern_map([[*names, "q_boundary(tri_shape)", "mine"]], "all")
    told = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert sorted(told) == sorted([*names, "other", "Q: q_boundary"])
