"""Every family keeps its promises on tiny models of transformers' own classes, and one that breaks them is found."""

import copy
import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import mmaccel
from mmaccel.contract import family
from mmaccel.core.adapter import ConfigOnlyModel, ModelView
from mmaccel.core.attach import adapt_recipe_to_model, adapter_for, family_of
from mmaccel.core.errors import ModelError
from mmaccel.core.prefill.attention import ForwardPass
from mmaccel.core.prefill.masked import BidirectionalImages
from mmaccel.core.recipe import Recipe
from mmaccel.core.registry import registry
from mmaccel.models import deepstack, gemma, generic, step, tiny
from mmaccel.models.family import Family
from mmaccel.models.generic import GenericFamily, UnlistedFamily
from mmaccel.models.prompt_layout import format_time
from mmaccel.models.qwen2_5_vl import Qwen25VL
from mmaccel.models.qwen3_vl import Qwen3VL
from mmaccel.policies.sparse import grid
from mmaccel.policies.sparse.block_topk import BlockTopK
from mmaccel.policies.sparse.k_boundary import KBoundary
from mmaccel.policies.sparse.orders import AttentionRegion
from mmaccel.policies.sparse.q_boundary import QBoundary
from mmaccel.policies.sparse.tri_shape import TriShape
from mmaccel.policies.sparse.vertical_slash import VerticalSlash
from tests.models.tiny_random import sampler
from tests.spies import product

pytestmark = pytest.mark.numeric(by="torch")


KINDS = sorted(kind for family in registry("model").values() for kind in family.model_types if kind != "*")


def try_only(monkeypatch: pytest.MonkeyPatch, checks: str, *patterns: str) -> None:
    """Let `check_family` run the checks of these names alone, by the patterns of these names."""
    monkeypatch.setattr(family, "CHECKS", tuple(getattr(family, check) for check in checks.split()))
    monkeypatch.setattr(family, "SPARSE", {name: family.SPARSE[name] for name in patterns})


