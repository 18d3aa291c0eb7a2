"""The contracts of a model: all that the rest of the package may ask of it, and of one sequence at work on it."""

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


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a wrapper that has `get_base_model`, as PEFT's have; any other model itself."""
    inner = getattr(model, "get_base_model", None) if isinstance(model, nn.Module) else None
    return inner() if callable(inner) else model


def home_of(model: nn.Module) -> torch.device:
    """Where a model computes first: the device of its first weights, or, where these are offloaded, that of the hooks that
    fetch them (`execution_device`, of the library accelerate)."""
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
class Branches:
    """Rows of a tree, run in one pass after the columns that were run before.

    sees [n, m] bool: whether new row i sees column j of the last m columns, the n new ones included; all before it sees.
    depth [n] long: the place of each row, counted from the first of those m columns.
    """

    sees: Tensor
    depth: Tensor


@dataclass
class Columns:
    """Facts of the columns in a cache: their layout, and the offset from a column to its rotary position."""

    layout: TokenLayout
    delta: Tensor

    def turn(self, new: TokenLayout) -> TokenLayout:
        """The layout followed by `new` [1, n], a turn of the same conversation: what is asked is asked in that turn."""
        text, visual = (new.modality == TEXT) & new.valid, (new.modality != TEXT).long()
        after = text & (visual.cumsum(1) == visual.sum(1, keepdim=True))
        asked = new.asked if bool(new.asked.any()) else after if bool(after.any()) else text
        before = torch.zeros_like(self.layout.asked)
        return replace(self.layout.append(new), asked=torch.cat([before, asked], 1))


