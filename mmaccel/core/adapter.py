"""Interfaces to a model: `ModelAdapter` (a model family), `Runner` (one sequence), `ModelView` (what policies may use)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.core.errors import ModelError, RecipeError
from mmaccel.core.layout import TEXT, TokenLayout


@dataclass(frozen=True)
class Geometry:
    """The sizes of a language model: layers, query heads, key/value heads, head size, hidden size, vocabulary."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper that has `get_base_model`, as PEFT's have; return any other model unchanged."""
    inner = getattr(model, "get_base_model", None) if isinstance(model, nn.Module) else None
    return inner() if callable(inner) else model


def home_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first weights, or, if the accelerate library offloads them, where its hooks bring them
    (`execution_device`)."""
    first = next(model.parameters()).device
    if first.type != "meta":
        return first
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in (hook, *getattr(hook, "hooks", ())):
            device = getattr(one, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return first


@dataclass(frozen=True, eq=False)
class TokenTree:
    """The token tree of one decode step, whose n tokens are appended to the cache in one forward pass (tree attention).

    sees [n, m] bool: whether new row i attends to column j of the last m columns, the n new ones included; earlier columns
    are seen by all. depth [n] long: the position of each row, counted from the first of those m columns.
    """

    sees: Tensor
    depth: Tensor


@dataclass
class Columns:
    """Facts of the tokens in a KV cache: their `layout`; `delta`, which is added to a column's number to get its rotary
    position; and `ids` [B, n], the token ids of the first n columns, or None if unknown."""

    layout: TokenLayout
    delta: Tensor
    ids: Tensor | None = None

    def append_turn(self, new: TokenLayout) -> TokenLayout:
        """Return `layout` followed by `new` [1, n], the layout of a conversation's next turn. In the result only the words
        of the new turn's question are marked `asked`."""
        text, visual = (new.modality == TEXT) & new.valid, (new.modality != TEXT).long()
        after = text & (visual.cumsum(1) == visual.sum(1, keepdim=True))
        asked = new.asked if bool(new.asked.any()) else after if bool(after.any()) else text
        before = torch.zeros_like(self.layout.asked)
        return replace(self.layout.append(new), asked=torch.cat([before, asked], 1))


class Runner(ABC):
    """Runs one sequence on one model, without gradients: prefill, decode steps, rollback, and prompts of later turns.

    lasting   whether a later turn of the conversation may follow; then the runner also remembers the prompt tokens that
              `prefill` left out by its argument `keep`
    together  None, or a callable that runs one step of several runners as one batch. Its arguments are the runners and the
              ids [1, n] of each; it returns logits [1, n, V] or an error for each. An attribute `warm` of the callable, if
              it has one, is False after a step that also captured a CUDA graph and so took longer than usual
    """

    lasting: bool = False
    together: Any = None

    @abstractmethod
    def prefill(self, inputs: Mapping[str, Any], keep: Tensor | None = None, compact: bool = False) -> Tensor:
        """Run a whole prompt (ids, pixels, grids; batch 1) after the tokens run before; return its last logits [1, V].

        `keep` [n]: run only the columns of these numbers, the last column among them, at their original rotary positions, or
        with `compact` at positions 0, 1, 2, ... In a later turn of a conversation `inputs` hold only the new prompt. `keep`
        then counts columns from the start of the conversation, and those it names of earlier prompts are run again.
        """

    @abstractmethod
    def step(self, ids: Tensor, branches: TokenTree | None = None) -> Tensor:
        """Run tokens `ids` [1, n], a chain or (with `branches`) a tree, after those run before; return logits [1, n, V]."""

    def resume(self, inputs: Mapping[str, Any], past: Columns | None = None) -> None:
        """Continue from a KV cache that already holds the tokens `past` and the prompt `inputs`; runs nothing."""
        raise ModelError(f"{type(self).__name__} cannot resume from a KV cache; run the whole prompt.")

    def accept(self, path: Tensor) -> None:
        """Of the columns that the last `step` added, keep only those at `path` [k] (ascending), and drop the others."""
        raise ModelError(f"{type(self).__name__} cannot verify token trees; propose chains.")

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Roll the sequence's KV cache back to its first `length` columns."""

    @abstractmethod
    def length(self) -> int:
        """Return the number of tokens (cache columns) that were run and not rolled back."""


