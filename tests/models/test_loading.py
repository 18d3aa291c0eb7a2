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
from mmaccel.core.errors import ModelError
from tests.models.streams import QUESTION, film

T = pytest.importorskip("transformers")
SPARSE = {"sparse": {"name": "a_shape", "block": 16, "window": 16, "sink": 4}, "dense_tail": 0}
NAMES = ["tiny-ov", "tiny-qwen"]
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


def test_layers_on_a_disk(folder: Path) -> None:
    pytest.importorskip("accelerate")
    plain, _ = calls(mmaccel.load_model(folder, torch.float32), folder)
    last = mmaccel.load_model(folder).config.text_config.num_hidden_layers - 1
    parts = {"model.vision_tower": "cpu", "model.multi_modal_projector": "cpu", "model.image_newline": "cpu"}
    if "qwen" in str(folder):
        parts = {"model.visual": "cpu"}
    text = "model.language_model"
    on = {
        **parts,
        f"{text}.embed_tokens": "cpu",
        f"{text}.norm": "cpu",
        f"{text}.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    on |= {f"{text}.layers.{n}": "disk" if n == last else "cpu" for n in range(last + 1)}
    model = mmaccel.load_model(folder, torch.float32, device_map=on)
    assert any(weight.is_meta for weight in model.parameters()), "nothing is on the disk"
    got, kept = calls(model, folder)
    assert got == plain and kept is not None and kept < 1


def test_an_adapter(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    aims = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    first = peft.get_peft_model(mmaccel.load_model(folder, torch.float32), peft.LoraConfig(**aims))
    first.save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(mmaccel.load_model(folder, torch.float32), tmp_path).eval()
    got, kept = calls(model, folder)
    assert kept is not None and kept < 1
    merged, _ = calls(model.merge_and_unload(), folder)
    assert got == merged


def quantized(kind: str) -> Any:
    if kind == "torchao":
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        return T.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return T.BitsAndBytesConfig(load_in_8bit=True)


@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
def test_quantized_weights(folder: Path, kind: str) -> None:
    config = quantized(kind)
    pytest.importorskip("accelerate")
    model = mmaccel.load_model(folder, torch.float32, device_map="cpu", quantization_config=config)
    whole = mmaccel.load_model(folder, torch.float32)
    query = model.model.language_model.layers[0].self_attn.q_proj.weight
    assert type(query) is not torch.nn.Parameter or query.dtype == torch.int8, "the weights are not quantized"
    _, kept = calls(model, folder)
    assert kept is not None and kept < 1 and type(model) is type(whole)


@pytest.mark.parametrize("folder", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)], indirect=True)
def test_a_compiled_model(folder: Path) -> None:
    model = mmaccel.load_model(folder, torch.float32)
    plain, _ = calls(model, folder)
    model.forward = torch.compile(model.forward, backend="eager")
    got, kept = calls(model, folder)
    assert got == plain and kept is not None and kept < 1


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
