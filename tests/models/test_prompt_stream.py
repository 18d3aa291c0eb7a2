"""`generate` on a memory of streams: the video goes into it, and the answer is a session's, and the plain model's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from tests.models.streams import FPS, MODELS, QUESTION, every_stream, film, open_session, pair
from tests.models.streams import logits as session_logits

ROOM = {name: kv for name, kv in every_stream().items() if name not in ("full", "window")}
TIGHT = {name: kv for name, kv in every_stream(4, 4).items() if name in ROOM}
CLOSE = {"rtol": 0.0, "atol": 1e-5}
MOSAIC = ROOM["mosaic"]


def ask(name: str, content: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
    return pair(name)[1].chat(content, fps=FPS, **how)  # type: ignore[no-any-return]


@functools.cache
def prompt(name: str, frames: int) -> dict[str, Any]:
    return ask(name, [{"type": "video", "video": film(frames)}, {"type": "text", "text": QUESTION}])


def said(name: str, kv: Any, inputs: dict[str, Any], tokens: int = 6, **options: Any) -> Any:
    """What `generate` gives with a memory; None: the plain model. New ids, and logits [n, V] of each."""
    model = pair(name)[0]
    how = {"max_new_tokens": tokens, "do_sample": False, **options}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    if kv is None:
        out = model.generate(**inputs, **how)
    else:
        with mmaccel.accelerate(model, kv=kv) as fast:
            out = fast.generate(**inputs, **how)
    assert torch.equal(out.sequences[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(one[0], other[0])
    torch.testing.assert_close(one[1], other[1], **CLOSE)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv", ROOM)
def test_with_room_for_all_it_is_the_plain_model(kv: str, name: str) -> None:
    inputs = prompt(name, 14)
    same(said(name, ROOM[kv], inputs), said(name, None, inputs))


@pytest.mark.parametrize("name", ("tiny-ov", "random-qwen"))
@pytest.mark.parametrize("kv", TIGHT)
def test_it_is_the_session(kv: str, name: str) -> None:
    """Where a memory keeps little, too: both read the same units in the same passes, and search by the same words."""
    ids, logits = said(name, TIGHT[kv], prompt(name, 24))
    with open_session(name, TIGHT[kv]) as session:
        session.watch(film(24), fps=FPS)
        torch.testing.assert_close(session_logits(session), logits[0, 0], **CLOSE)  # type: ignore[arg-type]
        answer = session.ask(QUESTION, 6)
    ends = pair(name)[0].generation_config.eos_token_id
    assert [token for token in ids[0].tolist() if token != ends] == list(answer.ids)


def test_the_report_has_the_memory_s_counters_and_the_store_is_closed() -> None:
    model, inputs = pair("tiny-ov")[0], prompt("tiny-ov", 24)
    with mmaccel.accelerate(model, kv=TIGHT["rekv"]) as fast:
        ids = fast.generate(**inputs, max_new_tokens=4, do_sample=False)
        report = fast.report()
        assert fast.last_state is None
    count = ids.shape[1] - inputs["input_ids"].shape[1]
    assert report.prompt_tokens == inputs["input_ids"].shape[1] and report.new_tokens == count
    assert report.ttft_s is not None and report.kv["units"] == 24
    assert 0 < report.kv["resident"] < 24 and report.kv["host_bytes"] > 0


def test_a_plain_call_after_detaching_is_the_plain_model_s() -> None:
    inputs = prompt("random-qwen", 6)
    before = said("random-qwen", None, inputs)
    said("random-qwen", MOSAIC, inputs)
    torch.testing.assert_close(said("random-qwen", None, inputs), before, rtol=0, atol=0)