@pytest.mark.always
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * kind.endswith("_moe")) for kind in KINDS]
)
def test_it_keeps_its_promises(
    kind: str, every: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each family with one pattern, and one that lists everything, others than its neighbour's; `slow`: with all of them,
    and models of experts, whose layers are their namesake's but for the experts."""
    for patterns in ("SPARSE", "FULL") if not every else ():
        all_of_them = getattr(family, patterns)
        one = [*all_of_them][KINDS.index(kind) % len(all_of_them)]
        monkeypatch.setattr(family, patterns, {one: all_of_them[one]})
    if kind == "perception_lm" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("its tower needs a newer timm under earlier transformers")
    rows = mmaccel.check_family(sampler(kind).kind)
    assert all(kept for _, _, kept in rows) and len(rows) > 17
    assert f"{kind} ({family_of(kind).name})" in capsys.readouterr().out


def _lost(given: Any, columns: Any) -> dict[str, Any]:
    whole = PLAIN(given, columns)
    return {**whole, deepstack.FEATURES: [one * 0 for one in whole[deepstack.FEATURES]]}


def _backwards(self: Any, model: Any, inputs: Any) -> Any:
    made = Qwen25VL.layout(self, model, inputs)
    return replace(made, frame=torch.where(made.frame < 0, made.frame, made.frame.max() - made.frame))


def _together(family: Any, *given: Any) -> Any:
    images, videos = Qwen25VL.token_grids(family, *given)
    return images, [replace(video, apart=False) for video in videos]


def _shifted(*given: Any) -> Any:
    made = frame_phases(*given)
    return replace(made, shift=(made.shift + 1) % made.stride)


frame_phases, near_and_first = grid.estimate_frame_phases, AttentionRegion.window_and_sink
strongest, shares = VerticalSlash._strongest, BlockTopK._shares
PATTERNS: dict[str, tuple[Any, str, Any]] = {
    "a_shape": (
        AttentionRegion,
        "window_and_sink",
        lambda region, sink, window: near_and_first(region, sink, window + 1),
    ),
    "tri_shape": (TriShape, "bottom", property(lambda self: 20, lambda self, value: None)),
    "vertical_slash": (
        VerticalSlash,
        "_strongest",
        lambda self, *a: strongest(self, *(-x for x in a[:2]), a[2]),
    ),
    "block_topk": (BlockTopK, "_shares", lambda self, *a: 1 / (shares(self, *a) + 1)),
    "grid": (grid, "estimate_frame_phases", _shifted),
    "q_boundary": (QBoundary, "modality_groups", KBoundary.modality_groups),
    "k_boundary": (
        KBoundary,
        "modality_groups",
        property(lambda self: {None: dict.fromkeys(self.modality_patterns, self.video)}),
    ),
}


PLAIN, PLAN, NARROW = deepstack.slice_features, ForwardPass._plan, gemma.Gemma3.sliding_layers
FAULTS: dict[str, tuple[Any, str, Any, str, str]] = {
    "features that chunks lose": (deepstack, "slice_features", _lost, "_dense", "dense in chunks"),
    "frames that follow each other": (Qwen3VL, "token_grids", _together, "_dense", "placeholders"),
    "frames from the last to the first": (Qwen3VL, "layout", _backwards, "_layout", "columns of frames"),
    "parts of a film from the last to the first": (
        *(Qwen3VL, "encode_pixels", lambda *given: tuple(x.flip(0) for x in Qwen25VL.encode_pixels(*given))),
        *("_layout", "pixels in parts: embeddings off by"),
    ),
    "a method that raises": (Qwen3VL, "token_grids", None, "_dense", "on 'qwen3_vl': dense: TypeError"),
    "a_shape in one layer alone": (
        *(ForwardPass, "_plan", lambda self, layer, *given: None if layer else PLAN(self, layer, *given)),
        *("_patterns", "a_shape: it does not act in layers"),
    ),
    **{
        name: (*fault, "_patterns", f"[:;] {name}: other pairs than its definition")
        for name, fault in PATTERNS.items()
    },
}
GEMMA: dict[str, tuple[Any, str, Any, str, str]] = {
    "images": (BidirectionalImages, "find_new_images", lambda *a: None, "_dense", "dense, a video"),
    "later": (BidirectionalImages, "next_chunk_boundary", lambda self, end: end, "_dense", "in chunks"),
    "windows": (
        *(gemma.Gemma3, "sliding_layers", lambda *a: dict.fromkeys(NARROW(*a), 1 << 16)),
        *("_dense", "dense, text|dense, a video"),
    ),
}


@pytest.mark.parametrize(
    ("fault", "kind"), [*((name, "qwen3_vl") for name in FAULTS), *product(GEMMA, ["gemma3", "gemma4"])]
)
def test_a_fault_is_found(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, check, said = {**FAULTS, **GEMMA}[fault]
    monkeypatch.setattr(where, name, wrong)
    try_only(monkeypatch, check, *[fault.split()[0]] * (check == "_patterns"))
    with pytest.raises(ModelError, match=said):
        mmaccel.check_family(sampler(kind).kind, quiet=True)


def test_every_fact_of_a_family_is_described() -> None:
    described = re.findall(r"(?m)^(\w+) {2,}\S", inspect.getdoc(Family) or "")
    assert described == list(Family.__annotations__)


def test_a_family_without_a_tiny_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3VL, "tiny", {})
    with pytest.raises(
        ModelError, match=r"'qwen3_vl' has no tiny\['qwen3_vl'\], which check_family needs; register a family"
    ):
        mmaccel.check_family("qwen3_vl")
    with pytest.raises(ModelError, match="give a model of transformers, its class or a model type"):
        mmaccel.check_family(7)
    monkeypatch.setattr(GenericFamily, "tiny_visual_input", None)
    with pytest.raises(ModelError, match=r"'generic': its tiny 'internvl' does not run .*`tiny`"):
        mmaccel.check_family("internvl")


def test_any_other_model_is_served_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idefics3 is built as SmolVLM is; of a model with windows or states nothing is taken on trust."""
    like = GenericFamily.tiny["smolvlm"]
    monkeypatch.setattr(UnlistedFamily, "tiny", {"idefics3": {**like, "pad_token_id": 0}})
    monkeypatch.setattr(
        UnlistedFamily,
        "tiny_visual_input",
        lambda self, config, *a: GenericFamily.tiny_visual_input(self, like_smolvlm(config), *a),
    )
    monkeypatch.setattr(
        UnlistedFamily,
        "complete_tiny_inputs",
        lambda self, config, made: GenericFamily.complete_tiny_inputs(self, like_smolvlm(config), made),
    )
    generic._TOLD.discard("idefics3")
    try_only(monkeypatch, "_dense _patterns _pruners", "a_shape")
    with pytest.warns(
        mmaccel.MmaccelWarning, match="'idefics3' has no family of its own: patterns, kv 'window'"
    ):
        rows = mmaccel.check_family(transformers.Idefics3ForConditionalGeneration, quiet=True)
    model = family_of("idefics3").tiny_model_factory(transformers.Idefics3ForConditionalGeneration).model()
    model.model.text_model.layers[1].self_attn.sliding_window = 8
    with pytest.raises(
        ModelError, match="'idefics3' is not supported: some of its layers have sliding-window"
    ):
        mmaccel.accelerate(model)
    assert ("prune fastv", True) in [(name, kept) for name, _, kept in rows]


@pytest.mark.parametrize(
    ("kind", "text"), [("llava_next_video", "mistral"), ("internvl", "qwen2"), ("qwen2_5_vl", None)]
)
def test_windows_that_a_family_does_not_compute_are_refused(kind: str, text: str | None) -> None:
    made = sampler(kind)
    model = made.model()
    config: Any = made.config() if text is None else copy.deepcopy(model.config)
    own = config.text_config.to_dict() if text is None else {**tiny.TEXT, "model_type": text}
    own = {**own, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    config.text_config = (
        type(config.text_config)(**{**own, "layer_types": None})
        if text is None
        else transformers.CONFIG_MAPPING[text](**{k: v for k, v in own.items() if k != "model_type"})
    )
    model = made.kind(config).float().eval()
    with pytest.raises(
        ModelError, match="sliding_window: layers of this model attend only to the last 8 tokens"
    ):
        mmaccel.accelerate(model)
    layers = model.get_decoder().layers
    assert not step.can_fuse_layers(layers, "silu", family_of(kind))
    for one in {
        id(x): x for x in (config.text_config, *(layer.self_attn.config for layer in layers))
    }.values():
        one.sliding_window, one.layer_types = None, None
    for layer in layers:
        layer.self_attn.sliding_window = None
    assert step.can_fuse_layers(layers, "silu", family_of(kind))


@pytest.mark.parametrize("kind", ["qwen2_5_omni_thinker", "hunyuan_vl"])
def test_positions_of_another_model_are_its_own(kind: str) -> None:
    """Qwen2.5-Omni finds images by their tokens alone; of text HunYuan makes four coordinates itself."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("a newer transformers has it")
    config, omni = transformers.CONFIG_MAPPING[kind](), kind != "hunyuan_vl"
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3] if omni else [2] * 4}
    text = {**tiny.TEXT, "layer_types": None, "head_dim": 16, "rope_parameters": rope}
    few = {**tiny.TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "fullatt_block_indexes": [0]}
    few |= {
        "text_hidden_size": 64,
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_ffn_dim": 32,
        "output_dim": 64,
    }
    few |= {"encoder_attention_heads": 2}
    towers = {
        x: getattr(config, x).to_dict() for x in ("vision_config", "audio_config") if hasattr(config, x)
    }
    towers = {x: {name: few.get(name, value) for name, value in one.items()} for x, one in towers.items()}
    ids = {"image_token_index": 190, "vision_start_token_id": 192, "pad_token_id": 0}
    made = type(config)(text_config=text, **towers, **ids)
    model: Any = family_of(kind).tiny_model_factory(kind).kind(made).float().eval()
    given = {"input_ids": torch.tensor([[*range(3, 30), 192, *[190] * 8 * omni, *range(40, 60)]])}
    if omni:
        given |= {"pixel_values": torch.randn(32, 1176), "image_grid_thw": torch.tensor([[1, 4, 8]])}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    with torch.no_grad():
        plain = model(**given).logits
        with mmaccel.accelerate(model):
            assert torch.equal(model(**given).logits, plain)


def like_smolvlm(config: Any) -> Any:
    return SimpleNamespace(model_type="smolvlm", image_token_id=config.image_token_id)


@pytest.mark.parametrize("kind", ["gemma3n", "mllama", "paligemma", "git", "kosmos-2", "blip-2"])
def test_a_model_of_other_layers_is_refused(kind: str) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    with pytest.raises(ModelError, match=f"model type '{kind}' is not supported: "):
        adapt_recipe_to_model(Recipe(), ModelView(ConfigOnlyModel(config), family_of(kind), adapter_for))


def test_a_time_has_five_characters() -> None:
    times = {0.0: "0.000", 9.25: "9.250", 12.5: "12.50", 100.0: "100.0"}
    times |= {999.96: "1000.", 1234.5: "1234.", 86400.0: "86400"}
    assert {time: format_time(time) for time in times} == times
    assert all(len(format_time(time)) == 5 for time in (9.99996, 99.9996, 99999.7, 1e5, 123456.7))
