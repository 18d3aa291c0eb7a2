"""One sequence at work on one Hugging Face model: prefill, step, roll back, with explicit positions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import Runner
from mmaccel.core.attach import attached
from mmaccel.core.errors import ModelError
from mmaccel.core.kv import KVPolicy

if TYPE_CHECKING:
    from mmaccel.models.family import Family


class HFRunner(Runner):
    """A runner over a transformers cache: ours on an accelerated model, a `DynamicCache` on a plain one. Batch 1."""

    def __init__(self, model: nn.Module, family: Family, cache: Any) -> None:
        self.model, self.family, self.cache = model, family, cache
        self.delta = 0

    @classmethod
    def open(cls, model: nn.Module, family: Family, kv: KVPolicy | None) -> HFRunner:
        """A fresh sequence; `kv` replaces the recipe's memory and needs an accelerated model."""
        from transformers import DynamicCache

        owner = attached(model)
        if owner is None:
            if kv is not None:
                raise ModelError("kv: a plain model keeps everything; accelerate it to choose its memory.")
            return cls(model, family, DynamicCache())
        from mmaccel.models.cache import KVCache

        state = (
            owner.open_state() if kv is None else kv.open(owner.view.geometry, owner.view, owner.view.device)
        )
        return cls(model, family, KVCache(state, owner.view.geometry.layers))

    def prefill(self, inputs: Mapping[str, Any]) -> Tensor:
        if inputs["input_ids"].shape[0] != 1:
            raise ModelError(
                f"input_ids: {inputs['input_ids'].shape[0]} sequences; a runner takes one at a time."
            )
        inputs = _accepted(self.model, unpadded(inputs))
        positions = inputs.get("position_ids")
        if positions is None:
            positions = self.family.positions(self.model, inputs)
        inputs.update(past_key_values=self.cache, position_ids=positions, use_cache=True, logits_to_keep=1)
        out = self.model(**inputs)
        # As `generate` does, go on from the last column: after a long video that is not the largest position.
        self.delta = int(positions.flatten(0, -2)[-1, -1]) + 1 - inputs["input_ids"].shape[1]
        return out.logits[:, -1]  # type: ignore[no-any-return]

    def step(self, ids: Tensor) -> Tensor:
        start = self.length() + self.delta
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        if self.family.mrope:
            positions = positions.expand(3, -1, -1)
        told = {} if attached(self.model) is None else {"mmaccel_note": _verify()}
        out = self.model(
            input_ids=ids, past_key_values=self.cache, position_ids=positions, use_cache=True, **told
        )
        return out.logits  # type: ignore[no-any-return]

    def truncate(self, length: int) -> None:
        surplus = self.length() - length
        if surplus > 0:
            self.cache.crop(-surplus)

    def length(self) -> int:
        return int(self.cache.get_seq_length())


def _verify() -> Any:
    from mmaccel.models.hf import Note

    return Note(verify=True)


def _accepted(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs the model's forward knows, without empty ones."""
    known = inspect.signature(type(model).forward).parameters
    loose = any(p.kind is p.VAR_KEYWORD for p in known.values()) and "mm_token_type_ids" not in known
    extra = {"mm_token_type_ids"} if loose else set()
    return {k: v for k, v in inputs.items() if v is not None and (k in known or k in extra)}


def unpadded(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """One sequence without its padding columns and without a mask."""
    inputs = dict(inputs)
    mask = inputs.pop("attention_mask", None)
    if mask is None or bool(mask.all()):
        return inputs
    ids = inputs["input_ids"]
    keep = mask[0].bool()
    for name, value in inputs.items():
        if (
            isinstance(value, Tensor)
            and value.shape[-1] == ids.shape[1]
            and name in ("input_ids", "mm_token_type_ids", "position_ids")
        ):
            inputs[name] = value[..., keep]
    return inputs
