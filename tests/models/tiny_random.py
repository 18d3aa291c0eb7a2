"""Tiny random models of both families, and prompts of every kind; no checkpoint, no network."""

from __future__ import annotations

import torch
import transformers as T

IMG, VID, VS, VE, VOCAB = 190, 191, 192, 193, 200


def qwen(layers: int = 2, hidden: int = 64, seed: int = 0):
    """A Qwen2.5-VL of 2 layers: 4 heads of 16, 2 key/value heads, merge 2, temporal patch 2."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    return T.Qwen2_5_VLForConditionalGeneration(
        T.Qwen2_5_VLConfig(
            text_config={
                "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": layers,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
                "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rope_parameters": rope,
            },
            vision_config={
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
                "fullatt_block_indexes": [1], "out_hidden_size": hidden,
            },
            image_token_id=IMG, video_token_id=VID, vision_start_token_id=VS, vision_end_token_id=VE,
        )
    ).eval()  # fmt: skip


def llava(layers: int = 2, hidden: int = 64, seed: int = 0):
    """A LLaVA-OneVision of 2 layers: 28-pixel frames of 2 x 2 pooled tokens."""
    torch.manual_seed(seed)
    model = T.LlavaOnevisionForConditionalGeneration(
        T.LlavaOnevisionConfig(
            vision_config={
                "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
                "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
                "vision_use_head": False,
            },
            text_config={
                "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 128,
                "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
            },
            image_token_id=IMG, video_token_id=VID, vision_feature_layer=-1,
            image_grid_pinpoints=[[28, 28], [28, 56], [56, 28]],
        )
    ).eval()  # fmt: skip
    redraw_patches(model, seed + 3)
    return model


def redraw_patches(model, seed: int) -> None:
    """Draws the one weight of a LLaVA that is a truncated normal: each version of PyTorch draws those in its own way."""
    patches = model.model.vision_tower.embeddings.patch_embedding.weight
    torch.nn.init.normal_(
        patches, std=patches[0].numel() ** -0.5, generator=torch.Generator().manual_seed(seed)
    )


BUILD = {"qwen": qwen, "llava": llava}


def _words(n: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, 180, (n,), generator=generator).tolist()


def prompt(family: str, pieces: list, seed: int = 0) -> dict[str, torch.Tensor]:
    """Model inputs of one sequence. `pieces`: ("text", n), ("video", frames) or ("image",), in order."""
    g = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    pixels: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    for kind, *rest in pieces:
        if kind == "text":
            ids += _words(rest[0], g)
        elif family == "qwen":
            t, h, w = (rest[0], 4, 6) if kind == "video" else (1, 4, 4)
            ids += [VS, *[VID if kind == "video" else IMG] * (t * h * w // 4), VE]
            pixels[kind].append(torch.randn(t * h * w, 3 * 2 * 14 * 14, generator=g))
            grids[kind].append([t, h, w])
        elif kind == "video":
            ids += [VID] * (rest[0] * 4 + 1)
            pixels[kind].append(torch.randn(rest[0], 3, 28, 28, generator=g))
        else:  # a 28 x 56 picture: base view, then two tiles with a newline a row
            ids += [IMG] * (16 + 4 * (8 + 1))
            pixels[kind].append(torch.randn(3, 3, 28, 28, generator=g))
    out = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    if family == "qwen":
        kinds = [2 if i == VID else 1 if i == IMG else 0 for i in ids]
        out["mm_token_type_ids"] = torch.tensor([kinds], dtype=torch.int)
        for kind, name in (("video", "video_grid_thw"), ("image", "image_grid_thw")):
            if grids[kind]:
                out["pixel_values_videos" if kind == "video" else "pixel_values"] = torch.cat(pixels[kind])
                out[name] = torch.tensor(grids[kind])
    else:
        if pixels["video"]:
            out["pixel_values_videos"] = torch.stack(pixels["video"])
        if pixels["image"]:
            out["pixel_values"] = torch.stack(pixels["image"])
            out["image_sizes"] = torch.tensor([[28, 56]] * len(pixels["image"]))
            out["batch_num_images"] = torch.tensor([1] * len(pixels["image"]))
    return out


def batch(family: str, prompts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Prompts of unequal length as one left-padded batch."""
    width = max(p["input_ids"].shape[1] for p in prompts)
    out: dict[str, torch.Tensor] = {}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if name in prompts[0]:
            out[name] = torch.cat(
                [torch.nn.functional.pad(p[name], (width - p[name].shape[1], 0)) for p in prompts]
            )
    for name in (
        "pixel_values",
        "pixel_values_videos",
        "image_grid_thw",
        "video_grid_thw",
        "image_sizes",
        "batch_num_images",
    ):
        found = [p[name] for p in prompts if name in p]
        if found:
            out[name] = torch.cat(found)
    return out


PROMPTS = {
    "text": [("text", 20)],
    "image": [("text", 5), ("image",), ("text", 7)],
    "video": [("text", 5), ("video", 6), ("text", 9)],
    "two videos": [("text", 3), ("video", 4), ("text", 1), ("video", 4), ("text", 6)],
    "interleaved": [
        ("video", 4),
        ("text", 2),
        ("image",),
        ("text", 1),
        ("image",),
        ("text", 5),
        ("video", 4),
        ("text", 8),
    ],
    "long": [("text", 8), ("video", 40), ("text", 12)],
}
