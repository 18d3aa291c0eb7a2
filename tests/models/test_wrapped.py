"""Models as others leave them: in a wrapper of PEFT, a shard of heads, in training, layers on a disk, quantized,
compiled; and what does not work, told."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError
from mmaccel.policies.draft import Sequential
from tests.models.streams import film
from tests.models.test_loading import QUANTIZED, SPARSE, quantized, said_by
from tests.models.tiny_random import BUILD, PROMPTS, prompt, sampler

pytestmark = pytest.mark.in_turn("kind", 3)
TOLD: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def peft_of(model: nn.Module) -> Any:
    """The model in peft's wrapper."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize("family", sorted(BUILD))
def test_a_model_in_a_wrapper_is_accelerated_inside(family: str) -> None:
    model = BUILD[family]()
    inputs = prompt(family, PROMPTS["long"])
    draft = copy.deepcopy(model)
    wrapper = peft_of(model)
    plain = wrapper.generate(**inputs, **TOLD)
    with mmaccel.accelerate(wrapper, **SPARSE) as fast:
        with pytest.raises(ModelError, match="already accelerated"):
            mmaccel.accelerate(model)
        wrapper(**inputs)
        assert fast.report().kept < 1 and mmaccel.attached(wrapper) is fast is mmaccel.attached(model)
    with mmaccel.accelerate(wrapper, draft=Sequential(model=peft_of(draft), window=3)) as fast:
        assert torch.equal(wrapper.generate(**inputs, **TOLD), plain)
        assert fast.report().draft["proposed"] > 0
        assert torch.equal(fast.generate(**inputs, **TOLD), plain)
    assert torch.equal(wrapper.generate(**inputs, **TOLD), plain) and "generate" not in model.__dict__


def halved(model: Any) -> Any:
    """A process's half of `model` under tensor parallelism: its config is that of the whole."""
    half = copy.deepcopy(model)
    for layer in half.model.language_model.layers:
        own = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear, axis = getattr(own, name), int(name == "o_proj")
            some = linear.weight.shape[axis] // 2
            linear.weight = nn.Parameter(linear.weight.detach().narrow(axis, 0, some).clone())
            if linear.bias is not None and not axis:
                linear.bias = nn.Parameter(linear.bias.detach()[:some].clone())
    return half


def named(half: Any) -> Any:
    """The same modules, whose config has the numbers of heads that they have."""
    other = copy.deepcopy(half)
    config = other.config.text_config
    config.num_attention_heads //= 2
    config.num_key_value_heads //= 2
    config.head_dim = 16
    return other


@pytest.mark.parametrize("family", sorted(BUILD))
@pytest.mark.parametrize(
    "recipe", [{"prune": {"name": "fastv", "layer": 1, "retention": 0.5}}, {"sparse": "grid"}]
)
def test_a_shard_of_heads_is_taken_as_it_is(family: str, recipe: dict[str, Any]) -> None:
    half = halved(BUILD[family]())
    inputs = prompt(family, PROMPTS["long"])
    with mmaccel.accelerate(half, **recipe) as fast:
        got = half.generate(**inputs, **TOLD)
        shape = fast.view.geometry
    assert (shape.heads, shape.kv_heads) == (2, 1) and fast.adapter.global_geometry(half).heads == 4
    other = named(half)
    with mmaccel.accelerate(other, **recipe) as fast:
        assert torch.equal(other.generate(**inputs, **TOLD), got)


@pytest.mark.parametrize("name", ["tiny-qwen", "tiny-ov"])
def test_a_stream_on_a_shard_of_heads(name: str, random_folder: Callable[[str], Path]) -> None:
    folder = random_folder(name)
    half = halved(mmaccel.load_model(folder))
    processor = mmaccel.load_processor(folder)
    frames = film(24)
    with mmaccel.VideoSession(half, processor, "mosaic") as session:
        session.watch(frames, fps=1.0)
        answer = session.ask("What is shown?", max_new_tokens=4)
    assert len(answer.ids) > 0
    assert adapter_for(half).geometry(half).heads * 2 == half.config.text_config.num_attention_heads


def test_a_stream_on_offloaded_weights(random_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = random_folder("tiny-qwen")
    model, processor = mmaccel.load_model(folder), mmaccel.load_processor(folder)

    def asked(path: Path) -> Any:
        with mmaccel.VideoSession(model, processor, "mosaic") as session:
            session.watch(film(24), fps=1.0)
            answer = session.ask("What is shown?", max_new_tokens=4)
            session.save(path)
        with mmaccel.VideoSession.resume(model, processor, path) as session:
            assert session.ask("What is shown?", max_new_tokens=4).ids == answer.ids
        return answer.ids

    plain = asked(tmp_path / "plain")
    pytest.importorskip("accelerate").cpu_offload(model)
    assert next(model.parameters()).is_meta
    assert asked(tmp_path / "offloaded") == plain
    with mmaccel.VideoSession.resume(model, processor, tmp_path / "plain") as session:
        assert session.frames == 24, "the same weights, wherever they are"


@pytest.mark.parametrize("family", sorted(BUILD))
def test_layers_that_are_recomputed_for_gradients_are_told(family: str) -> None:
    model, inputs = BUILD[family](), prompt(family, PROMPTS["text"])
    model.train()
    model.gradient_checkpointing_enable()
    with mmaccel.accelerate(model):
        for call in (lambda: model(**inputs), lambda: model.generate(**inputs, **TOLD)):
            with pytest.raises(ModelError, match=r"gradient_checkpointing: .*call model\.eval\(\)"):
                call()
        model.eval()
        model.generate(**inputs, **TOLD)


def test_an_import_that_fails_for_torchvision_is_told(
    random_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForImageTextToText

    def load(*_: Any, **__: Any) -> Any:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'LlavaOnevisionModel'.") from error

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", load)
    with pytest.raises(ModelError, match=r"^torchvision: .*; install the one made for it"):
        mmaccel.load_model(random_folder("tiny-ov"))


T = pytest.importorskip("transformers")
KINDS = ("gemma3", "gemma4", "internvl", "llava_onevision", "qwen2_5_vl", "qwen3_5", "qwen3_vl")


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
    plain, kept = said_by(model, prompt(kind, [("text", 6), ("video", 24), ("text", 9)]), dense)
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
def test_a_compiled_model(kind: str, folder: Path, dynamo: None) -> None:
    model = mmaccel.load_model(folder, torch.float32)
    plain = calls(model, kind)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(calls(model, kind, ({},)), plain)
