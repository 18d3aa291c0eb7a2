"""Policies and families that others write: what they declare decides what they may stand beside. Models as others leave
them: in a wrapper of PEFT, a shard of heads, in training, on a disk, quantized, compiled; and what does not work, told."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

import mmaccel
from mmaccel.contract.draft import check_draft
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.recipe import Recipe, check_policies_compatible, stream_policy
from mmaccel.core.registry import registry
from mmaccel.models.llava_onevision import LlavaOnevision
from mmaccel.models.modules import is_norm
from mmaccel.models.processor import Processor
from mmaccel.models.prompt_layout import ProcessorSpec
from mmaccel.models.step import can_fuse_layers
from mmaccel.policies.draft import PromptLookup, Sequential, SparseToDense, TextOnly
from mmaccel.policies.draft.prompt_lookup import _Finder
from mmaccel.policies.kv.full import Full
from mmaccel.policies.kv.window import Window
from mmaccel.policies.sparse.dense import Dense
from tests.models.streams import film, pair, processor_like
from tests.models.test_loading import QUANTIZED, SPARSE, STOCK, quantized, said_by
from tests.models.tiny_random import BUILD, PROMPTS, prompt, sampler

TOLD: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


class _Named(_Finder):
    """Its counters have names that a shipped draft uses for something else."""

    def counters(self) -> dict[str, float]:
        return {"pauses": 3.0, "alone": 2.0, "window": 4.0}

    def report_notes(self) -> list[str]:
        return ["it looked 3 times"]


@dataclass(frozen=True, kw_only=True)
class Theirs(PromptLookup):
    """A draft of somebody else's, with a field of its own named `model`."""

    name: ClassVar[str] = "theirs"
    model: str = "a table of n-grams"

    def open(self, target: Any) -> _Named:
        return _Named(self.window, self.ngram)


@dataclass(frozen=True, kw_only=True)
class Counting(Full):
    """A memory that keeps everything, as the one it is made of, under another name."""

    name: ClassVar[str] = "counting"


@dataclass(frozen=True, kw_only=True)
class Plain(Dense):
    """Dense attention under another name."""

    name: ClassVar[str] = "plain"


@pytest.mark.parametrize("family", sorted(BUILD))
def test_a_draft_tells_the_report_what_its_figures_mean(family: str) -> None:
    check_draft(Theirs())
    model = BUILD[family]()
    with mmaccel.accelerate(model, draft=Theirs()) as fast:
        model.generate(**prompt(family, PROMPTS["text"]), max_new_tokens=12, do_sample=False)
        report = fast.report()
    assert report.draft["counters"]["pauses"] == 3.0
    lines = [line for line in str(report).splitlines() if line.startswith("draft: ")]
    assert "draft: it looked 3 times" in lines and len(lines) <= 2


def test_a_memory_is_known_by_what_it_declares() -> None:
    check_policies_compatible(Recipe(kv=Counting(), draft=SparseToDense()))
    model = BUILD["llava"]()
    inputs = prompt("llava", PROMPTS["video"])
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    with mmaccel.accelerate(model, kv=Counting(), draft=SparseToDense(window=3)) as fast:
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), plain)
        assert fast.report().draft["proposed"] > 0
    with pytest.raises(RecipeError, match="set kv to 'full' or 'window'"):
        check_policies_compatible(Recipe.load(kv="mosaic", draft=SparseToDense()))


def test_a_dense_pattern_is_known_by_what_it_declares() -> None:
    """Dense attention under another name may stand beside every memory, and nothing is measured for it."""
    for recipe in (Recipe(sparse=Plain(), kv=Window()), Recipe.load("mosaic", sparse=Plain())):
        check_policies_compatible(recipe)
    stream_policy(Recipe.load("mosaic", sparse=Plain()))
    with mmaccel.accelerate(BUILD["llava"](), sparse=Plain()) as fast:
        assert fast.attention.choice is not None and "lists no block" in fast.attention.choice.why


def test_a_policy_declares_its_files_and_the_words_taken_for_it(tmp_path: Path) -> None:
    """A file that ends as a policy says is a recipe of that policy; a word that it explains is explained."""

    @mmaccel.register("sparse", "of_a_file")
    @dataclass(frozen=True, kw_only=True)
    class OfAFile(Dense):
        file: ClassVar[tuple[str, str]] = (".heads", "table")
        words: ClassVar[dict[str, str]] = {"headwise": "is a kind of file; give the file"}

        table: str = ""

    try:
        recipe = Recipe.load(tmp_path / "some.heads")
        assert recipe.sparse == OfAFile(table=str(tmp_path / "some.heads"))
        for given, kind in (("headwise", "recipe"), ({"sparse": "headwise"}, "sparse")):
            with pytest.raises(RecipeError, match=f"^{kind} 'headwise' is a kind of file; give the file.$"):
                Recipe.load(given)
    finally:
        del registry("sparse")._classes["of_a_file"]


