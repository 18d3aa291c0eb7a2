"""Models loaded the way people load them: devices, offload, quantized weights, adapters, compiled, in a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError
from mmaccel.models import step
from tests.models.streams import QUESTION, film

pytestmark = pytest.mark.in_turn("folder", 1)

T = pytest.importorskip("transformers")
SPARSE = {"sparse": {"name": "a_shape", "block": 16, "window": 16, "sink": 4}, "dense_tail": 0}
STOCK = pytest.mark.skipif(find_spec("torchvision") is None, reason="Qwen3-VL's processor needs torchvision")
NAMES = ["tiny-ov", "tiny-qwen", *(pytest.param(name, marks=STOCK) for name in ("tiny-qwen3", "tiny-hybrid"))]
FRAMES = 12


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, random_folder: Callable[[str], Path]) -> Path:
    return random_folder(request.param)


def calls(model: Any, folder: Path) -> tuple[list[Any], float | None]:
    """The plain model's answer and a dense recipe's, a draft's, and two of a stream; and what a pattern kept."""
    processor = mmaccel.load_processor(folder)
    content = [{"type": "video", "video": film(FRAMES)}, {"type": "text", "text": QUESTION}]
    inputs = processor.chat(content)
    some = {"max_new_tokens": 5, "do_sample": False}
    said = [model.generate(**inputs, **some)]
    for recipe in ({}, {"draft": "prompt_lookup"}):
        with mmaccel.accelerate(model, **recipe):
            said.append(model.generate(**inputs, **some))
    with mmaccel.accelerate(model, **SPARSE) as fast:
        model.generate(**inputs, **some)
        kept = fast.report().kept
    assert torch.equal(said[0], said[1]) and torch.equal(said[0], said[2])
    with mmaccel.VideoSession(model, processor, "rekv") as session:
        session.watch(film(FRAMES), fps=1.0)
        streamed = [session.ask(QUESTION, max_new_tokens=5).ids for _ in range(2)]
    assert streamed[0] == streamed[1]
    return [said[0].tolist(), streamed[0]], kept


def test_the_keywords_go_to_from_pretrained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []

    def load(source: str, **given: Any) -> Any:
        heard.append(given)
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(T.AutoModelForImageTextToText, "from_pretrained", load)
    mmaccel.load_model(folder)
    assert heard.pop() == {"dtype": "auto", "trust_remote_code": False}
    given = {"revision": "v2", "quantization_config": object(), "attn_implementation": "eager"}
    mmaccel.load_model(folder, torch.bfloat16, device_map="auto", trust_remote_code=True, **given)
    assert heard.pop() == {
        "dtype": torch.bfloat16, "device_map": "auto", "trust_remote_code": True, **given
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("accelerate") is None, reason="weights go straight to a device by accelerate")
def test_weights_go_straight_to_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: pytest.fail("moved after it was read"))
    model = mmaccel.load_model(folder, device="cuda")
    assert {weight.device.type for weight in model.parameters()} == {"cuda"}


def test_what_excludes_itself_is_told(folder: Path) -> None:
    with pytest.raises(ModelError, match="device, devices and device_map exclude each other; give one"):
        mmaccel.load_model(folder, device="cpu", device_map="auto")
    for given in ("cuda:99", {"": "cuda:99"}, 99):
        with pytest.raises(ModelError, match=r"device_map: cuda:99 is not there; this machine has"):
            mmaccel.load_model(folder, device_map=given)


def test_another_type_is_refused_before_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_6_vl"}))
    read = pytest.fail
    monkeypatch.setattr(T.AutoModelForImageTextToText, "from_pretrained", lambda *_, **__: read("weights"))
    told = r"model type 'qwen2_6_vl' is not supported; the nearest that is, is 'qwen2_5_vl'; there are"
    with pytest.raises(ModelError, match=told):
        mmaccel.load_model(tmp_path)


QUANTIZED = ("torchao", "bitsandbytes")


def quantized(folder: Path, how: str) -> Any:
    """The model with weights of eight bits."""
    pytest.importorskip("accelerate")
    if how == "torchao":
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        config = T.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    else:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        # Columns beyond a threshold are those of all rows of a call together: what a row gives would depend on the others.
        config = T.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    model: Any = mmaccel.load_model(folder, torch.float32, device_map="cpu", quantization_config=config)
    weight = next(
        layer.self_attn.q_proj.weight for layer in model.get_decoder().layers if hasattr(layer, "self_attn")
    )
    assert weight.dtype == torch.int8 or type(weight) is not torch.nn.Parameter, (
        "the weights are not quantized"
    )
    return model


@pytest.mark.parametrize("how", QUANTIZED)
def test_quantized_weights(folder: Path, how: str) -> None:
    model = quantized(folder, how)
    _, kept = calls(model, folder)
    assert kept is not None and kept < 1
    family: Any = adapter_for(model)
    assert not step.known(family.layers(model), "silu", family), "a step would read the weights as they lie"


@pytest.mark.skipif(find_spec("torchvision") is None, reason="a pipeline's processor needs torchvision")
def test_a_pipeline(folder: Path) -> None:
    from PIL import Image

    model = mmaccel.load_model(folder, torch.float32)
    processor = T.AutoProcessor.from_pretrained(folder)
    pipe = T.pipeline("image-text-to-text", model=model, processor=processor)
    image = Image.fromarray(film(1)[0].permute(1, 2, 0).numpy())
    asked = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]}
    ]
    how = {"generate_kwargs": {"max_new_tokens": 5, "do_sample": False}}
    plain = pipe(text=asked, **how)
    with mmaccel.accelerate(model):
        assert pipe(text=asked, **how) == plain
    with mmaccel.accelerate(model, **SPARSE) as fast:
        pipe(text=asked, **how)
        assert fast.report().kept is not None
