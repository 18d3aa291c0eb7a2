"""The training forward of the tiny models: stock weights, a video read once, and few, fused kernels.

A batch row is a prefix (the prompt up to its question: video frames and text) and several branches (a question and
its answer, or a caption). Every branch sees the prefix and itself, never another branch, at the positions it would
have were it alone; so one pass gives the logits of as many separate prompts. Activations are in the dtype of the
frames (bf16 in training), weights are cast where they are used; the halves of a layer before and after its attention
are functions of tensors alone, which `compile_layers` compiles once for all layers and lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel_lab.tiny.configs import HEAD, MROPE_SECTION, PATCH, Spec

EPS = 1e-6


@dataclass(frozen=True)
class Branches:
    """The first `prefix` columns are causal, the rest see what `seen` says.

    `seen`: bool [B, 1, N, prefix + N], or None when there are no branches.
    """

    prefix: int
    seen: Tensor | None


def see(prefix_length: Tensor, branch: Tensor, prefix: int) -> Tensor:
    """Who sees whom: [B] true prefix lengths, [B, N] branch numbers (-1 is padding) -> bool [B, 1, N, prefix + N]."""
    count = branch.shape[1]
    place = torch.arange(count, device=branch.device)
    own = (branch[:, :, None] == branch[:, None, :]) & (place[:, None] >= place[None, :])
    past = torch.arange(prefix, device=branch.device) < prefix_length[:, None]
    return torch.cat((past[:, None, :].expand(-1, count, -1), own), 2)[:, None]


def branch_attention(query: Tensor, key: Tensor, value: Tensor, branches: Branches) -> Tensor:
    """[B, H, S, D] attention of queries [B, H, S, D] over keys and values [B, G, S, D] under `branches`."""
    split = branches.prefix
    # The kernels that take a mask want as many key heads as query heads.
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    first = F.scaled_dot_product_attention(
        query[:, :, :split], key[:, :, :split], value[:, :, :split], is_causal=True
    )
    if branches.seen is None:
        return first
    rest = F.scaled_dot_product_attention(query[:, :, split:], key, value, attn_mask=branches.seen)
    return torch.cat((first, rest), 2)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight.to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def _text_before(
    x: Tensor,
    norm: Tensor,
    wq: Tensor,
    bq: Tensor,
    wk: Tensor,
    bk: Tensor,
    wv: Tensor,
    bv: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T, E] -> queries [T, H, D], keys and values [T, G, D], rotated by cos and sin [T, D]."""
    y = _rms(x, norm)
    query = _linear(y, wq, bq).unflatten(-1, (-1, HEAD))
    key = _linear(y, wk, bk).unflatten(-1, (-1, HEAD))
    value = _linear(y, wv, bv).unflatten(-1, (-1, HEAD))
    return _turn(query, cos[:, None], sin[:, None]), _turn(key, cos[:, None], sin[:, None]), value


