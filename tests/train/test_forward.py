"""The training forward gives the stock model's logits: every branch as if its conversation stood alone."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from mmaccel_lab.tiny import tower
from mmaccel_lab.tiny.configs import SPECS, build_model
from mmaccel_lab.train import pixels, step
from mmaccel_lab.train.data import make_batch
from mmaccel_lab.train.dialect import Dialect
from mmaccel_lab.train.plan import Plan

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
