"""The presets for what people do, none of them idle, and what `mmaccel recommend` predicts of them."""

import copy
import dataclasses
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import mmaccel
from mmaccel.backends.select import CostFile
from mmaccel.core import costs, rates
from mmaccel.core.errors import MmaccelWarning, ModelError
from mmaccel.core.layout import VIDEO, TokenLayout
from mmaccel.core.memory.footprint import Footprint
from mmaccel.core.recipe import (
    FORMER,
    MAIN_PRESETS,
    Recipe,
    check_generate,
    presets,
    read_recipe_fields,
    stream_policy,
)
from mmaccel.core.registry import policy, registry
from mmaccel.models import step
from mmaccel.models.recommend import LOSSLESS, _few_rows, device_rates_of, model_sizes_of, recommend
from mmaccel.models.shapes import SHAPES
from mmaccel.policies.kv import Full
from mmaccel_lab.world import World, render
from tests.models.streams import QUESTION, film, pair
from tests.spies import crossed, heard

DEVICE = rates.DEVICES["h100"]
SIZES = model_sizes_of("llava-onevision-7b")
GB = 10**9


def work(**given: Any) -> costs.Workload:
    return costs.Workload(**{"frames": 600, "memory": 80 * GB, "host": 500 * GB, **given})


def cost(
    recipe: Any = None, device: rates.DeviceRates = DEVICE, draft: Any = None, **given: Any
) -> costs.PredictedCost:
    """What a recipe, dense by default, costs the large model on such work."""
    return costs.predict_cost(Recipe.load(recipe), SIZES, work(**given), device, draft)


@pytest.mark.parametrize("name", ["random-ov", "random-qwen"])
def test_sizes_are_the_loaded_model_s(name: str) -> None:
    model, processor = pair(name)
    sizes = model_sizes_of(model, (42, 70), processor=processor)
    assert sizes.weights == sum(p.numel() for p in model.parameters())
    assert sizes.layers == 2 and sizes.frames_per_unit == (2 if name == "random-qwen" else 1)
    with mmaccel.VideoSession(model, processor, "full") as session:
        session.watch(film(4), fps=1.0)
        assert sizes.tokens == session._live.info.tokens_per_unit  # type: ignore[union-attr]
        held = session.counters()
        columns = held["held"] + 256  # a buffer's room
        each = sizes.kv_bytes_per_token
        assert held["bytes"] <= columns * each <= 1.3 * held["bytes"] + 256 * each


def test_a_shape_and_a_folder_are_counted_without_weights(random_folder: Any) -> None:
    assert 7.9e9 < SIZES.weights < 8.2e9 and (SIZES.patches, SIZES.tokens) == (729, 196)
    assert SIZES.kv_bytes_per_token == 2 * 28 * 4 * 128 * 2
    assert SIZES.inner == SHAPES["llava-onevision-7b"].intermediate
    folder = random_folder("tiny-ov-draft")
    sizes = model_sizes_of(folder, (112, 112))
    assert sizes.weights == sum(p.numel() for p in mmaccel.load_model(folder).parameters())
    with pytest.raises(ModelError, match="there is no"):
        model_sizes_of("/no/such/folder")


def test_terms_grow_as_their_work_does() -> None:
    one, two = (cost(frames=n) for n in (600, 1200))
    assert 2 * one.read_s < two.read_s < 4 * one.read_s, "products go with the length, pairs with its square"
    grown = 600 * SIZES.tokens * SIZES.kv_bytes_per_token
    assert two.device_bytes - one.device_bytes > grown and one.host_bytes == 0
    fields = {"memory": 24 * GB, "questions": 2}
    film, longer = (cost("film-many-questions", frames=n, **fields) for n in (3600, 7200))
    assert longer.device_bytes == film.device_bytes
    assert longer.host_bytes - film.host_bytes >= 6 * grown - (1 << 28)
    assert longer.read_s < 2.5 * film.read_s, "an ingestion that holds a part sees a part"
    fast = replace(DEVICE, copy=2 * DEVICE.copy)
    assert cost(device=fast).token_s < 0.8 * one.token_s
    assert two.total_s == two.read_s + two.question_s + 64 * two.token_s


