"""Write a tiny model as a folder that stock `from_pretrained` and this project's processor both read."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmaccel_lab.tiny.configs import PATCH, Spec
from mmaccel_lab.tiny.tokenizer import SPECIAL, build_tokenizer

BICUBIC = 3
MAX_NEW_TOKENS = 600
MOST_FRAMES = 2**16
FPS = 2.0  # frames a second that are taken of a file: all that a world has, which has one


def export(model: Any, spec: Spec, words: Sequence[str], folder: Path, card: str) -> None:
    """Save bf16 weights, configs, tokenizer, processor configs and a model card (`card` is Markdown) in `folder`."""
    import torch
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    # A copy, so that training can go on in fp32; it must not know the training attention.
    shipped = copy.deepcopy(model).to("cpu", torch.bfloat16).eval()
    shipped.set_attn_implementation("sdpa")
    shipped.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        max_new_tokens=MAX_NEW_TOKENS,
    )
    shipped.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    build_tokenizer(words, spec.model_type).save_pretrained(folder)
    if spec.model_type == "qwen3_5":
        # Newer versions of transformers cut the text of this type in their own way, whatever the folder says, except where
        # it names code. Without `trust_remote_code` that code is passed over.
        place = folder / "tokenizer_config.json"
        told = {
            **json.loads(place.read_text(encoding="utf-8")),
            "auto_map": {"AutoTokenizer": [None, "none.None"]},
        }
        place.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    for name, content in processor_files(spec).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def processor_files(spec: Spec) -> dict[str, dict[str, Any]]:
    """The processor's JSON files by name."""
    common: dict[str, Any] = dict(
        do_resize=True,
        do_rescale=True,
        do_normalize=True,
        do_convert_rgb=True,
        rescale_factor=1 / 255,
        image_mean=list(spec.mean),
        image_std=list(spec.std),
        resample=BICUBIC,
    )
    if spec.model_type == "llava_onevision":
        side = spec.height
        common["size"] = {"height": side, "width": side}
        processor: dict[str, Any] = dict(
            processor_class="LlavaOnevisionProcessor",
            num_image_tokens=(side // PATCH) ** 2,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_9",
            image_token="<image>",
            video_token="<video>",
        )
        image = dict(
            image_processor_type="LlavaOnevisionImageProcessor",
            do_pad=True,
            image_grid_pinpoints=[[side, side], [side, 2 * side], [2 * side, side], [2 * side, 2 * side]],
            **common,
        )
        video = dict(
            video_processor_type="LlavaOnevisionVideoProcessor", do_sample_frames=False, fps=FPS, **common
        )
    else:
        pixels = spec.height * spec.width
        common.update(
            size={"shortest_edge": pixels, "longest_edge": pixels},
            patch_size=PATCH,
            temporal_patch_size=1,
            merge_size=2,
        )
        processor = dict(processor_class="Qwen3VLProcessor" if spec.stamped else "Qwen2_5_VLProcessor")
        image = dict(image_processor_type="Qwen2VLImageProcessor", **common)
        video = dict(
            video_processor_type="Qwen3VLVideoProcessor" if spec.stamped else "Qwen2VLVideoProcessor",
            do_sample_frames=False,
            fps=FPS,
            cap_pixels_per_frame=spec.stamped,
            **common,
        )
        if spec.stamped:
            # Qwen3-VL's pixels are of all frames of a video together; a cap holds for each.
            video.update(
                size={"shortest_edge": pixels, "longest_edge": MOST_FRAMES * pixels},
                max_video_tokens=spec.tokens_per_frame,
                max_frames=MOST_FRAMES,
            )
    name = processor["processor_class"]
    return {
        "processor_config.json": processor,
        "preprocessor_config.json": {"processor_class": name, **image},
        "video_preprocessor_config.json": {"processor_class": name, **video},
    }
