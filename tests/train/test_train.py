"""A run is stopped, goes on without a difference, is exported and installed; batches and pixels follow from their seeds.

What the readers are told of a frame's past is true; the training forward gives the stock model's logits, every branch as if
its conversation stood alone.
"""

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
from mmaccel.models.shipped import tiny_model_folder
from mmaccel_lab import tiny, world
from mmaccel_lab.tiny import tower
from mmaccel_lab.tiny.configs import SPECS, build_model
from mmaccel_lab.train import pixels, plan, step
from mmaccel_lab.train.__main__ import main
from mmaccel_lab.train.data import FIRST_SEED, _past, make_batch
from mmaccel_lab.train.dialect import Dialect
from mmaccel_lab.train.feeder import Feeder, Recipe
from mmaccel_lab.train.loop import Journal, Options, Trainer, _figure, rate_at
from mmaccel_lab.train.plan import Plan
from mmaccel_lab.world import Card, Segment, World
from mmaccel_lab.world.words import QUESTIONS


def _options(out, **changes):
    usual = dict(name="tiny-ov-draft", seconds=600, began=time.monotonic(), steps=40, budget=6, longest=4)
    return Options(out=out, **{**usual, "quick": False, **changes})


def _weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.always
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


@pytest.mark.usefixtures("forkserver")
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
        tiny_model_folder(NAME)
    for _ in range(2):
        assert main(["install", str(run.parent)]) == 0
        assert tiny_model_folder(NAME) == tmp_path / NAME and [p.name for p in tmp_path.iterdir()] == [NAME]


def test_a_device_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([NAME, "--out", str(tmp_path), "--device", "banana"]) == 2
    assert "'banana' is not a device" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    assert _figure(math.nan) is None and _figure(math.inf) is None and _figure(0.12345) == 0.1235
    Journal({"model": NAME}, [{"loss": _figure(math.nan)}]).save(tmp_path)
    assert json.loads((tmp_path / "curve.json").read_text())["losses"] == [{"loss": None}]


PLANS = {
    "question": Plan("t", "question", 5, 2, questions=4, chats=0.5, captions=0.5),
    "caption": Plan("t", "caption", 6, 2, max_words=40),
    "document": Plan("t", "document", 6, 2, segments=3, questions=4, chats=0.5),
}


