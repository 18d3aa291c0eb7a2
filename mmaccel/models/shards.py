"""Facts from a model's weights: checksums, and which attention heads this process holds under tensor parallelism."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import tensor_parallel_size
from mmaccel.core.errors import ModelError

SAMPLED = 1024
"""Elements that the digest reads of each projection, evenly spaced."""


def checksum(model: nn.Module, attentions: Iterable[Any]) -> str | None:
    """Compute a checksum of the query and key projections of `attentions`; None if one is quantized (not a
    floating-point matrix) or the model is sharded over processes."""
    if tensor_parallel_size(model) > 1:
        return None
    found = hashlib.sha256()
    for attention in attentions:
        # Some layers read the keys of others.
        shares = hasattr(attention, "q_proj") and not hasattr(attention, "k_proj")
        for name in ("q_proj",) if shares else ("q_proj", "k_proj"):
            weight = getattr(getattr(attention, name, None), "weight", None)
            if not isinstance(weight, Tensor) or weight.is_meta or not weight.is_floating_point():
                return None
            flat = weight.detach().flatten()
            # In bfloat16 the same for weights that were saved so and loaded in float32 or float16.
            some = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].to("cpu", torch.bfloat16)
            found.update(repr(tuple(weight.shape)).encode() + some.view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def local_heads(model: nn.Module, heads: int) -> range:
    """Return which of the `heads` attention heads this process computes, as a range of head indices."""
    shards = tensor_parallel_size(model)
    if shards == 1:
        return range(heads)
    # transformers keeps the mesh of `from_pretrained(..., tp_plan=...)`; heads lie in the order of the ranks.
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None:
        rank = torch.distributed.get_rank() % shards
    else:
        rank = mesh.get_local_rank("tp" if "tp" in (mesh.mesh_dim_names or ()) else None)
    each = heads // shards
    return range(rank * each, (rank + 1) * each)


def weights_checksum(model: nn.Module) -> str:
    """Compute a checksum of all weights, from a sample of each; raises `ModelError` if processes share the weights."""
    if (processes := tensor_parallel_size(model)) > 1:
        raise ModelError(
            f"save, load: {processes} processes share the model's weights; use a model that one process holds."
        )
    states, by_kind = sorted(model.state_dict().items()), dict[Any, list[tuple[int, Tensor]]]()
    for number, (name, tensor) in enumerate(states):
        flat = _weight(model, name, tensor).flatten()
        step = max(1, flat.numel() // 16)
        sample = flat[: 16 * step : step]
        # A view would keep what is read from elsewhere.
        sample = sample.clone() if tensor.is_meta else sample
        by_kind.setdefault((flat.device, flat.dtype), []).append((number, sample))
    samples = list[tuple[tuple[int, ...], tuple[int, ...], Any, bytes]]()
    for some in by_kind.values():
        numbers, views = zip(*some, strict=True)
        host = torch.cat(views).cpu()  # one copy for all of a type: each waits for the device
        raw = host.view(torch.uint8).numpy().tobytes()
        samples.append((numbers, tuple(map(len, views)), host.dtype, raw))
    return _hash_samples(tuple((name, *tensor.shape) for name, tensor in states), tuple(samples))


@lru_cache(8)
def _hash_samples(weights: tuple[Any, ...], samples: tuple[Any, ...]) -> str:
    """The checksum of `weights` (name and sizes of each), of whose `samples` of each type there are the numbers of the
    weights, lengths, the type and the bytes. It is kept, for a model that saves often: the text takes most of its time."""
    marks, values = hashlib.sha256(), dict[int, Tensor]()
    for numbers, sizes, dtype, raw in samples:
        flat = torch.tensor(list(raw), dtype=torch.uint8).view(dtype).double()
        values |= zip(numbers, flat.split(sizes), strict=True)
    for number, (name, *size) in enumerate(weights):
        marks.update(f"{name} {size} {values[number].tolist()}".encode())
    return marks.hexdigest()[:32]


def _weight(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The weight `name` of a state, `tensor`, or what an offload keeps of it elsewhere."""
    if not tensor.is_meta:
        return tensor
    owner, _, own = name.rpartition(".")
    hook = getattr(model.get_submodule(owner), "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        if getattr(one, "weights_map", None) is not None:
            found: Tensor = one.weights_map[own]
            return found
    raise ModelError(f"the weight {name} is not on any device; load the model with its weights.")