def test_what_a_pattern_lists_is_what_it_costs() -> None:
    dense, sparse = (cost(one, frames=1800) for one in ("dense", "a_shape"))
    assert sparse.read_s < 0.4 * dense.read_s
    dense, sparse = (cost(one, frames=4) for one in ("dense", "a_shape"))
    assert sparse.read_s == dense.read_s, "where dense attention is faster it runs"


@pytest.mark.parametrize("name", sorted(registry("kv")))
@pytest.mark.parametrize("live", [False, True])
def test_every_memory_is_predicted_by_what_it_declares(name: str, live: bool) -> None:
    recipe, one = Recipe(kv=name), work(frames=3600, questions=2, live=live)
    full, found = (costs.predict_cost(each, SIZES, one, DEVICE) for each in (Recipe(), recipe))
    told = (found.read_s, found.question_s, found.token_s, float(found.device_bytes), float(found.host_bytes))
    assert all(math.isfinite(n) and n >= 0 for n in told) and min(found.question_s, *told[2:4]) > 0
    kept = recipe.kv.footprint(SIZES.tokens, SIZES.frames_per_unit)
    if kept == Footprint():
        assert name == "full" and found == full
    else:
        assert found.device_bytes < full.device_bytes
    assert (found.host_bytes > 0) == (kept.host != 0)
    assert (found.read_s == 0) == kept.deferred
    if kept.copied:
        assert found.token_s > full.token_s
        assert found.host_bytes >= 3600 * SIZES.tokens * SIZES.kv_bytes_per_token
    elif not kept.deferred:
        assert found.question_s <= full.question_s and (kept.shown is None or found.token_s < full.token_s)


def test_a_memory_of_somebody_else_is_taken_for_one_that_keeps_all() -> None:
    """Its fields say nothing, whatever their names: what it declares does."""

    @dataclass(frozen=True, kw_only=True)
    class Own(Full):
        frames: int = 4

    assert cost(Recipe(kv=Own())) == cost()
    live = recommend(SIZES, work(live=True), DEVICE, presets=["full", "recent"])
    assert "camera" in live.unfit["full"] and live.name == "recent"
    drafts = {name: "model" in cls.needs for name, cls in registry("draft").items()}
    assert drafts == {name: hasattr(cls, "model") for name, cls in registry("draft").items()}


def test_a_draft_costs_its_own_reading_and_gives_tokens() -> None:
    small = model_sizes_of("llava-onevision-0.5b")
    alone, with_draft = cost(), cost("captions", draft=small)
    assert with_draft.read_s > alone.read_s and with_draft.token_s < alone.token_s
    assert with_draft.device_bytes > alone.device_bytes + small.weights * 2
    never = cost("captions", draft=small, step_tokens=1.0)
    assert never.token_s > alone.token_s, "a draft of which nothing is kept"


def test_the_preset_that_fits_is_taken_and_what_does_not_says_by_how_much() -> None:
    found = recommend(SIZES, work(frames=1800, questions=5, memory=24 * GB), DEVICE)
    assert found.name == "film-many-questions" and found.why.startswith("no other fits")
    lacks, _ = found.lacks["exact"]
    assert lacks == found.costs["exact"].device_bytes - 24 * GB > 0
    again = recommend(SIZES, work(frames=1800, questions=5, memory=24 * GB + lacks, host=0), DEVICE)
    assert again.lacks["exact"] == (0, 0) and again.lacks["film-many-questions"][1] > 0
    assert "captions" in again.unfit and "--draft" in again.unfit["captions"]
    short = recommend(SIZES, work(frames=30), DEVICE)
    assert short.name in LOSSLESS, "a lossless one where it takes little longer"
    nothing = recommend(SIZES, work(memory=GB), DEVICE)
    assert nothing.name is None and "Nothing fits" in nothing.why and "GB more" in nothing.why
    live = recommend(SIZES, work(live=True, frames=10**5), DEVICE)
    assert live.name == "stream" and set(live.costs) == {"stream"}
    assert live.costs["stream"].host_bytes <= 500 * GB
    only = recommend(SIZES, work(frames=1800), DEVICE, lossless=True)
    assert set(only.costs) == {"exact"}
    far = recommend(replace(SIZES, limit=1000), work(), DEVICE)
    assert "1000 positions" in far.unfit["exact"] and "film-many-questions" in far.costs


