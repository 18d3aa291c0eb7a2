"""Checks whether fused layer steps (`layer_step`) may replace decoder layers: known classes, unchanged modules, no hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.core.adapter import home_device
from mmaccel.core.decoding.replay import GraphBuffers
from mmaccel.models.install import PrefillHook
from mmaccel.models.modules import is_plain_linear
from mmaccel.models.prompt_layout import has_sliding_window


class ModuleFingerprint:
    """Snapshot of modules and their submodules: identities, classes, weights and weight addresses. It is compared at every
    pass, ten times faster than by walking through the modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        roots = list(modules)
        self._all = [one for module in roots for one in module.modules()]
        # Held, so that no other object comes by the identity of one of them.
        self._held, self._mark = self._look(roots)

    def is_unchanged(self, modules: Sequence[nn.Module]) -> bool:
        """Whether `modules` are those of the snapshot and unchanged. In-place changes of weight values do not count."""
        return self._look(modules)[1] == self._mark

    def has_hooks(self) -> bool:
        """Whether any module of the snapshot has a forward hook that must run."""
        return has_foreign_hooks(self._all)

    def own_forwards(self) -> list[Any]:
        """The `forward` of each module of the snapshot that has one in place of its class's, else None."""
        return [vars(one).get("forward") for one in self._all]

    def foreign_forwards(self) -> list[Any]:
        """As `own_forwards`, without what wraps them for passes of streams, of this thread or of one that is paused."""
        return [_unwrapped(one, forward) for one, forward in zip(self._all, self.own_forwards(), strict=True)]

    def has_foreign_modules(self) -> bool:
        """Whether any module is of another library: an adapter, say, which may be switched off and leave no trace."""
        return any(type(one).__module__.partition(".")[0] not in _KNOWN for one in self._all)

    def _look(self, roots: Sequence[nn.Module]) -> tuple[list[Any], list[int]]:
        """The roots, their children, classes and weights; and the identity of each, and where the weights lie."""
        children, weights = zip(*map(_TABLES, self._all), strict=True)
        tensors = [one for one in chain.from_iterable(map(dict.values, weights)) if one is not None]
        held = [*roots, *chain.from_iterable(map(dict.values, children)), *map(type, self._all), *tensors]
        return held, [*map(id, held), *map(Tensor.data_ptr, tensors)]


class ModuleGraphBuffers:
    """The `GraphBuffers` that captures of passes through a module share, as long as the module is unchanged."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._watched = module, ModuleFingerprint([module])
        self._buffers, self._forwards = GraphBuffers(home_device(module)), self._watched.foreign_forwards()
        self._foreign = self._watched.has_foreign_modules()

    def find(self) -> GraphBuffers | None:
        """Return the buffers, anew if the module has changed; None if it has hooks or parts of another library, if it could
        not be captured, or under autocast."""
        known = self._forwards == self._watched.foreign_forwards()
        if not known or not self._watched.is_unchanged([self._module]):
            self.__init__(self._module)  # type: ignore[misc]
        never = self._foreign or self._buffers.unfit or self._watched.has_hooks()
        return None if never or torch.is_autocast_enabled(home_device(self._module).type) else self._buffers


def _unwrapped(module: nn.Module, forward: Any) -> Any:
    """The `forward` of `module` that our wrappers (`Hooks.wrap`, `rebind_function`) call in the end; None if it is that of
    the module's class."""
    while isinstance(forward, partial) and str(forward.func.__module__).startswith("mmaccel."):
        if (inner := getattr(forward, "__wrapped__", None)) is None:
            break
        forward = inner
    own = getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward
    return None if own else forward


def has_foreign_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of `modules` has a forward hook that a fused decode step must run. Not counted are our prompt hooks
    (`PrefillHook`), hooks of a stream's pass (they serve its thread alone), and those that transformers leaves installed
    after `output_attentions` or `output_hidden_states`, which a step does not return."""
    return any(
        not isinstance(hook, PrefillHook)
        and getattr(getattr(hook, "func", hook), "__module__", "") not in _OTHERS
        for tables in filter(any, map(_HOOKS, modules))
        for table in tables
        for hook in table.values()
    )


_TABLES: Callable[[Any], tuple[dict[Any, Any], ...]] = attrgetter("_modules", "_parameters")
_HOOKS: Callable[[Any], tuple[dict[Any, Any], ...]] = attrgetter("_forward_hooks", "_forward_pre_hooks")
_KNOWN = "torch", "transformers", "mmaccel"
_OTHERS = (
    "transformers.utils.output_capturing",
    *(f"mmaccel.models.{x}" for x in ("stream", "recurrent", "tree_paths")),
)


def can_fuse_layers(layers: Iterable[Any], activation: str, family: Any) -> bool:
    """Whether `layer_step` computes the same as `layers`: their classes are the family's `decoder_layers`, each layer is on
    one device, linear modules are plain, and projections that are fused all have a bias or all have none."""
    return activation == "silu" and all(
        type(layer).__name__ in family.decoder_layers
        and not (hasattr(layer, "self_attn") and _slides(layer.self_attn))
        and all(is_plain_linear(linear) for some in fusable_linear_groups(layer) for linear in some)
        and (not has_experts(layer) or _loose(layer.mlp.experts))
        and len({p.device for p in layer.parameters()}) == 1
        and all(len({one.bias is None for one in some}) == 1 for some in fusable_linear_groups(layer))
        for layer in layers
    )


def _slides(attention: Any) -> bool:
    return getattr(attention, "sliding_window", None) is not None or has_sliding_window(attention.config)


def _loose(experts: Any) -> bool:
    """Whether `expert_mlp` computes what `experts` do: no adapter, no quantized weight."""
    own = dict(experts.named_parameters())
    kinds = {type(one) for one in own.values()}
    return own.keys() == {"gate_up_proj", "down_proj"} and kinds == {nn.Parameter} and not experts._buffers


def has_experts(layer: Any) -> bool:
    """Whether a decoder layer's MLP is a mixture of experts."""
    return hasattr(layer.mlp, "experts")


def fusable_linear_groups(layer: Any) -> list[list[Any]]:
    """Group a layer's linear modules by what one kernel computes together: q, k, v; output; then, unless the MLP is a
    mixture of experts, gate and up (or both in one); down. A linear-attention layer has its input projections, its output
    projection and its gate projection in place of the first two groups."""
    mlp = layer.mlp
    if (own := getattr(layer, "linear_attn", None)) is not None:
        found = [[own.in_proj_qkv, own.in_proj_b, own.in_proj_a], [own.out_proj], [own.in_proj_z]]
    else:
        own = layer.self_attn
        found = [[own.q_proj, own.k_proj, own.v_proj], [own.o_proj]]
    if has_experts(layer):
        return found
    gated = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
    return [*found, gated, [mlp.down_proj]]