def test_a_draft_on_a_stream_is_known_by_what_it_declares() -> None:
    class Reads(Theirs):
        needs = frozenset({"rollback", "prompt"})

    for draft in (Theirs(), TextOnly(model="x"), Sequential(model="x")):
        stream_policy(Recipe.load("mosaic", draft=draft))
    with pytest.raises(RecipeError, match="a stream has none"):
        stream_policy(Recipe.load(kv="full", draft=Reads()))
    with pytest.raises(RecipeError, match="a VideoSession does not have; set draft to 'off'"):
        stream_policy(Recipe.load(kv="full", draft=SparseToDense()))


class TheirConfig(LlavaOnevisionConfig):
    model_type = "theirs_onevision"


class TheirModel(LlavaOnevisionForConditionalGeneration):
    config_class = TheirConfig


class TheirNorm(Qwen2RMSNorm):
    pass


class TheirLayer(Qwen2DecoderLayer):
    pass


class TheirFamily(LlavaOnevision):
    """LLaVA-OneVision under another model type, with decoder layers and norms of other classes."""

    name = "theirs"
    model_types = ("theirs_onevision",)
    processors: ClassVar[Mapping[str, ProcessorSpec]] = {
        "theirs_onevision": LlavaOnevision.processors["llava_onevision"]
    }
    decoder_layers = frozenset({"TheirLayer"})
    rms_norms = frozenset({"TheirNorm"})


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Processor]:
    """A model and a processor of their family, made of those of LLaVA-OneVision."""
    monkeypatch.setitem(registry("model")._classes, "theirs", TheirFamily)
    like, processor = pair("random-ov")
    config = TheirConfig.from_dict({**like.config.to_dict(), "model_type": "theirs_onevision"})
    model = TheirModel(config).float().eval()
    model.load_state_dict(like.state_dict())
    model.generation_config = copy.deepcopy(like.generation_config)
    for layer in model.model.language_model.layers:
        layer.__class__ = TheirLayer
        layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = TheirNorm
    return model, processor_like(processor, "theirs_onevision", config=config.to_dict())


def test_its_facts_are_those_of_its_class(theirs: tuple[Any, Processor], tmp_path: Any) -> None:
    model, processor = theirs
    layers, family = list(model.model.language_model.layers), TheirFamily()
    assert can_fuse_layers(layers, "silu", family) and not can_fuse_layers(layers, "silu", LlavaOnevision())
    norm = layers[0].input_layernorm
    assert is_norm(norm, family) and not is_norm(norm, LlavaOnevision())
    processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    assert Processor.from_pretrained(tmp_path).model_type == "theirs_onevision"


def test_a_family_without_a_fact_does_without(theirs: tuple[Any, Processor], monkeypatch) -> None:
    model, processor = theirs
    monkeypatch.setattr(TheirFamily, "vision_scorer", None)
    with pytest.raises(RecipeError, match="cannot read the vision tower of theirs"):
        mmaccel.accelerate(model, prune="visionzip")
    monkeypatch.setattr(TheirFamily, "processors", {})
    with pytest.raises(ModelError, match="'theirs_onevision' is not one of llava_onevision, qwen2"):
        Processor("theirs_onevision", processor.tokenizer)


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
    for own in adapter_for(half).attentions(half):  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("name", ["tiny-qwen", "tiny-ov", pytest.param("tiny-hybrid", marks=STOCK)])
def test_a_stream_on_a_shard_of_heads(name: str, random_folder: Callable[[str], Path]) -> None:
    folder = random_folder(name)
    half = halved(mmaccel.load_model(folder))
    processor = mmaccel.load_processor(folder)
    with mmaccel.VideoSession(half, processor, "mosaic") as session:
        session.watch(film(24), fps=1.0)
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
    assert next(model.parameters()).is_meta and asked(tmp_path / "offloaded") == plain
    with mmaccel.VideoSession.resume(model, processor, tmp_path / "plain") as session:
        assert session.frames == 24, "the same weights, wherever they are"
    with mmaccel.accelerate(model, draft={"name": "sequential", "model": str(folder)}):
        model.generate(**processor.chat("What is shown?"), **TOLD)


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


@pytest.fixture(
    params=["gemma3", "gemma4", "internvl", "llava_onevision", "qwen2_5_vl", "qwen3_5", "qwen3_vl"]
)
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
