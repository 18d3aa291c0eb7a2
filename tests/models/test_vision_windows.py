"""Windows of one length go through Qwen2.5-VL's vision tower in one call, and what is found is the same."""

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.models import qwen2_5_vl
from mmaccel.models.modules import batched_tower
from mmaccel.models.qwen2_5_vl import WINDOW_ATTENTION
from tests.models.streams import film, pair
from tests.models.test_vision_parts import mixed_qwen
from tests.models.tiny_random import BUILD, PROMPTS, prompt, qwen
from tests.spies import crossed, heard

# Steps, rows and columns of patches; a window is 4 x 4.
GRIDS = {
    "one window": [[1, 4, 4]],
    "whole windows": [[3, 8, 12]],
    "one short window": [[2, 2, 2]],
    "lower edge": [[4, 10, 8]],
    "right edge": [[4, 8, 10]],
    "both edges": [[5, 10, 14]],
    "many sizes": [[3, 10, 14], [1, 4, 4], [2, 6, 8], [1, 2, 12], [3, 10, 14]],
}
TOWER = (2, 16)
"""Heads of the tower and their size; the text has four."""
TYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the queries of each call of attention."""
    functional = torch.nn.functional
    return heard(
        monkeypatch, functional, "scaled_dot_product_attention", lambda query, *_, **__: tuple(query.shape)
    )


def batched(model: Any) -> AbstractContextManager[None]:
    return batched_tower(adapter_for(model), model)


def pixels_of(grids: list[list[int]], seed: int = 3) -> tuple[Tensor, Tensor]:
    count = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3 * 2 * 14 * 14, generator=generator), torch.tensor(grids)


@crossed(name=GRIDS, dtype=TYPES)
@torch.no_grad()
def test_the_tower_finds_the_same_in_few_calls(name: str, dtype: torch.dtype, calls: list[Any]) -> None:
    pixels, grid = pixels_of(GRIDS[name])
    model = qwen()
    exact = model.model.visual(pixels, grid_thw=grid)
    model.to(dtype)
    plain = model.model.visual(pixels.to(dtype), grid_thw=grid)
    del calls[:]
    with batched(model):
        got = model.model.visual(pixels.to(dtype), grid_thw=grid)
    # Layer 0 has windows of at most four lengths a size of frame, layer 1 one length.
    sizes = {(h, w) for _, h, w in GRIDS[name]}
    assert len(calls) <= 5 * len(sizes)
    assert sum(n * rows for n, _, rows, _ in calls) == 2 * len(pixels)
    for part in ("pooler_output", "last_hidden_state"):
        if dtype == torch.float32:
            torch.testing.assert_close(got[part], plain[part], rtol=0, atol=1e-5)
        else:
            error = (got[part].float() - exact[part]).norm()
            assert 0 < error <= 1.02 * (plain[part].float() - exact[part]).norm()


@torch.no_grad()
def test_more_windows_of_a_size_are_no_more_calls(calls: list[Any]) -> None:
    model, counts = qwen(), []
    for grid in ([[1, 10, 14]], [[9, 10, 14]], [[9, 10, 14]] * 4):
        pixels, told = pixels_of(grid)
        with batched(model):
            model.model.visual(pixels, grid_thw=told)
        counts.append(len(calls))
        del calls[:]
    # Windows of 16, 8 (at both edges) and 4 patches; steps.
    assert counts == [4, 4, 4]


@torch.no_grad()
def test_windows_that_follow_each_other_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, grid = pixels_of(GRIDS["whole windows"])
    model = qwen()
    with batched(model):
        monkeypatch.setattr(Tensor, "index_select", Mock(side_effect=AssertionError("rows were copied")))
        model.model.visual(pixels, grid_thw=grid)
        with pytest.raises(AssertionError, match="copied"):
            model.model.visual(*pixels_of(GRIDS["both edges"]))


@torch.no_grad()
def test_lengths_are_read_once_a_call_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    read = heard(monkeypatch, qwen2_5_vl, "group_windows_by_length", lambda ends, device: len(ends))
    pixels, grid = pixels_of(GRIDS["both edges"])
    model = qwen()
    tower = model.model.visual
    tower.blocks.extend([*tower.blocks, *tower.blocks])
    with batched(model):
        for turn in (1, 2):
            tower(pixels, grid_thw=grid)
            # 5 steps of 3 x 4 windows; 5 steps.
            assert read == [61, 6] * turn


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_lengths_that_were_written_to_are_read_again(mode: Any) -> None:
    """A caller may keep the tensor of lengths and write the next video's into it; nothing is kept beside the tensor."""
    with mode():
        query, key, value = torch.randn(3, 1, 2, 12, 8, generator=torch.Generator().manual_seed(5)).unbind()
        kept = torch.tensor([0, 4, 8, 12])

        def found(lengths: Tensor) -> Tensor:
            module = torch.nn.Module()
            return qwen2_5_vl.attend_windows(
                module, query, key, value, None, lengths, scaling=1.0, is_causal=False
            )[0]

        first = found(kept)
        assert torch.equal(found(kept), first)
        # As a caller may bring them, who did not drop what fills a grid of windows up.
        assert torch.equal(found(torch.tensor([0, 0, 4, 8, 8, 12, 12])), first)
        kept.copy_(torch.tensor([0, 2, 10, 12]))
        again = found(kept)
        assert torch.equal(again, found(torch.tensor([0, 2, 10, 12]))) and not torch.equal(again, first)
        copied = copy.deepcopy(kept).fill_(0)
        copied[1:] = torch.tensor([4, 8, 12])
        assert torch.equal(found(copied), first)


