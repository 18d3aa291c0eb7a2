"""Calls of `generate` on a memory of streams (each of its arguments: test_arguments)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.errors import MmaccelWarning, ModelError, RecipeError
from tests.models.tiny_random import BUILD, PROMPTS, batch, prompt

CALL = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module")
def models() -> Any:
    """The plain model, and the same with a memory that keeps everything."""
    plain = BUILD["llava"]()
    plain.generation_config.eos_token_id = None
    plain.set_attn_implementation("eager")
    other = copy.deepcopy(plain)
    with mmaccel.accelerate(other, kv="offload"):
        yield plain, other


def test_a_forward_pass_by_itself_is_no_stream(models: Any) -> None:
    with pytest.raises(RecipeError, match="'offload' is a memory of streams; call"):
        models[1](**prompt("llava", PROMPTS["video"]))


@pytest.mark.parametrize("family", sorted(BUILD))
def test_a_padded_batch_is_each_prompt_alone(family: str) -> None:
    plain = BUILD[family]()
    plain.generation_config.eos_token_id = None
    rows = [prompt(family, PROMPTS[kind]) for kind in ("video", "text", "video")]
    inputs = batch(family, rows)
    with mmaccel.accelerate(
        copy.deepcopy(plain), kv={"name": "rekv", "frames": 2, "window": 2, "local": 1}
    ) as fast:
        got = fast.generate(**inputs, **CALL)
        assert [one["new_tokens"] for one in fast.report().draft["sequences"]] == [5, 5, 5]
        alone = [fast.generate(**row, **CALL)[0, row["input_ids"].shape[1] :] for row in rows]
    assert torch.equal(got[:, inputs["input_ids"].shape[1] :], torch.stack(alone))
    with mmaccel.accelerate(copy.deepcopy(plain), kv="offload") as fast:
        assert torch.equal(fast.generate(**inputs, **CALL), plain.generate(**inputs, **CALL))


def test_a_place_for_each_token_or_none(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """True positions end with the model's; closed up, as many units as are shown have places."""
    plain, other = models
    call = prompt("llava", PROMPTS["video"])
    for one in models:
        monkeypatch.setattr(
            one.model.language_model.config, "max_position_embeddings", call["input_ids"].shape[1] + 2
        )
    with pytest.warns(MmaccelWarning, match="has .* positions"):
        got = other.generate(**call, **CALL)
    assert got.shape[1] == call["input_ids"].shape[1] + 2
    for one in models:
        monkeypatch.setattr(
            one.model.language_model.config, "max_position_embeddings", call["input_ids"].shape[1] - 4
        )
    with pytest.raises(ModelError, match="positions"):
        other.generate(**call, **CALL)
    closed = {"name": "rekv", "frames": 1, "window": 1, "local": 0, "positions": "compact"}
    with mmaccel.accelerate(plain, kv=closed) as fast:
        assert fast.generate(**call, **CALL).shape[1] == call["input_ids"].shape[1] + 5


def test_a_result_says_that_it_has_no_cache(models: Any) -> None:
    call = {**prompt("llava", PROMPTS["video"]), **CALL}
    with mmaccel.accelerate(models[0], kv="recent") as fast:
        assert fast.generate(**call, return_dict_in_generate=True).past_key_values is None
        assert any("past_key_values is None" in note for note in fast.report().notes)
        fast.generate(**call)
        assert not fast.report().notes


@pytest.mark.parametrize("name", ["vision_feature_layer", "vision_feature_select_strategy"])
def test_a_tower_read_otherwise_is_refused(models: Any, name: str) -> None:
    with pytest.raises(ModelError, match=f"^{name}: kv 'offload' takes a tower's features as"):
        models[1].generate(**prompt("llava", PROMPTS["video"]), **CALL, **{name: "full"})


def test_the_time_may_run_out_while_the_video_is_read(models: Any) -> None:
    call = prompt("llava", PROMPTS["video"])
    with pytest.warns(MmaccelWarning, match="ran out before the prompt was read"):
        got = models[1].generate(**call, **CALL, max_time=1e-9)
    assert torch.equal(got, call["input_ids"])
    assert models[1].generate(**call, **CALL).shape[1] == got.shape[1] + 5, "nothing is left of it"


def test_inference_mode_changes_nothing(models: Any) -> None:
    call = {**prompt("llava", PROMPTS["video"]), **CALL}
    want = models[0].generate(**call)
    with torch.inference_mode():
        assert torch.equal(models[1].generate(**call), want)
