"""What the readers are told of a frame's past is true; the training forward gives the stock model's logits.

Every branch as if its conversation stood alone.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from mmaccel_lab import world
from mmaccel_lab.tiny import tower
from mmaccel_lab.tiny.configs import SPECS, build_model
from mmaccel_lab.train import pixels, step
from mmaccel_lab.train.data import _past, make_batch
from mmaccel_lab.train.dialect import Dialect
from mmaccel_lab.train.plan import Plan
from mmaccel_lab.world import Card, Segment, World

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
    assert (
        flat[batch.recall.max(1) + 1] == dialect.video
    ).all()  # a frame is followed by another, or by the newline


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