class ModelAdapter(ABC):
    """What the package asks of one model family. It has no state: every method takes the model.

    `inputs` are the keyword arguments that a user gives the model (input_ids, attention_mask, pixels, grids, ...). Letters:
    B batch, S columns, n new columns, E hidden size, V vocabulary.
    """

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    unable: ClassVar[Mapping[str, str]] = {}
    """What its models do not support ("streams", "pruning", "trees"), and why, as words that go on after "its models"."""

    @abstractmethod
    def geometry(self, model: nn.Module) -> Geometry:
        """Return the sizes of the part that this process computes: under tensor parallelism, the heads of its shard."""

    def global_geometry(self, model: nn.Module) -> Geometry:
        """Return the sizes of the whole model, over all tensor-parallel shards."""
        return self.geometry(model)

    def fingerprint(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's type and sizes (JSON-ready), by which a table of head patterns is matched to a model."""
        shape = self.global_geometry(model)
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        sizes = {name: getattr(shape, name) for name in ("layers", "heads", "kv_heads", "head_dim")}
        return {"type": kind, **sizes}

    def qk_checksum(self, model: nn.Module) -> str | None:
        """Return a checksum of the query and key weights, which tells whether a table of head patterns was searched on this
        model. It is the same in any floating type that holds the saved values; None if the weights cannot be read (absent,
        sharded, quantized or offloaded)."""
        return None

    def local_heads(self, model: nn.Module) -> range:
        """Return the indices of the query heads that this process computes: under tensor parallelism, those of its shard."""
        return range(self.global_geometry(model).heads)

    def model_folder(self, model: nn.Module) -> Path | None:
        """Return the local folder the model was loaded from, or None."""
        return None

    @abstractmethod
    def multimodal(self, model: nn.Module) -> nn.Module:
        """Return the module whose forward takes ids, pixels and grids and merges visual features with text."""

    @abstractmethod
    def text_model(self, model: nn.Module) -> nn.Module:
        """Return the language model, without its output head, of a vision-language `model`."""

    @abstractmethod
    def layers(self, model: nn.Module) -> nn.ModuleList:
        """Return the decoder layers of the language model."""

    @abstractmethod
    def layout(self, model: nn.Module, inputs: Mapping[str, Any]) -> TokenLayout:
        """Return the `TokenLayout` of ``inputs["input_ids"]`` [B, S]: the modality, frame and cell of each token."""

    @abstractmethod
    def positions(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the rotary positions of a prompt, from the model's own rope index: [B, S], or [3, B, S] for M-RoPE."""

    @abstractmethod
    def embed(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the language model's input embeddings [B, S, E], with visual features in place of their placeholders."""

    @abstractmethod
    def input_norm(self, model: nn.Module, layer: int, hidden: Tensor) -> Tensor:
        """Apply the input norm of `layer`, whose output enters the q/k/v projections, to hidden states [B, n, E]."""

    @abstractmethod
    def project_query(self, model: nn.Module, layer: int, rows: Tensor) -> Tensor:
        """Return queries [B, H, n, D] of `layer` before RoPE for `rows` [B, n, E] of `input_norm`'s output."""

    @abstractmethod
    def rope_angles(self, model: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return RoPE's cosines and sines [1, 1, n, D] of `positions` [n] or [3, n], as the model makes them in `dtype`."""

    @abstractmethod
    def apply_rope(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Apply RoPE to `x` [B, heads, n, D] with the cosines and sines `angles`, which `rope_angles` returned."""

    @abstractmethod
    def apply_rope_(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """Apply RoPE to `x` in place (see `apply_rope`)."""

    @abstractmethod
    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Return logits [B, n, V] of final hidden states [B, n, E], taken after the last norm."""

    @abstractmethod
    def runner(self, model: nn.Module) -> Runner:
        """Return a `Runner` for one sequence on `model` (prefill, steps, rollback), with or without a recipe attached."""

    @abstractmethod
    def load(self, path: str, like: nn.Module) -> nn.Module:
        """Load the model saved in folder `path` with dtype and device of `like`; a `ConfigOnlyModel` if `like` is one."""

    def supports_model_type(self, kind: str) -> bool:
        """Return whether this family supports the `model_type` `kind` of a config.json. A family that declares "*" is asked
        last, when no other family supports the type."""
        return kind in self.model_types

    def tiny_model_factory(self, kind: type[nn.Module]) -> Any:
        """Return a test factory (`models.tiny.TinyModels`) of tiny random models of class `kind`, and of their prompts."""
        raise ModelError(f"family {self.name!r} does not define tiny_model_factory; override it.")

    def check_recipe(self, model: nn.Module, recipe: Any) -> None:
        """Raise `RecipeError` if the model cannot do what `recipe` asks; see `unable` and `rollback_limit`."""
        who, prune, draft = f"models of the family {self.name!r}", recipe.prune, recipe.draft
        asked = {
            "streams": ("kv", recipe.kv, not recipe.kv.sequences),
            "pruning": ("prune", prune or draft.pruner, (prune or draft.pruner) is not None),
            "trees": ("draft", draft, bool({"branches", "memory"} & draft.needs)),
        }
        for what, (kind, part, wanted) in asked.items():
            if wanted and what in self.unable:
                raise RecipeError(f"{kind} {part.name!r}: {who} {self.unable[what]}; leave {kind} out.")
        most = self.rollback_limit(model)
        if "rollback" in draft.needs and most is not None and most < draft.max_rollback:
            raise RecipeError(
                f"draft {draft.name!r} rolls back up to {draft.max_rollback} tokens and {who} only {most}; lower the "
                "draft's window."
            )
        if (getattr(model, "tp_size", None) or 1) == 1:
            return
        for kind, part in (("kv", recipe.kv), ("prune", prune), ("draft", draft), ("prune", draft.pruner)):
            if part is not None and part.no_tensor_parallel is not None:
                raise RecipeError(
                    f"{kind} {part.name!r}: it {part.no_tensor_parallel}, so it does not run under tensor parallelism; "
                    f"choose another {kind}, or load the model without distributed_config."
                )

    def rollback_limit(self, model: nn.Module) -> int | None:
        """Return how many of the last tokens the model's layers can roll back, with any KV memory; None: any number."""
        return None

    def sliding_layers(self, model: nn.Module) -> Mapping[int, int]:
        """Return layer -> window size, in columns with the query's own, of the layers with sliding-window attention."""
        return {}

    def bidirectional_image_layers(self, model: nn.Module) -> frozenset[int]:
        """Return the layers in which tokens of one image attend to each other in both directions."""
        return frozenset()

    def memory(self, view: ModelView, state: Callable[[int], Any]) -> Any:
        """Return a new KV cache (`KVState`) for all layers. `state(n)` opens the recipe's KV memory for n layers; a family
        overrides this where some layers need another cache."""
        return state(view.geometry.layers)

    def tree_mask_argument(self, model: nn.Module, mask: Tensor, positions: Tensor) -> Any:
        """Return the attention mask argument with which the plain model runs a token tree: the additive `mask` [1, 1, n, N]
        of the tree's n tokens at `positions` [1, n], in the form that this family's forward expects."""
        return mask

    def with_pass_info(self, model: nn.Module, kwargs: dict[str, Any], note: Any) -> Any:
        """Return `note` (`ForwardPassInfo`: facts of a forward pass that its layers need), with facts from the multimodal
        model's arguments `kwargs` added; may remove some of these."""
        return note

    def placeholders(self, model: nn.Module) -> tuple[int, ...]:
        """Return the token ids that visual features replace in a prompt."""
        return ()

    def causal_lm(self, model: str | nn.Module, like: nn.Module) -> tuple[nn.Module, ModelAdapter] | None:
        """Return a causal language model without vision, and its adapter. `model` is the model, or a folder to load it from.
        Return None if it is another kind of model; raise `ModelError` if its KV cache cannot be rolled back."""
        return None


class ConfigOnlyModel(nn.Module):
    """Stands in for a model whose weights were not loaded: it has the configuration, so sizes and folder are known."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


@dataclass(frozen=True, eq=False)
class ModelView:
    """The part of a model that policies may use; with a `ConfigOnlyModel` they only check whether they support the model.

    Methods and properties that `ModelAdapter` has too do the same, for this model.
    """

    model: nn.Module
    adapter: ModelAdapter
    resolve: Callable[[nn.Module], ModelAdapter]
    _loaded: dict[str, nn.Module] = field(default_factory=dict, init=False, repr=False)
    _held: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def config_only(self) -> bool:
        """Whether the model has no weights, only a configuration; then nothing can be run or loaded."""
        return isinstance(self.model, ConfigOnlyModel)

    @property
    def geometry(self) -> Geometry:
        return self.adapter.geometry(self.model)

    @property
    def model_folder(self) -> Path | None:
        return self.adapter.model_folder(self.model)

    @property
    def device(self) -> torch.device:
        return home_device(self.model)

    def input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        return self.adapter.input_norm(self.model, layer, hidden)

    def project_query(self, layer: int, rows: Tensor) -> Tensor:
        """Return queries as `ModelAdapter.project_query` does."""
        return self.adapter.project_query(self.model, layer, rows)

    def rope_angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.adapter.rope_angles(self.model, positions, dtype)

    def apply_rope(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return self.adapter.apply_rope(x, angles)

    def apply_rope_(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        self.adapter.apply_rope_(x, angles)

    def runner(self) -> Runner:
        """Return a `Runner`, which prefills, decodes and rolls back one sequence on this model."""
        return self.adapter.runner(self.model)

    def get_or_create(
        self, name: str, make: Callable[[], Any], use: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        """Return the object cached as `name`; create it by `make` if it is missing, or anew if ``use(it)`` is False."""
        if name in self._held and not use(self._held[name]):
            self._held.pop(name).close()
        if name not in self._held:
            self._held[name] = make()
        return self._held[name]

    def close_cached_objects(self) -> None:
        """Close and forget all objects that `get_or_create` cached; called when the recipe is detached."""
        while self._held:
            self._held.popitem()[1].close()

    def other_model_view(self, model: str | nn.Module) -> ModelView:
        """Return the view of another model: a module, or a folder, loaded once with this model's dtype and device."""
        if isinstance(model, str):
            if model not in self._loaded:
                self._loaded[model] = self.adapter.load(model, like=self.model)
            model = self._loaded[model]
        model = unwrap(model)
        return ModelView(model, self.resolve(model), self.resolve)

    def causal_lm(self, model: str | nn.Module) -> ModelView | None:
        """Return a view of a causal language model without vision, given as a folder or module; None for any other model."""
        given = self._loaded.get(model, model) if isinstance(model, str) else unwrap(model)
        found = self.adapter.causal_lm(given, self.model)
        if found is None:
            return None
        if isinstance(model, str):
            self._loaded[model] = found[0]
        return ModelView(*found, self.resolve)


def tensor_parallel_size(model: nn.Module) -> int:
    """Return the number of tensor-parallel processes that share each layer of a model."""
    return getattr(model, "tp_size", None) or 1


def rows_of(module: Any, name: str) -> int | None:
    """Return how many rows of the weight of projection `name` this process holds; None if it is no floating-point matrix."""
    weight = getattr(getattr(module, name, None), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    # A DTensor has the shape of the whole.
    return int(getattr(weight, "_local_tensor", weight).shape[0])
