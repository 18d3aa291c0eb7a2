"""The vision towers of the tiny models in training: stock weights, all frames at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel_lab.tiny.configs import PATCH, SIDE, Spec
from mmaccel_lab.tiny.halves import HALVES, both, linear, normed, rms


def encode(model: Any, spec: Spec, frames: Tensor) -> Tensor:
    """Features [F, tokens_per_frame, hidden] of normalised frames [F, 3, height, width]; with DeepStack, those for each of
    the first layers of text follow in the last axis."""
    return (_encode_qwen if spec.mrope else _encode_llava)(model.model, spec, frames)


def _encode_llava(model: Any, spec: Spec, frames: Tensor) -> Tensor:
    tower = getattr(model.vision_tower, "vision_model", model.vision_tower)
    count, channels, height, width = frames.shape
    rows, columns = height // PATCH, width // PATCH
    grid = frames.reshape(count, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
    proj = tower.embeddings.patch_embedding
    x = linear(grid.reshape(count, rows * columns, -1), proj.weight.flatten(1), proj.bias)
    x = x + tower.embeddings.position_embedding.weight.to(x.dtype)
    for layer in tower.encoder.layers:
        own, mlp = layer.self_attn, layer.mlp
        weights = (layer.layer_norm1, own.q_proj, own.k_proj, own.v_proj)
        qkv = HALVES["_siglip_before"](x, *map(both, weights))
        seen = _attention(t.unflatten(-1, (spec.vision_heads, -1)) for t in qkv)
        x = HALVES["_plain_after"](x, seen, *map(both, (own.out_proj, layer.layer_norm2, mlp.fc1, mlp.fc2)))
    project = model.multi_modal_projector
    x = linear(F.gelu(linear(x, *both(project.linear_1))), *both(project.linear_2))
    # The stock bilinear halving of an even grid: each output is the mean of two by two.
    return x.view(count, rows // 2, 2, columns // 2, 2, -1).mean((2, 4)).flatten(1, 2)


def _encode_qwen(model: Any, spec: Spec, frames: Tensor) -> Tensor:
    """Of Qwen2.5-VL, and of Qwen3-VL and later, which learn the places of patches and have plain MLPs."""
    visual, proj = model.visual, model.visual.patch_embed.proj
    rows, columns, device = frames.shape[2] // PATCH, frames.shape[3] // PATCH, str(frames.device)
    x = linear(patchify(frames), proj.weight.flatten(1), proj.bias)
    if spec.stamped:
        x = x + (_grid_places(rows, columns, device) @ visual.pos_embed.weight).to(x.dtype)
    cos, sin = _grid_rotation(rows, columns, spec.vision_width // spec.vision_heads, device)
    deep = []
    for depth, block in enumerate(visual.blocks):
        own, mlp = block.attn, block.mlp
        seen = _attention(HALVES["_qwen_before"](x, both(block.norm1), both(own.qkv), cos, sin))
        if spec.stamped:
            plain = (own.proj, block.norm2, mlp.linear_fc1, mlp.linear_fc2)
            x = HALVES["_plain_after"](x, seen, *map(both, plain))
        else:
            gated = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
            x = HALVES["_gated_after"](x, seen, both(own.proj), block.norm2.weight, *map(both, gated))
        if depth in spec.deepstack:
            deep.append(_merged(visual.deepstack_merger_list[spec.deepstack.index(depth)], x))
    if spec.stamped:
        return torch.cat((_merged(visual.merger, x), *deep), -1)
    merged = rms(x, visual.merger.ln_q.weight).view(x.shape[0], -1, 4 * x.shape[-1])
    return linear(F.gelu(linear(merged, *both(visual.merger.mlp[0]))), *both(visual.merger.mlp[2]))


def _attention(heads: Iterable[Tensor]) -> Tensor:
    """What the heads of each frame see [F, P, C], of queries, keys and values [F, P, heads, D]."""
    query, key, value = (t.transpose(1, 2) for t in heads)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def _merged(merger: Any, x: Tensor) -> Tensor:
    """Patches [F, P, C] -> features [F, P / 4, hidden]; the norm is of each patch, or of the four together."""
    four, norm = x.unflatten(1, (-1, 4)), merger.norm
    four = four.flatten(2) if len(norm.weight) > x.shape[-1] else four
    y = normed(four, *both(norm)).flatten(2)
    return linear(F.gelu(linear(y, *both(merger.linear_fc1))), *both(merger.linear_fc2))


@lru_cache(maxsize=8)
def _grid_places(rows: int, columns: int, device: str) -> Tensor:
    """[rows * columns, SIDE * SIDE]: how the learned places mix into those of one frame's patches, in `patchify`'s order."""
    learnt = torch.eye(SIDE * SIDE).view(1, -1, SIDE, SIDE)
    grid = F.interpolate(learnt, size=(rows, columns), mode="bilinear", align_corners=True)[0]
    grid = grid.view(-1, rows // 2, 2, columns // 2, 2).permute(1, 3, 2, 4, 0)
    return grid.reshape(rows * columns, -1).to(device)


def patchify(frames: Tensor) -> Tensor:
    """Patches [F, rows * columns, 3 * 14 * 14] in the order of Qwen's processors: 2 by 2 neighbours together."""
    count, channels, height, width = frames.shape
    rows, columns = height // PATCH, width // PATCH
    grid = frames.reshape(count, channels, rows // 2, 2, PATCH, columns // 2, 2, PATCH)
    return grid.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(count, rows * columns, -1)


@lru_cache(maxsize=8)
def _grid_rotation(rows: int, columns: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosine and sine [rows * columns, 1, size] of the axial rotation of one frame, in `patchify`'s order."""
    place = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    place = place.view(2, rows // 2, 2, columns // 2, 2).permute(0, 1, 3, 2, 4).reshape(2, -1).float()
    rate = 1.0 / 10000.0 ** (torch.arange(0, size // 2, 2).float() / (size // 2))
    angle = (place[..., None] * rate).permute(1, 0, 2).flatten(1)
    angle = torch.cat((angle, angle), -1).to(device)[:, None]
    return angle.cos(), angle.sin()