def _text_after(
    x: Tensor, seen: Tensor, wo: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    x = x + _linear(seen, wo)
    y = _rms(x, norm)
    return x + _linear(F.silu(_linear(y, gate)) * _linear(y, up), down)


def _siglip_before(
    x: Tensor,
    norm: Tensor,
    shift: Tensor,
    wq: Tensor,
    bq: Tensor,
    wk: Tensor,
    bk: Tensor,
    wv: Tensor,
    bv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    y = F.layer_norm(x.float(), norm.shape, norm, shift, EPS).to(x.dtype)
    return _linear(y, wq, bq), _linear(y, wk, bk), _linear(y, wv, bv)


def _siglip_after(
    x: Tensor,
    seen: Tensor,
    wo: Tensor,
    bo: Tensor,
    norm: Tensor,
    shift: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
) -> Tensor:
    x = x + _linear(seen, wo, bo)
    y = F.layer_norm(x.float(), norm.shape, norm, shift, EPS).to(x.dtype)
    return x + _linear(F.gelu(_linear(y, w1, b1), approximate="tanh"), w2, b2)


def _qwen_before(
    x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Patches [F, P, C] -> [F, P, heads, D] each, rotated by cos and sin [P, 1, D]."""
    query, key, value = _linear(_rms(x, norm), weight, bias).unflatten(-1, (3, -1, cos.shape[-1])).unbind(2)
    return _turn(query, cos, sin), _turn(key, cos, sin), value


def _qwen_after(
    x: Tensor,
    seen: Tensor,
    wo: Tensor,
    bo: Tensor,
    norm: Tensor,
    wg: Tensor,
    bg: Tensor,
    wu: Tensor,
    bu: Tensor,
    wd: Tensor,
    bd: Tensor,
) -> Tensor:
    x = x + _linear(seen, wo, bo)
    y = _rms(x, norm)
    return x + _linear(F.silu(_linear(y, wg, bg)) * _linear(y, wu, bu), wd, bd)


_HALVES: dict[str, Callable[..., Any]] = {
    half.__name__: half
    for half in (_text_before, _text_after, _siglip_before, _siglip_after, _qwen_before, _qwen_after)
}


def compile_layers() -> None:
    """Compile the halves of a layer, once for all layers, lengths and frame counts."""
    for name, half in _HALVES.items():
        _HALVES[name] = torch.compile(half, dynamic=True)


def _both(module: Any) -> tuple[Tensor, Tensor]:
    return module.weight, module.bias


def encode(model: Any, spec: Spec, frames: Tensor) -> Tensor:
    """Features [F, tokens_per_frame, hidden] of normalised frames [F, 3, height, width]."""
    if spec.model_type == "llava_onevision":
        return _encode_llava(model.model, spec, frames)
    return _encode_qwen(model.model, spec, frames)


def _encode_llava(model: Any, spec: Spec, frames: Tensor) -> Tensor:
    tower = getattr(model.vision_tower, "vision_model", model.vision_tower)
    count, channels, height, width = frames.shape
    rows, columns = height // PATCH, width // PATCH
    grid = frames.reshape(count, channels, rows, PATCH, columns, PATCH).permute(0, 2, 4, 1, 3, 5)
    proj = tower.embeddings.patch_embedding
    x = _linear(grid.reshape(count, rows * columns, -1), proj.weight.flatten(1), proj.bias)
    x = x + tower.embeddings.position_embedding.weight.to(x.dtype)
    for layer in tower.encoder.layers:
        own, mlp = layer.self_attn, layer.mlp
        qkv = _HALVES["_siglip_before"](
            x, *_both(layer.layer_norm1), *_both(own.q_proj), *_both(own.k_proj), *_both(own.v_proj)
        )
        query, key, value = (t.unflatten(-1, (spec.vision_heads, -1)).transpose(1, 2) for t in qkv)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = _HALVES["_siglip_after"](
            x, seen, *_both(own.out_proj), *_both(layer.layer_norm2), *_both(mlp.fc1), *_both(mlp.fc2)
        )
    project = model.multi_modal_projector
    x = _linear(F.gelu(_linear(x, *_both(project.linear_1))), *_both(project.linear_2))
    # The stock bilinear halving of an even grid: each output is the mean of two by two.
    return x.view(count, rows // 2, 2, columns // 2, 2, -1).mean((2, 4)).flatten(1, 2)


def _encode_qwen(model: Any, spec: Spec, frames: Tensor) -> Tensor:
    visual = model.visual
    patches = patchify(frames)
    x = _linear(patches, visual.patch_embed.proj.weight.flatten(1))
    size = spec.vision_width // spec.vision_heads
    cos, sin = _grid_rotation(frames.shape[2] // PATCH, frames.shape[3] // PATCH, size, str(frames.device))
    for block in visual.blocks:
        mlp = block.mlp
        qkv = _HALVES["_qwen_before"](x, block.norm1.weight, *_both(block.attn.qkv), cos, sin)
        query, key, value = (t.transpose(1, 2) for t in qkv)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = _HALVES["_qwen_after"](
            x, seen, *_both(block.attn.proj), block.norm2.weight,
            *_both(mlp.gate_proj), *_both(mlp.up_proj), *_both(mlp.down_proj),
        )  # fmt: skip
    merger = visual.merger
    merged = _rms(x, merger.ln_q.weight).view(x.shape[0], -1, 4 * x.shape[-1])
    return _linear(F.gelu(_linear(merged, *_both(merger.mlp[0]))), *_both(merger.mlp[2]))


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


def _rotation(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, HEAD] for positions [B, S], or [3, B, S] whose coordinates share the frequencies (M-RoPE)."""
    rate = 1.0 / 1e6 ** (torch.arange(0, HEAD, 2, device=positions.device).float() / HEAD)
    if positions.ndim == 3:
        sections = torch.tensor(MROPE_SECTION, device=positions.device)
        axis = torch.repeat_interleave(torch.arange(3, device=positions.device), sections)
        angle = positions.flatten(1).float()[axis].T * rate
    else:
        angle = positions.flatten().float()[:, None] * rate
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def hidden_states(
    model: Any, spec: Spec, ids: Tensor, positions: Tensor, features: Tensor, videos: int, branches: Branches
) -> tuple[Tensor, Tensor]:
    """Last hidden states [B, S, hidden] of ids [B, S] whose video tokens are filled by `features` in reading order, and
    the states [B * S, hidden] halfway up the layers.

    `features`: [F, tokens_per_frame, hidden] of `encode`. `positions`: [B, S], or [3, B, S] for M-RoPE. `videos`: how
    many videos of equal length the frames make up.
    """
    text = model.model.language_model
    embeds = F.embedding(ids, text.embed_tokens.weight).to(features.dtype)
    if spec.newline:
        features = features.reshape(videos, -1, features.shape[-1])
        newline = model.model.image_newline.to(features.dtype).expand(videos, 1, -1)
        features = torch.cat((features, newline), 1)
    x = embeds.masked_scatter((ids == model.config.video_token_id)[..., None], features).flatten(0, 1)
    cos, sin = _rotation(positions)
    batch, half = ids.shape[0], (len(text.layers) + 1) // 2
    halfway = x
    for depth, layer in enumerate(text.layers):
        halfway = x if depth == half else halfway
        own, mlp = layer.self_attn, layer.mlp
        qkv = _HALVES["_text_before"](
            x,
            layer.input_layernorm.weight,
            *_both(own.q_proj),
            *_both(own.k_proj),
            *_both(own.v_proj),
            cos,
            sin,
        )
        query, key, value = (t.unflatten(0, (batch, -1)).transpose(1, 2) for t in qkv)
        seen = branch_attention(query, key, value, branches).transpose(1, 2).reshape(x.shape[0], -1)
        x = _HALVES["_text_after"](
            x, seen, own.o_proj.weight, layer.post_attention_layernorm.weight,
            mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
        )  # fmt: skip
    return _rms(x, text.norm.weight).unflatten(0, (batch, -1)), halfway
