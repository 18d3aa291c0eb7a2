"""Target and draft on one CUDA device: two streams, one process, and the target's own tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.policies.draft import Parallel, _draft_decoder
from tests.models.tiny_random import BUILD, PROMPTS, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module", params=sorted(BUILD))
def family(request: pytest.FixtureRequest) -> tuple[str, Any]:
    model = BUILD[request.param](layers=3).cuda()
    model.generation_config.eos_token_id = None
    return request.param, model


def question(name: str, kind: str) -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in prompt(name, PROMPTS[kind]).items()}


@pytest.mark.parametrize("prune", [None, {"name": "uv", "retention": 0.3}, {"name": "attention"}])
@pytest.mark.parametrize("window", [3, None])
@pytest.mark.parametrize("kind", ["video", "long"])
def test_two_streams_say_what_the_target_says(
    family: tuple[str, Any], prune: Any, window: int | None, kind: str
) -> None:
    """fp32; captured steps of both models, again and again, so that what one overwrote too early would be seen."""
    name, model = family
    inputs = question(name, kind)
    want = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    draft = Parallel(
        model=BUILD[name](seed=1, layers=2).cuda(), window=window, prune=prune, process=False, most=4
    )
    with mmaccel.accelerate(model, draft=draft) as fast:
        for _ in range(3):
            assert torch.equal(fast.generate(**inputs, max_new_tokens=48, do_sample=False), want)
            told = fast.report().draft
            assert told["failed"] is None and told["counters"]["drafted"] > 0


def test_the_draft_works_on_a_stream_of_its_own(
    family: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A twin is right wherever it is asked, and neither reads nor writes on the stream that the target verifies on."""
    name, model = family
    inputs = question(name, "video")
    seen: list[tuple[str, torch.cuda.Stream]] = []

    class Noted(_draft_decoder.DraftDecoder):
        def read(self, *args: Any, **kwargs: Any) -> None:
            seen.append(("read", torch.cuda.current_stream()))
            super().read(*args, **kwargs)

        def write(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(("write", torch.cuda.current_stream()))
            return super().write(*args, **kwargs)

    monkeypatch.setattr(_draft_decoder, "DraftDecoder", Noted)
    draft = Parallel(model=copy.deepcopy(model), window=4, process=False)
    with mmaccel.accelerate(model, draft=draft) as fast:
        fast.generate(**inputs, max_new_tokens=32, do_sample=False)
        told = fast.report().draft
    assert told["failed"] is None and told["accepted"] == told["proposed"] > 0
    assert {what for what, _ in seen} == {"read", "write"}
    assert len({stream for _, stream in seen}) == 1
    assert all(stream != torch.cuda.current_stream() for _, stream in seen)
