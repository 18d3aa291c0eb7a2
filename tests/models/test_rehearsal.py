"""Short sessions of a reduced model for `mmaccel recommend`; the rates that it keeps on disk, and what it predicts."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.backends.select import CostFile
from mmaccel.core import costs, rates
from mmaccel.core.errors import ModelError
from mmaccel.core.prefill.attention import MIN_ROWS
from mmaccel.core.recipe import Recipe
from mmaccel.models import rehearsal, shapes, step
from mmaccel.models.recommend import candidate_recipes, device_rates_of, model_sizes_of
from tests.models.streams import pair
from tests.models.test_recommend import DEVICE, GB, SIZES, cost
from tests.spies import broken, product

CPU = torch.device("cpu")
CLUSTERED = {"name": "mosaic", "frames": 4, "window": 6, "local": 2}
KINDS: dict[str, dict[str, Any]] = {"call": {"questions": 1}, "session": {}, "live": {"live": True}}


def work(**given: Any) -> costs.Workload:
    return costs.Workload(**{"frames": 600, "questions": 4, "memory": 80 * GB, "host": 500 * GB, **given})


def told(**given: Any) -> rates.MeasuredOverhead:
    none = (0.0,) * 6
    return rates.MeasuredOverhead(**{"read": none, "question": none, "step": none, "first": (), **given})


def with_told(recipe: Recipe, one: costs.Workload, surplus: rates.MeasuredOverhead) -> rates.DeviceRates:
    return replace(DEVICE, sessions={costs.overhead_key(recipe, one): surplus})


def seconds(
    plane: rates.Plane, layers: tuple[int, int], units: tuple[int, int]
) -> dict[tuple[int, int], float]:
    return {(n, m): rates.predict_plane_seconds(plane, n, m) for n, m in itertools.product(layers, units)}


def test_what_begins_costs_no_less_than_nothing() -> None:
    """What grows faster than the video are pairs, and no time won at its begin."""
    pairs = 0.0, 1e-4, 2e-6, 0.0, 1e-5, 5e-7
    found = rates.fit_cost_plane(seconds(pairs, (4, 12), (96, 320)), pairs=True)
    assert found == pytest.approx(pairs)
    line = rates.fit_cost_plane(seconds(pairs, (4, 12), (96, 320)))
    assert line[0] == line[2] == line[3] == line[5] == 0.0
    assert rates.predict_plane_seconds(line, 12, 320) == pytest.approx(
        rates.predict_plane_seconds(pairs, 12, 320)
    )
    steep = {(n, units): 0.01 * units - 1 for n in (4, 12) for units in (96, 320)}
    beyond = rates.fit_cost_plane(steep, least=110)
    assert rates.predict_plane_seconds(beyond, 28, 110) == pytest.approx(0.1)
    assert rates.predict_plane_seconds(rates.fit_cost_plane(steep, least=90), 28, 90) == pytest.approx(
        0.0, abs=1e-9
    )
    same = rates.fit_cost_plane({(4, 96): 1.0, (4, 320): 3.0, (12, 96): 2.0, (12, 320): 4.0}, grows=False)
    assert [rates.predict_plane_seconds(same, 28, units) for units in (1, 1800)] == pytest.approx([5.0, 5.0])
    leaves = rates.fit_cost_plane(seconds((-0.152, 2e-3, *[0.0] * 4), (4, 12), (96, 320)), least=76)
    assert rates.predict_plane_seconds(leaves, 28, 20) == 0.0, "no frame has left the window"
    odd = rates.fit_cost_plane({(4, 96): 1.5, (4, 320): 1.5, (12, 96): 0.5, (12, 320): 0.5})
    assert rates.predict_plane_seconds(odd, 28, 0) == pytest.approx(1.0), "nor does more of it cost less"


def test_a_surplus_is_added_where_it_was_measured_and_nowhere_else() -> None:
    recipe, one = Recipe.load("film-many-questions"), work()
    plain = costs.predict_cost(recipe, SIZES, one, DEVICE)
    more = told(
        read=(1.0, 0.0, 0.0, 0.0, 1e-4, 0.0), question=(2e-3, *[0.0] * 5), step=(*[0.0] * 3, 1e-4, 0.0, 0.0),
        first=((0.0, 0.1), (0.5, 0.0)),
    )  # fmt: skip
    device = with_told(recipe, one, more)
    found = costs.predict_cost(recipe, SIZES, one, device)
    assert found.read_s - plain.read_s == pytest.approx(1 + 600 * 28 * 1e-4)
    assert found.question_s - plain.question_s == pytest.approx(2e-3)
    assert found.token_s - plain.token_s == pytest.approx(28 * 1e-4)
    assert found.once_s == pytest.approx((2.8, 0.5)) and found.first_s - found.read_s > 2.8
    grown = found.total_s - found.read_s - 4 * found.question_and_answer_s
    assert grown == pytest.approx(3.3) and found.device_bytes == plain.device_bytes
    single = costs.predict_cost(recipe, SIZES, replace(one, questions=1), device)
    assert single.total_s == pytest.approx(single.read_s + single.question_and_answer_s + 2.8)
    halved = costs.predict_cost(recipe, SIZES, replace(one, step_tokens=2.0), device)
    assert halved.token_s == pytest.approx(found.token_s / 2), "of a step, which gives two tokens"
    for other, what in ((Recipe(), one), (recipe, replace(one, live=True))):
        assert costs.predict_cost(other, SIZES, what, device) == costs.predict_cost(
            other, SIZES, what, DEVICE
        )
    less = costs.predict_cost(recipe, SIZES, one, with_told(recipe, one, told(read=(-1e9, *[0.0] * 5))))
    assert less.read_s == pytest.approx(plain.read_s / 2)


def test_a_draft_model_leaves_the_rest_of_a_recipe_what_it_is() -> None:
    film, everything = Recipe.load("film-many-questions"), Recipe.load("everything")
    drafted = replace(film, draft=everything.draft)
    assert costs.overhead_key(film, work()) == costs.overhead_key(drafted, work())
    ways = {costs.overhead_key(film, work(live=live, questions=n)) for live in (True, False) for n in (1, 2)}
    assert len(ways) == 2, "it is read in a session for one question too"
    assert costs.overhead_key(Recipe(), work(questions=1)) != costs.overhead_key(Recipe(), work())


def sessions(monkeypatch: pytest.MonkeyPatch, spent: rates.MeasuredOverhead) -> list[tuple[int, int, int]]:
    """Sessions that take what is predicted and `spent`; returns the layers, frames and questions of each."""
    ran: list[tuple[int, int, int]] = []

    def reduced(model: Any, layers: int, *_: Any) -> Any:
        return torch.nn.Linear(1, 1, device="meta"), layers

    def run(
        model: Any, layers: int, recipe: Recipe, film: Any, one: costs.Workload, **_: Any
    ) -> rehearsal.RunTimings:
        ran.append((layers, len(film), one.questions))
        weights = SIZES.layer_weights * layers // 28
        sizes = replace(
            SIZES, layers=layers, layer_weights=weights, weights=SIZES.weights - SIZES.layer_weights + weights
        )
        told = costs.predict_cost(recipe, sizes, replace(one, step_tokens=1.0), with_told(recipe, one, spent))
        once = [*told.once_s, *[0.0] * one.questions]
        asked = ((told.question_s + once[n], told.token_s) for n in range(one.questions))
        return rehearsal.RunTimings(told.read_s, tuple(asked), 1.0)

    monkeypatch.setattr(rehearsal, "_reduced", reduced)
    monkeypatch.setattr(torch.nn.Linear, "device", CPU, raising=False)
    monkeypatch.setattr(rehearsal, "run_and_time", run)
    return ran


def measured(store: Any, recipes: list[Recipe], **given: Any) -> rates.DeviceRates:
    how = {"size": (28, 28), "recipes": recipes, "work": work(), "store": store, **given}
    return rehearsal.add_measured_overheads(DEVICE, CPU, SIZES, "llava-onevision-7b", **how)


def test_sessions_of_four_and_twelve_layers_tell_of_28(monkeypatch, tmp_path: Path) -> None:
    """The prediction then is what a session takes whose host needs so long; kept on disk, and measured once."""
    spent = told(
        read=(0.4, 1e-3, 0.0, 0.01, 3e-4, 0.0), question=(*[0.0] * 3, 5e-4, 0.0, 0.0),
        step=(1e-3, 0.0, 0.0, 1e-4, 0.0, 0.0),
        first=((0.1, 0.02), (0.0, 0.01), (0.0, 0.0)),
    )  # fmt: skip
    ran = sessions(monkeypatch, spent)
    store = CostFile(tmp_path / "sessions.json", rates.MeasuredOverhead.from_dict)
    # Of a dense prefill, whose pairs are counted in no time.
    recipe, lines = Recipe.load("film-many-questions", sparse="dense"), list[str]()
    found = measured(store, [recipe], say=lines.append)
    assert sorted({layers for layers, *_ in ran}) == [4, 12] and len(ran) == 4 and len(store) == 1
    assert "1 kinds of sessions on h100" in lines[0] and "2 of 2" in lines[-1]
    for frames in (200, 1800):
        one = work(frames=frames, questions=20)
        right = costs.predict_cost(recipe, SIZES, one, with_told(recipe, one, spent))
        assert costs.predict_cost(recipe, SIZES, one, found).total_s == pytest.approx(right.total_s, rel=1e-6)
        assert costs.predict_cost(recipe, SIZES, one, DEVICE).total_s < 0.8 * right.total_s
    assert measured(store, [recipe]) == found and len(ran) == 4
    measured(store, [replace(recipe, draft=Recipe.load("everything").draft)])
    assert len(ran) == 4, "a draft model beside it is not run"
    measured(store, [recipe, Recipe.load("exact")])
    assert len(ran) == 10 and len(store) == 2, (
        "what is planted is over three times a short dense session: run again"
    )
    whole = json.loads(store.path.read_text())
    for damage in ({"read": [1.0]}, {"first": None}, {"step": "fast"}):
        store.path.write_text(json.dumps({key: {**one, **damage} for key, one in whole.items()}))
        count = len(ran)
        assert measured(store, [recipe]) == found and len(ran) == count + 4


def test_what_stops_a_session_once_is_not_predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran, late = sessions(monkeypatch, told()), [20.0]
    plain = rehearsal.run_and_time

    def run(model: Any, layers: int, recipe: Recipe, film: Any, one: costs.Workload, **how: Any) -> Any:
        found = plain(model, layers, recipe, film, one, **how)
        stopped = late.pop() if ran[-1][:2] == (12, 316) and late else 0.0
        return replace(found, read_s=found.read_s + stopped)

    monkeypatch.setattr(rehearsal, "run_and_time", run)
    recipe = Recipe.load("film-many-questions", sparse="dense")
    found = measured(CostFile(tmp_path / "sessions.json", rates.MeasuredOverhead.from_dict), [recipe])
    many = work(frames=1800, questions=20)
    assert costs.predict_cost(recipe, SIZES, many, found).read_s == pytest.approx(
        costs.predict_cost(recipe, SIZES, many, DEVICE).read_s, rel=1e-6
    )
    assert len(ran) == 5 and not late


def test_what_takes_too_long_or_too_much_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = sessions(monkeypatch, told())
    store = CostFile(tmp_path / "sessions.json", rates.MeasuredOverhead.from_dict)
    slow = replace(DEVICE, products={width: rate / 1e4 for width, rate in DEVICE.products.items()})
    small, short = replace(DEVICE, memory=8 * GB), replace(SIZES, limit=8192)
    for device, sizes in ((slow, SIZES), (small, SIZES), (DEVICE, short)):
        given = sizes, "llava-onevision-7b", (28, 28), [Recipe()], work()
        assert rehearsal.add_measured_overheads(device, CPU, *given, store=store) == device
    assert not ran and not len(store)


@pytest.mark.parametrize(
    "error", [ModelError("it is full."), torch.OutOfMemoryError("it is full.\nfree some")]
)
def test_a_family_that_cannot_be_run_leaves_the_prediction(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(monkeypatch, rehearsal, "_reduced", error)
    store, lines = CostFile(tmp_path / "sessions.json", rates.MeasuredOverhead.from_dict), list[str]()
    assert measured(store, [Recipe()], say=lines.append) == DEVICE and not len(store)
    assert lines[-1] == "sessions are not measured: it is full."


@pytest.mark.parametrize("name", ["llava-onevision-7b", "qwen2.5-vl-7b"])
def test_a_shape_gets_a_processor_that_counts_as_its_sizes_do(name: str) -> None:
    processor, sizes = rehearsal._processor(shapes.model_config(name, 2)), model_sizes_of(name)
    few, many = (
        processor.chat("What?", videos=torch.zeros(n, 3, 252, 448, dtype=torch.uint8), fps=0.5)["input_ids"]
        for n in (2, 2 + sizes.frames_per_unit)
    )
    assert many.shape[1] - few.shape[1] == sizes.tokens
    question = processor.chat(rehearsal.QUESTION, videos=torch.zeros(2, 3, 252, 448, dtype=torch.uint8))
    assert question["input_ids"].shape[1] - 2 // sizes.frames_per_unit * sizes.tokens < min(
        MIN_ROWS, step.WIDTHS[-1]
    )


@pytest.mark.parametrize(("family", "kind"), product(["random-ov", "random-qwen"], KINDS))
def test_sessions_run_on_a_loaded_model(family: str, kind: str, monkeypatch, tmp_path: Path) -> None:
    """One layer and two of a random model, by its own processor; the caller's random numbers stay as they are."""
    monkeypatch.setattr(rehearsal, "UNITS", (8, 16, 24))
    monkeypatch.setattr(rehearsal, "ANSWER", 4)
    monkeypatch.setattr(rehearsal, "LIMIT_S", 1e9)
    model, processor = pair(family)
    sizes = model_sizes_of(model, (42, 70), processor=processor)
    kv = "full" if kind == "call" else CLUSTERED
    recipe, one = Recipe.load(kv=kv), work(**KINDS[kind])
    before = torch.get_rng_state()
    store = CostFile(tmp_path / "sessions.json", rates.MeasuredOverhead.from_dict)
    slow = replace(DEVICE, name="cpu")
    found = rehearsal.add_measured_overheads(
        slow, CPU, sizes, model, (42, 70), [recipe], one, processor=processor, store=store
    )
    (way,) = found.sessions
    assert way.startswith(f"{kind} ") and torch.equal(torch.get_rng_state(), before)
    surplus = found.sessions[way]
    assert rates.predict_plane_seconds(surplus.read, sizes.layers, 24) > 0, "random-ov on a CPU is no H100"
    assert len(surplus.first) == (1 if kind == "call" else rehearsal.FIRST)
    stored = CostFile(store.path, rates.MeasuredOverhead.from_dict)
    assert stored.get(next(iter(json.loads(store.path.read_text())))) == surplus


