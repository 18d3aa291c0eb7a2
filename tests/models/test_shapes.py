"""The named shapes are the published ones, at any depth."""

import pytest

from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import UnknownName
from mmaccel.models.shapes import SHAPES, build, config

# Parameters of the whole checkpoint as published, in units of 1e9 (vision tower included).
PUBLISHED = {
    "qwen2.5-vl-3b": 3.75,
    "qwen2.5-vl-7b": 8.29,
    "qwen2.5-vl-32b": 33.45,
    "llava-onevision-0.5b": 0.89,
    "llava-onevision-7b": 8.03,
    "llava-onevision-72b": 73.2,
    "qwen3-vl-8b": 8.77,
    "qwen3.5-9b": 9.41,  # 8.95 of language, without the layer that predicts a second token
    "internvl3.5-8b": 8.53,
    "glm-4.1v-9b": 10.29,
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_parameter_count_is_the_published_one(name):
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config(name))
    count = sum(p.numel() for p in model.parameters()) / 1e9
    assert count == pytest.approx(PUBLISHED[name], rel=0.02)


def test_any_depth_and_adapter():
    with pytest.raises(UnknownName, match=r"qwen2\.5-vl-7b"):
        config("qwen2.5-vl-7")
    import torch

    model = build("llava-onevision-0.5b", layers=1, vision_layers=1, dtype=torch.bfloat16)
    geometry = adapter_for(model).geometry(model)
    assert (geometry.layers, geometry.heads, geometry.kv_heads, geometry.head_dim) == (1, 14, 2, 64)
    assert next(model.parameters()).dtype == torch.bfloat16
