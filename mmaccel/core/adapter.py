"""The model-adapter contract: all that the rest of the package may ask of a vision-language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.layout import TokenLayout

if TYPE_CHECKING:
    from mmaccel.core.attach import Accelerated
    from mmaccel.core.kv import KVPolicy


@dataclass(frozen=True)
class Geometry:
    """The sizes of a language model: layers, query heads, key/value heads, head size, hidden size, vocabulary."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int


class Runner(ABC):
    """One sequence at work on one model: prefill once, then step and roll back; positions are explicit."""

    @abstractmethod
    def prefill(self, inputs: Mapping[str, Any]) -> Tensor:
        """Run the whole prompt (ids, pixels, grids; batch 1); logits [1, V] of its last token."""

    @abstractmethod
    def step(self, ids: Tensor) -> Tensor:
        """Run `ids` [1, n] after what was run; logits [1, n, V]."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget all but the first `length` columns."""

    @abstractmethod
    def length(self) -> int:
        """Columns run and not rolled back."""


class ModelAdapter(ABC):
    """One family of models. Stateless: every method takes the model.

    `inputs` is the mapping of keyword arguments a user gives the model (input_ids, attention_mask, pixels, grids, ...).
    Letters: B batch, S columns, n new columns, E hidden size, V vocabulary.
    """

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]

    @abstractmethod
    def geometry(self, model: nn.Module) -> Geometry: ...

    def fingerprint(self, model: nn.Module) -> dict[str, Any]:
        """What a table of head patterns is bound to: the model's type and sizes; JSON-ready."""
        shape = self.geometry(model)
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        sizes = {name: getattr(shape, name) for name in ("layers", "heads", "kv_heads", "head_dim")}
        return {"type": kind, **sizes}

    def folder(self, model: nn.Module) -> Path | None:
        """The local folder the model was loaded from, if there is one."""
        return None

    @abstractmethod
    def multimodal(self, model: nn.Module) -> nn.Module:
        """The module that joins visual features and text; its forward sees ids, pixels and grids."""

    @abstractmethod
    def text(self, model: nn.Module) -> nn.Module:
        """The language model without its head."""

    @abstractmethod
    def layers(self, model: nn.Module) -> nn.ModuleList:
        """The decoder layers of the language model."""

    @abstractmethod
    def rotary(self, model: nn.Module) -> nn.Module:
        """The rotary embedding module of the language model."""

    @abstractmethod
    def pointwise(self, model: nn.Module) -> list[nn.Module]:
        """Modules of the language model that act on each row alone: safe to run in chunks of rows."""

    @abstractmethod
    def layout(self, model: nn.Module, inputs: Mapping[str, Any]) -> TokenLayout:
        """What each column of ``inputs["input_ids"]`` [B, S] is."""

    @abstractmethod
    def positions(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Rotary positions of the prompt from the model's own rope index: [B, S], or [3, B, S] for M-RoPE."""

    @abstractmethod
    def embed(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """[B, S, E] input embeddings of the language model, visual features in place."""

    @abstractmethod
    def frames(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """[n, E] features of the visual tokens of ``inputs``' videos, in order, as the language model would get them."""

    @abstractmethod
    def query(self, model: nn.Module, layer: int, hidden: Tensor) -> Tensor:
        """[B, H, n, D] queries of `layer` for hidden states [B, n, E] that enter it, before rotation."""

    @abstractmethod
    def rotate(self, model: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
        """`x` [B, heads, n, D] rotated to `positions` [B, n] or [3, B, n]."""

    @abstractmethod
    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """[B, n, V] logits of final hidden states [B, n, E] (after the last norm)."""

    @abstractmethod
    def attach(self, model: nn.Module, owner: Accelerated) -> Callable[[], None]:
        """Lay the road of `owner` through `model`; the returned call takes it up again and leaves no trace."""

    @abstractmethod
    def runner(self, model: nn.Module, kv: KVPolicy | None = None) -> Runner:
        """A runner on `model`, attached or plain; `kv` chooses the memory of an attached one (None: its recipe's)."""

    @abstractmethod
    def load(self, path: str, like: nn.Module) -> nn.Module:
        """The model saved in folder `path`, in the dtype and on the device of `like`."""


@dataclass(frozen=True, eq=False)
class ModelView:
    """The narrow handle on a model that policies get."""

    model: nn.Module
    adapter: ModelAdapter
    resolve: Callable[[nn.Module], ModelAdapter]
    _loaded: dict[str, nn.Module] = field(default_factory=dict, init=False, repr=False)

    @property
    def geometry(self) -> Geometry:
        return self.adapter.geometry(self.model)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `ModelAdapter.fingerprint`."""
        return self.adapter.fingerprint(self.model)

    @property
    def folder(self) -> Path | None:
        """See `ModelAdapter.folder`."""
        return self.adapter.folder(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def query(self, layer: int, hidden: Tensor) -> Tensor:
        """See `ModelAdapter.query`."""
        return self.adapter.query(self.model, layer, hidden)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """See `ModelAdapter.rotate`."""
        return self.adapter.rotate(self.model, x, positions)

    def frames(self, inputs: Mapping[str, Any]) -> Tensor:
        """See `ModelAdapter.frames`."""
        return self.adapter.frames(self.model, inputs)

    def runner(self, kv: KVPolicy | None = None) -> Runner:
        """A sequence on this model."""
        return self.adapter.runner(self.model, kv)

    def peer(self, model: str | nn.Module) -> ModelView:
        """The view of another model: a module, or a folder to load, once, in this one's dtype and on its device."""
        if isinstance(model, str):
            if model not in self._loaded:
                self._loaded[model] = self.adapter.load(model, like=self.model)
            model = self._loaded[model]
        return ModelView(model, self.resolve(model), self.resolve)