def test_what_is_run_is_what_would_be_recommended() -> None:
    stored = candidate_recipes(SIZES, work())
    assert Recipe.load("exact") in stored and Recipe.load("stream") not in stored
    assert candidate_recipes(SIZES, work(live=True)) == [Recipe.load("stream")]


@pytest.mark.parametrize("captures", [True, False])
def test_on_a_gpu_what_a_call_s_steps_take_more_comes_once(captures: bool) -> None:
    """Elsewhere nothing is captured, and it is of each step."""
    one, cases = replace(work(questions=1), answer=16), dict[tuple[int, int], Any]()
    for layers, units in itertools.product((4, 12), (94, 316)):
        cost = costs.predict_cost(Recipe(), replace(SIZES, layers=layers), replace(one, frames=units), DEVICE)
        taken = rehearsal.RunTimings(cost.read_s + cost.question_s, ((0.0, cost.token_s + 1e-3),), 1.0)
        cases[layers, units] = taken, cost
    found = rehearsal._surplus(cases, True, 0, captures)
    once, step = (0.016, 0.0) if captures else (0.0, 1e-3)
    assert found.first[0] == pytest.approx((once, 0.0))
    assert rates.predict_plane_seconds(found.step, 28, 600) == pytest.approx(step)
    assert rates.predict_plane_seconds(found.read, 28, 600) == pytest.approx(0.0, abs=1e-9)


