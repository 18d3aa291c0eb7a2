"""Models loaded the way people load them; what their configuration alone tells; and the named shapes, as published."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import mmaccel
from mmaccel.core.attach import adapter_for
from mmaccel.core.errors import DraftError, ModelError, UnknownName
from mmaccel.models import loading, step
from mmaccel.models.shapes import SHAPES, build_model, model_config
from tests.models.streams import QUESTION, asked_of_film, film
from tests.spies import refusal

T = pytest.importorskip("transformers")
SPARSE = {"sparse": {"name": "a_shape", "block": 16, "window": 16, "sink": 4}, "dense_tail": 0}
STOCK = pytest.mark.skipif(find_spec("torchvision") is None, reason="Qwen3-VL's processor needs torchvision")
NAMES = ["tiny-ov", "tiny-qwen", *(pytest.param(name, marks=STOCK) for name in ("tiny-qwen3", "tiny-hybrid"))]
FRAMES = 12
QUANTIZED = ("torchao", "bitsandbytes")


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, random_folder: Callable[[str], Path]) -> Path:
    return random_folder(request.param)


def said_by(model: Any, inputs: Any, dense: Iterable[dict[str, Any]]) -> tuple[torch.Tensor, float | None]:
    """The plain model's tokens, which recipes without a pattern give too, and what a pattern kept."""
    some = {"max_new_tokens": 5, "do_sample": False}
    plain: torch.Tensor = model.generate(**inputs, **some)
    for recipe in dense:
        with mmaccel.accelerate(model, **recipe):
            assert torch.equal(model.generate(**inputs, **some), plain)
    with mmaccel.accelerate(model, **SPARSE) as fast:
        model.generate(**inputs, **some)
        return plain, fast.report().kept


@pytest.mark.parametrize("how", QUANTIZED)
def test_quantized_weights(folder: Path, how: str) -> None:
    """A model's answers, two of a stream too; and what a pattern kept."""
    model, processor = quantized(folder, how), mmaccel.load_processor(folder)
    _, kept = said_by(model, processor.chat(asked_of_film(FRAMES)), ({}, {"draft": "prompt_lookup"}))
    with mmaccel.VideoSession(model, processor, "rekv") as session:
        session.watch(film(FRAMES), fps=1.0)
        streamed = [session.ask(QUESTION, max_new_tokens=5).ids for _ in range(2)]
    assert streamed[0] == streamed[1]
    assert kept is not None and kept < 1
    family: Any = adapter_for(model)
    assert not step.can_fuse_layers(family.layers(model), "silu", family), (
        "a step would read the weights as they lie"
    )


def test_the_keywords_go_to_from_pretrained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Mock(return_value=torch.nn.Linear(1, 1))
    monkeypatch.setattr(T.AutoModelForImageTextToText, "from_pretrained", load)
    mmaccel.load_model(folder)
    assert load.call_args.kwargs == {"dtype": "auto", "trust_remote_code": False}
    given = {"revision": "v2", "quantization_config": object(), "attn_implementation": "eager"}
    mmaccel.load_model(folder, torch.bfloat16, device_map="auto", trust_remote_code=True, **given)
    assert load.call_args.kwargs == {
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


def test_another_type_is_refused_before_weights_are_read(folder: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_6_vl"}))
    read = pytest.fail
    monkeypatch.setattr(T.AutoModelForImageTextToText, "from_pretrained", lambda *_, **__: read("weights"))
    told = r"model type 'qwen2_6_vl' is not supported; the nearest that is, is 'qwen2_5_vl'; there are"
    with pytest.raises(ModelError, match=told):
        mmaccel.load_model(tmp_path)
    for dtype in ("int8", 32):
        with pytest.raises(UnknownName, match=f"unknown dtype '{dtype}': there are auto"):
            mmaccel.load_model(folder, dtype=dtype)  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "paligemma"}))
    with pytest.raises(ModelError, match="'paligemma' is not supported: some of its tokens attend"):
        mmaccel.load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for load in (mmaccel.load_model, mmaccel.load_processor):
        with pytest.raises(ModelError, match="models of type 'bert' take no images or videos"):
            load(tmp_path)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="transformers' processors need torchvision")
def test_a_processor_that_does_not_load_tells_the_cause(tmp_path: Path, monkeypatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ImportError("Package `num2words` is required. " + "word " * 99)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "smolvlm"}))
    monkeypatch.setattr(T.AutoProcessor, "from_pretrained", fails)
    with pytest.raises(
        ModelError, match=r"\(Package `num2words` is required\. .* word \.\.\.\); install the"
    ):
        mmaccel.load_processor(tmp_path)


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
    for recipe in ({}, {"draft": "prompt_lookup"}):
        with mmaccel.accelerate(model, **recipe) as fast:
            assert pipe(text=asked, **how) == plain
            assert fast.report().new_tokens > 0
    with mmaccel.accelerate(model, **SPARSE) as fast:
        pipe(text=asked, **how)
        assert fast.report().kept is not None


Folder = Callable[[str], Path]
HEAD = {"pattern": {"name": "a_shape", "sink": 16, "window": 128}}
DEEP = {"model": "DRAFT", "prune": {"name": "uv", "layer": 30}}
TOO_DEEP = "uv: layer 30 and base 1 on a target of 3 layers"
OTHERS = "the draft is a qwen2_5_vl and the target a llava_onevision"


