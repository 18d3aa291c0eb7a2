"""A question on a stretch of time sees the frames of that time, and of the stream no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.core.errors import ModelError
from mmaccel.core.streams.asking import asked
from tests.models.streams import CLUSTERS, FPS, QUESTION, every_stream, film, open_session, pair
from tests.products import product

pytestmark = pytest.mark.in_turn("kv", 4)

KEEPERS = {
    **{
        name: fields
        for name, fields in every_stream(frames=4, window=6).items()
        if name not in ("window", "recent")
    },
    "mosaic": {"name": "mosaic", "window": 6, "local": 2, "frames": 4, "index": CLUSTERS, "encode_frames": 2},
    "rekv reps": {"name": "rekv", "window": 6, "local": 2, "frames": 4, "reps": 3, "cache": 4},
}
COUNT = 25


def first(session: Any, between: tuple[float, float] | None) -> torch.Tensor:
    with asked(session._live, QUESTION, 4, beside=True, between=between) as turn:
        return turn.logits[0].clone()


@torch.no_grad()
def masked(name: str, begin: int, end: int) -> torch.Tensor:
    """[V] what the plain model says where the words of the question see, of the frames, those from `begin` to `end`."""
    model, processor = pair(name)
    content = [{"type": "video", "video": film(COUNT)}, {"type": "text", "text": QUESTION}]
    inputs = processor.chat(content, fps=FPS)
    shown = (inputs["input_ids"][0] == processor.video_token_id).nonzero()[:, 0]
    pace = 2 if name == "random-qwen" else 1
    units = -(-COUNT // pace)
    per = len(shown) // units
    length, last = inputs["input_ids"].shape[1], int(shown[units * per - 1])
    mask = torch.full((length, length), -torch.inf).triu(1)
    gone = shown[: units * per].view(units, per)
    gone = torch.cat([gone[: begin // pace], gone[end // pace :]]).flatten()
    rows = torch.arange(last + 1, length)
    mask[rows[:, None], gone] = -torch.inf
    inputs["attention_mask"] = mask[None, None]
    whole = processor.chat(content, fps=FPS)
    positions = {}
    if hasattr(model.model, "get_rope_index"):
        given = {k: v for k, v in whole.items() if "pixel" not in k}
        positions["position_ids"] = model.model.get_rope_index(**given)[0]
    return model(**inputs, **positions).logits[0, -1]


def test_it_is_the_model_that_sees_no_other_frames() -> None:
    with open_session("random-ov", every_stream()["full"]) as session:
        session.watch(film(COUNT), fps=FPS)
        for begin, end in ((4, 9), (0, 3), (20, 25)):
            want = masked("random-ov", begin, end)
            assert torch.allclose(first(session, (begin / FPS, (end - 1) / FPS)), want, atol=2e-4)
        assert not torch.allclose(first(session, None), want, atol=1e-3)
        assert torch.allclose(first(session, (0.0, 1e9)), first(session, None), atol=2e-4)


@pytest.mark.parametrize(("kv", "name"), product(KEEPERS, ["random-ov", "random-qwen"]))
def test_it_rests_on_frames_of_that_time(name: str, kv: str) -> None:
    with open_session(name, KEEPERS[kv]) as session:
        session.watch(film(COUNT), fps=FPS)
        plain = session.ask(QUESTION, 4)
        for begin, end in ((2.0, 4.0), (8.0, 12.0)):
            answer = session.ask(QUESTION, 4, between=(begin, end))
            assert answer.ids and answer.evidence
            assert all(begin <= one.seconds <= end for one in answer.evidence)
        again = session.ask(QUESTION, 4)
        assert (again.ids, again.evidence) == (plain.ids, plain.evidence), "it leaves no trace"


def test_a_time_of_which_nothing_is_left() -> None:
    with open_session("random-ov", every_stream(frames=4, window=6)["recent"]) as session:
        session.watch(film(COUNT), fps=FPS)
        assert session.ask(QUESTION, 2, between=(11.0, 12.0)).ids
        with pytest.raises(ModelError, match="kv 'recent' holds nothing of that time any more"):
            session.ask(QUESTION, 2, between=(1.0, 3.0))
        for between in ((40.0, 50.0), (3.0, 2.0), (2.1, 2.3)):
            with pytest.raises(ModelError, match="between: no frame was shown from"):
                session.ask(QUESTION, 2, between=between)
        assert session.ask(QUESTION, 2).ids