def test_rates_on_disk_are_of_this_machine_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory is looked up anew, as containers differ; with other threads, or a damaged file, all is measured anew."""
    path, runs = tmp_path / "rates.json", list[int]()

    def measured() -> rates.DeviceRates:
        def bench(*_: Any) -> float:
            runs.append(1)
            return 1e-3

        def step(layers: int) -> None: ...

        store = CostFile(path, rates.DeviceRates.from_dict)
        return rates.measure_device(torch.device("cpu"), SIZES, step, step, None, store=store, bench=bench)

    def runs_of() -> int:
        before = len(runs)
        measured()
        return len(runs) - before

    monkeypatch.setattr(rates, "total_host_bytes", lambda: 64 * GB)
    first, count = measured(), len(runs)
    monkeypatch.setattr(rates, "total_host_bytes", lambda: 4 * GB)
    assert first.memory == 64 * GB and measured() == replace(first, memory=4 * GB) and len(runs) == count
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 1000)
        assert runs_of() == count
    whole = json.loads(path.read_text())
    for field, value in {"products": {"wide": 1.0}, "layer": None, "copy": "fast"}.items():
        path.write_text(json.dumps({key: {**one, field: value} for key, one in whole.items()}))
        assert runs_of() == count and runs_of() == 0


def test_frames_that_wait_on_the_host_for_a_question_are_not_pinned() -> None:
    """`no_cache` keeps frames in plain memory, and a question sends but those that it runs."""
    recipe = Recipe.load(kv={"name": "no_cache", "frames": 64, "kept": 1 << 16})
    few, many = (cost(recipe, frames=n, questions=3) for n in (64, 60_000))
    assert many.host_bytes > 100 * few.host_bytes and many.question_s == few.question_s


def test_what_is_measured_leaves_random_numbers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a session are timed on a shape whose weights are drawn by a seed; here one of few words."""
    shape = shapes.SHAPES["llava-onevision-0.5b"]
    monkeypatch.setitem(shapes.SHAPES, "llava-onevision-0.5b", replace(shape, vocab=2000))

    def measured(place: Any, sizes: Any, step: Any, few: Any, *_: Any) -> Any:
        few(1)
        return torch.rand(1)

    monkeypatch.setattr(rates, "measure_device", measured)
    before = torch.random.get_rng_state()
    device_rates_of("cpu", model_sizes_of("llava-onevision-0.5b"))
    assert torch.equal(torch.random.get_rng_state(), before)
