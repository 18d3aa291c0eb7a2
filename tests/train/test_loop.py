"""A run is stopped, goes on without a difference, is exported and installed; batches and pixels follow from their seeds."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmaccel.core.errors import ModelError
from mmaccel.models.shipped import path
from mmaccel_lab import tiny, world
from mmaccel_lab.tiny.configs import SPECS
from mmaccel_lab.train import pixels, plan
from mmaccel_lab.train.__main__ import main
from mmaccel_lab.train.data import FIRST_SEED, make_batch
from mmaccel_lab.train.dialect import Dialect
from mmaccel_lab.train.feeder import Feeder, Recipe
from mmaccel_lab.train.loop import Journal, Options, Trainer, _figure, rate_at
from mmaccel_lab.world.words import QUESTIONS


def _options(out, **changes):
    usual = dict(
        name="tiny-ov-draft",
        out=out,
        seconds=600,
        began=time.monotonic(),
        steps=40,
        budget=6,
        longest=4,
        quick=False,
    )
    return Options(**{**usual, **changes})


def _weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_resuming_is_exact(tmp_path):
    whole = Trainer(_options(tmp_path / "a", stop_at=8 / 40))
    whole.run()
    half = Trainer(_options(tmp_path / "b", stop_at=5 / 40))
    half.run()
    assert half.step == 5 and not torch.equal(_weights(half), _weights(whole))
    rest = Trainer(_options(tmp_path / "c", stop_at=8 / 40, resume=tmp_path / "b"))
    rest.run()
    assert rest.step == whole.step == 8
    assert torch.equal(_weights(rest), _weights(whole))
    feeder = Feeder(Recipe("tiny-ov-draft", 0, 6, 4, 40), 8, 0)
    batch = feeder.next(0.0)
    assert whole._train(batch)[0] == rest._train(batch)[0]


def test_workers_make_the_same_batches_in_order():
    recipe = Recipe("tiny-ov-draft", 1, 6, 4, 100)
    alone, together = Feeder(recipe, 3, 0), Feeder(recipe, 3, 2)
    try:
        for _ in range(4):
            first, second = alone.next(0.0), together.next(0.0)
            assert first.plan == second.plan and np.array_equal(first.ids, second.ids)
    finally:
        together.close()


def test_rate_warms_up_holds_and_decays():
    assert rate_at(0.0, 1.0) < 0.1 and rate_at(0.3, 1.0) == 1.0 and rate_at(1.0, 1.0) == pytest.approx(0.01)


@pytest.mark.parametrize("phases", [plan.TARGET, plan.DRAFT])
def test_plans_stay_within_their_phase(phases):
    rng = Random(0)
    for progress in np.linspace(0, 1, 200):
        ceiling = plan.phase_at(phases, progress).ceiling
        one = plan.draw(phases, progress, 2048, rng)
        longest = max(ceiling, 128) if one.kind == "caption" else ceiling
        assert 1 <= one.frames <= longest and one.rows * one.frames <= max(2048, one.frames)
        assert one.frames % one.segments == 0


def test_training_seeds_are_apart_from_evaluation_seeds(monkeypatch):
    seen = []
    generate = world.World.generate.__func__
    monkeypatch.setattr(
        world.World,
        "generate",
        classmethod(lambda cls, seed, *a, **k: (seen.append(seed), generate(cls, seed, *a, **k))[1]),
    )
    dialect = Dialect(SPECS["tiny-ov-draft"])
    one = plan.Plan("t", "question", 4, 8, questions=2)
    make_batch(one, dialect, Random(0))
    assert min(seen) >= FIRST_SEED
    seen.clear()
    make_batch(one, dialect, Random(0), training=False)
    assert max(seen) < 2**31


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_pixels_are_the_packaged_preprocessing(name):
    spec = SPECS[name]
    table = world.World.generate(11, 4).table()
    ours = pixels.draw(table, spec)
    frames = world.render(table, pixels.NATIVE_HEIGHT, pixels.NATIVE_WIDTH)
    small = F.interpolate(
        frames, size=(spec.height, spec.width), mode="bicubic", antialias=True, align_corners=False
    )
    back = ours * torch.tensor(spec.std).view(3, 1, 1) * 255 + torch.tensor(spec.mean).view(3, 1, 1) * 255
    difference = (back - small.float()).abs()
    # The 8-bit resize uses integer weights: single grey levels differ.
    assert difference.max() <= 2.5 and difference.mean() < 0.1


def test_codec_is_mild_and_stronger_when_asked():
    table = world.World.generate(3, 6).table()
    frames = world.render(table, 168, 280).float()
    weak, strong = (
        (pixels.codec(frames, torch.full((6,), s), torch.Generator().manual_seed(0)) - frames).abs().mean()
        for s in (0.2, 1.0)
    )
    assert 0.1 < weak < strong < 14


def test_a_draft_stops_when_it_knows_enough(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mmaccel_lab.train.loop.DRAFT_QUICK_SECONDS", 0.0)
    monkeypatch.setattr("mmaccel_lab.train.evaluate.DRAFT_QUICK", ())
    for enough, steps in ((0.0, 1), (0.5, 6)):
        monkeypatch.setattr("mmaccel_lab.train.loop.DRAFT_ENOUGH", enough)
        trainer = Trainer(_options(tmp_path / str(enough), quick=True, stop_at=6 / 40))
        trainer.run()
        assert trainer.step == steps and (tmp_path / str(enough) / "checkpoint.pt").is_file()


NAME = "tiny-ov-draft"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps with its checkpoint and its export."""
    runs = tmp_path_factory.mktemp("runs")
    out = runs / NAME
    trainer = Trainer(_options(out, stop_at=2 / 40, seed=5))
    trainer.slowdown = 0.7
    trainer.run()
    assert main(["export", str(out), str(out / "export")]) == 0
    return out


