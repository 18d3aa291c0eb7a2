"""The training forward of the tiny models: stock weights, a video read once, and few, fused kernels.

A batch row is a prefix (the prompt up to its question: video frames and text) and several branches (a question and
its answer, or a caption). Every branch sees the prefix and itself, never another branch, at the positions it would
have were it alone; so one pass gives the logits of as many separate prompts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel_lab.tiny import delta
from mmaccel_lab.tiny.configs import HEAD, Spec
from mmaccel_lab.tiny.halves import HALVES, both, rms


def see(prefix_length: Tensor, branch: Tensor, prefix: int) -> Tensor:
    """Who sees whom: [B] true prefix lengths, [B, N] branch numbers (-1 is padding) -> bool [B, 1, N, prefix + N]."""
    count = branch.shape[1]
    place = torch.arange(count, device=branch.device)
    own = (branch[:, :, None] == branch[:, None, :]) & (place[:, None] >= place[None, :])
    past = torch.arange(prefix, device=branch.device) < prefix_length[:, None]
    return torch.cat((past[:, None, :].expand(-1, count, -1), own), 2)[:, None]


def branch_attention(query: Tensor, key: Tensor, value: Tensor, split: int, seen: Tensor) -> Tensor:
    """[B, H, S, D] attention of queries [B, H, S, D] over keys and values [B, G, S, D]: the first `split` columns are
    causal, the rest see what `seen` [B, 1, S - split, S] says."""
    # The kernels that take a mask want as many key heads as query heads.
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    first = F.scaled_dot_product_attention(
        query[:, :, :split], key[:, :, :split], value[:, :, :split], is_causal=True
    )
    rest = F.scaled_dot_product_attention(query[:, :, split:], key, value, attn_mask=seen)
    return torch.cat((first, rest), 2)


def _rotation(spec: Spec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, D] for positions [B, S], or [3, B, S] whose coordinates share the frequencies (M-RoPE): one after
    the other, or in turns as long as there are some of each, and then time. D is what of a head is turned."""
    turned = 2 * sum(spec.section)
    place = torch.arange(turned // 2, device=positions.device)
    rate = 1.0 / 1e6 ** (2 * place.float() / turned)
    if positions.ndim == 3:
        sections = torch.tensor(spec.section, device=positions.device)
        if spec.stamped:
            axis = torch.where(place < 3 * sections[place % 3], place % 3, 0)
        else:
            axis = torch.repeat_interleave(torch.arange(3, device=positions.device), sections)
        angle = positions.flatten(1).float()[axis].T * rate
    else:
        angle = positions.flatten().float()[:, None] * rate
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def hidden_states(model: Any, spec: Spec, batch: Any, features: Tensor) -> tuple[Tensor, Tensor]:
    """Last hidden states [B, S, hidden] of a batch whose video tokens are filled by `features` in reading order, and the
    states [B * S, hidden] halfway up the layers.

    `features`: what `encode` gave. Of the batch count `ids` [B, S], `positions` [B, S], or [3, B, S] for M-RoPE, how many
    `videos` of equal length the frames make up, and who sees whom: `prefix` and `seen` (`see`), and `chunks` for layers that
    carry a state.
    """
    text = model.model.language_model
    embeds = F.embedding(batch.ids, text.embed_tokens.weight).to(features.dtype)
    if spec.newline:
        features = features.reshape(batch.videos, -1, features.shape[-1])
        newline = model.model.image_newline.to(features.dtype).expand(batch.videos, 1, -1)
        features = torch.cat((features, newline), 1)
    shown = (batch.ids == model.config.video_token_id)[..., None]
    features, *deep = features.split(spec.hidden, -1)
    x = embeds.masked_scatter(shown, features).flatten(0, 1)
    cos, sin = _rotation(spec, batch.positions)
    half = (len(text.layers) + 1) // 2
    halfway = x
    centre = 1.0 if spec.kinds else 0.0  # Qwen3.5 keeps its scales less one
    for depth, layer in enumerate(text.layers):
        halfway = x if depth == half else halfway
        mlp, norm = layer.mlp, layer.input_layernorm.weight + centre
        if hasattr(layer, "linear_attn"):
            out, seen = layer.linear_attn.out_proj, _delta(layer.linear_attn, x, norm, batch.chunks)
        else:
            own = layer.self_attn
            out, seen = own.o_proj, _attention(own, x, norm, centre, cos, sin, batch)
        layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        scale = layer.post_attention_layernorm.weight + centre
        x = HALVES["_gated_after"](x, seen, both(out), scale, *map(both, layers))
        if depth < len(deep):
            x = x + torch.zeros_like(embeds).masked_scatter(shown, deep[depth]).flatten(0, 1)
    return rms(x, text.norm.weight + centre).unflatten(0, (len(batch.ids), -1)), halfway


def _attention(
    own: Any, x: Tensor, norm: Tensor, centre: float, cos: Tensor, sin: Tensor, batch: Any
) -> Tensor:
    """What the heads of a layer see [T, H * D]."""
    scales = (own.q_norm.weight + centre, own.k_norm.weight + centre) if hasattr(own, "q_norm") else ()
    rows = HEAD * own.q_proj.weight.shape[0] // own.o_proj.weight.shape[1]
    weights = map(both, (own.q_proj, own.k_proj, own.v_proj))
    *qkv, gate = HALVES["_text_before"](x, norm, *weights, scales, cos, sin, rows)
    query, key, value = (t.unflatten(0, (len(batch.ids), -1)).transpose(1, 2) for t in qkv)
    seen = (
        branch_attention(query, key, value, batch.prefix, batch.seen).transpose(1, 2).reshape(x.shape[0], -1)
    )
    return seen * gate.flatten(1).sigmoid() if gate.numel() else seen


def _delta(own: Any, x: Tensor, norm: Tensor, chunks: delta.Chunks) -> Tensor:
    """What the states of a layer say to each row [T, H * D]."""
    weights = (own.in_proj_qkv.weight, own.in_proj_z.weight, own.in_proj_b.weight, own.in_proj_a.weight)
    mixed, gate, decay, write = HALVES["_delta_before"](x, norm, *weights, own.A_log, own.dt_bias)
    mixed = delta.convolve(mixed, own.conv1d.weight, chunks)
    query, key, value = mixed.split([own.key_dim, own.key_dim, own.value_dim], -1)
    heads = (own.head_k_dim, own.head_k_dim, own.head_v_dim)
    query, key, value = (
        one.unflatten(-1, (-1, size)) for one, size in zip((query, key, value), heads, strict=True)
    )
    seen = delta.mix(query, key, value, decay, write, chunks)
    return HALVES["_delta_gate"](seen, own.norm.weight, gate)  # type: ignore[no-any-return]
