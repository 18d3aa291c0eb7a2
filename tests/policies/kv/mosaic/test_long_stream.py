"""A trained model on a stream far longer than its window: everything that the memory does happens, and it answers."""

from __future__ import annotations

import pytest

import mmaccel
from mmaccel.core.streams.session import VideoSession
from mmaccel_lab.world import World, render

FRAMES, WINDOW = 500, 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_hundreds_of_frames(name: str) -> None:
    model, processor = mmaccel.load_model(name).float(), mmaccel.load_processor(name)
    world = World.generate(113, FRAMES)
    kv = {"name": "mosaic", "window": WINDOW, "local": 4, "frames": 16, "cache": 16}
    right = asked = 0
    with VideoSession(model, processor, {"kv": kv}) as session:
        table = world.table()
        for first in range(0, FRAMES, 50):
            rows = {column: values[first : first + 50] for column, values in table.items()}
            session.watch(render(rows, 112, 112), fps=1.0)
        before = session.counters()
        units = before["units"]
        assert before["window"] <= 0.1 * units, "nine frames in ten are off the device"
        assert before["host_units"] == model.config.text_config.num_hidden_layers * (units - before["window"])
        for question in world.questions(["needle", "combine"]):
            answer = session.ask(question.text, max_new_tokens=8)
            asked += 1
            right += answer.text.strip(" .") == question.answer.strip(" .")
        after = session.counters()
    named = ("visual_splits", "deferred", "singletons", "eager_splits", "deferred_splits", "fetch_cached")
    assert min(after[each] for each in ("recalled", "resolved", "fetch_covered", "host_copies_in")) > 0
    assert sum(after[each] > 0 for each in named) >= 5, {each: after[each] for each in named}
    assert asked >= 4 and right >= 0.7 * asked, f"{right} of {asked}"
