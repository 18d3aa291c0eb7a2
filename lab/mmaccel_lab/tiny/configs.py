"""Sizes of the six tiny models, and the stock transformers classes built from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmaccel.core.errors import ModelError
from mmaccel_lab.tiny.tokenizer import SPECIAL, STAMPED, VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD = 64
PATCH = 14
MAX_POSITIONS = 131072
# SigLIP and Qwen statistics of the stock processors.
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One tiny model: its family, its frame and its widths. `height` and `width` are pixels of a frame."""

    name: str
    model_type: str
    height: int
    width: int
    vision_layers: int
    vision_width: int
    vision_heads: int
    vision_inner: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    target: str | None = None
    deepstack: tuple[int, ...] = ()
    """Layers of the vision tower whose features are added after the first layers of text."""
    kinds: tuple[str, ...] = ()
    """What each layer of text is, where not all are attention."""
    section: tuple[int, int, int] = (8, 12, 12)
    """How many of the rotary frequencies tell time, row and column (M-RoPE); their double is turned of each head."""

    @property
    def tokens_per_frame(self) -> int:
        """Language-model tokens of one frame."""
        rows, columns = self.height // PATCH, self.width // PATCH
        return (rows // 2) * (columns // 2)

    @property
    def newline(self) -> int:
        """Tokens that a video has after its frames: LLaVA-OneVision ends a video with one newline."""
        return 1 if self.model_type == "llava_onevision" else 0

    @property
    def mrope(self) -> bool:
        """Whether positions are of time, row and column."""
        return self.model_type != "llava_onevision"

    @property
    def stamped(self) -> bool:
        """Whether the time of each frame stands before it, as text (Qwen3-VL and later)."""
        return self.model_type in STAMPED

    @property
    def mean(self) -> tuple[float, float, float]:
        return CLIP_MEAN if self.model_type == "qwen2_5_vl" else HALF

    @property
    def std(self) -> tuple[float, float, float]:
        return CLIP_STD if self.model_type == "qwen2_5_vl" else HALF


_TARGET: dict[str, Any] = dict(
    vision_layers=4, vision_width=160, vision_heads=4, layers=8, hidden=256, heads=4, kv_heads=2, inner=640
)
# Three thin layers: a decode step then costs about a quarter of the target's eight (`mmaccel_lab.eval.table.step_ratio`).
_DRAFT: dict[str, Any] = dict(
    vision_layers=2, vision_width=96, vision_heads=3, layers=3, hidden=128, heads=2, kv_heads=1, inner=256
)
_OV: dict[str, Any] = dict(model_type="llava_onevision", height=112, width=112)
_QWEN: dict[str, Any] = dict(model_type="qwen2_5_vl", height=84, width=140)
# A quarter of the other targets' weights.
_SMALL: dict[str, Any] = dict(
    height=84,
    width=140,
    vision_layers=3,
    vision_width=80,
    vision_heads=2,
    vision_inner=160,
    hidden=160,
    heads=4,
    kv_heads=2,
)
QWEN = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}
"""What the stock classes of a type of model are called."""
SIDE = 8
"""Rows and columns of the learned places of patches, where a tower has them."""

SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        Spec(name="tiny-ov", vision_inner=640, **_OV, **_TARGET),
        Spec(name="tiny-ov-draft", target="tiny-ov", vision_inner=384, **_OV, **_DRAFT),
        Spec(name="tiny-qwen", vision_inner=432, **_QWEN, **_TARGET),
        Spec(name="tiny-qwen-draft", target="tiny-qwen", vision_inner=256, **_QWEN, **_DRAFT),
        Spec(
            name="tiny-qwen3",
            model_type="qwen3_vl",
            layers=5,
            inner=208,
            deepstack=(1,),
            section=(12, 10, 10),
            **_SMALL,
        ),
        Spec(
            name="tiny-hybrid",
            model_type="qwen3_5",
            layers=8,
            inner=128,
            kinds=(*["linear_attention"] * 3, "full_attention") * 2,
            section=(4, 2, 2),
            **_SMALL,
        ),
    )
}


def spec_of(name: str) -> Spec:
    """The spec of a tiny model by name."""
    if name not in SPECS:
        raise ModelError(f"There is no tiny model {name!r}; choose one of {', '.join(SPECS)}.")
    return SPECS[name]


def _text(spec: Spec) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if spec.mrope:
        rope["mrope_section"] = list(spec.section)
    more: dict[str, Any] = {}
    if spec.stamped:
        rope["mrope_interleaved"] = True
        more["head_dim"] = HEAD
    if spec.kinds:
        rope["partial_rotary_factor"] = 2 * sum(spec.section) / HEAD
        more.update(
            layer_types=list(spec.kinds),
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=HEAD // 2,
            linear_value_head_dim=HEAD // 2,
        )
    return dict(
        **more,
        vocab_size=VOCABULARY,
        hidden_size=spec.hidden,
        intermediate_size=spec.inner,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )


def _llava(spec: Spec) -> PreTrainedModel:
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    side = spec.height
    config = LlavaOnevisionConfig(
        vision_config=dict(
            model_type="siglip_vision_model",
            hidden_size=spec.vision_width,
            intermediate_size=spec.vision_inner,
            num_hidden_layers=spec.vision_layers,
            num_attention_heads=spec.vision_heads,
            image_size=side,
            patch_size=PATCH,
            vision_use_head=False,
        ),
        text_config=dict(model_type="qwen2", **_text(spec)),
        image_token_index=SPECIAL.index("<image>"),
        video_token_index=SPECIAL.index("<video>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=[[side, side], [side, 2 * side], [2 * side, side], [2 * side, 2 * side]],
        tie_word_embeddings=True,
    )
    return LlavaOnevisionForConditionalGeneration(config)


def _qwen(spec: Spec) -> PreTrainedModel:
    import transformers

    vision: dict[str, Any] = dict(
        depth=spec.vision_layers,
        hidden_size=spec.vision_width,
        intermediate_size=spec.vision_inner,
        num_heads=spec.vision_heads,
        patch_size=PATCH,
        spatial_merge_size=2,
        temporal_patch_size=1,
        out_hidden_size=spec.hidden,
    )
    if spec.stamped:
        vision["num_position_embeddings"] = SIDE * SIDE
    else:
        # One temporal step a frame at the world's frame a second; a fraction would be cut to 0 by transformers 5.17.
        vision["tokens_per_second"] = 1
        vision |= dict(window_size=16 * PATCH, fullatt_block_indexes=list(range(spec.vision_layers)))
    if spec.model_type == "qwen3_vl":
        vision["deepstack_visual_indexes"] = list(spec.deepstack)
    name = QWEN[spec.model_type]
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(spec),
        vision_config=vision,
        image_token_id=SPECIAL.index("<|image_pad|>"),
        video_token_id=SPECIAL.index("<|video_pad|>"),
        vision_start_token_id=SPECIAL.index("<|vision_start|>"),
        vision_end_token_id=SPECIAL.index("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    return model


def build_model(spec: Spec, seed: int = 0) -> PreTrainedModel:
    """A freshly initialised fp32 model of `spec`; the same seed gives the same weights."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (_qwen if spec.mrope else _llava)(spec)
    return model.eval()
