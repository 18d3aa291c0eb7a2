"""The attention function that transformers calls in layers with our hooks, and arguments of `forward` that concern it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmaccel.core.attention import ForwardPass
from mmaccel.core.draft import PrefillPass, Probe
from mmaccel.core.errors import ModelError
from mmaccel.core.packed import PackedPass
from mmaccel.core.recipe import Recipe

ATTENTION = "mmaccel"
"""The name of `attention` among transformers' attention functions."""

PLAIN = "mmaccel_plain_attention"
"""The attribute of a config under which it keeps the model's own config, for calls beside a pass of a stream."""


FORWARD = {
    "is_causal": "the attention of an accelerated model is causal; leave it out, or detach the recipe.",
}
"""Arguments of `forward` that no recipe takes."""

WEIGHTS = "{part} never holds the attention weights; ask for them under the recipe 'dense'."
"""Why a recipe refuses output_attentions, where it does not run dense attention over whole keys."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function; the `ForwardPass` takes the place of the mask. Gives weights on request.

    A call with any other mask comes from a thread that uses the model while another one runs a pass of a stream: it gets the
    attention that the model's config names.
    """
    if not isinstance(attention_mask, ForwardPass | PackedPass):
        function, own = _plain(module)
        return function(own, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    weights = None
    if kwargs.get("output_attentions") and not attention_mask.stream:
        attention_mask, weights = with_weights(attention_mask)
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    layer: int = module.layer_idx  # type: ignore[assignment]
    # Whoever plans and attends chooses the types: under autocast they come mixed, and are not to be changed on the way.
    mixed = torch.is_autocast_enabled(query.device.type)
    with torch.autocast(query.device.type, enabled=False) if mixed else nullcontext():
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
            out = OneWay.apply(attention_mask, layer, query, key, value, scale)  # type: ignore[no-untyped-call]
        else:
            out = attention_mask.attend(layer, query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None if weights is None else weights()


AttentionInterface.register(ATTENTION, attention)


def _plain(module: nn.Module) -> tuple[Callable[..., Any], nn.Module]:
    """The attention of a layer without our hooks, for a call beside a pass of a stream, and the module to call it with.

    That module shares all that `module` has, but holds the model's own config: flash attention reads its variant from there.
    """
    shared = getattr(
        module.config, PLAIN, module.config
    )  # the pass may end between the call of the layer and here
    name = shared._attn_implementation  # type: ignore[union-attr]
    if name == ATTENTION:
        raise ModelError(
            "a layer of an accelerated model was called by itself; call the model, or detach the recipe first."
        )
    own = object.__new__(type(module))
    own.__dict__ = {**module.__dict__, "config": shared}
    eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager), own  # type: ignore[arg-type]


class OneWay(torch.autograd.Function):
    """The attention where gradients are on; the backward pass raises one sentence."""

    @staticmethod
    def forward(
        ctx: Any,
        run: ForwardPass | PackedPass,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> Tensor:
        return run.attend(layer, query, key, value, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ModelError(
            "backward: the attention of an accelerated model has no gradient; detach the recipe to train."
        )


def check_training(layers: nn.ModuleList) -> None:
    """Raise `ModelError` for layers that are recomputed for gradients: they run without the cache that is read here."""
    if any(getattr(layer, "gradient_checkpointing", False) and layer.training for layer in layers):
        raise ModelError(
            "gradient_checkpointing: an accelerated model is not trained, and its layers run without a cache under it; call "
            "model.eval(), or detach the recipe to train."
        )


class Weights(Probe):
    """Computes the weights [B, H, n, N] of one run and layer from what enters its attention, in the type of the queries.

    Rows of padding are zeros, where transformers spreads them evenly.
    """

    weights: Tensor

    def attending(
        self, run: PrefillPass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> None:
        rows, columns = query.shape[2], key.shape[2]
        at = torch.arange(columns, device=query.device)
        unseen = at > at[run.start : run.start + rows, None]
        if run.layout.padded:
            valid = run.layout.valid.to(query.device)
            unseen = (unseen | ~valid[:, None] | ~valid[:, run.start : run.start + rows, None])[:, None]
        heads = query.unflatten(1, (key.shape[1], -1))
        scores = (heads @ key[:, :, None].transpose(-1, -2)).flatten(1, 2) * scale
        weights = scores.float().masked_fill(unseen, float("-inf")).softmax(-1)
        self.weights = weights.nan_to_num(0.0).to(query.dtype)


def with_weights(run: ForwardPass | PackedPass) -> tuple[ForwardPass | PackedPass, Callable[[], Tensor]]:
    """A run of one layer whose weights are computed beside it, and a call that gives them once it has attended."""
    if isinstance(run, ForwardPass):
        probe = Weights()
        return replace(run, probes=(*run.probes, probe)), lambda: probe.weights
    pairs = [with_weights(one) for _, _, one in run.runs]
    places = [(b, columns) for b, columns, _ in run.runs]

    def whole() -> Tensor:
        each = [found() for _, found in pairs]
        size = max(columns.stop for _, columns in places)
        weights = each[0].new_zeros(places[-1][0] + 1, each[0].shape[1], size, size)
        for (b, columns), one in zip(places, each, strict=True):
            weights[b, :, columns, columns] = one[0]
        return weights

    watching = [(*place, one) for place, (one, _) in zip(places, pairs, strict=True)]
    return PackedPass(tuple(watching)), whole  # type: ignore[arg-type]


def check_forward(recipe: Recipe, kwargs: Mapping[str, Any]) -> None:
    """Raise `ModelError` with one sentence for an argument of `forward` that `recipe` does not take."""
    if kwargs.get("is_causal") is False:
        raise ModelError(f"is_causal: {FORWARD['is_causal']}")
    if kwargs.get("output_attentions"):
        part = None
        if not recipe.sparse.dense:
            part = f"sparse {recipe.sparse.name!r}"
        elif not recipe.kv.exact:
            part = f"kv {recipe.kv.name!r}"
        elif recipe.prune is not None:
            part = f"prune {recipe.prune.name!r}"
        if part is not None:
            raise ModelError(f"output_attentions: {WEIGHTS.format(part=part)}")


def packed_in(kwargs: Mapping[str, Any], mask: Tensor | None, mrope: bool) -> Tensor | None:
    """[B, S] number of the sequence that each column belongs to, where a forward pass without a cache has several in a row;
    else None.

    As transformers has it: where positions start anew and there is no mask. Under M-RoPE the ranks stand before the three
    coordinates, where packed sequences are given.
    """
    positions: Tensor | None = kwargs.get("position_ids")
    if mask is not None or positions is None:
        return None
    if mrope:
        if positions.ndim != 3 or positions.shape[0] != 4:
            return None
        positions = positions[0]
    return find_packed_sequence_indices(positions)