@torch.no_grad()
def test_an_accelerated_model_reads_images_and_videos_so_and_is_restored(
    calls: list[Any], tmp_path: Path
) -> None:
    """The model's config does not name it."""
    inputs, model = mixed_qwen(), qwen()
    tower, before = model.model.visual, model.model.visual.config
    want = model(**inputs).logits
    apart = len(calls)
    del calls[:]
    with mmaccel.accelerate(model) as fast:
        assert tower.config._attn_implementation == WINDOW_ATTENTION and tower.config is not before
        torch.testing.assert_close(fast(**inputs).logits, want, rtol=0, atol=1e-5)
        assert len(calls) < apart / 3
        with batched(model):
            pass
        assert tower.config._attn_implementation == WINDOW_ATTENTION
        built = type(model)(copy.deepcopy(model.config))
        model.save_pretrained(tmp_path)
    assert built.config.vision_config._attn_implementation == "sdpa"
    assert WINDOW_ATTENTION not in (tmp_path / "config.json").read_text()
    assert before._attn_implementation == "sdpa"
    assert all(m.config is before for m in tower.modules() if hasattr(m, "config"))
    assert torch.equal(model(**inputs).logits, want)


def test_a_session_s_frames_go_so(calls: list[Any]) -> None:
    model, processor = pair("random-qwen")
    tower = model.model.visual
    with mmaccel.VideoSession(model, processor) as session:
        del calls[:]
        session._stream_adapter.features(film(8), tuple(film(8).shape[-2:]))
        assert tower.config is model.config.vision_config
    assert len(tower.blocks) <= len(calls) <= 4 * len(tower.blocks)


@torch.no_grad()
def test_another_attention_of_the_user_s_choice_stays(calls: list[Any]) -> None:
    inputs, model = mixed_qwen(), qwen()
    want = model(**inputs).logits
    assert TOWER in {shape[1::2] for shape in calls}
    model.set_attn_implementation({"vision_config": "eager"})
    config = model.model.visual.config
    del calls[:]
    with mmaccel.accelerate(model) as fast:
        assert model.model.visual.config is config and config._attn_implementation == "eager"
        torch.testing.assert_close(fast(**inputs).logits, want, rtol=0, atol=1e-5)
        assert TOWER not in {shape[1::2] for shape in calls}


def test_gradients_and_states_are_the_same() -> None:
    model = qwen()
    tower = model.model.visual
    pixels, grid = pixels_of(GRIDS["many sizes"])

    def told() -> tuple[list[Tensor], Any]:
        tower.zero_grad()
        out = tower(pixels, grid_thw=grid, output_hidden_states=True, output_attentions=True)
        out.pooler_output.square().sum().backward()
        return [p.grad.clone() for p in tower.parameters() if p.grad is not None], out

    want, plain = told()
    with batched(model):
        got, out = told()
    assert len(got) == len(want) == len(list(tower.parameters()))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for name in ("hidden_states", "attentions"):
        assert len(out[name]) == len(plain[name])
        for one, other in zip(out[name], plain[name], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@torch.no_grad()
def test_called_for_each_window_it_is_sdpa(calls: list[Any]) -> None:
    model = qwen()
    layer = model.model.visual.blocks[0].attn
    query, key, value = torch.randn(3, 1, 2, 12, 16).unbind()
    got, _ = qwen2_5_vl.attend_windows(
        layer, query, key, value, None, scaling=0.25, dropout=0.0, is_causal=False
    )
    want = ((query @ key.mT) * 0.25).softmax(-1) @ value
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=0, atol=1e-5)
    assert calls == [(1, 2, 12, 16)]


def test_families_whose_frames_are_a_batch_are_left() -> None:
    model = BUILD["llava"]()
    config = model.model.vision_tower.config
    with mmaccel.accelerate(model) as fast, torch.no_grad():
        assert model.model.vision_tower.config is config
        fast(**prompt("llava", PROMPTS["video"]))