class Runner(ABC):
    """Runs one sequence on one model: prompts of its turns, steps forward, rollbacks. Positions are explicit; no gradients.

    lasting   another prompt may follow: what `keep` leaves out of one stays at hand
    together  runs steps of several runners as one, or None: these, ids [1, n] of each -> logits [1, n, V] or error of each.
              Its `warm`, if it has one: the last step took what such steps take, for it captured nothing
    """

    lasting: bool = False
    together: Any = None

    @abstractmethod
    def prefill(self, inputs: Mapping[str, Any], keep: Tensor | None = None, compact: bool = False) -> Tensor:
        """Run the whole prompt (ids, pixels, grids; batch 1), after what was run; logits [1, V] of its last token.

        keep [n] runs only those columns, the last one among them, each at its own rotary position; with `compact` they are
        numbered anew. They count from the first column of the first prompt: of a later turn, prompts before it are run
        anew, and `inputs` begin where the prompt before ended.
        """

    @abstractmethod
    def step(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        """Run `ids` [1, n] after what was run; logits [1, n, V]. They are a chain, or the rows of a tree."""

    def resume(self, inputs: Mapping[str, Any], past: Columns | None = None) -> None:
        """Take over a memory that already holds the prompt `inputs`, behind columns `past`: set positions, run nothing."""
        raise ModelError(f"{type(self).__name__} cannot go on from a memory that another filled.")

    def accept(self, path: Tensor) -> None:
        """Keep of the last `step` the columns at `path` [k], ascending, and drop its others."""
        raise ModelError(f"{type(self).__name__} cannot take one branch of many; propose chains.")

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
    unable: ClassVar[Mapping[str, str]] = {}
    """What its models cannot do, and why: "streams", "pruning", "trees" (drafts of these, or that read its memory)."""

    @abstractmethod
    def geometry(self, model: nn.Module) -> Geometry:
        """The sizes of what this process computes: under tensor parallelism the heads of its shard."""

    def whole_geometry(self, model: nn.Module) -> Geometry:
        """The sizes of the whole model, over all shards."""
        return self.geometry(model)

    def fingerprint(self, model: nn.Module) -> dict[str, Any]:
        """The model's type and sizes, by which a table of head patterns is matched to it; JSON-ready."""
        shape = self.whole_geometry(model)
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        sizes = {name: getattr(shape, name) for name in ("layers", "heads", "kv_heads", "head_dim")}
        return {"type": kind, **sizes}

    def weights_digest(self, model: nn.Module) -> str | None:
        """A short digest of the weights that make queries and keys, the same in any floating type that holds the saved
        weights; None where it cannot be read (no weights, a shard of them, quantized, or off the device)."""
        return None

    def own_heads(self, model: nn.Module) -> range:
        """The numbers of the query heads that this process computes: a shard of them under tensor parallelism."""
        return range(self.whole_geometry(model).heads)

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
    def layout(self, model: nn.Module, inputs: Mapping[str, Any]) -> TokenLayout:
        """The layout of the columns of ``inputs["input_ids"]`` [B, S]: what each one is."""

    @abstractmethod
    def positions(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Rotary positions of the prompt from the model's own rope index: [B, S], or [3, B, S] for M-RoPE."""

    @abstractmethod
    def embed(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """[B, S, E] input embeddings of the language model, visual features in place."""

    @abstractmethod
    def norm(self, model: nn.Module, layer: int, hidden: Tensor) -> Tensor:
        """[B, n, E]: hidden states that enter `layer`, as its first norm gives them to its projections."""

    @abstractmethod
    def query(self, model: nn.Module, layer: int, rows: Tensor) -> Tensor:
        """[B, H, n, D] queries of `layer` for rows [B, n, E] of `norm`, before rotation; linear but for a constant, and
        for a norm of queries."""

    @abstractmethod
    def angles(self, model: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, 1, n, D] of `positions` [n] or [3, n], as the model makes them for `dtype`."""

    @abstractmethod
    def apply_rope(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate `x` [B, heads, n, D] by the result of `angles` (RoPE)."""

    @abstractmethod
    def apply_rope_(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """`apply_rope` in place."""

    @abstractmethod
    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """[B, n, V] logits of final hidden states [B, n, E] (after the last norm)."""

    @abstractmethod
    def runner(self, model: nn.Module) -> Runner:
        """A `Runner`, which takes one sequence through `model` (prompt, steps, rollbacks), with or without a recipe."""

    @abstractmethod
    def load(self, path: str, like: nn.Module) -> nn.Module:
        """The model saved in folder `path`, in the dtype and on the device of `like`; its outline if that is one."""

    def serves(self, kind: str) -> bool:
        """Of a family whose model type is "*": whether it takes models of type `kind`, which no other has."""
        return kind in self.model_types

    def sampler(self, kind: type[nn.Module]) -> Any:
        """The sampler of tiny models of class `kind` and of prompts for them (`models.tiny.Sampler`)."""
        raise ModelError(f"{self.name}: this family does not say how a tiny model of it is made.")

    def check(self, model: nn.Module, recipe: Any) -> None:
        """Raise `RecipeError` for what of a recipe the model cannot do (`unable`, `first_cut`, `unsharded`)."""
        who, prune, draft = f"models of the family {self.name!r}", recipe.prune, recipe.draft
        asked = {
            "streams": ("kv", recipe.kv, not recipe.kv.sequences),
            "pruning": ("prune", prune or draft.pruner, (prune or draft.pruner) is not None),
            "trees": ("draft", draft, bool({"branches", "memory"} & draft.needs)),
        }
        for what in self.unable.keys() & asked.keys():
            kind, part, wanted = asked[what]
            if wanted:
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
            if part is not None and part.unsharded is not None:
                raise RecipeError(
                    f"{kind} {part.name!r}: it {part.unsharded}, so it does not run under tensor parallelism; choose "
                    f"another {kind}, or load the model without distributed_config."
                )
        layers = [] if prune is None else [one.layer for one in prune.stages(self.geometry(model).layers)]
        first = self.first_cut(model)
        if layers and 0 < layers[0] < first:
            raise RecipeError(
                f"prune {prune.name!r} cuts before layer {layers[0]}, and {who} add features to all visual tokens before "
                f"layer {first}; cut there or later."
            )

    def rollback_limit(self, model: nn.Module) -> int | None:
        """How many of the last tokens its layers can go back, whatever the memory; None: all."""
        return None

    def sliding(self, model: nn.Module) -> Mapping[int, int]:
        """The layers that see the last columns alone, and how many, their own included."""
        return {}

    def bidirectional_image_layers(self, model: nn.Module) -> frozenset[int]:
        """The layers in which the tokens of an image see each other, also those behind them."""
        return frozenset()

    def memory(self, view: ModelView, state: Callable[[int], Any]) -> Any:
        """A memory of all layers, a `KVState`; `state` opens the recipe's for so many layers."""
        return state(view.geometry.layers)

    def tree_mask(self, model: nn.Module, mask: Tensor, positions: Tensor) -> Any:
        """The plain model's mask argument for rows of a tree at `positions` [1, n], from additive `mask` [1, 1, n, N]."""
        return mask

    def note_of(self, model: nn.Module, kwargs: dict[str, Any], note: Any) -> Any:
        """The `Note` of a pass of the multimodal model with what else its arguments tell; may take these out of `kwargs`."""
        return note

    def first_cut(self, model: nn.Module) -> int:
        """The first layer before which a prompt may be pruned between two layers."""
        return 1

    def placeholders(self, model: nn.Module) -> tuple[int, ...]:
        """Tokens of the prompt in whose places visual features are put."""
        return ()

    def text_only(self, model: str | nn.Module, like: nn.Module) -> tuple[nn.Module, ModelAdapter] | None:
        """A causal language model without vision, loaded as `load` does where `model` names one, and its adapter: positions,
        sizes and a runner of text. None where `model` is anything else; raises `ModelError` where it cannot roll back."""
        return None


class ConfigOnlyModel(nn.Module):
    """In the place of a model whose weights are not read: its configuration, from which sizes and folder follow."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


@dataclass(frozen=True, eq=False)
class ModelView:
    """The narrow handle on a model that policies get; of a `ConfigOnlyModel` they say whether they can serve it.

    What `ModelAdapter` has too is that, asked of this model.
    """

    model: nn.Module
    adapter: ModelAdapter
    resolve: Callable[[nn.Module], ModelAdapter]
    _loaded: dict[str, nn.Module] = field(default_factory=dict, init=False, repr=False)
    _held: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def config_only(self) -> bool:
        """Whether there are no weights: peers then have none either, and nothing can be run."""
        return isinstance(self.model, ConfigOnlyModel)

    @property
    def geometry(self) -> Geometry:
        return self.adapter.geometry(self.model)

    @property
    def folder(self) -> Path | None:
        return self.adapter.folder(self.model)

    @property
    def device(self) -> torch.device:
        return home_of(self.model)

    def norm(self, layer: int, hidden: Tensor) -> Tensor:
        return self.adapter.norm(self.model, layer, hidden)

    def query(self, layer: int, rows: Tensor) -> Tensor:
        return self.adapter.query(self.model, layer, rows)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.adapter.angles(self.model, positions, dtype)

    def apply_rope(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return self.adapter.apply_rope(x, angles)

    def apply_rope_(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        self.adapter.apply_rope_(x, angles)

    def runner(self) -> Runner:
        """A sequence on this model."""
        return self.adapter.runner(self.model)

    def hold(self, name: str, make: Callable[[], Any], use: Callable[[Any], bool] = lambda held: True) -> Any:
        """Return the result of `make`, cached until `release`; made again when `use` rejects the cached one."""
        held = self._held.get(name)
        if held is not None and not use(held):
            self._held.pop(name).close()
            held = None
        if held is None:
            held = self._held[name] = make()
        return held

    def release(self) -> None:
        """Close what is held; called when the recipe is taken off."""
        while self._held:
            self._held.popitem()[1].close()

    def peer(self, model: str | nn.Module) -> ModelView:
        """The view of another model: a module, or a folder to load, once, in this one's dtype and on its device."""
        if isinstance(model, str):
            if model not in self._loaded:
                self._loaded[model] = self.adapter.load(model, like=self.model)
            model = self._loaded[model]
        model = unwrapped(model)
        return ModelView(model, self.resolve(model), self.resolve)

    def text_only(self, model: str | nn.Module) -> ModelView | None:
        """As `peer`, of a causal language model without vision; None where `model` is anything else."""
        given = self._loaded.get(model, model) if isinstance(model, str) else unwrapped(model)
        found = self.adapter.text_only(given, self.model)
        if found is None:
            return None
        if isinstance(model, str):
            self._loaded[model] = found[0]
        return ModelView(*found, self.resolve)


def shard_count(model: nn.Module) -> int:
    """How many processes share each layer of a model (tensor parallelism)."""
    return getattr(model, "tp_size", None) or 1


def rows_of(module: Any, name: str) -> int | None:
    """The rows of a projection's weight that this process holds; None where it is no matrix of floating numbers."""
    weight = getattr(getattr(module, name, None), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    # A DTensor has the shape of the whole.
    return int(getattr(weight, "_local_tensor", weight).shape[0])
