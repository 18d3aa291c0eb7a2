"""Identifies the weights of a process: a digest that is cheap at any size, and the heads of its shard."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from mmaccel.core.errors import ModelError

SAMPLED = 1024
"""Elements that the digest reads of each projection."""


def query_key_digest(layers: nn.ModuleList) -> str | None:
    """A digest of evenly spaced elements of each layer's query and key projections, rounded to bfloat16.

    Rounding makes it the same for bfloat16 weights that were loaded in float32 or float16. None where a projection is not
    a floating matrix at hand: quantized, or offloaded.
    """
    found = hashlib.sha256()
    for layer in layers:
        for name in ("q_proj", "k_proj"):
            weight = getattr(getattr(getattr(layer, "self_attn", None), name, None), "weight", None)
            if not isinstance(weight, torch.Tensor) or weight.is_meta or not weight.is_floating_point():
                return None
            flat = weight.detach().flatten()
            some = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].to("cpu", torch.bfloat16)
            found.update(repr(tuple(weight.shape)).encode() + some.view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def at_hand(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The weight `name` of a state, `tensor`, or what an offload keeps of it elsewhere."""
    if not tensor.is_meta:
        return tensor
    owner, _, own = name.rpartition(".")
    hook = getattr(model.get_submodule(owner), "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        if getattr(one, "weights_map", None) is not None:
            found: torch.Tensor = one.weights_map[own]
            return found
    raise ModelError(f"the weight {name} is not on any device; load the model with its weights.")


def rows_of(module: Any, name: str) -> int | None:
    """The rows of a projection's weight that this process holds, a shard of them under tensor parallelism; None where the
    weight is no matrix of floating numbers, such as a quantized one."""
    weight = getattr(getattr(module, name, None), "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    # A DTensor has the shape of the whole.
    return int(getattr(weight, "_local_tensor", weight).shape[0])


def shards(model: nn.Module) -> int:
    """How many processes share each layer of a model (tensor parallelism)."""
    return getattr(model, "tp_size", None) or 1


def own_heads(model: nn.Module, heads: int) -> range:
    """The numbers of the query heads, of `heads` in all, that this process computes."""
    count = shards(model)
    if count == 1:
        return range(heads)
    # transformers keeps the mesh of `from_pretrained(..., tp_plan=...)`; heads lie in the order of the ranks.
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None:
        rank = torch.distributed.get_rank() % count
    else:
        rank = mesh.get_local_rank("tp" if "tp" in (mesh.mesh_dim_names or ()) else None)
    each = heads // count
    return range(rank * each, (rank + 1) * each)