def test_a_checkpoint_keeps_its_pace_and_options(run: Path, tmp_path: Path) -> None:
    assert Trainer(_options(tmp_path, resume=run)).slowdown == 0.7
    text = (run / "export" / "README.md").read_text()
    assert "seed 5, videos of up to 4 frames" in text
    assert json.loads((run / "export" / "curve.json").read_text())["options"]["seed"] == 5


def test_a_card_holds_the_measured_rows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, export = tmp_path / "rows.json", run / "export"
    rows.write_text(json.dumps({"model": NAME, "markdown": "| V-NIAH | 8 | 128 | 12.3% |"}))
    assert main(["card", str(export), "--rows", str(rows)]) == 0
    text = (export / "README.md").read_text()
    assert "| V-NIAH | 8 | 128 | 12.3% |" in text and "license: apache-2.0" in text
    for form in QUESTIONS.values():
        assert form.split("{")[0].strip(" ?").replace(" ,", ",") in text.lower()
    rows.write_text(json.dumps({"model": "tiny-qwen", "markdown": "x"}))
    assert main(["card", str(export), "--rows", str(rows)]) == 2
    assert main(["card", str(tmp_path)]) == 2
    assert f"holds no table of {NAME}" in capsys.readouterr().err


def test_installing_puts_models_where_they_are_found(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny, "ROOT", tmp_path)
    assert main(["install", str(tmp_path)]) == 2 and "give the --out folder" in capsys.readouterr().err
    with pytest.raises(ModelError, match="make train"):
        path(NAME)
    for _ in range(2):
        assert main(["install", str(run.parent)]) == 0
        assert path(NAME) == tmp_path / NAME and [p.name for p in tmp_path.iterdir()] == [NAME]


def test_a_device_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([NAME, "--out", str(tmp_path), "--device", "banana"]) == 2
    assert "'banana' is not a device" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    assert _figure(math.nan) is None and _figure(math.inf) is None and _figure(0.12345) == 0.1235
    Journal({"model": NAME}, [{"loss": _figure(math.nan)}]).save(tmp_path)
    assert json.loads((tmp_path / "curve.json").read_text())["losses"] == [{"loss": None}]
