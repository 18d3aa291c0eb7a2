"""Families as people load them, in calls: layers on a disk, adapters, compiled, in a pipeline (streams: test_loading)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from tests.models.streams import QUESTION
from tests.models.test_loading import QUANTIZED, quantized
from tests.models.tiny_random import prompt, sampler

T = pytest.importorskip("transformers")
KINDS = ("gemma3", "gemma4", "internvl", "llava_onevision", "qwen2_5_vl", "qwen3_5", "qwen3_vl")
SPARSE = {"sparse": {"name": "a_shape", "block": 16, "window": 16, "sink": 4}, "dense_tail": 0}
TOLD: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    model: Any = sampler(kind).model()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


DENSE: tuple[dict[str, Any], ...] = ({}, {"draft": "prompt_lookup"}, {"chunk": 64})


def calls(model: Any, kind: str, dense: tuple[dict[str, Any], ...] = DENSE) -> torch.Tensor:
    """The plain model's tokens, which recipes without a pattern give too; a pattern leaves out pairs."""
    inputs = prompt(kind, [("text", 6), ("video", 24), ("text", 9)])
    plain: torch.Tensor = model.generate(**inputs, **TOLD)
    for recipe in dense:
        with mmaccel.accelerate(model, **recipe):
            assert torch.equal(model.generate(**inputs, **TOLD), plain)
    with mmaccel.accelerate(model, **SPARSE) as fast:
        model.generate(**inputs, **TOLD)
        kept = fast.report().kept
    assert kept is not None and 0 < kept < 0.9
    return plain


def test_layers_on_a_disk(kind: str, folder: Path) -> None:
    pytest.importorskip("accelerate")
    plain = mmaccel.load_model(folder, torch.float32)
    text = plain.get_decoder()
    name = next(name for name, one in plain.named_modules() if one is text)
    last = len(text.layers) - 1
    around = [one for one, _ in plain.named_modules() if one.count(".") == 1 and one != name]
    on: dict[str, str] = {"lm_head": "cpu", **dict.fromkeys(around, "cpu")}
    on |= {f"{name}.{one}": "cpu" for one, _ in text.named_children() if one != "layers"}
    on |= {f"model.{one}": "cpu" for one, _ in plain.model.named_parameters(recurse=False)}
    on |= {f"{name}.layers.{n}": "disk" if n == last else "cpu" for n in range(last + 1)}
    model = mmaccel.load_model(folder, torch.float32, device_map=on)
    assert any(weight.is_meta for weight in model.parameters()), "nothing is on the disk"
    assert torch.equal(calls(model, kind), calls(plain, kind))


@pytest.mark.parametrize("how", QUANTIZED)
def test_quantized_weights(kind: str, folder: Path, how: str) -> None:
    calls(quantized(folder, how), kind)


def test_an_adapter(kind: str, folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    aims = peft.LoraConfig(target_modules=r".*language_model.*\.(q_proj|o_proj)", init_lora_weights=False)
    first = peft.get_peft_model(mmaccel.load_model(folder, torch.float32), aims)
    first.save_pretrained(tmp_path / "adapter")
    plain = mmaccel.load_model(folder, torch.float32)
    model = peft.PeftModel.from_pretrained(
        mmaccel.load_model(folder, torch.float32), tmp_path / "adapter"
    ).eval()
    inputs = prompt(kind, [("text", 6), ("video", 4), ("text", 9)])
    with torch.no_grad():
        assert not torch.allclose(model(**inputs).logits, plain(**inputs).logits)
    calls(model, kind)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model(kind: str, folder: Path) -> None:
    model = mmaccel.load_model(folder, torch.float32)
    plain = calls(model, kind)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(calls(model, kind, ({},)), plain)
    torch._dynamo.reset()


@pytest.mark.skipif(find_spec("torchvision") is None, reason="a pipeline's processor needs torchvision")
def test_a_pipeline(random_folder: Callable[[str], Path]) -> None:
    """Of Qwen3-VL; of LLaVA-OneVision and Qwen2.5-VL see test_loading."""
    from PIL import Image

    stock = T.AutoProcessor.from_pretrained(random_folder("tiny-qwen"))
    words, maker = stock.tokenizer, sampler("qwen3_vl")
    config = maker.config()
    ids = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    ids |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    for name, token in ids.items():
        setattr(config, name, words.convert_tokens_to_ids(token))
    config.text_config.vocab_size = len(words)
    torch.manual_seed(0)
    model = maker.kind(config).float().eval()
    pixels = {"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}}
    images, videos = T.Qwen2VLImageProcessor(**pixels), T.Qwen3VLVideoProcessor(**pixels)
    processor = T.Qwen3VLProcessor(images, words, videos, chat_template=stock.chat_template)
    pipe = T.pipeline("image-text-to-text", model=model, processor=processor)
    noise = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    content = [{"type": "image", "image": Image.fromarray(noise.numpy())}, {"type": "text", "text": QUESTION}]
    asked, how = [{"role": "user", "content": content}], {"generate_kwargs": TOLD}
    plain = pipe(text=asked, **how)
    for recipe in ({}, {"draft": "prompt_lookup"}):
        with mmaccel.accelerate(model, **recipe) as fast:
            assert pipe(text=asked, **how) == plain
            assert fast.report().new_tokens == 5