@pytest.mark.parametrize(("device", "wanted"), [("cuda", 0.5), ("cpu", (3 + 4 * 0.5) / 4)])
def test_on_a_gpu_a_layer_s_time_leaves_out_what_a_step_adds(device: str, wanted: float) -> None:
    spent: list[float] = []

    def bench(run: Any, device: torch.device) -> float:
        spent.clear()
        run()
        return sum(spent)

    found = rates._layer(lambda layers: spent.append(3 + 0.5 * layers), torch.device(device), bench)
    assert found == pytest.approx(wanted)


def test_a_layer_of_few_rows_is_timed_as_a_session_s_captured_step_runs_it(monkeypatch) -> None:
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    ran: list[int] = []
    layers = heard(
        monkeypatch, step.CapturedStreamSteps, "run_step", lambda steps, run, embeds, *_: len(embeds)
    )
    few = _few_rows(pair("random-ov")[0])
    for _ in range(3):
        few()
        ran.append(len(layers))
    assert ran == [1, 2, 3] and layers == [1, 1, 1]


def test_on_a_gpu_captured_steps_and_pinning_are_what_a_session_takes() -> None:
    slow, dear = replace(DEVICE, layer=100 * DEVICE.layer), replace(DEVICE, few=2 * DEVICE.few)
    plain, other, held = (cost(device=one, frames=100, questions=3) for one in (DEVICE, slow, dear))
    assert other.token_s == plain.token_s and other.question_s == plain.question_s
    assert held.token_s - plain.token_s == pytest.approx(SIZES.layers * DEVICE.few)
    cold, warm = (cost("film-many-questions", replace(DEVICE, pin=pin)) for pin in (1e9, math.inf))
    assert cold.read_s - warm.read_s == pytest.approx(cold.host_bytes * (1e-9 - 1 / DEVICE.wire))


