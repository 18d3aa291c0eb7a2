"""The rates of a device that `mmaccel recommend` keeps on disk, and the seconds that it predicts of the host's memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.backends.select import Store
from mmaccel.core import rates
from mmaccel.core.recipe import Recipe
from mmaccel.models import shapes
from mmaccel.models.recommend import device_of, sizes_of
from tests.models.test_recommend import GB, SIZES, cost


def test_rates_on_disk_are_of_this_machine_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory is looked up anew, as a container has another limit than the one before; with other threads, and where the
    file is damaged, all is measured anew."""
    path, runs = tmp_path / "rates.json", list[int]()

    def measured() -> rates.Device:
        def bench(*_: Any) -> float:
            runs.append(1)
            return 1e-3

        def step(layers: int) -> None: ...

        store = Store(path, rates.Device.from_dict)
        return rates.measure_device(torch.device("cpu"), SIZES, step, step, None, store=store, bench=bench)

    def runs_of() -> int:
        before = len(runs)
        measured()
        return len(runs) - before

    monkeypatch.setattr(rates, "host_total", lambda: 64 * GB)
    first, count = measured(), len(runs)
    monkeypatch.setattr(rates, "host_total", lambda: 4 * GB)
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
    device_of("cpu", sizes_of("llava-onevision-0.5b"))
    assert torch.equal(torch.random.get_rng_state(), before)
