"""What a model family of Hugging Face does: the ways into the rest of this room, imported when they are taken.

Importing this file does not import transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from mmaccel.core.adapter import ConfigOnlyModel, Geometry, ModelAdapter, Runner, unwrapped
from mmaccel.core.attach import Accelerated
from mmaccel.core.errors import ModelError
from mmaccel.core.kv import KVState
from mmaccel.core.layout import TokenLayout
from mmaccel.core.stream_adapter import StreamAdapter
from mmaccel.models.family_facts import FamilyFacts


class Family(FamilyFacts):
    """A family that takes recipes and reads streams; `FamilyFacts` says which facts and methods a subclass gives."""

    def attach(self, model: nn.Module, owner: Accelerated) -> Callable[[], None]:
        from mmaccel.models.generate import DraftTimes, generate
        from mmaccel.models.hf import Attachment

        return Attachment(model, self, owner, generate, DraftTimes()).remove

    def runner(self, model: nn.Module, state: KVState | None = None) -> Runner:
        from mmaccel.models.runner import HFRunner

        return HFRunner.open(model, self, state)

    def load(self, path: str, like: nn.Module) -> nn.Module:
        from mmaccel.models.loading import load_model, outline

        if isinstance(like, ConfigOnlyModel):
            return outline(path).model
        first = next(like.parameters())
        return load_model(path, dtype=first.dtype, device=first.device)

    def seam(self, model: nn.Module, processor: Any) -> StreamAdapter:
        from mmaccel.models.stream import HFStreamAdapter

        return HFStreamAdapter(unwrapped(model), self, processor)

    def reader(self, model: str | nn.Module, like: nn.Module) -> tuple[nn.Module, ModelAdapter] | None:
        from mmaccel.models.loading import load_reader

        found = load_reader(model, like) if isinstance(model, str) else model
        adapter = None if found is None else causal(found)
        return None if adapter is None or found is None else (found, adapter)


class Causal(Family):
    """``AutoModelForCausalLM`` of any kind whose cache can be cut back to an earlier token."""

    name = "text"
    model_types = ()
    decoder_layers = frozenset({"Qwen2DecoderLayer", "Qwen2_5_VLDecoderLayer"})

    def geometry(self, model: nn.Module) -> Geometry:
        return self.whole_geometry(model)

    def multimodal(self, model: nn.Module) -> nn.Module:
        return model.base_model  # type: ignore[return-value]

    def text(self, model: nn.Module) -> nn.Module:
        return model.base_model  # type: ignore[return-value]

    def layout(self, model: nn.Module, inputs: Mapping[str, Any]) -> TokenLayout:
        return TokenLayout.text(*inputs["input_ids"].shape)

    def embed(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        return self.words(model)(inputs["input_ids"])  # type: ignore[no-any-return]


def causal(model: nn.Module) -> Causal | None:
    """The adapter of a causal language model, or of the outline of one; None for any other model.

    Raises `ModelError` for one that keeps a running state instead of a cache.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

    config: Any = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(model, ConfigOnlyModel | kind):
        return None
    if getattr(kind, "_is_stateful", False):
        raise ModelError(
            f"model type {config.model_type!r} keeps a running state and cannot roll back; give a language model with "
            "attention alone."
        )
    return Causal()