def _stock(model, spec, dialect, ids, frames, videos):
    """Logits of one conversation from the stock forward; `frames` normalised, `ids` with expanded placeholders."""
    inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
    if spec.model_type == "llava_onevision":
        inputs["pixel_values_videos"] = frames.view(videos, -1, *frames.shape[1:])
    else:
        inputs["pixel_values_videos"] = tower.patchify(frames).flatten(0, 1)
        grid = [len(frames) // videos, spec.height // 14, spec.width // 14]
        inputs["video_grid_thw"] = torch.tensor([grid] * videos)
        inputs["mm_token_type_ids"] = (ids[None] == dialect.video).int() * 2
        if not spec.stamped:
            # One second a grid step and one position a second: exact in every version of transformers.
            inputs["second_per_grid_ts"] = torch.ones(videos)
    with torch.no_grad():
        return model(**inputs).logits[0]


@pytest.mark.parametrize("name", ["tiny-ov-draft", "tiny-qwen-draft", "tiny-qwen3", "tiny-hybrid"])
@pytest.mark.parametrize("kind", PLANS)
def test_branches_equal_separate_stock_prompts(name, kind, monkeypatch):
    monkeypatch.setattr("mmaccel_lab.train.data.INTERVALS", ((1.0, 1.0),))
    spec = SPECS[name]
    dialect = Dialect(spec)
    batch = make_batch(PLANS[kind], dialect, Random(7))
    model = build_model(spec, seed=1)
    # Random weights of trained size, so that a wrong position or a leak is seen in the logits.
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    feed = step.upload(batch, torch.device("cpu"))
    frames = pixels.draw(feed.table, spec)
    with torch.no_grad():
        hidden = step.look(model, spec, feed, frames).states
        ours = model.lm_head(hidden)
    checked = 0
    per_row = batch.plan.frames
    for row in range(batch.ids.shape[0]):
        shown = frames[row * per_row : (row + 1) * per_row]
        prefix = batch.ids[row, : batch.length[row]]
        for owner in range(batch.branch[row].max() + 1):
            columns = (batch.branch[row] == owner).nonzero()[0] + batch.prefix
            ids = torch.from_numpy(np.concatenate([prefix, batch.ids[row, columns]]))
            want = _stock(model, spec, dialect, ids, shown, batch.plan.segments)
            torch.testing.assert_close(ours[row, columns], want[len(prefix) :], atol=1e-4, rtol=1e-4)
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize(("kind", "segments"), [("question", 1), ("caption", 1), ("document", 3)])
def test_tokens_are_those_of_the_frame(kind, segments):
    """M-RoPE tells the frame of a token: its first coordinate counts frames from the start of its video."""
    plan = Plan("t", kind, 12, 3, segments=segments, questions=2)
    batch = make_batch(plan, Dialect(SPECS["tiny-qwen"]), Random(3), training=False)
    width = batch.ids.shape[1]
    assert len(batch.recall) == len(batch.past) > 0
    time, tall, wide = (batch.positions[axis].reshape(-1)[batch.recall] for axis in range(3))
    # The fifteen tokens of one frame: one moment, three rows of five.
    assert (time == time[:, :1]).all()
    assert (tall - tall[:, :1] == np.repeat(np.arange(3), 5)).all()
    assert (wide - wide[:, :1] == np.tile(np.arange(5), 3)).all()
    # A column's start is its video's start, so the difference of time and column is the frame within its video.
    frame = (time - wide)[:, 0]
    card = batch.table["shape"].reshape(3, 12)
    per = 12 // segments
    for at, told, inside in zip(batch.recall[:, 0] // width, batch.past, frame, strict=True):
        shown = card[at].reshape(segments, per)[:, inside]
        assert told[2] < 0 or (shown >= 0).any()


def test_llava_tokens_lie_inside_videos_and_not_on_newlines():
    spec = SPECS["tiny-ov"]
    dialect = Dialect(spec)
    batch = make_batch(
        Plan("t", "document", 12, 3, segments=3, questions=2), dialect, Random(3), training=False
    )
    flat = batch.ids.reshape(-1)
    assert (flat[batch.recall] == dialect.video).all() and (np.diff(batch.recall, axis=1) == 1).all()
    # A frame is followed by another, or by the newline.
    assert (flat[batch.recall.max(1) + 1] == dialect.video).all()


def test_the_past_is_what_came_before():
    cards = (Card(1, "red", "star"), Card(4, "blue", "ring"), Card(5, "green", "moon"))
    made = World(0, 8, "needle", cards, (Segment(0, 4, "beach"), Segment(4, 8, "forest")))
    star, ring = (list(world.SHAPES).index(name) for name in ("star", "ring"))
    red, blue = (list(world.COLOURS).index(name) for name in ("red", "blue"))
    beach = list(world.SCENES).index("beach")
    assert _past(made).tolist() == [[1, -1, -1, 0, -1], [4, star, red, 1, beach], [5, ring, blue, 2, -1]]


def test_notes_are_told_only_in_training():
    plan = Plan("t", "document", 24, 8, segments=3, questions=2)
    dialect = Dialect(SPECS["tiny-ov"])
    asked = dialect.encode("what is in the notes ?")

    def told(training):
        batch = make_batch(plan, dialect, Random(3), training=training)
        rows = batch.ids[:, batch.prefix :]
        windows = np.lib.stride_tricks.sliding_window_view(rows, len(asked), axis=1)
        return int((windows == asked).all(-1).sum())

    assert told(True) > 0 and told(False) == 0