def test_rows_of_a_pass_hold_their_share_of_a_line() -> None:
    """What a grid lists for a part of the rows is estimated as what it lists for all of them is."""
    grid, tokens, frames = policy("sparse", "grid"), 16, 800
    place = torch.arange(frames * tokens)[None]
    keys = TokenLayout.build(torch.full_like(place, VIDEO), frame=place // tokens)
    n = place.shape[1] // 8
    queries = keys.select_tokens(place[0, -n:])
    x = torch.randn(2, 1, 1, place.shape[1], 16, generator=torch.Generator().manual_seed(0))
    plan = grid.plan(x[0, :, :, -n:], x[1], queries, keys)
    assert plan is not None
    listed = sum(float(s.lists.list_lengths.double().sum((0, 2)).mean()) for p in plan.parts for s in p.spans)
    assert 0.7 < grid.expected_blocks(n, place.shape[1], (queries, keys)) / listed < 1.4


def test_slashes_of_few_rows_list_no_block_of_keys_twice() -> None:
    """A block of queries that holds rows of many classes was taken to list the lines of each, more than there are keys."""
    grid, tokens, frames = policy("sparse", {"name": "grid", "horizontal": False, "vertical": False}), 196, 20
    place = torch.arange(frames * tokens)[None]
    keys = TokenLayout.build(torch.full_like(place, VIDEO), frame=place // tokens)
    for n in (64, 128, 256):
        expected = grid.expected_blocks(n, len(place[0]), (keys.select_tokens(place[0, -n:]), keys))
        assert expected <= n // 64 * -(-len(place[0]) // 64)


def test_rates_are_measured_once_and_kept(tmp_path: Path) -> None:
    sizes = model_sizes_of(pair("random-ov")[0], (42, 70), processor=pair("random-ov")[1])
    store = CostFile(tmp_path / "rates.json", rates.DeviceRates.from_dict)
    runs: list[int] = []

    def bench(run: Any, device: torch.device) -> float:
        runs.append(1)
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    first = device_rates_of("cpu", sizes, store=store, bench=bench)
    assert runs and len(store) == 1 and first.layer > 0 and first.copy > first.wire / 100 > 0
    count = len(runs)
    assert device_rates_of("cpu", sizes, store=store, bench=bench) == first and len(runs) == count
    assert device_rates_of("h200", sizes).attend.dense.each < rates.DEVICES["h200"].attend.dense.each
    with pytest.raises(ModelError, match="h200, h100"):
        device_rates_of("h900", sizes)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_towers_that_name_their_widths_otherwise_are_counted(kind: str, tmp_path: Path) -> None:
    """Qwen2-VL's `hidden_size` is the width that it gives, and it has no `intermediate_size`."""
    from transformers import AutoConfig

    stock = mmaccel.load_processor("tiny-qwen").stock
    config = AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    stock.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    vision = config.vision_config
    sizes = model_sizes_of(tmp_path)
    assert sizes.tower_width == getattr(vision, "embed_dim", vision.hidden_size)
    assert sizes.tower_inner == getattr(vision, "intermediate_size", int(4 * sizes.tower_width))


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


def long_film(frames: int) -> torch.Tensor:
    """Frames: `FRAMES` are more than a window of 76 and 64 recalled, and more tokens than twice a window of 1 024."""
    return render(World.generate(3, frames).table(), 112, 224)


@crossed(name=MAIN_PRESETS, family=FAMILIES)
def test_all_that_a_preset_names_acts_in_a_session(name: str, family: str) -> None:
    model, processor = pair(family)
    chosen, report = recipe(name, family), None
    with mmaccel.VideoSession(model, processor, chosen) as session:
        take: Any = session.watch if name == "stream" else session.ingest
        take(long_film(FRAMES[family]), fps=1.0)
        answer, report = session.ask(QUESTION, TOKENS), session.report()
        counted = session.counters()
    assert len(answer.ids) > 1
    assert chosen.sparse.dense or 0 < (report.kept or 0) < 1
    if chosen.draft.active:
        assert report.draft["rounds"] > 0 and answer.counters.get("drafted", 0) > 0
    if chosen.kv.name == "mosaic":
        assert counted["host_bytes"] > 0 and counted["recalled"] > 0
        assert counted["resident"] < counted["units"]
    else:
        assert counted["resident"] == counted["units"]
    assert not any("idle" in note or "acts on those given to ingest" in note for note in report.notes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["exact", "captions"])
def test_a_lossless_preset_says_what_the_plain_model_says(name: str, family: str) -> None:
    model, processor = pair(family)
    inputs = processor.chat(QUESTION, videos=long_film(32), fps=1.0)
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
    check_generate(Recipe.load(name))
    stream_policy(Recipe.load(name))


def test_a_former_name_is_the_preset_that_took_its_place() -> None:
    for old, new in FORMER.items():
        assert old not in presets()
        with pytest.warns(MmaccelWarning, match=f"'{old}' is the former name; write '{new}'"):
            assert read_recipe_fields(old) == read_recipe_fields(new)
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
    """In the head of its file, `field value  where (default: value, ...)`; and the page of the paper has rows of both."""
    text = resources.files("mmaccel").joinpath("recipes", f"{name}.yaml").read_text()
    found = re.findall(r"^# (\w+) (\S+)\s{2,}.*\(default: ([^,)]+)", text, re.MULTILINE)
    assert len(found) == text.count("default: ")
    listed = {field: (yaml.safe_load(value), yaml.safe_load(default)) for field, value, default in found}
    theirs, default = (dict(leaves(Recipe.load(one).to_dict())) for one in (name, ours))
    assert theirs.keys() == default.keys()
    differs = {field: (theirs[field], default[field]) for field in theirs if theirs[field] != default[field]}
    assert listed == {field.rpartition(".")[2]: values for field, values in differs.items()}
    root, rows = Path(__file__).parents[2], f"{name}_tiny-ov_cpu_202611.jsonl"
    told = (root / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert f"`{name}`" in told and f"`{rows}`" in told and (root / "bench" / "results" / rows).is_file()


def leaves(fields: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Fields and values of nested mappings; names have dots."""
    for field, value in fields.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{field}.")
        else:
            yield f"{above}{field}", value
