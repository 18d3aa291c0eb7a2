"""A pruned model written out: whole layers over the whole prompt, masks and gathers, no cache; plain PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmaccel.core.attach import adapter_for

Choose = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]


def eager(model: Any) -> Any:
    """A copy whose language model tells its attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation({"text_config": "eager"})
    return model


@torch.no_grad()
def run(
    model: Any,
    inputs: dict[str, Tensor],
    written: Tensor,
    cuts: dict[int, Callable[[dict[str, Any]], tuple[Tensor, Tensor]]],
    see: Callable[[int, Tensor, Tensor], Tensor] | None = None,
    compact: bool = False,
) -> Tensor:
    """[n + 1, V]: the logits at the prompt's last token and at each of the tokens `written` [n] after it.

    `model` is eager; layers are those with attention. A cut at a layer is told ``hidden`` [S', E] now, ``start`` [S, E] what
    entered layer 0, ``columns`` [S'] the prompt's columns that are left, ``before`` and ``here`` [H, S', S'] the attention
    of the layer before and of the one to come, all of the prompt's; it gives the places out of S' that stay, and their
    states. ``see(layer, weights, mask)`` may change a layer's mask [R, R], by the weights [H, R, R] of the layer before.
    """
    family = adapter_for(model)
    entering = family.forward_inputs(model, inputs)
    embeds, levels = entering["inputs_embeds"][0], entering.get("deepstack_visual_embeds", [])
    visual = entering.get("visual_pos_masks")
    places = family.positions(model, inputs)
    S, n = embeds.shape[0], written.numel()
    end = places[..., -1:]
    places = torch.cat([places, end + 1 + torch.arange(n)], -1)
    start = embeds = torch.cat([embeds, model.get_input_embeddings()(written)])
    cos, sin = family.rotary(model)(embeds[None], places)
    columns = torch.arange(S + n)
    weights = None
    attended, cuts = family.attended_layers(model), dict(cuts)
    for number, layer in enumerate(family.layers(model)):
        index = attended.index(layer) if layer in attended else None
        if index == 0:
            start = embeds
        if (cut := cuts.pop(index if number else 0, None)) is not None:
            inside = int((columns < S).sum())
            told = {
                "hidden": embeds[:inside],
                "start": start[columns[:inside]],
                "columns": columns[:inside],
                "before": None if weights is None else weights[:, :inside, :inside],
                "here": None
                if index is None
                else _attend(layer, embeds, cos, sin, _causal(len(columns)))[1][:, :inside, :inside],
            }
            stay, states = cut(told)
            rows = torch.cat([stay, torch.arange(inside, len(columns))])
            embeds = torch.cat([states, embeds[inside:]])
            columns, cos, sin = columns[rows], cos[:, rows], sin[:, rows]
            if compact and inside != len(stay):
                flat = torch.arange(len(columns))[None]
                cos, sin = family.rotary(model)(
                    embeds[None], flat.expand(3, -1, -1) if family.mrope else flat
                )
        if index is None:
            embeds = embeds + layer.linear_attn(layer.input_layernorm(embeds)[None])[0]
        else:
            mask = _causal(len(columns))
            if see is not None and weights is not None:
                mask = see(index, weights, mask)
            out, weights = _attend(layer, embeds, cos, sin, mask)
            embeds = embeds + out
        embeds = embeds + layer.mlp(layer.post_attention_layernorm(embeds))
        if number < len(levels):
            added = torch.zeros(S + n, embeds.shape[1])
            added[:S][visual[0]] = levels[number]
            embeds = embeds + added[columns]
    hidden = family.text(model).norm(embeds[-n - 1 :])
    return model.get_output_embeddings()(hidden)


def _causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


def _attend(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
    out, weights = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden)[None],
        attention_mask=bias,
        position_embeddings=(cos, sin),
        past_key_values=None,
    )
    return out[0], weights[0]
