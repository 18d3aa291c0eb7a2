"""From a run to an installed model with its card."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from mmaccel.core.errors import ModelError
from mmaccel.models.shipped import path
from mmaccel_lab import tiny
from mmaccel_lab.train.__main__ import main
from mmaccel_lab.train.loop import Journal, Options, Trainer, _figure
from mmaccel_lab.world.words import QUESTIONS

NAME = "tiny-ov-draft"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps with its checkpoint and its export."""
    runs = tmp_path_factory.mktemp("runs")
    out = runs / NAME
    options = Options(
        name=NAME,
        out=out,
        seconds=600,
        began=time.monotonic(),
        steps=40,
        stop_at=2 / 40,
        seed=5,
        budget=6,
        longest=4,
        quick=False,
    )
    trainer = Trainer(options)
    trainer.slowdown = 0.7
    trainer.run()
    assert main(["export", str(out), str(out / "export")]) == 0
    return out


def test_a_checkpoint_keeps_its_pace_and_options(run: Path, tmp_path: Path) -> None:
    options = Options(
        name=NAME, out=tmp_path, seconds=1, began=0.0, steps=40, resume=run, budget=6, longest=4
    )
    assert Trainer(options).slowdown == 0.7
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