def heads(table: Any) -> dict[str, Any]:
    return {"sparse": {"name": "per_head", "table": table}}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dense_layers": [1, 40]}, "there is no layer 40; the model has layers 0 to 2"),
    ({"prune": {"name": "fastv", "layer": 9}}, "fastv: layer 9 of a model of 3"),
    ({"prune": {"name": "pyramid_drop", "stages_at": [0.5, 0.7]}}, "fall on layers [2, 2] of 3"),
    ({"draft": {"name": "sequential", **DEEP}}, TOO_DEEP),
    # In a process of its own.
    ({"draft": {"name": "parallel", **DEEP}}, TOO_DEEP),
    (heads({8: {0: "grid"}}), "table has layer 8; the model has layers 0 to 2"),
    (heads({0: {64: "grid"}}), "has head 64; the model has heads 0 to"),
    (heads("TABLE"), "was searched on another model"),
    ({"sparse": "per_head"}, "no table is shipped with this model"),
    ({"draft": {"name": "sequential", "model": "./nowhere"}}, "draft.model: there is no folder ./nowhere"),
    ({"draft": {"name": "parallel", "model": "./nowhere"}}, "draft.model: there is no folder ./nowhere"),
    ({"draft": {"name": "tree", "model": "beside"}}, "there is no folder"),
    ({"draft": "sequential"}, "sequential: model is 'beside', as it is when none"),
    ({"draft": {"name": "sequential", "model": "OTHER"}}, OTHERS),
]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=str)
def test_it_is_told_before_and_after_in_the_same_words(
    fields: dict[str, Any], words: str, random_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"type": "llava_onevision", "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    table = {"kind": "mmaccel heads", "schema": 1, "model": facts, "block": 64, "layers": [[HEAD]]}
    (tmp_path / "table.json").write_text(json.dumps(table))
    folder, other = random_folder("tiny-ov-draft"), random_folder("tiny-qwen-draft")
    text = json.dumps(fields)
    for word, path in (("TABLE", tmp_path / "table.json"), ("DRAFT", folder), ("OTHER", other)):
        text = text.replace(word, str(path))
    recipe = mmaccel.Recipe.load(json.loads(text))
    with monkeypatch.context() as unloaded:
        unloaded.setattr(loading, "load_model", lambda *_, **__: pytest.fail("something is loaded"))
        before = refusal(lambda: loading.check_recipe(recipe, folder))
    model = mmaccel.load_model(folder)
    assert words in before and "Error" not in before
    assert before == refusal(lambda: mmaccel.accelerate(model, recipe))
    assert mmaccel.attached(model) is None


def test_an_outline_is_as_large_as_the_model(random_folder: Folder) -> None:
    for name in ("tiny-ov-draft", "tiny-qwen-draft"):
        found, model = loading.config_only_view(random_folder(name)), loading.load_model(random_folder(name))
        family = adapter_for(model)
        assert found.config_only and not list(found.model.parameters())
        assert found.geometry == family.geometry(model)
        assert found.adapter.fingerprint(found.model) == family.fingerprint(model)
        assert found.model_folder == family.model_folder(model) == random_folder(name)
        assert found.adapter.name == family.name


def test_what_fits_is_not_refused(random_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    ov, recipe = random_folder("tiny-ov-draft"), {"dense_layers": [0, 2], "prune": "fastv"}
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("something is loaded"))
    loading.check_recipe(recipe, ov)
    for strategy in ("sequential", "parallel"):
        loading.check_recipe({"draft": {"name": strategy, "model": str(ov), "prune": "uv"}}, ov)


def test_a_folder_that_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        loading.config_only_view(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="model type 'bert' is not supported"):
        loading.config_only_view(tmp_path)


@pytest.mark.parametrize("strategy", ["sequential", "tree", "text_only", "parallel"])
def test_a_draft_of_no_model_is_the_one_beside_the_target(
    strategy: str, random_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every road, from within the folder too; where there is none, `WRONG` has the sentence."""
    target = tmp_path / "target"
    shutil.copytree(random_folder("tiny-ov-draft"), target)
    monkeypatch.chdir(target)
    with pytest.raises(DraftError, match="target-draft; give the draft model's folder"):
        loading.check_recipe(strategy, ".")
    shutil.copytree(target, tmp_path / "target-draft")
    for given in (strategy, {"draft": strategy}, {"draft": {"name": strategy}}):
        assert mmaccel.Recipe.load(given) == mmaccel.Recipe.load(draft={"name": strategy, "model": "beside"})
        loading.check_recipe(given, target)
        loading.check_recipe(given, ".")
    model = mmaccel.load_model(target)
    with mmaccel.accelerate(
        model, draft={"name": strategy, **({"process": False} if strategy == "parallel" else {})}
    ):
        pass


@pytest.mark.parametrize("name", ["tiny-ov", "tiny-qwen"])
def test_a_shipped_model_has_its_draft_beside_it(name: str) -> None:
    loading.check_recipe("sequential", name)


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
    with torch.device("meta"):
        model = T.AutoModelForImageTextToText.from_config(model_config(name))
    count = sum(p.numel() for p in model.parameters()) / 1e9
    assert count == pytest.approx(PUBLISHED[name], rel=0.02)


def test_any_depth_and_adapter(monkeypatch):
    name = "llava-onevision-0.5b"
    monkeypatch.setitem(SHAPES, name, replace(SHAPES[name], vocab=2000))
    with pytest.raises(UnknownName, match=r"qwen2\.5-vl-7b"):
        model_config("qwen2.5-vl-7")
    model = build_model(name, layers=1, vision_layers=1, dtype=torch.bfloat16)
    geometry = adapter_for(model).geometry(model)
    assert (geometry.layers, geometry.heads, geometry.kv_heads, geometry.head_dim) == (1, 14, 2, 64)
    assert next(model.parameters()).dtype == torch.bfloat16
